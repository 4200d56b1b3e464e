"""The default planner: all others' frontiers merged, then improved by local search.

In: a profile. Out: a frontier. Work is limited by counts that depend on the size of the graph only, so equal profiles get
equal plans; the clock is the last resort.
"""

from __future__ import annotations

from fxmem.planners import chen, intervals, mincut
from fxmem.planners.frontier import Clock, judge_all, pareto
from fxmem.planners.search import improve
from fxmem.simulate import drop_all
from fxmem.types import FrontierPoint, GraphProfile

SEARCH_WORK = 300_000
"""Recipes times trials of the local search."""
MOST_TRIALS = 2_500


def frontier(profile: GraphProfile, *, seconds: float) -> tuple[FrontierPoint, ...]:
    """Return the merged and improved Pareto set of the other planners, found within ``seconds``."""
    clock = Clock(seconds)
    points = [*intervals.frontier(profile, seconds=0.6 * seconds)]
    points += mincut.frontier(profile, seconds=0.3 * clock.left_seconds)
    points += chen.frontier(profile, seconds=0.3 * clock.left_seconds)
    points += judge_all(profile, "drop_all", [drop_all(profile).limits], clock)
    num_trials = min(MOST_TRIALS, SEARCH_WORK // max(1, len(profile.recipes)))
    return improve(profile, pareto(points), num_trials=num_trials, clock=clock)
