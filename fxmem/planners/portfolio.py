"""The default planner: all others' frontiers merged, then improved, in the stages of :data:`STAGES`.

In: a profile. Out: a frontier. Work is limited by counts that depend on the size of the graph only, so equal profiles get
equal plans; the clock, which counts CPU time, is the last resort and far from what ordinary graphs take. What each stage
brings is measured by ``python -m benchmarks.ablation``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from fxmem.ir import FrontierPoint, GraphProfile
from fxmem.planners import chen, mincut, segment_dp
from fxmem.planners.incremental import Bases
from fxmem.planners.local_search import improve
from fxmem.planners.neighbourhood_search import search_at, search_neighbourhoods
from fxmem.planners.pareto import Clock, cheapest_within, pareto
from fxmem.planners.path_relinking import relink_paths
from fxmem.planners.simulate import tables_of

SEARCH_WORK = 220_000
"""Recipes times trials of the local search."""
MOST_TRIALS = 2_500
MOST_TURNS, TURN_GAIN = 6, 0.005
"""Turns of improving and relinking at the end, and what one must bring, of the area below the frontier, for another."""
MOST_WINDOWS, WINDOW_WORK = 40, 11_000
"""Neighbourhoods that it chooses anew; times recipes to the power of 3/2, as which the work for each grows."""

Points = tuple[FrontierPoint, ...]
Planner = Callable[..., Points]
Stage = Callable[[GraphProfile, Points, Clock, Bases], Points]
"""See :data:`STAGES`, at the end."""


def frontier(profile: GraphProfile, *, seconds: float, stages: Mapping[str, Stage] | None = None) -> Points:
    """Return the Pareto set that the stages, one after the other, find within ``seconds``.

    ``stages``: others than all of :data:`STAGES`, for benchmarks that leave some out.
    """
    clock, bases = Clock(seconds), Bases(tables_of(profile))
    points: Points = ()
    for stage in (STAGES if stages is None else stages).values():
        points = stage(profile, points, clock, bases)
    return points


def at_budget(profile: GraphProfile, points: Points, budget_bytes: int, *, seconds: float) -> Points:
    """Return the Pareto set of ``points`` and of what a search for one budget finds within ``seconds``: a frontier is
    searched for all budgets, and half of that at its end."""
    point = cheapest_within(points, budget_bytes)
    if point is None or not point.recompute_seconds:
        return points
    return search_at(profile, points, budget_bytes, num_windows=_num_windows(profile), clock=Clock(seconds))


# -- plans to begin with -----------------------------------------------------------------------------------------------


def _by_planner(planner: Planner, share: float) -> Stage:
    """Return the stage that adds what ``planner`` finds within a share of the seconds left."""

    def stage(profile: GraphProfile, points: Points, clock: Clock, _: Bases) -> Points:
        return pareto((*points, *planner(profile, seconds=share * clock.left_seconds)))

    return stage


# -- plans made better -------------------------------------------------------------------------------------------------


def _num_trials(profile: GraphProfile) -> int:
    return min(MOST_TRIALS, SEARCH_WORK // max(1, len(profile.recipes)))


def _improved(profile: GraphProfile, points: Points, clock: Clock, bases: Bases) -> Points:
    return improve(profile, points, num_trials=_num_trials(profile), clock=clock, bases=bases)


def _relinked(profile: GraphProfile, points: Points, clock: Clock, bases: Bases) -> Points:
    return relink_paths(profile, points, num_trials=_num_trials(profile) // 2, clock=clock, bases=bases)


def _chosen_anew(profile: GraphProfile, points: Points, clock: Clock, _: Bases) -> Points:
    return search_neighbourhoods(profile, points, num_windows=_num_windows(profile), clock=clock)


def _num_windows(profile: GraphProfile) -> int:
    return min(MOST_WINDOWS, int(WINDOW_WORK / max(1, len(profile.recipes)) ** 1.5))


def _polished(profile: GraphProfile, points: Points, clock: Clock, bases: Bases) -> Points:
    """Return the points improved and relinked in turn, each making what the other works on, as long as that helps."""
    num_trials = _num_trials(profile) // 4
    for _ in range(MOST_TURNS):
        before = points
        points = improve(profile, points, num_trials=num_trials, clock=clock, bases=bases)
        points = relink_paths(profile, points, num_trials=num_trials, clock=clock, bases=bases)
        if clock.over or _area(points, before) >= (1.0 - TURN_GAIN) * _area(before, before):
            break
    return points


def _area(points: Sequence[FrontierPoint], span: Sequence[FrontierPoint]) -> float:
    """Return the area below a staircase: seconds, summed over the logarithms of the budgets that ``span`` has."""
    least, most = span[-1].peak_bytes, span[0].peak_bytes
    steps = pairwise((most, *(min(max(p.peak_bytes, least), most) for p in points)))
    return sum(
        p.recompute_seconds * math.log(upper / lower)
        for p, (upper, lower) in zip(points, steps, strict=True)
        if upper > lower
    )


STAGES: dict[str, Stage] = {
    "intervals": _by_planner(segment_dp.frontier, 0.6),
    "mincut": _by_planner(mincut.frontier, 0.3),
    "chen": _by_planner(chen.frontier, 0.3),  # so that none is worse than a planner asked for by name
    "local search": _improved,
    "path relinking": _relinked,
    "neighbourhood search": _chosen_anew,
    "polish": _polished,
}
"""By name, in order. Each takes the profile, the points so far, the clock and what earlier stages found out, and returns a
Pareto set at least as good."""
