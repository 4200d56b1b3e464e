"""One graph of a compiled step, planned: which plans there are, what each takes, which one a budget takes.

In: a joint graph, what is around it, settings. Out: forward and backward of a plan with a :class:`CompiledReport`, or what
every budget costs. The order: joint graph -> would-be kernels -> frontier -> candidates lowered and run on fakes -> the
cheapest that fits -> partitioned graphs. Candidates and what was seen of them are remembered in the process, by graph.

NOTE [Layouts]

Inductor copies the weights of convolutions to channels last, and these copies are saved for the backward: they take as much
as the weights. On the CPU a convolution lays out what it is given by itself, so the copies may be spared, which costs
:data:`LAYOUT_SHARE` of a step. A budget takes the cheaper of what fits with layouts as Inductor has them and of what fits
with layouts as they are. Less memory never costs less time in either, nor in the cheaper of both. On CUDA the layout
decides which kernels run: there it is left alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from torch import fx

from fxmem.compiled import emit
from fxmem.compiled.choice import Candidates, Run
from fxmem.compiled.fakerun import StepRun, run_step
from fxmem.compiled.joint import JointGraph
from fxmem.compiled.kernels import Kernels, profile_of
from fxmem.compiled.lower import layouts, lays_out, signature_of, without_duplicates
from fxmem.compiled.report import CompiledCost, CompiledReport
from fxmem.compiled.surroundings import Surroundings
from fxmem.errors import InfeasibleBudgetError
from fxmem.frontiers import recomputing_frontier
from fxmem.ir import FrontierPoint, GraphProfile, Plan
from fxmem.passes.context import Settings
from fxmem.profiling.roofline import Hardware, hardware_for
from fxmem.progress import check_interrupted, stage

LAYOUT_SHARE = 0.05
"""Of a step: what convolutions in the model's own layout cost at most. ResNet-18 takes less time so, even with plans that
recompute (``benchmarks/results/compiled.json``)."""
MOST_KEPT = 32
"""Graphs whose candidates are remembered in a process."""

_KNOWN: dict[str, tuple[Candidates, Candidates | None]] = {}
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
    as_laid_out: Candidates | None
    """The same, lowered with convolutions laid out as they are (NOTE [Layouts]); None where that changes nothing."""
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
            candidates = Candidates.of(recomputing_frontier(profile, settings))
            _KNOWN[key] = candidates, Candidates(candidates.points) if lays_out(joint) else None
        return GraphPlanner(kernels, profile, around, hardware, static, *_KNOWN[key], start)

    def within(self, budget_bytes: int | None) -> tuple[emit.Partitioned, CompiledReport]:
        """Return forward and backward of the cheapest plan that fits. Errors: ``InfeasibleBudgetError``."""
        known, budget = self._num_lowered(), float("inf") if budget_bytes is None else budget_bytes
        taken = self._cheapest_within(budget)
        if taken is None:
            assert budget_bytes is not None
            least = min(each.least_bytes(self._run_of(each)) for each in self._each())
            raise infeasible(least, self.around, budget_bytes)
        candidates, place = taken
        point, run = candidates.points[place], candidates.runs[place]
        report = CompiledReport(
            budget_bytes,
            run.peak_bytes,
            self.candidates.runs[0].peak_bytes,
            self.around.fixed_bytes,
            run.saved_bytes,
            self.candidates.runs[0].seconds,
            *self._overhead(candidates, point),
            len(self.kernels.kernels),
            len(point.plan.dropped),
            self._num_lowered() - known,
            time.perf_counter() - self.started_at,
            candidates is self.as_laid_out,
            run.most_bytes,
        )
        return self.parts(point.plan), report

    def frontier(self) -> tuple[CompiledCost, ...]:
        """Return the budgets at which the plan changes, falling. All candidates are lowered."""
        budgets = {each.needed_bytes(i, self._run_of(each)) for each in self._each() for i in range(len(each.points))}
        least: dict[tuple[bool, int], CompiledCost] = {}
        for budget in sorted(budgets, reverse=True):
            taken = self._cheapest_within(budget)
            if taken is not None:
                candidates, place = taken
                cost = self._overhead(candidates, candidates.points[place])
                peak_bytes = candidates.runs[place].peak_bytes
                least[candidates is self.as_laid_out, place] = CompiledCost(budget, peak_bytes, *cost)
        return tuple(least.values())

    def _cheapest_within(self, budget_bytes: float) -> tuple[Candidates, int] | None:
        """Return the candidate to take, and which ones it is of (NOTE [Layouts]); None if none fits."""
        usual = self._found_in(self.candidates, budget_bytes)
        if self.as_laid_out is None or (usual is not None and self._share(usual) <= LAYOUT_SHARE):
            return usual
        found = [each for each in (usual, self._found_in(self.as_laid_out, budget_bytes)) if each is not None]
        return min(found, key=self._share, default=None)

    def _found_in(self, candidates: Candidates, budget_bytes: float) -> tuple[Candidates, int] | None:
        place = candidates.cheapest_within(budget_bytes, self._run_of(candidates))
        return None if place is None else (candidates, place)

    def _each(self) -> tuple[Candidates, ...]:
        return (self.candidates,) if self.as_laid_out is None else (self.candidates, self.as_laid_out)

    def _share(self, found: tuple[Candidates, int]) -> float:
        candidates, place = found
        return self._overhead(candidates, candidates.points[place])[1]

    def _num_lowered(self) -> int:
        return sum(len(each.runs) for each in self._each())

    def _overhead(self, candidates: Candidates, point: FrontierPoint) -> tuple[float, float]:
        """Return the seconds of what is recomputed and of other layouts, and their share of the step that keeps all."""
        seconds = self.candidates.runs[0].seconds
        more = point.recompute_seconds - self.candidates.points[0].recompute_seconds
        more += LAYOUT_SHARE * seconds if candidates is self.as_laid_out else 0.0
        return more, more / seconds if seconds else 0.0

    def parts(self, plan: Plan) -> emit.Partitioned:
        """Return forward and backward under a plan."""
        return emit.partition(self.kernels, self.profile, plan, self.static_inputs)

    def _run_of(self, candidates: Candidates) -> Run:
        """Return what lowers a plan of ``candidates`` and runs it."""

        def run(point: FrontierPoint) -> StepRun:
            stage("lowering a plan")
            check_interrupted()
            parts = self.parts(point.plan)
            with layouts(optimized=False) if candidates is self.as_laid_out else nullcontext():
                return run_step(parts, self.kernels.joint.num_outputs, self.around, self.hardware)

        return run


def infeasible(least: int, around: Surroundings, budget_bytes: int) -> InfeasibleBudgetError:
    parts = (("parameters, buffers, batch and optimizer state", around.fixed_bytes),)
    breakdown = (*parts, ("activations and gradients", least - around.fixed_bytes))
    return InfeasibleBudgetError(budget_bytes, least, breakdown, "the compiled step")
