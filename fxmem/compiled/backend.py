"""A Dynamo backend that keeps a budget: Inductor with fxmem's planner in the partitioner's seat.

In: graphs from ``torch.compile``. Out: compiled functions, and a :class:`CompiledReport` for each training graph. The
order: joint graph -> would-be kernels -> frontier -> candidates lowered and run on fakes -> the cheapest that fits ->
partitioned graphs, which Inductor then compiles. Errors: ``InfeasibleBudgetError`` before any kernel is compiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from fxmem.compiled import emit
from fxmem.compiled.choice import Candidates
from fxmem.compiled.fakerun import StepRun, run_step
from fxmem.compiled.joint import JointGraph
from fxmem.compiled.kernels import Kernels, profile_of
from fxmem.compiled.lower import compiled, frame_of_compilation, passing_dynamo, signature_of, without_duplicates
from fxmem.compiled.refusals import check_frame, check_inputs, check_settings
from fxmem.compiled.surroundings import Surroundings, surroundings_of
from fxmem.errors import FxMemError, InfeasibleBudgetError, in_units
from fxmem.ir import FrontierPoint, GraphProfile, PlainData
from fxmem.passes.context import Settings
from fxmem.pipeline import frontier_of
from fxmem.profiling.roofline import Hardware, hardware_for
from fxmem.progress import stage

MOST_KEPT = 32
"""Graphs whose candidates are remembered in a process."""


@dataclass(frozen=True, slots=True)
class CompiledReport(PlainData):
    """What was planned for one compiled training step. Bytes are those of the whole step, as allocated."""

    budget_bytes: int | None
    predicted_peak_bytes: int
    """Of the code that Inductor generated for the plan, run on fakes."""
    keep_all_peak_bytes: int
    """Of the same step with nothing recomputed but what is free."""
    fixed_bytes: int
    """Of the peak: parameters, buffers, batch, optimizer state."""
    saved_bytes: int
    """Alive between forward and backward."""
    overhead_ratio: float
    """Estimated time of the step over that of keeping all, less 1."""
    num_kernels: int
    num_recomputed: int
    """Values in memory that the plan drops and makes again."""
    num_lowered: int
    """Plans whose code was generated and judged."""
    plan_seconds: float

    def __str__(self) -> str:
        budget = "no budget" if self.budget_bytes is None else f"budget {in_units(self.budget_bytes)}"
        return (
            f"compiled step: peak {in_units(self.predicted_peak_bytes)} ({budget}; keeping all "
            f"{in_units(self.keep_all_peak_bytes)}; parameters, batch and optimizer {in_units(self.fixed_bytes)}), "
            f"{self.num_recomputed} of {self.num_kernels} kernels run again, time {self.overhead_ratio:+.1%} "
            f"(estimate); planned in {self.plan_seconds:.1f} s, {self.num_lowered} plans lowered"
        )


@dataclass(frozen=True, slots=True)
class _Planner:
    """One graph's kernels and profile, to lower plans of."""

    kernels: Kernels
    profile: GraphProfile
    around: Surroundings
    hardware: Hardware
    static_inputs: Sequence[int] | None

    def parts(self, point: FrontierPoint) -> emit.Partitioned:
        return emit.partition(self.kernels, self.profile, point.plan, self.static_inputs)

    def run(self, point: FrontierPoint) -> StepRun:
        stage("lowering a plan")
        return run_step(self.parts(point), self.kernels.joint.num_outputs, self.around, self.hardware)


class Planned(BaseException):
    """Ends a compilation that was for planning only."""


Around = Callable[[Sequence[torch.Tensor]], Surroundings]
"""Called with a graph's inputs."""


class Backend:
    """A backend for ``torch.compile`` under a budget. ``reports``: one for each training graph that was planned."""

    __name__ = "fxmem"

    def __init__(self, settings: Settings, around: Around | None = None) -> None:
        self.settings, self.only_plan = settings, False
        self.reports: list[CompiledReport] = []
        self._around = around or self._of_graph
        self._frame: object = None

    def __call__(self, graph_module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        try:
            check_settings(options)
            check_inputs(inputs)
            tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
            return compiled(graph_module, inputs, partial(self._partition, tensors))
        except FxMemError as error:
            raise passing_dynamo(error) from None

    def _partition(
        self, tensors: Sequence[torch.Tensor], joint: fx.GraphModule, num_outputs: int, static: Sequence[int] | None
    ) -> emit.Partitioned:
        frame = frame_of_compilation()
        check_frame(frame, self._frame)
        self._frame = frame
        parts, report = plan_graph(joint, num_outputs, static, self._around(tensors), self.settings)
        self.reports.append(report)
        if self.only_plan:
            raise Planned
        return parts

    def _of_graph(self, tensors: Sequence[torch.Tensor]) -> Surroundings:
        """What is around a graph of which no more is known than its inputs: it holds its loss."""
        parameters = [t for t in tensors if isinstance(t, torch.nn.Parameter)]
        return surroundings_of(tensors, parameters, self.settings.step)


_KNOWN: dict[str, Candidates] = {}
"""By signature of a graph and all that its plans depend on."""


def plan_graph(
    joint: fx.GraphModule, num_outputs: int, static: Sequence[int] | None, around: Surroundings, settings: Settings
) -> tuple[emit.Partitioned, CompiledReport]:
    """Return forward and backward of the cheapest plan that fits. Errors: ``InfeasibleBudgetError``."""
    start = time.perf_counter()
    kernels = Kernels.of(JointGraph.of(without_duplicates(joint), num_outputs))
    device = next((t.meta["val"].device.type for t in kernels.joint.inputs), "cpu")
    hardware = settings.hardware or hardware_for(device)
    profile = profile_of(kernels, around, hardware)
    planner = _Planner(kernels, profile, around, hardware, static)
    key = signature_of(joint, num_outputs, around, hardware, settings.policy, settings.planner, settings.plan_seconds)
    if key not in _KNOWN:
        while len(_KNOWN) >= MOST_KEPT:
            del _KNOWN[next(iter(_KNOWN))]
        _KNOWN[key] = Candidates.of(frontier_of(profile, settings))
    candidates = _KNOWN[key]
    known = len(candidates.runs)
    budget_bytes = settings.budget_bytes
    place = candidates.cheapest_within(float("inf") if budget_bytes is None else budget_bytes, planner.run)
    if place is None:
        assert budget_bytes is not None
        raise infeasible(candidates, around, budget_bytes)
    point, run, first = candidates.points[place], candidates.runs[place], candidates.runs[0]
    report = CompiledReport(
        budget_bytes,
        run.peak_bytes,
        first.peak_bytes,
        around.fixed_bytes,
        run.saved_bytes,
        run.seconds / first.seconds - 1 if first.seconds else 0.0,
        len(kernels.kernels),
        len(point.plan.dropped),
        len(candidates.runs) - known,
        time.perf_counter() - start,
    )
    return planner.parts(point), report


def infeasible(candidates: Candidates, around: Surroundings, budget_bytes: int) -> InfeasibleBudgetError:
    least = candidates.least_bytes
    parts = (("parameters, buffers, batch and optimizer state", around.fixed_bytes),)
    breakdown = (*parts, ("activations and gradients", least - around.fixed_bytes))
    return InfeasibleBudgetError(budget_bytes, least, breakdown, "the compiled step")
