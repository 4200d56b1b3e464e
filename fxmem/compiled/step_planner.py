"""Several calls of compiled graphs before one backward, planned together: one budget over all of them.

In: the calls of a step, each graph's :class:`GraphPlanner`. Out: a candidate for each call, with a :class:`CompiledReport`.
Candidates of the step are one path, whatever the budget: from all calls keeping all to all at their deepest, each time one
call goes deeper, where a byte costs the least time (the lower convex hulls of the graphs' frontiers, merged by slope). They
are judged as those of a single graph are (NOTE [Monotone budgets] in :mod:`fxmem.compiled.choice`): the code of all
calls is run on fakes, one forward after the other, then the backwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from fxmem.compiled.choice import Candidates, Choices
from fxmem.compiled.fakerun import GraphCall, LoweredGraph, run_step
from fxmem.compiled.graph_planner import GraphPlanner, report_of, taken_within
from fxmem.compiled.levers import NO_LEVERS, Levers
from fxmem.compiled.report import CompiledReport
from fxmem.compiled.step_run import TIGHTNESSES, StepRun, least_of
from fxmem.compiled.surroundings import Surroundings
from fxmem.ir import FrontierPoint


class Variant(NamedTuple):
    """How a graph is compiled: under which of its candidates."""

    place: int
    levers: Levers = NO_LEVERS


@dataclass(frozen=True, slots=True)
class Combination:
    """A candidate of each call."""

    places: tuple[int, ...]
    recompute_seconds: float
    peak_bytes: int
    """Of all calls, each as if alone, together: where all are there at once, that falls as the peak of the step does."""


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    """A graph that was compiled, and its code under the candidates that were tried."""

    planner: GraphPlanner
    codes: dict[Variant, LoweredGraph] = field(default_factory=dict)

    def variant(self, place: int, levers: Levers) -> Variant:
        """Return how the graph is compiled in a step that is compiled so."""
        layouts_left = levers.layouts_left and self.planner.as_laid_out is not None
        return Variant(place, Levers(layouts_left, levers.tightness if place > 0 else 0))

    def deepest(self, levers: Levers) -> Variant:
        return self.variant(len(self.planner.candidates.points) - 1, levers)

    def code(self, variant: Variant) -> LoweredGraph:
        if variant not in self.codes:
            place, levers = variant
            if levers.tightness:
                code = self.code(Variant(place, levers._replace(tightness=0))).tight(levers.tightness)
            else:
                code = self.planner.lowered(self.planner.candidates.points[place].plan, levers)
            self.codes[variant] = code
        return self.codes[variant]


@dataclass(frozen=True, slots=True)
class StepPlanner:
    """The calls of one step, in their order."""

    graphs: tuple[PlannedGraph, ...]
    calls: tuple[GraphCall, ...]
    around: Surroundings

    def within(self, budget_bytes: int | None) -> tuple[tuple[Variant, ...], CompiledReport, StepRun]:
        """Return how each call's graph is to be compiled. Errors: ``InfeasibleBudgetError``."""
        start = time.perf_counter()
        frontiers = [graph.planner.candidates.points for graph in self.graphs]
        choices = self._choices(tuple(path(frontiers)))
        taken = taken_within(budget_bytes, choices, self.around)
        plans = [points[place].plan for points, place in zip(frontiers, taken.point.places, strict=True)]
        report = report_of(
            taken,
            choices,
            self.around,
            budget_bytes=budget_bytes,
            num_kernels=sum(len(graph.planner.kernels.kernels) for graph in self.graphs),
            num_recomputed=sum(len(plan.dropped) for plan in plans),
            num_lowered=choices.num_lowered,
            plan_seconds=time.perf_counter() - start,
            num_calls=len(self.calls),
        )
        return self._variants(taken.point.places, taken.levers), report, taken.run

    def last_within(self, before: Sequence[Variant], budget_bytes: float) -> tuple[Variant | None, StepRun | None]:
        """Return the cheapest way to compile the last call's graph that keeps the budget, given those before it, and what
        all of them take; None if none does."""
        places = tuple(variant.place for variant in before)
        points = self.graphs[-1].planner.candidates.points
        combinations = tuple(
            Combination((*places, place), point.recompute_seconds, point.peak_bytes)
            for place, point in enumerate(points)
        )
        taken = self._choices(combinations, before).cheapest_within(budget_bytes)
        if taken is None:
            return None, None
        return self.graphs[-1].variant(taken.place, taken.levers), taken.run

    def peak_bytes(self, variants: Sequence[Variant]) -> int:
        """Return the least budget that these fit."""
        return self._run(variants).needed_bytes

    def letting_go(self) -> StepPlanner:
        """Return the same step where all outputs are let go when the forwards are over."""
        return replace(self, calls=tuple(replace(call, outputs_stay=False) for call in self.calls))

    def deepest(self) -> tuple[Variant, ...]:
        """Return all graphs at their deepest, with usual or with tight backwards, whichever take less."""
        each = [Levers(layouts_left=True, tightness=tightness) for tightness in (0, *TIGHTNESSES)]
        return min((tuple(graph.deepest(levers) for graph in self.graphs) for levers in each), key=self.peak_bytes)

    def _variants(self, places: Sequence[int], levers: Levers) -> tuple[Variant, ...]:
        return tuple(graph.variant(place, levers) for graph, place in zip(self.graphs, places, strict=True))

    def _choices(self, combinations: tuple[Combination, ...], before: Sequence[Variant] = ()) -> Choices[Combination]:
        """``before``: as the first calls' graphs are compiled, in whatever layouts the others are."""

        def run(combination: Combination, layouts_left: bool, enough_bytes: float) -> StepRun:
            def run_with(levers: Levers) -> StepRun:
                return self._run((*before, *self._variants(combination.places, levers)[len(before) :]))

            usual = run_with(Levers(layouts_left))
            return least_of(usual, enough_bytes, lambda tightness: run_with(Levers(layouts_left, tightness)))

        lays_out = any(graph.planner.as_laid_out is not None for graph in self.graphs[len(before) :])
        return Choices(Candidates(combinations), Candidates(combinations) if lays_out else None, run)

    def _run(self, variants: Sequence[Variant]) -> StepRun:
        graphs = [graph.code(variant) for graph, variant in zip(self.graphs, variants, strict=True)]
        measures = any(graph.planner.measures for graph in self.graphs)
        found = run_step(graphs, self.calls, self.around, self.graphs[0].planner.hardware, measures=measures)
        return replace(found, loses_writes=any(graph.loses_writes for graph in graphs))


def path(frontiers: Sequence[Sequence[FrontierPoint]]) -> Iterator[Combination]:
    """Yield combinations from all first to all last points: each time the call goes on where a byte costs least."""
    places, seconds = [0] * len(frontiers), sum(points[0].recompute_seconds for points in frontiers)
    peak_bytes = sum(points[0].peak_bytes for points in frontiers)
    yield Combination(tuple(places), seconds, peak_bytes)
    steps = [(slope, call, place) for call, points in enumerate(frontiers) for slope, place in _hull(points)]
    for _, call, place in sorted(steps):
        points = frontiers[call]
        seconds += points[place].recompute_seconds - points[places[call]].recompute_seconds
        peak_bytes += points[place].peak_bytes - points[places[call]].peak_bytes
        places[call] = place
        yield Combination(tuple(places), seconds, peak_bytes)


def _hull(points: Sequence[FrontierPoint]) -> list[tuple[float, int]]:
    """Return the places of the lower convex hull after the first, each with the seconds a byte that lead to it."""
    hull = [0]
    for place in range(1, len(points)):
        while len(hull) > 1 and _slope(points, hull[-2], hull[-1]) >= _slope(points, hull[-1], place):
            hull.pop()
        hull.append(place)
    return [(_slope(points, a, b), b) for a, b in pairwise(hull)]


def _slope(points: Sequence[FrontierPoint], a: int, b: int) -> float:
    more_seconds = points[b].recompute_seconds - points[a].recompute_seconds
    return more_seconds / max(1, points[a].peak_bytes - points[b].peak_bytes)
