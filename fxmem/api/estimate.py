"""How much memory training a model takes, before running it, and where it goes.

In: a model (real, on the meta device or fake), one call's inputs, optimizer, loss, autocast. Out: an :class:`Estimate`.
Nothing is computed and nothing big is allocated: the whole step runs on fakes. What is counted is the step as a user
writes it (NOTE [The training step] in step.py), exactly on CPU; on CUDA see :mod:`fxmem.profiling.caching_allocator`
for what is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch

from fxmem.api.budget import parse_bytes
from fxmem.capture.dynamic_batch import batch_dims, largest_batch, resized
from fxmem.capture.export import as_in_training, capture, fitting
from fxmem.capture.graph import Inputs
from fxmem.errors import InputError, unit_of
from fxmem.fake.fake_tensors import FakeWorld
from fxmem.ir import GraphProfile, Phase, Timeline
from fxmem.pipeline import (
    Settings,
    frontier_of,
    least_peak_bytes,
    profile_as_captured,
    profile_for_short_memory,
    profile_in_place,
    profile_model,
)
from fxmem.planners.plan_transfer import Planned
from fxmem.planners.simulate import keep_all, simulate
from fxmem.profiling.caching_allocator import Allocation, AllocatorPeaks
from fxmem.profiling.training_step import LossFn, OptimizerLike, TrainingStep, check_step
from fxmem.profiling.verify import cuda_peaks, eager_peak_bytes
from fxmem.runtime.autocast import Autocast
from fxmem.torch_patches import replaced


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the step something is: phase, node of the graph, module path and the user's source line."""

    phase: Phase
    node: str
    module_path: str
    source_line: str

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.module_path, self.source_line) if part)
        name = f" of {self.node}" if self.node else ""
        return f"the {self.phase.value}{name}" + (f" ({where})" if where else "")


@dataclass(frozen=True, slots=True)
class Breakdown:
    """What is alive at the peak, in bytes; the fields sum to the peak."""

    parameters_bytes: int
    buffers_bytes: int
    inputs_bytes: int
    optimizer_state_bytes: int
    gradients_bytes: int
    activations_bytes: int
    """Outputs of the model's ops that the forward or autograd holds."""
    internals_bytes: int
    """What autograd saves beside inputs and outputs: masks, statistics, cast weights."""
    loss_bytes: int
    """What the loss allocates outside the model."""
    temporaries_bytes: int
    """All else: gradients on their way, scratch of a composite op, the optimizer's temporaries."""
    held_by_code_bytes: int
    """What local variables and attributes of the model's own code hold longer than its graph needs."""

    def rows(self) -> tuple[tuple[str, int], ...]:
        """Return (kind, bytes) pairs, the largest first."""
        pairs = [(name.removesuffix("_bytes").replace("_", " "), getattr(self, name)) for name in self.__slots__]
        return tuple(sorted(pairs, key=lambda pair: -pair[1]))


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory of one training step of a model as it is, and the least that fxmem can bring it to."""

    peak_bytes: int
    """Largest sum of live bytes in the step."""
    peak_at: Place
    breakdown: Breakdown
    timeline: Timeline
    """Live bytes over the whole step of the captured graph: forward, loss, backward, optimizer. Its peak is below
    ``peak_bytes`` by ``breakdown.held_by_code_bytes``."""
    floor_bytes: int
    """The least peak any plan reaches."""
    cuda: AllocatorPeaks | None
    """For a step on CUDA: what the caching allocator makes of it (:mod:`fxmem.profiling.caching_allocator`), cuBLAS's
    workspaces included."""
    _peak_at_batch: Callable[[int, int | None], int] = field(repr=False)

    def fits(self, budget: float | str) -> bool:
        """True if the step fits ``budget`` (bytes, or text such as "24GiB") without recomputation."""
        return self.peak_bytes <= parse_bytes(budget)

    def max_batch_size(self, budget: float | str, *, recompute: bool = False) -> int:
        """Return the largest batch size whose step fits ``budget``; with ``recompute``, under fxmem's best plan.

        Exact: each size tried is profiled. 0 or 1 means that not even a batch of 2 fits. Errors: ``InputError`` if the
        example has a batch of 1, ``CaptureError`` if the model is tied to its batch size.
        """
        budget_bytes = parse_bytes(budget)
        planned_for = budget_bytes if recompute else None
        return largest_batch(lambda size: self._peak_at_batch(size, planned_for), budget_bytes)

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
        return "\n".join(lines)


def estimate(
    model: torch.nn.Module,
    example_args: Any = None,
    example_kwargs: dict[str, Any] | None = None,
    *,
    optimizer: OptimizerLike = "adamw",
    loss_fn: LossFn | None = None,
    autocast: torch.dtype | None = None,
    accumulate: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    device: torch.device | str | None = None,
    planner: str = "auto",
    plan_seconds: float = 10.0,
) -> Estimate:
    """Return what one training step of ``model`` takes, without running it.

    ``model`` may lie on the meta device (it is then taken to be on ``device``, CPU by default) or be made under a
    ``FakeTensorMode``; it must be in training mode. ``device="cuda"`` where torch finds no CUDA, or the model is on
    the CPU, has the step on the CPU counted as CUDA's allocator would: ``Estimate.cuda``. What differs from a step
    on a device: the CPU's kernels are chosen (attention saves other internals, norms other dtypes), the step
    counters of an optimizer count as on the device, and cuDNN's workspaces are missing; optimizers take the
    multi-tensor kernels that they take on CUDA, whose temporaries are as large as the parameters. The other arguments are
    those of :func:`fxmem.optimize`; ``plan_seconds`` is the planner's CPU time, not time by the clock. Gradients
    are taken to be absent at the start of the step (``zero_grad(set_to_none=True)``), or with ``accumulate`` to be
    there, as left by an earlier micro-batch; the optimizer's and the scaler's state is there. Sparse gradients
    count by as many entries as the batch has, as before coalescing. Errors: ``InputError``, ``CaptureError``,
    ``ProfileError``.
    """
    step = check_step(TrainingStep(loss_fn, optimizer, bool(accumulate), scaler))
    if not model.training:
        raise InputError("the model is in eval mode; call model.train() first: an estimate is of a training step")
    inputs = Inputs.of_example(example_args, example_kwargs, model)
    on_cuda = torch.device("cpu" if device is None else device).type == "cuda"
    world = FakeWorld(inputs.leaves, "cpu" if device is None or (on_cuda and not torch.cuda.is_available()) else device)
    if any(t.is_meta for t in (*model.parameters(), *model.buffers(), *inputs.tensors)):
        inputs = Inputs(tuple(world.fake_all(leaf) for leaf in inputs.leaves), inputs.spec)
    device_type = world.fake(next(model.parameters(), inputs.tensors[0])).device.type
    region = Autocast.of(device_type, autocast)
    on_cuda |= device_type == "cuda"
    events: list[Allocation] = []
    settings = Settings(
        budget_bytes=None,
        step=step,
        planner=planner,
        plan_seconds=plan_seconds,
        hardware=None,
    )

    @contextmanager
    def on_fakes() -> Iterator[None]:
        """Stand in for parameters that have no bytes; real ones stay."""
        meta = any(t.is_meta for t in (*model.parameters(), *model.buffers()))
        as_on_cuda = _for_each_on("cpu") if on_cuda and device_type == "cpu" else nullcontext()
        with as_in_training(), world.state_of(model) if meta else nullcontext(), as_on_cuda:
            yield

    with on_fakes():
        captured = capture(model, inputs, region)
        profiled = profile_as_captured(model, captured, inputs, replace(settings, inplace=False))
        in_place = profile_in_place(profiled, model, inputs, settings)
        planned_profile = profile_for_short_memory(in_place, model, inputs, settings).profile
        peak_bytes = eager_peak_bytes(model, captured, inputs, step, lambda *event: events.append(event), profiled.seen)
    graph_profile = profiled.profile
    plan = keep_all(graph_profile)
    timeline = simulate(graph_profile, plan, with_steps=True)

    points = frontier_of(planned_profile, settings)
    planned = [Planned(planned_profile, points)]

    def peak_at_batch(size: int, budget_bytes: int | None) -> int:
        """Peak at another batch size, as it is or under a plan: one within the budget, else that of the least peak."""
        other = resized(inputs, batch_dims(inputs), size)
        with on_fakes():
            graph = fitting(dynamic(), model, other)
            if budget_bytes is None:
                return eager_peak_bytes(model, graph, other, step, seen=profiled.seen)
            profile = profile_model(model, graph, other, settings, profiled).profile
        return least_peak_bytes(profile, settings, planned, budget_bytes)

    captures: list[Any] = []

    def dynamic() -> Any:
        if not captures:
            captures.append(capture(model, inputs, region, batch_dims(inputs)))
        return captures[0]

    return Estimate(
        peak_bytes=peak_bytes,
        peak_at=place_of(graph_profile, timeline.peak_step),
        breakdown=breakdown_of(graph_profile, timeline.peak_step, peak_bytes),
        timeline=timeline,
        floor_bytes=points[-1].peak_bytes,
        cuda=cuda_peaks(events) if on_cuda else None,
        _peak_at_batch=peak_at_batch,
    )


@contextmanager
def _for_each_on(device_type: str) -> Iterator[None]:
    """Let the body's optimizers choose multi-tensor kernels on ``device_type`` too, as they do on CUDA."""
    optimizers: Any = import_module("torch.optim.optimizer")
    devices = optimizers._get_foreach_kernels_supported_devices()
    with replaced(optimizers, "_get_foreach_kernels_supported_devices", lambda: [*devices, device_type]):
        yield


def place_of(profile: GraphProfile, tick: int) -> Place:
    """Return where ``profile.ticks[tick]`` is."""
    at = profile.ticks[tick]
    if at.node is None:
        return Place(at.phase, "", "", "")
    node = profile.nodes[at.node]
    return Place(at.phase, node.name, node.source.module_path, node.source.line)


def breakdown_of(profile: GraphProfile, tick: int, eager_bytes: int) -> Breakdown:
    """Return what is alive in ``profile.ticks[tick]`` if nothing is dropped, in a step that peaks at ``eager_bytes``."""
    at, static = profile.ticks[tick], profile.static
    alive = _alive(profile, tick)
    internals = sum(profile.storages[i].nbytes for i in alive if profile.storages[i].internal)
    activations = sum(profile.storages[i].nbytes for i in alive) - internals
    created = [profile.storages[i] for i in at.creates]
    temporaries = at.peak_bytes - static.total_bytes - at.gradient_bytes - at.loss_bytes
    inside = min(temporaries, sum(s.nbytes for s in created))
    inner = min(inside, sum(s.nbytes for s in created if s.internal))
    graph_bytes = at.peak_bytes + activations + internals
    return Breakdown(
        parameters_bytes=static.parameters_bytes,
        buffers_bytes=static.buffers_bytes,
        inputs_bytes=static.inputs_bytes,
        optimizer_state_bytes=static.optimizer_state_bytes,
        gradients_bytes=static.gradients_bytes + at.gradient_bytes,
        activations_bytes=activations + inside - inner,
        internals_bytes=internals + inner,
        loss_bytes=at.loss_bytes,
        temporaries_bytes=temporaries - inside,
        held_by_code_bytes=eager_bytes - graph_bytes,
    )


def _alive(profile: GraphProfile, tick: int) -> list[int]:
    """Managed storages alive at the start of a tick if nothing is dropped."""
    begin: dict[int, int] = {}
    end: dict[int, int] = {}
    for t, at in enumerate(profile.ticks):
        begin.update(dict.fromkeys(at.creates, t))
        end.update(dict.fromkeys((*at.lets_go, *at.releases), t))
    return [i for i, t in begin.items() if t < tick <= end.get(i, len(profile.ticks))]
