"""How much memory training a model takes, before running it, and where it goes.

In: a model (real, on the meta device or fake), one call's inputs, optimizer, loss, autocast. Out: an :class:`Estimate`.
Nothing is computed and nothing big is allocated: the model's own step runs on fakes, and no graph is captured for that.
What is counted is the step as a user writes it (NOTE [The training step] in :mod:`fxmem.profiling.training_step`), exactly
on CPU; on CUDA see :mod:`fxmem.profiling.caching_allocator` for what is added.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Unpack, cast

import torch

from fxmem.api.arguments import (
    Options,
    check_backend,
    check_model,
    example_of,
    region_of_step,
    settings_of,
    with_options,
    without_measuring,
)
from fxmem.api.budget import parse_bytes
from fxmem.api.frontier import Frontier
from fxmem.api.question import Question
from fxmem.capture.dynamic_batch import largest_batch
from fxmem.capture.graph import Inputs, device_of
from fxmem.devices import DeviceModel, device_named
from fxmem.errors import InputError, in_units, unit_of
from fxmem.fake.fake_tensors import FakeWorld
from fxmem.fake.stand_in import cuda_model, stands_for
from fxmem.ir import PlainData, Timeline
from fxmem.passes.context import CompileContext
from fxmem.profiling.allocator_state import AllocatorPeaks
from fxmem.profiling.peak_watch import Alive
from fxmem.progress import CAPTURE_SECONDS, told
from fxmem.report.peak import Breakdown, Place, breakdown_at_peak, place_of_peak
from fxmem.report.text import Report
from fxmem.torch_patches import without_dynamo


@dataclass(frozen=True, slots=True, repr=False)
class Estimate(PlainData):
    """Memory of one training step of a model as it is; what fxmem can bring it to is planned for when it is asked for.

    It holds the model and the batch, which later questions are about: let go of it, too, to free their memory. What
    :meth:`to_dict` returns holds neither.
    """

    peak_bytes: int
    """Largest sum of live bytes in the step."""
    peak_at: Place
    breakdown: Breakdown
    timeline: Timeline
    """Live bytes over the whole step, op by op: forward, loss, backward, optimizer."""
    bound_bytes: int
    """What a budget bounds: the peak; on CUDA allocated or reserved bytes (``budget_of=``)."""
    cuda: AllocatorPeaks | None
    """For a step on CUDA: what the caching allocator makes of it (:mod:`fxmem.profiling.caching_allocator`), cuBLAS's
    workspaces included."""
    alive: tuple[Alive, ...]
    """Each storage that is alive at the peak, with the call that made it."""
    _question: Question = field(compare=False)

    def __repr__(self) -> str:
        least = self._question.known_floor_bytes
        return f"Estimate(peak {in_units(self.peak_bytes)}{f', least reachable {in_units(least)}' if least else ''})"

    @property
    def floor_bytes(self) -> int:
        """Minimum feasible peak: the least budget that any plan found keeps. Asking for it captures and plans, once.

        Errors: ``CaptureError``, ``ProfileError``.
        """
        return self._question.floor_bytes()

    @property
    def graph_peak_bytes(self) -> int:
        """Peak if each value went right after its last use, whatever names the model's code has for it: that of the graph.

        Errors: ``CaptureError``, ``ProfileError``.
        """
        return self._question.graph_peak_bytes()

    def frontier(self) -> Frontier:
        """Return what every budget costs, as :func:`fxmem.frontier` does, on the device of the estimate."""
        return self._question.frontier()

    def cuda_with(self, *, expandable_segments: bool = False, empty_cache: bool = False) -> AllocatorPeaks:
        """Return what CUDA's caching allocator makes of the step with ``expandable_segments:True``, or with a call of
        ``torch.cuda.empty_cache`` after each step. Errors: ``InputError`` for a step that is not on CUDA."""
        return self._question.cuda_with(expandable_segments, empty_cache)

    def evaluation_peak_bytes(self, *, no_grad: bool = True) -> int:
        """Return the peak of a forward and loss of the model in eval mode on the same batch, parameters and optimizer state
        included; ``no_grad=False``: as it is where nobody turned gradients off."""
        return self._question.evaluation_peak_bytes(no_grad)

    def cyclic_bytes(self) -> int:
        """Return what reference cycles hold of a step that is over, until Python's garbage collector finds them."""
        return self._question.cyclic_bytes()

    def report(self, budget: float | str | None = None, *, most_pieces: int | None = None) -> Report:
        """Return the report of the plan that :func:`fxmem.optimize` would make for ``budget`` on the estimate's device.
        ``most_pieces``: with ``allow=("microbatch",)``, no more are tried, for each takes time.

        Errors: ``BudgetError``, ``InfeasibleBudgetError``, ``CaptureError``, ``ProfileError``.
        """
        return self._question.report(None if budget is None else parse_bytes(budget), most_pieces)

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate, ready for ``json.dumps``; ``floor_bytes`` is None where it was not asked for."""
        return {**PlainData.to_dict(self), "floor_bytes": self._question.known_floor_bytes}

    def fits(self, budget: float | str) -> bool:
        """True if the step fits ``budget`` (bytes, or text such as "24GiB") without recomputation."""
        return self.bound_bytes <= parse_bytes(budget)

    def max_batch_size(self, budget: float | str, *, recompute: bool = False) -> int:
        """Return the largest batch size whose step fits ``budget``; with ``recompute``, under fxmem's best plan.

        Exact: each size tried is profiled. 0 or 1 means that not even a batch of 2 fits. Errors: ``InputError`` if the
        example has a batch of 1, ``CaptureError`` if the model is tied to its batch size.
        """
        budget_bytes = parse_bytes(budget)
        planned_for = budget_bytes if recompute else None
        return largest_batch(lambda size: self._question.peak_at_batch(size, planned_for), budget_bytes)

    def __str__(self) -> str:
        unit, scale = unit_of(self.peak_bytes)

        def sized(nbytes: int) -> str:
            return f"{nbytes / scale:.4f} {unit}"

        lines = [f"peak {sized(self.peak_bytes)} at {self.peak_at}"]
        lines += [f"  {kind:<16} {sized(nbytes):>14}" for kind, nbytes in self.breakdown.rows() if nbytes]
        if self._question.known_floor_bytes is not None:
            lines.append(f"least reachable with recomputation {sized(self.floor_bytes)}")
        if self.cuda is not None:
            lines.append(
                f"of CUDA's caching allocator: allocated {sized(self.cuda.allocated_bytes)}, reserved "
                f"{sized(self.cuda.reserved_bytes)} (cuBLAS workspaces {sized(self.cuda.workspace_bytes)} in both)"
            )
            if self.cuda.most_reserved_bytes > self.cuda.reserved_bytes:
                lines.append(
                    f"with cuDNN's workspaces, upper bound: allocated {sized(self.cuda.most_allocated_bytes)}, reserved "
                    f"{sized(self.cuda.most_reserved_bytes)}"
                )
        return "\n".join(lines)


@with_options
def estimate(
    model: torch.nn.Module,
    example_args: Any = None,
    example_kwargs: dict[str, Any] | None = None,
    *,
    device: torch.device | str | None = None,
    backend: str = "eager",
    **options: Unpack[Options],
) -> Estimate:
    """Return what one training step of ``model`` takes, without running it: on a GPU its convolutions and batch norms alone
    are run, one at a time on tensors of their own, as only that tells cuDNN's workspaces.

    - ``model``: in training mode; it may lie on the meta device (it is then taken to be on ``device``, CPU by default) or
      be made under a ``FakeTensorMode``.
    - ``example_args`` (a tensor or a tuple) and ``example_kwargs``: one call's arguments.
    - ``device``: where the step is counted, if not where the model is. ``"cuda"`` is this machine's GPU, or an H100 where
      there is none; ``"cuda:a100-80gb"`` a GPU by name (:mod:`fxmem.devices`), for which no CUDA is needed: the model may
      stay on the CPU or the meta device. Autocast's lists, the choice of attention kernels, what is saved, optimizers'
      kernels, what ops take inside and the allocator are then CUDA's. Workspaces of cuDNN's convolutions are not in the
      figures for a GPU by name: with an upper bound of them, allocated and reserved bytes are ``cuda.most_...``.
    - ``backend``: ``"inductor"`` returns a :class:`fxmem.CompiledEstimate` of the step that torch.compile's Inductor would
      run, from the code that it generates; no kernel is compiled. It takes no ``device``.

    Gradients are absent at the start of the step (``zero_grad(set_to_none=True)``); with ``accumulate`` they are there,
    as an earlier micro-batch leaves them. The state of optimizer and scaler is there. Sparse gradients count as many
    entries as the batch has, before coalescing.

    Errors: ``InputError``, ``CaptureError``, ``ProfileError``.
    """
    if check_backend(backend) == "inductor":
        from fxmem.api.compiled import compiled_estimate  # which imports Dynamo

        if device is not None:
            raise InputError('device= is not for backend="inductor"; move the model there')
        return cast(Estimate, compiled_estimate(model, (example_args, example_kwargs), options))
    check_model(model)
    inputs = example_of(model, example_args, example_kwargs)
    where, gpu = _place_of_step(device, model)
    settings = without_measuring(settings_of(options), model, elsewhere=gpu is not None)
    with without_dynamo():
        world = FakeWorld(inputs.leaves, where, moved=gpu is not None)
        if gpu is not None or any(t.is_meta for t in (*model.parameters(), *model.buffers(), *inputs.tensors)):
            inputs = _on_fakes(inputs, world)
    context = CompileContext(model, inputs, settings, region_of_step(model, settings.step, where.type))
    question = Question(context, world, where.type == "cuda", gpu)
    with told(f"estimating a training step of {type(model).__name__}", CAPTURE_SECONDS):
        return _estimate(question)


def _on_fakes(inputs: Inputs, world: FakeWorld) -> Inputs:
    """Return ``inputs`` as fakes, of whose values the real ones are asked."""
    fakes = tuple(world.fake_all(leaf) for leaf in inputs.leaves)
    for fake, leaf in zip(fakes, inputs.leaves, strict=True):
        if isinstance(leaf, torch.Tensor) and fake is not leaf:
            stands_for(fake, leaf)
    return Inputs(fakes, inputs.spec)


def _place_of_step(
    device: torch.device | str | None, model: torch.nn.Module
) -> tuple[torch.device, DeviceModel | None]:
    """Return the device of the step, and the GPU that stands in for it if the model is not there."""
    own = device_of(model)
    name = "" if device is None else str(device).removeprefix("cuda").removeprefix(":")
    if device is None and own.type == "cuda" and not torch.cuda.is_available():  # fakes
        return own, device_named("h100")
    if device is None or not str(device).startswith("cuda"):
        return (own if own.type != "meta" else torch.device(device or "cpu")), None
    if name and not name.isdigit():
        return torch.device("cuda"), device_named(name)
    where = torch.device(device)
    if torch.cuda.is_available():
        return where, None if own.type == "cuda" else cuda_model(where)
    return where, device_named("h100")


def _estimate(question: Question) -> Estimate:
    """Return the answer to ``question``, whose context becomes that of other sizes."""
    ran = question.first_answer()
    watched, question.events = ran.watched, ran.events
    assert watched is not None
    held = ran.libraries_bytes
    steps = tuple(replace(each, live_bytes=each.live_bytes + held) for each in watched.steps)
    return Estimate(
        peak_bytes=ran.peak_bytes,
        peak_at=place_of_peak(watched),
        breakdown=breakdown_at_peak(watched, held),
        timeline=Timeline(ran.peak_bytes, watched.peak_step, 0.0, 0, steps),
        bound_bytes=question.bound_bytes(ran),
        cuda=ran.events.peaks() if question.on_cuda else None,
        alive=watched.alive,
        _question=question,
    )
