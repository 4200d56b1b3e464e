"""The default planner: all others' frontiers merged, then improved by local search.

In: a profile. Out: a frontier. Work is limited by counts that depend on the size of the graph only, so equal profiles get
equal plans; the clock is the last resort.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from fxmem.planners import chen, ilp, intervals, mincut
from fxmem.planners.bound import Relaxation
from fxmem.planners.frontier import Clock, Limits, judge_all, pareto
from fxmem.planners.repair import Repair
from fxmem.planners.search import improve
from fxmem.planners.splice import splice
from fxmem.simulate import drop_all, tables_of
from fxmem.types import FrontierPoint, GraphProfile

SEARCH_WORK = 250_000
"""Recipes times trials of the local search."""
MOST_TRIALS = 2_500
REPAIR_WORK = 180_000
"""Recipes times runs of the repair."""
MOST_REPAIRS = 3_000
NUM_REPAIRS = 8
"""Budgets it works on."""
RELAXATION_SHARES = tuple(k / 16 for k in range(16))
"""Budgets for which the relaxation makes suggestions, as shares of the way from the least peak to eager's."""
MOST_STEPS = 20
RELAXATION_WORK = 20_000
"""Recipes times steps of the relaxation for one budget."""
MOST_EXACT_RECIPES = 32
"""Up to here the integer program is asked too."""
EXACT_WORK = 160
"""Recipes times budgets it is asked about, ..."""
EXACT_BRANCHES = 60
"""... how far it may branch for each, ..."""
EXACT_SECONDS = 1.0
"""... and for how long, should that take longer than ever seen."""


def frontier(profile: GraphProfile, *, seconds: float) -> tuple[FrontierPoint, ...]:
    """Return the merged and improved Pareto set of the other planners, found within ``seconds``."""
    clock = Clock(seconds)
    points = [*intervals.frontier(profile, seconds=0.6 * seconds)]
    points += mincut.frontier(profile, seconds=0.3 * clock.left_seconds)
    points += chen.frontier(profile, seconds=0.3 * clock.left_seconds)
    points += judge_all(profile, "drop_all", [drop_all(profile).limits], clock)
    num_trials = min(MOST_TRIALS, SEARCH_WORK // max(1, len(profile.recipes)))
    points += judge_all(profile, "relaxation", _suggested(profile, pareto(points), clock), clock)
    found = improve(profile, pareto(points), num_trials=num_trials, clock=clock)
    found = splice(profile, found, num_trials=num_trials // 2, clock=clock)
    found = improve(profile, _repaired(profile, found, clock), num_trials=num_trials // 4, clock=clock)
    return found if len(profile.recipes) > MOST_EXACT_RECIPES else _exact(profile, found, clock)


def _suggested(profile: GraphProfile, points: tuple[FrontierPoint, ...], clock: Clock) -> Iterator[Limits]:
    """Yield what the relaxation's prices for ticks make cheapest, for budgets over the whole span."""
    tables = tables_of(profile)
    relaxation, last = Relaxation(tables), len(tables.inputs) - 1
    low, high = points[-1].peak_bytes, points[0].peak_bytes
    num_steps = min(MOST_STEPS, RELAXATION_WORK // max(1, len(tables.inputs)))
    for share in RELAXATION_SHARES:
        budget_bytes = round(low + share * (high - low))
        cost = next(p.recompute_seconds for p in points if p.peak_bytes <= budget_bytes)
        bound = relaxation.bound(budget_bytes, upper_seconds=cost, num_steps=num_steps, clock=clock)
        for reruns in bound.reruns:
            choice = mincut.Choice(reruns, 0.0, 0.0)
            yield mincut.choice_limits(tables, choice, last)
            yield mincut.choice_limits(tables, choice, None)


def _repaired(profile: GraphProfile, points: tuple[FrontierPoint, ...], clock: Clock) -> tuple[FrontierPoint, ...]:
    """Return the points and better ones, made from points that just exceed a budget, at the deepest steps first."""
    repair = Repair(tables_of(profile))
    left = min(MOST_REPAIRS, REPAIR_WORK // max(1, len(profile.recipes)))
    done: set[int] = set()
    for number in range(NUM_REPAIRS):
        steps = [(s, b) for s, b in _steps(points) if b not in done]
        if not steps or clock.over:
            break
        _, budget_bytes = max(steps)
        done.add(budget_bytes)
        above = [p for p in reversed(points) if p.peak_bytes > budget_bytes]
        further = next((p for p in above if p.peak_bytes > 1.06 * budget_bytes), above[-1])
        for start in dict.fromkeys((above[0].plan.limits, further.plan.limits)):
            before = repair.num_runs
            fitting = list(repair.fit(start, budget_bytes, left // (NUM_REPAIRS - number)))
            left -= repair.num_runs - before
            points = pareto((*points, *judge_all(profile, "repair", fitting, clock)))
    return points


def _steps(points: tuple[FrontierPoint, ...]) -> Iterator[tuple[float, int]]:
    """Yield the steps of a frontier's staircase: relative bytes times seconds of the corner, and the budget amid it."""
    for higher, lower in pairwise(points):
        size = math.log(higher.peak_bytes / lower.peak_bytes) * (lower.recompute_seconds - higher.recompute_seconds)
        yield size, (higher.peak_bytes + lower.peak_bytes) // 2


def _exact(profile: GraphProfile, points: tuple[FrontierPoint, ...], clock: Clock) -> tuple[FrontierPoint, ...]:
    """Return the points and what the integer program finds where most may be missing, improved by search once more.

    It is asked about the largest budgets for which a point is the best known: just below the next point's peak.
    """
    relaxation = Relaxation(tables_of(profile))
    steps = []
    for higher, point in pairwise(points):
        for budget_bytes in {higher.peak_bytes - 1, point.peak_bytes}:
            cost = point.recompute_seconds
            bound = relaxation.bound(budget_bytes, upper_seconds=cost, num_steps=10, clock=clock)
            steps.append((bound.seconds - cost, budget_bytes, cost))
    plans = []
    for gap, budget_bytes, cost in sorted(steps)[: EXACT_WORK // max(1, len(profile.recipes))]:
        if gap < 0.0 and not clock.over:
            limit = min(EXACT_SECONDS, clock.left_seconds)
            limits = ilp.best_limits(
                profile, budget_bytes, seconds=limit, num_branches=EXACT_BRANCHES, upper_seconds=cost
            )
            plans += [] if limits is None else [limits]
    better = pareto((*points, *judge_all(profile, "ilp", plans, clock)))
    return improve(profile, better, num_trials=MOST_TRIALS // 2, clock=clock)
