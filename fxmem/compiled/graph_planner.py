"""One graph of a compiled step, planned: which plans there are, what each takes, which one a budget takes.

In: a joint graph, what is around it, settings. Out: forward and backward of a plan with a :class:`CompiledReport`, or what
every budget costs. The order: joint graph -> would-be kernels -> frontier -> candidates lowered and run on fakes -> the
cheapest that fits -> partitioned graphs. Candidates and what was seen of them are remembered in the process, by graph.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from fxmem.compiled import emit
from fxmem.compiled.choice import Candidates, Choices, P, Taken
from fxmem.compiled.fakerun import GraphCall, LoweredGraph, run_step
from fxmem.compiled.joint import JointGraph
from fxmem.compiled.kernels import Kernels
from fxmem.compiled.levers import Levers, lays_out
from fxmem.compiled.lower import own_context, signature_of, without_duplicates
from fxmem.compiled.profile import profile_of
from fxmem.compiled.report import CompiledCost, CompiledReport
from fxmem.compiled.step_run import StepRun, least_of
from fxmem.compiled.surroundings import Surroundings
from fxmem.errors import InfeasibleBudgetError
from fxmem.frontiers import recomputing_frontier
from fxmem.ir import FrontierPoint, GraphProfile, Plan
from fxmem.passes.context import Settings
from fxmem.planners.simulate import simulate
from fxmem.profiling.roofline import Hardware, hardware_for
from fxmem.progress import check_interrupted, stage
from fxmem.user_frames import level_of_user

MOST_KEPT = 32
"""Graphs whose candidates are remembered in a process."""

STEP = "the compiled step"

_KNOWN: dict[str, tuple[Candidates[FrontierPoint], Candidates[FrontierPoint] | None]] = {}
"""By signature of a graph and all that its plans depend on."""


@dataclass(frozen=True, slots=True)
class GraphPlanner:
    """One graph's kernels and profile, its candidates, and what lowers them."""

    kernels: Kernels
    profile: GraphProfile
    around: Surroundings
    hardware: Hardware
    static_inputs: Sequence[int] | None
    candidates: Candidates[FrontierPoint]
    as_laid_out: Candidates[FrontierPoint] | None
    """The same, lowered with convolutions laid out as they are; None where that changes nothing."""
    call: GraphCall
    """Of the graph, where a step is one call of it."""
    measures: bool
    """Whether convolutions are timed in both."""
    started_at: float
    """When planning began, by ``time.perf_counter``."""

    @staticmethod
    def of(
        joint: fx.GraphModule,
        num_outputs: int,
        static: Sequence[int] | None,
        around: Surroundings,
        settings: Settings,
        trained: frozenset[int] = frozenset(),
    ) -> GraphPlanner:
        """``trained``: the places of inputs that a backward gives a gradient to keep."""
        start = time.perf_counter()
        kernels = Kernels.of(JointGraph.of(without_duplicates(joint), num_outputs))
        hardware = settings.hardware or hardware_for(kernels.joint.device_type)
        profile = profile_of(kernels, around, hardware)
        step = settings.step
        call = GraphCall((), step.loop.keeps_output, trained if step.accumulate else frozenset())
        key = signature_of(
            joint,
            num_outputs,
            around,
            hardware,
            settings.policy,
            settings.planner,
            settings.plan_seconds,
            settings.measure,
            call,
        )
        if key not in _KNOWN:
            while len(_KNOWN) >= MOST_KEPT:
                del _KNOWN[next(iter(_KNOWN))]
            candidates = Candidates.of(recomputing_frontier(profile, settings))
            _KNOWN[key] = candidates, Candidates(candidates.points) if lays_out(joint) else None
        usual, as_laid_out = _KNOWN[key]
        measures = settings.measure and as_laid_out is not None
        return GraphPlanner(kernels, profile, around, hardware, static, usual, as_laid_out, call, measures, start)

    def beside(self, around: Surroundings) -> GraphPlanner:
        """Return the same with other surroundings, which differ in ``present`` and ``in_forwards`` alone: what was lowered
        need not be again."""
        profile = profile_of(self.kernels, around, self.hardware)
        present_bytes = sum(around.present) - sum(self.around.present)
        in_forwards_bytes = sum(around.in_forwards) - sum(self.around.in_forwards)
        added_bytes = sum(around.added_to) - sum(self.around.added_to)
        peaks = [simulate(profile, point.plan).peak_bytes for point in self.candidates.points]
        points = tuple(replace(point, peak_bytes=p) for point, p in zip(self.candidates.points, peaks, strict=True))

        def moved(candidates: Candidates[FrontierPoint]) -> Candidates[FrontierPoint]:
            more = present_bytes, in_forwards_bytes, added_bytes
            return Candidates(points, {place: run.beside(*more) for place, run in candidates.runs.items()})

        as_laid_out = None if self.as_laid_out is None else moved(self.as_laid_out)
        return replace(
            self,
            profile=profile,
            around=around,
            candidates=moved(self.candidates),
            as_laid_out=as_laid_out,
            started_at=time.perf_counter(),
        )

    def again(self, joint: fx.GraphModule, static: Sequence[int] | None) -> GraphPlanner:
        """Return the same for the same graph, traced once more: its plans, written into the new nodes."""
        kernels = Kernels.of(JointGraph.of(without_duplicates(joint), self.kernels.joint.num_outputs))
        assert len(kernels.values) == len(self.kernels.values), "the graph is another one when traced again"
        return replace(self, kernels=kernels, static_inputs=static)

    @property
    def choices(self) -> Choices[FrontierPoint]:
        return Choices(self.candidates, self.as_laid_out, self._run)

    def within(self, budget_bytes: int | None, where: str = STEP) -> tuple[Taken[FrontierPoint], CompiledReport]:
        """Return the cheapest plan that fits where a step is one call of the graph. Errors: ``InfeasibleBudgetError``."""
        choices = self.choices
        known = choices.num_lowered
        taken = taken_within(budget_bytes, choices, self.around, where)
        report = report_of(
            taken,
            choices,
            self.around,
            budget_bytes=budget_bytes,
            num_kernels=len(self.kernels.kernels),
            num_recomputed=len(taken.point.plan.dropped),
            num_lowered=choices.num_lowered - known,
            plan_seconds=time.perf_counter() - self.started_at,
        )
        return taken, report

    def frontier(self) -> tuple[CompiledCost, ...]:
        """Return the budgets at which the plan changes, falling. All candidates are lowered."""
        choices = self.choices
        return tuple(
            CompiledCost(budget, taken.run.peak_bytes, choices.overhead_seconds(taken), choices.overhead_ratio(taken))
            for budget, taken in choices.costs()
        )

    def lowered(self, plan: Plan, levers: Levers) -> LoweredGraph:
        """Return the code under a plan."""
        stage("lowering a plan")
        check_interrupted()
        return LoweredGraph(self.parts(plan), self.kernels.joint.num_outputs, levers)

    def parts(self, plan: Plan) -> emit.Partitioned:
        """Return forward and backward under a plan."""
        with own_context([node.meta.get("val") for node in self.kernels.joint.inputs]):
            return emit.partition(self.kernels, self.profile, plan, self.static_inputs)

    def _run(self, point: FrontierPoint, layouts_left: bool, enough_bytes: float) -> StepRun:
        def run(graph: LoweredGraph) -> StepRun:
            found = run_step([graph], [self.call], self.around, self.hardware, measures=self.measures)
            return replace(found, loses_writes=graph.loses_writes)

        graph = self.lowered(point.plan, Levers(layouts_left))
        return least_of(run(graph), enough_bytes, lambda tightness: run(graph.tight(tightness)))


def taken_within(budget_bytes: int | None, choices: Choices[P], around: Surroundings, where: str = STEP) -> Taken[P]:
    """Return the cheapest that fits. Errors: ``InfeasibleBudgetError``."""
    taken = choices.cheapest_within(float("inf") if budget_bytes is None else budget_bytes)
    if taken is None:
        assert budget_bytes is not None
        raise infeasible(choices.least_bytes(), around, budget_bytes, where)
    if taken.run.loses_writes:
        warnings.warn(
            "the code that Inductor generates for this step reads a gradient before it is there, a fault of torch's: "
            "gradients of what lies before are wrong, without fxmem too. Compare them with eager's, or leave out "
            'backend="inductor"',
            stacklevel=level_of_user(),
        )
    return taken


def report_of(
    taken: Taken[P],
    choices: Choices[P],
    around: Surroundings,
    *,
    budget_bytes: int | None,
    num_kernels: int,
    num_recomputed: int,
    num_lowered: int,
    plan_seconds: float,
    num_calls: int = 1,
) -> CompiledReport:
    return CompiledReport(
        budget_bytes,
        taken.run.peak_bytes,
        choices.keep_all.peak_bytes,
        around.fixed_bytes,
        taken.run.saved_bytes,
        choices.keep_all.seconds,
        choices.overhead_seconds(taken),
        choices.overhead_ratio(taken),
        num_kernels,
        num_recomputed,
        num_lowered,
        plan_seconds,
        taken.levers.layouts_left,
        bool(taken.levers.tightness),
        taken.run.most_bytes,
        num_calls,
    )


def infeasible(least: int, around: Surroundings, budget_bytes: int, where: str = STEP) -> InfeasibleBudgetError:
    parts = (("parameters, buffers, batch and optimizer state", around.fixed_bytes),)
    breakdown = (*parts, ("activations and gradients", least - around.fixed_bytes))
    return InfeasibleBudgetError(budget_bytes, least, breakdown, where)
