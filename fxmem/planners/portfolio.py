"""The default planner: all others' frontiers merged, then improved, in the stages of :data:`STAGES`.

In: a profile. Out: a frontier. Work is limited by counts that depend on the size of the graph only, so equal profiles get
equal plans; the clock, which counts CPU time, is the last resort and far from what ordinary graphs take. What each stage
brings is measured by ``python -m benchmarks.ablation``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from fxmem.ir import FrontierPoint, GraphProfile
from fxmem.planners import chen, ilp, mincut, segment_dp
from fxmem.planners.bound import Relaxation
from fxmem.planners.local_search import improve
from fxmem.planners.neighbourhood_search import LEAST_GAIN, search_neighbourhoods
from fxmem.planners.pareto import Clock, Limits, judge_all, pareto
from fxmem.planners.path_relinking import relink_paths
from fxmem.planners.repair import Repair
from fxmem.planners.simulate import drop_all, tables_of

SEARCH_WORK = 220_000
"""Recipes times trials of the local search."""
MOST_TRIALS = 2_500
REPAIR_WORK = 180_000
"""Recipes times runs of the repair."""
MOST_REPAIRS = 3_000
REPAIR_SHARES = (0.1, 0.05, 0.02, 0.0)
"""Budgets it works on first, as shares of the way from the least peak to eager's, ..."""
NUM_REPAIRS = 10
"""... and how many in all; the others lie amid the deepest steps."""
RELAXATION_SHARES = tuple(k / 16 for k in range(16))
"""Budgets for which the relaxation makes suggestions, as shares of the way from the least peak to eager's."""
MOST_STEPS, FEWEST_STEPS = 20, 5
"""Steps of the relaxation for one budget; graphs too long for the fewest do without it."""
RELAXATION_WORK = 5_000
"""Recipes times steps."""
MOST_EXACT_RECIPES = 28
"""Up to here the integer program is asked too."""
FEWEST_EXACT, EXACT_WORK = 2, 64
"""Least number of budgets it is asked about, recipes times budgets, ..."""
EXACT_BRANCHES = 1
"""... how far it may branch for each, ..."""
EXACT_SECONDS = 60.0
"""... and for how long, should that take far longer than ever seen."""
MOST_TURNS, TURN_GAIN = 6, 0.005
"""Turns of improving and relinking at the end, and what one must bring, of the area below the frontier, for another."""
MOST_WINDOWS, WINDOW_WORK = 40, 11_000
"""Neighbourhoods that it chooses anew; times recipes to the power of 3/2, as which the work for each grows."""
UNLIKE = 0.01
"""Budgets that differ by so much are worth asking about separately."""

Points = tuple[FrontierPoint, ...]
Planner = Callable[..., Points]
Stage = Callable[[GraphProfile, Points, Clock], Points]
"""See :data:`STAGES`, at the end."""


def frontier(profile: GraphProfile, *, seconds: float, stages: Mapping[str, Stage] | None = None) -> Points:
    """Return the Pareto set that the stages, one after the other, find within ``seconds``.

    ``stages``: others than all of :data:`STAGES`, for benchmarks that leave some out.
    """
    clock = Clock(seconds)
    points: Points = ()
    for stage in (STAGES if stages is None else stages).values():
        points = stage(profile, points, clock)
    return points


# -- plans to begin with -----------------------------------------------------------------------------------------------


def _by_planner(planner: Planner, share: float) -> Stage:
    """Return the stage that adds what ``planner`` finds within a share of the seconds left."""

    def stage(profile: GraphProfile, points: Points, clock: Clock) -> Points:
        return pareto((*points, *planner(profile, seconds=share * clock.left_seconds)))

    return stage


def _all_dropped(profile: GraphProfile, points: Points, clock: Clock) -> Points:
    """Return the points and the plan that drops everything."""
    return pareto((*points, *judge_all(profile, "drop_all", [drop_all(profile).limits], clock)))


def _relaxed(profile: GraphProfile, points: Points, clock: Clock) -> Points:
    """Return the points and those that the relaxation suggests."""
    return pareto((*points, *judge_all(profile, "relaxation", _suggested(profile, points, clock), clock)))


def _suggested(profile: GraphProfile, points: Points, clock: Clock) -> Iterator[Limits]:
    """Yield what the relaxation's prices for ticks make cheapest, for budgets over the whole span."""
    tables = tables_of(profile)
    relaxation, last = Relaxation(tables), len(tables.inputs) - 1
    low, high = points[-1].peak_bytes, points[0].peak_bytes
    num_steps = min(MOST_STEPS, RELAXATION_WORK // max(1, len(tables.inputs)))
    for share in RELAXATION_SHARES if num_steps >= FEWEST_STEPS else ():
        budget_bytes = round(low + share * (high - low))
        cost = next(p.recompute_seconds for p in points if p.peak_bytes <= budget_bytes)
        bound = relaxation.bound(budget_bytes, upper_seconds=cost, num_steps=num_steps, clock=clock)
        for reruns in bound.reruns:
            choice = mincut.Choice(reruns, 0.0, 0.0)
            yield mincut.choice_limits(tables, choice, last)
            yield mincut.choice_limits(tables, choice, None)


# -- plans made better -------------------------------------------------------------------------------------------------


def _num_trials(profile: GraphProfile) -> int:
    return min(MOST_TRIALS, SEARCH_WORK // max(1, len(profile.recipes)))


def _improved(profile: GraphProfile, points: Points, clock: Clock) -> Points:
    return improve(profile, points, num_trials=_num_trials(profile), clock=clock)


def _relinked(profile: GraphProfile, points: Points, clock: Clock) -> Points:
    return relink_paths(profile, points, num_trials=_num_trials(profile) // 2, clock=clock)


def _repaired(profile: GraphProfile, points: Points, clock: Clock) -> Points:
    """Return the points and better ones, made from points that just exceed a budget."""
    repair = Repair(tables_of(profile))
    left = min(MOST_REPAIRS, REPAIR_WORK // max(1, len(profile.recipes)))
    low, high = points[-1].peak_bytes, points[0].peak_bytes
    near_floor = [round(low + share * (high - low)) for share in REPAIR_SHARES]
    done: set[int] = set()
    for number in range(NUM_REPAIRS):
        steps = [(s, b) for s, b in _steps(points) if b not in done]
        if not steps or clock.over:
            break
        budget_bytes = near_floor[number] if number < len(near_floor) else max(steps)[1]
        done.add(budget_bytes)
        above = [p for p in reversed(points) if p.peak_bytes > budget_bytes]
        further = next((p for p in above if p.peak_bytes > 1.06 * budget_bytes), above[-1])
        for start in dict.fromkeys((above[0].plan.limits, further.plan.limits)):
            before = repair.num_runs
            fitting = list(repair.fit(start, budget_bytes, left // (NUM_REPAIRS - number)))
            left -= repair.num_runs - before
            points = pareto((*points, *judge_all(profile, "repair", fitting, clock)))
    return points


def _steps(points: Points) -> Iterator[tuple[float, int]]:
    """Yield the steps of a frontier's staircase: relative bytes times seconds of the corner, and the budget amid it."""
    for higher, lower in pairwise(points):
        size = math.log(higher.peak_bytes / lower.peak_bytes) * (lower.recompute_seconds - higher.recompute_seconds)
        yield size, (higher.peak_bytes + lower.peak_bytes) // 2


def _chosen_anew(profile: GraphProfile, points: Points, clock: Clock) -> Points:
    num_windows = min(MOST_WINDOWS, int(WINDOW_WORK / max(1, len(profile.recipes)) ** 1.5))
    return search_neighbourhoods(profile, points, num_windows=num_windows, clock=clock)


def _exact(profile: GraphProfile, points: Points, clock: Clock) -> Points:
    """Return the points and what the integer program finds, in small graphs, where most may be missing."""
    if len(profile.recipes) > MOST_EXACT_RECIPES:
        return points
    relaxation, num_recipes = Relaxation(tables_of(profile)), max(1, len(profile.recipes))
    done: list[int] = []
    for _ in range(max(FEWEST_EXACT, EXACT_WORK // num_recipes)):
        asked = _widest_gap(points, relaxation, done, clock)
        if asked is None or clock.over:
            break
        budget_bytes, cost = asked
        done.append(budget_bytes)
        found = ilp.best_limits(
            profile,
            budget_bytes,
            seconds=min(EXACT_SECONDS, clock.left_seconds),
            num_branches=EXACT_BRANCHES,
            upper_seconds=LEAST_GAIN * cost,
        )
        if found.limits is not None:
            points = pareto((*points, *judge_all(profile, "ilp", [found.limits], clock)))
    return points


def _widest_gap(points: Points, relaxation: Relaxation, done: list[int], clock: Clock) -> tuple[int, float] | None:
    """Return the budget, unlike those done, whose best point may be farthest from the optimum, and that point's seconds.

    Budgets asked about are the largest for which a point is the best known (just below the next point's peak), and the
    least peak.
    """
    budgets = [(higher.peak_bytes - 1, point.recompute_seconds) for higher, point in pairwise(points)]
    budgets.append((points[-1].peak_bytes, points[-1].recompute_seconds))
    gaps = []
    for budget_bytes, cost in budgets:
        if all(abs(budget_bytes - other) > UNLIKE * other for other in done):
            bound = relaxation.bound(budget_bytes, upper_seconds=cost, num_steps=10, clock=clock)
            gaps.append((cost - bound.seconds, budget_bytes, cost))
    gap, budget_bytes, cost = max(gaps, default=(0.0, 0, 0.0))
    return (budget_bytes, cost) if gap > 0.0 else None


def _polished(profile: GraphProfile, points: Points, clock: Clock) -> Points:
    """Return the points improved and relinked in turn, each making what the other works on, as long as that helps."""
    num_trials = _num_trials(profile) // 4
    for _ in range(MOST_TURNS):
        before = points
        points = improve(profile, points, num_trials=num_trials, clock=clock)
        points = relink_paths(profile, points, num_trials=num_trials, clock=clock)
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
    "chen": _by_planner(chen.frontier, 0.3),
    "drop all": _all_dropped,
    "relaxation": _relaxed,
    "local search": _improved,
    "path relinking": _relinked,
    "repair": _repaired,
    "neighbourhood search": _chosen_anew,
    "integer program": _exact,
    "polish": _polished,
}
"""By name, in order. Each takes the profile, the points so far and the clock, and returns a Pareto set at least as good."""
