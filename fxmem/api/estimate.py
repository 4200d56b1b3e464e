"""How much memory training a model takes, before running it, and where it goes.

In: a model (real, on the meta device or fake), one call's inputs, optimizer, loss, autocast. Out: an :class:`Estimate`.
Nothing is computed and nothing big is allocated: the whole step runs on fakes. What is counted is the step as a user
writes it (NOTE [The training step] in :mod:`fxmem.profiling.training_step`), exactly on CPU; on CUDA see
:mod:`fxmem.profiling.caching_allocator` for what is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import torch

from fxmem.api.arguments import (
    Options,
    check_model,
    example_of,
    region_of_step,
    settings_of,
    with_options,
    without_measuring,
)
from fxmem.api.budget import parse_bytes
from fxmem.capture.dynamic_batch import batch_dims, largest_batch, resized
from fxmem.capture.export import capture, fitting
from fxmem.capture.graph import CaptureGraph, Inputs, device_of
from fxmem.devices import DeviceModel, device_named
from fxmem.emitted import bound_bytes
from fxmem.errors import in_units, unit_of
from fxmem.fake.fake_tensors import FakeWorld
from fxmem.fake.stand_in import cuda_model, standing_in
from fxmem.ir import PlainData, Timeline
from fxmem.passes.context import CompileContext
from fxmem.pipeline import floor_bytes, frontier_of, least_bytes_within, profile_for_short_memory
from fxmem.planners.plan_transfer import Planned
from fxmem.planners.simulate import keep_all, simulate
from fxmem.profiling.caching_allocator import AllocatorPeaks
from fxmem.profiling.verify import FakeStep, eager_step
from fxmem.progress import CAPTURE_SECONDS, told
from fxmem.report.peak import Breakdown, Place, breakdown_of, place_of
from fxmem.torch_patches import as_in_training


@dataclass(slots=True)
class Question:
    """What an estimate is of, for further questions: a context, and the world of fakes that it is answered in."""

    context: CompileContext
    world: FakeWorld
    on_cuda: bool
    gpu: DeviceModel | None
    """The GPU that stands in for the device of the model, if one does."""
    planned: list[Planned] = field(default_factory=list)
    _dynamic: CaptureGraph | None = None

    @contextmanager
    def on_fakes(self) -> Iterator[None]:
        """Stand in for parameters that have no bytes; real ones stay."""
        model = self.context.model
        stand_ins = self.gpu is not None or any(t.is_meta for t in (*model.parameters(), *model.buffers()))
        with as_in_training(), standing_in(self.gpu), self.world.state_of(model) if stand_ins else nullcontext():
            yield

    def peak_at_batch(self, size: int, budget_bytes: int | None) -> int:
        """What a budget bounds at another batch size, as it is or under a plan: one within the budget, else the least."""
        context = self.context
        other = replace(context, inputs=resized(context.inputs, batch_dims(context.inputs), size), _profiles={})
        with self.on_fakes():
            graph = fitting(self.dynamic_graph(), context.model, other.inputs)
            if budget_bytes is None:
                seen = None if other.base is None else other.base.seen
                return self.bound_bytes(eager_step(context.model, graph, other.inputs, other.step, seen))
            return least_bytes_within(profile_for_short_memory(graph, other), other, self.planned, budget_bytes)

    def bound_bytes(self, ran: FakeStep) -> int:
        """Return what a budget bounds of a step."""
        return bound_bytes(ran.peak_bytes, ran.events.peaks() if self.on_cuda else None, self.context.settings)

    def dynamic_graph(self) -> CaptureGraph:
        """Return the graph that serves other batch sizes. Errors: ``CaptureError`` if the model is tied to its own."""
        if self._dynamic is None:
            context = self.context
            dims = batch_dims(context.inputs)
            self._dynamic = capture(context.model, context.inputs, context.autocast, dims)
        return self._dynamic


@dataclass(frozen=True, slots=True, repr=False)
class Estimate(PlainData):
    """Memory of one training step of a model as it is, and the least that fxmem can bring it to."""

    peak_bytes: int
    """Largest sum of live bytes in the step."""
    peak_at: Place
    breakdown: Breakdown
    timeline: Timeline
    """Live bytes over the whole step of the captured graph: forward, loss, backward, optimizer. Its peak is below
    ``peak_bytes`` by ``breakdown.held_by_code_bytes``."""
    bound_bytes: int
    """What a budget bounds: the peak; on CUDA allocated or reserved bytes (``budget_of=``)."""
    floor_bytes: int
    """Minimum feasible peak: the least budget that any plan found keeps."""
    cuda: AllocatorPeaks | None
    """For a step on CUDA: what the caching allocator makes of it (:mod:`fxmem.profiling.caching_allocator`), cuBLAS's
    workspaces included."""
    _question: Question = field(compare=False)

    def __repr__(self) -> str:
        return f"Estimate(peak {in_units(self.peak_bytes)}, least reachable {in_units(self.floor_bytes)})"

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
    **options: Unpack[Options],
) -> Estimate:
    """Return what one training step of ``model`` takes, without running it.

    - ``model``: in training mode; it may lie on the meta device (it is then taken to be on ``device``, CPU by default) or
      be made under a ``FakeTensorMode``.
    - ``example_args`` (a tensor or a tuple) and ``example_kwargs``: one call's arguments.
    - ``device``: where the step is counted, if not where the model is. ``"cuda"`` is this machine's GPU, or an H100 where
      there is none; ``"cuda:a100-80gb"`` a GPU by name (:mod:`fxmem.devices`), for which no CUDA is needed: the model may
      stay on the CPU or the meta device. Autocast's lists, the choice of attention kernels, what is saved, optimizers'
      kernels, what ops take inside and the allocator are then CUDA's. Workspaces of cuDNN's convolutions are not in the
      figures: with an upper bound of them, allocated and reserved bytes are ``cuda.most_...``.

    Gradients are absent at the start of the step (``zero_grad(set_to_none=True)``); with ``accumulate`` they are there,
    as an earlier micro-batch leaves them. The state of optimizer and scaler is there. Sparse gradients count as many
    entries as the batch has, before coalescing.

    Errors: ``InputError``, ``CaptureError``, ``ProfileError``.
    """
    check_model(model)
    inputs = example_of(model, example_args, example_kwargs)
    where, gpu = _place_of_step(device, model)
    settings = without_measuring(settings_of(options), model, elsewhere=gpu is not None)
    world = FakeWorld(inputs.leaves, where, moved=gpu is not None)
    if gpu is not None or any(t.is_meta for t in (*model.parameters(), *model.buffers(), *inputs.tensors)):
        inputs = Inputs(tuple(world.fake_all(leaf) for leaf in inputs.leaves), inputs.spec)
    context = CompileContext(model, inputs, settings, region_of_step(model, settings.step, where.type))
    question = Question(context, world, where.type == "cuda", gpu)
    with told(f"estimating a training step of {type(model).__name__}", CAPTURE_SECONDS + settings.plan_seconds):
        return _estimate(question)


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
    context = question.context
    model, inputs, settings = context.model, context.inputs, context.settings
    with question.on_fakes():
        captured = capture(model, inputs, context.autocast)
        profiled = context.profile_of(captured)
        short = profile_for_short_memory(captured, context)
        eager = eager_step(model, captured, inputs, context.step, profiled.seen)
        points = frontier_of(short.profile, settings)
        least_bytes = floor_bytes(short, context, points)
    timeline = simulate(profiled.profile, keep_all(profiled.profile), with_steps=True)
    question.planned.append(Planned(short.profile, points))
    question.context = replace(context, base=profiled, _profiles={})
    return Estimate(
        peak_bytes=eager.peak_bytes,
        peak_at=place_of(profiled.profile, timeline.peak_step),
        breakdown=breakdown_of(profiled.profile, timeline.peak_step, eager.peak_bytes),
        timeline=timeline,
        bound_bytes=question.bound_bytes(eager),
        floor_bytes=least_bytes,
        cuda=eager.events.peaks() if question.on_cuda else None,
        _question=question,
    )
