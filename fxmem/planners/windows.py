"""Plans re-chosen a neighbourhood at a time by the integer program, where local search moves too little at once.

In: a frontier. Out: a frontier at least as good. Near the floor a better plan often differs from a good one in all
storages of a stretch together, and no few moves lead there. So one plan's limits are held fast but for those of a few
recipes that read from each other, which :mod:`fxmem.planners.ilp` chooses anew within the same budget; so small a
program's root takes a tenth to half of a second in graphs of 30 to 140 recipes. Neighbourhoods overlap; those
that recompute most come first; they are gone through again as long as that helps. In small graphs wider ones follow at the
floor, as in a variable neighbourhood descent (Hansen & Mladenovic 2001).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fxmem.planners import ilp
from fxmem.planners.frontier import Clock, Limits, cheapest_within, judge_all, pareto
from fxmem.simulate import NO_RECIPE, Tables, tables_of
from fxmem.types import KEEP, FrontierPoint, GraphProfile

WIDTH, SMALL_WIDTH = 8, 10
"""Recipes of a neighbourhood; the latter in graphs of at most ..."""
SMALL = 48
"""... so many recipes, where the whole program is small."""
WIDER, MOST_WIDER = (14, 18, 24), 2
"""There, at the least peak, if narrower ones helped: further widths, and how many neighbourhoods of each are tried."""
MOST_VARIABLES = 1_200
"""Of a wider one's program; its root takes some two seconds then."""
BUDGET_SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5)
"""Budgets worked on, as shares of the way from the least peak to eager's; each with half of the windows left."""
MOST_IN_VAIN = 2
"""Budgets one after the other where nothing is found; further ones are not tried then."""
LEAST_GAIN = 0.99
"""What is sought costs at most this part of what is known: where there is none, the program soon says so."""
SECONDS = 60.0
"""For one neighbourhood, should that take far longer than ever seen."""


def rechoose(
    profile: GraphProfile, points: Iterable[FrontierPoint], *, num_windows: int, clock: Clock
) -> tuple[FrontierPoint, ...]:
    """Return the Pareto set of ``points`` and of what choosing at most ``num_windows`` neighbourhoods anew brings."""
    tables, found = tables_of(profile), pareto(points)
    low, high, before = found[-1].peak_bytes, found[0].peak_bytes, found[-1]
    is_small, in_vain = len(tables.inputs) <= SMALL, 0
    windows = neighbourhoods(tables, SMALL_WIDTH if is_small else WIDTH)
    for share in BUDGET_SHARES:
        budget_bytes = round(low + share * (high - low))
        better, num_tried = _rechosen_at(profile, found, budget_bytes, windows, (num_windows + 1) // 2, clock)
        num_windows -= num_tried
        in_vain = in_vain + 1 if _at(better, budget_bytes) == _at(found, budget_bytes) else 0
        found = better
        if in_vain == MOST_IN_VAIN:
            break
    wider = [width for width in WIDER if width < len(tables.inputs)] if is_small else []
    for width in wider if _at(found, low) != before else ():
        around = neighbourhoods(tables, width)
        found, _ = _rechosen_at(profile, found, low, around, MOST_WIDER, clock, MOST_VARIABLES)
    return found


def _rechosen_at(
    profile: GraphProfile,
    points: tuple[FrontierPoint, ...],
    budget_bytes: int,
    windows: list[frozenset[int]],
    most_tried: int,
    clock: Clock,
    most_variables: float = math.inf,
) -> tuple[tuple[FrontierPoint, ...], int]:
    """Return what going through the windows, until none helps at this budget any more, makes of ``points``; and how many
    were tried."""
    num_tried, before = 0, None
    while before != _at(points, budget_bytes):
        before = _at(points, budget_bytes)
        for window in _by_seconds(tables_of(profile), before.plan.limits, windows):
            if num_tried == most_tried or clock.over:
                return points, num_tried
            num_tried += 1
            limits = _rechosen(profile, _at(points, budget_bytes), budget_bytes, window, clock, most_variables)
            points = pareto((*points, *judge_all(profile, "windows", limits, clock)))
    return points, num_tried


def _at(points: tuple[FrontierPoint, ...], budget_bytes: int) -> FrontierPoint:
    """Return the cheapest point within a budget that is no less than the least peak."""
    point = cheapest_within(points, budget_bytes)
    assert point is not None
    return point


def _rechosen(
    profile: GraphProfile,
    point: FrontierPoint,
    budget_bytes: int,
    window: frozenset[int],
    clock: Clock,
    most_variables: float,
) -> list[Limits]:
    """Return the limits, if any, of a plan that is no dearer, other in what the window's recipes make."""
    position = tables_of(profile).position
    limits = ilp.best_limits(
        profile,
        budget_bytes,
        seconds=min(SECONDS, clock.left_seconds),
        num_branches=1,
        upper_seconds=LEAST_GAIN * point.recompute_seconds,
        fixed={s: point.plan.limits[s] for s, p in enumerate(position) if p != NO_RECIPE and p not in window},
        most_variables=most_variables,
    )
    return [] if limits is None else [limits]


def neighbourhoods(tables: Tables, width: int) -> list[frozenset[int]]:
    """Return for every few recipes the ``width`` recipes nearest by what they read and make, then by position."""
    near: list[set[int]] = [set() for _ in tables.inputs]
    for k, inputs in enumerate(tables.inputs):
        for maker in {tables.position[s] for s in inputs} - {NO_RECIPE}:
            near[maker].add(k)
            near[k].add(maker)
    found = []
    for center in range(0, len(near), width // 2):
        reached = [center]
        for k in reached:
            if len(reached) < width:
                reached += sorted(near[k].difference(reached), key=lambda other: (abs(other - center), other))
        found.append(frozenset(reached[:width]))
    return found


def _by_seconds(tables: Tables, limits: Limits, windows: list[frozenset[int]]) -> list[frozenset[int]]:
    """Return the windows that recompute anything, those that recompute most first."""
    dropped = {p for p, limit in zip(tables.position, limits, strict=True) if limit != KEEP}
    seconds = [sum(tables.seconds[p] for p in window & dropped) for window in windows]
    order = sorted(range(len(windows)), key=lambda number: -seconds[number])
    return [windows[number] for number in order if seconds[number] > 0.0]
