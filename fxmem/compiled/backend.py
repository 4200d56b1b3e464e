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
from fxmem.compiled.lower import compilation_now, compiled, passing_dynamo, signature_of, without_duplicates
from fxmem.compiled.refusals import check_inputs, check_one_graph, check_settings
from fxmem.compiled.report import CompiledReport
from fxmem.compiled.surroundings import Surroundings, surroundings_of
from fxmem.errors import FxMemError, InfeasibleBudgetError
from fxmem.frontiers import recomputing_frontier
from fxmem.ir import FrontierPoint, GraphProfile
from fxmem.passes.context import Settings
from fxmem.profiling.roofline import Hardware, hardware_for
from fxmem.progress import stage

MOST_KEPT = 32
"""Graphs whose candidates are remembered in a process."""


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
        self._compilation: tuple[object, object] | None = None

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
        compilation = compilation_now()
        check_one_graph(compilation, self._compilation)
        parts, report = plan_graph(joint, num_outputs, static, self._around(tensors), self.settings)
        self.reports.append(report)
        if self.only_plan:
            raise Planned
        self._compilation = compilation
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
        _KNOWN[key] = Candidates.of(recomputing_frontier(profile, settings))
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
