"""One graph of a compiled step, planned: which plans there are, what each takes, which one a budget takes.

In: a joint graph, what is around it, settings. Out: forward and backward of a plan with a :class:`CompiledReport`, or what
every budget costs. The order: joint graph -> would-be kernels -> frontier -> candidates lowered and run on fakes -> the
cheapest that fits -> partitioned graphs. Candidates and what was seen of them are remembered in the process, by graph.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from fxmem.compiled import emit
from fxmem.compiled.choice import Candidates
from fxmem.compiled.fakerun import StepRun, run_step
from fxmem.compiled.joint import JointGraph
from fxmem.compiled.kernels import Kernels, profile_of
from fxmem.compiled.lower import signature_of, without_duplicates
from fxmem.compiled.report import CompiledCost, CompiledReport
from fxmem.compiled.surroundings import Surroundings
from fxmem.errors import InfeasibleBudgetError
from fxmem.frontiers import recomputing_frontier
from fxmem.ir import FrontierPoint, GraphProfile, Plan
from fxmem.passes.context import Settings
from fxmem.profiling.roofline import Hardware, hardware_for
from fxmem.progress import check_interrupted, stage

MOST_KEPT = 32
"""Graphs whose candidates are remembered in a process."""

_KNOWN: dict[str, Candidates] = {}
"""By signature of a graph and all that its plans depend on."""


@dataclass(frozen=True, slots=True)
class GraphPlanner:
    """One graph's kernels and profile, its candidates, and what lowers them."""

    kernels: Kernels
    profile: GraphProfile
    around: Surroundings
    hardware: Hardware
    static_inputs: Sequence[int] | None
    candidates: Candidates
    started_at: float
    """When planning began, by ``time.perf_counter``."""

    @staticmethod
    def of(
        joint: fx.GraphModule,
        num_outputs: int,
        static: Sequence[int] | None,
        around: Surroundings,
        settings: Settings,
    ) -> GraphPlanner:
        start = time.perf_counter()
        kernels = Kernels.of(JointGraph.of(without_duplicates(joint), num_outputs))
        device = next((t.meta["val"].device.type for t in kernels.joint.inputs), "cpu")
        hardware = settings.hardware or hardware_for(device)
        profile = profile_of(kernels, around, hardware)
        key = signature_of(
            joint, num_outputs, around, hardware, settings.policy, settings.planner, settings.plan_seconds
        )
        if key not in _KNOWN:
            while len(_KNOWN) >= MOST_KEPT:
                del _KNOWN[next(iter(_KNOWN))]
            _KNOWN[key] = Candidates.of(recomputing_frontier(profile, settings))
        return GraphPlanner(kernels, profile, around, hardware, static, _KNOWN[key], start)

    def within(self, budget_bytes: int | None) -> tuple[emit.Partitioned, CompiledReport]:
        """Return forward and backward of the cheapest plan that fits. Errors: ``InfeasibleBudgetError``."""
        candidates = self.candidates
        known = len(candidates.runs)
        place = candidates.cheapest_within(float("inf") if budget_bytes is None else budget_bytes, self._run)
        if place is None:
            assert budget_bytes is not None
            raise infeasible(candidates.least_bytes(self._run), self.around, budget_bytes)
        point, run, first = candidates.points[place], candidates.runs[place], candidates.runs[0]
        report = CompiledReport(
            budget_bytes,
            run.peak_bytes,
            first.peak_bytes,
            self.around.fixed_bytes,
            run.saved_bytes,
            first.seconds,
            *self._overhead(point),
            len(self.kernels.kernels),
            len(point.plan.dropped),
            len(candidates.runs) - known,
            time.perf_counter() - self.started_at,
        )
        return self.parts(point.plan), report

    def frontier(self) -> tuple[CompiledCost, ...]:
        """Return the budgets at which the plan changes, falling. All candidates are lowered."""
        candidates = self.candidates
        budgets = sorted({candidates.needed_bytes(i, self._run) for i in range(len(candidates.points))}, reverse=True)
        least: dict[int, int] = {}
        for budget in budgets:
            place = candidates.cheapest_within(budget, self._run)
            if place is not None:
                least[place] = budget
        return tuple(
            CompiledCost(budget, candidates.runs[place].peak_bytes, *self._overhead(candidates.points[place]))
            for place, budget in least.items()
        )

    def _overhead(self, point: FrontierPoint) -> tuple[float, float]:
        """Return the seconds of what is recomputed, and their share of the step that keeps all."""
        seconds = self.candidates.runs[0].seconds
        more = point.recompute_seconds - self.candidates.points[0].recompute_seconds
        return more, more / seconds if seconds else 0.0

    def parts(self, plan: Plan) -> emit.Partitioned:
        """Return forward and backward under a plan."""
        return emit.partition(self.kernels, self.profile, plan, self.static_inputs)

    def _run(self, point: FrontierPoint) -> StepRun:
        stage("lowering a plan")
        check_interrupted()
        return run_step(self.parts(point.plan), self.kernels.joint.num_outputs, self.around, self.hardware)


def infeasible(least: int, around: Surroundings, budget_bytes: int) -> InfeasibleBudgetError:
    parts = (("parameters, buffers, batch and optimizer state", around.fixed_bytes),)
    breakdown = (*parts, ("activations and gradients", least - around.fixed_bytes))
    return InfeasibleBudgetError(budget_bytes, least, breakdown, "the compiled step")
