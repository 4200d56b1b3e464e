"""The default planner: all others' frontiers merged, then improved by local search.

In: a profile. Out: a frontier. Work is limited by counts that depend on the size of the graph only, so equal profiles get
equal plans; the clock is the last resort.
"""

from __future__ import annotations

from fxmem.planners import chen, ilp, intervals, mincut
from fxmem.planners.frontier import Clock, judge_all, pareto
from fxmem.planners.search import improve
from fxmem.simulate import drop_all
from fxmem.types import FrontierPoint, GraphProfile

SEARCH_WORK = 300_000
"""Recipes times trials of the local search."""
MOST_TRIALS = 2_500
MOST_EXACT_RECIPES = 32
"""Up to here the integer program is asked too."""
NUM_EXACT = 8
"""Budgets it is asked about, ..."""
EXACT_BRANCHES = 50
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
    found = improve(profile, pareto(points), num_trials=num_trials, clock=clock)
    return found if len(profile.recipes) > MOST_EXACT_RECIPES else _exact(profile, found, clock)


def _exact(profile: GraphProfile, points: tuple[FrontierPoint, ...], clock: Clock) -> tuple[FrontierPoint, ...]:
    """Return the points and what the integer program finds at some of their peaks, lowest first, made late by search."""
    plans = []
    for point in points[:: -max(1, -(-len(points) // NUM_EXACT))]:
        limits = ilp.best_limits(
            profile,
            point.peak_bytes,
            seconds=min(EXACT_SECONDS, clock.left_seconds),
            num_branches=EXACT_BRANCHES,
            upper_seconds=point.recompute_seconds,
        )
        plans += [] if limits is None else [limits]
        if clock.over:
            break
    better = pareto((*points, *judge_all(profile, "ilp", plans, clock)))
    return improve(profile, better, num_trials=MOST_TRIALS // 2, clock=clock)
