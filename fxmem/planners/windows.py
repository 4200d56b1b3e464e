"""Plans re-chosen a window at a time by the integer program, where local search moves too little at once.

In: a frontier. Out: a frontier at least as good. Near the floor a better plan often differs from a good one in all
storages of a stretch together, and no few moves lead there. So one plan's limits are held fast but for those of a window
of recipes, which :mod:`fxmem.planners.ilp` chooses anew within the same budget; so small a program's root takes a
twentieth to two fifths of a second in graphs of 30 to 110 recipes. Windows overlap by half; those that recompute most
come first.
"""

from __future__ import annotations

from collections.abc import Iterable

from fxmem.planners import ilp
from fxmem.planners.frontier import Clock, Limits, cheapest_within, judge_all, pareto
from fxmem.simulate import NO_RECIPE, Tables, tables_of
from fxmem.types import KEEP, FrontierPoint, GraphProfile

WIDTH = 8
"""Recipes of a window."""
BUDGET_SHARES = (0.0, 0.1)
"""Budgets worked on, to equal parts, as shares of the way from the least peak to eager's."""
SECONDS = 60.0
"""For one window, should that take far longer than ever seen."""


def rechoose(
    profile: GraphProfile, points: Iterable[FrontierPoint], *, num_windows: int, clock: Clock
) -> tuple[FrontierPoint, ...]:
    """Return the Pareto set of ``points`` and of what choosing at most ``num_windows`` windows anew brings."""
    tables, found = tables_of(profile), pareto(points)
    for number, share in enumerate(BUDGET_SHARES):
        low, high = found[-1].peak_bytes, found[0].peak_bytes
        budget_bytes = round(low + share * (high - low))
        most = num_windows // len(BUDGET_SHARES) + (number < num_windows % len(BUDGET_SHARES))
        for start in _starts(tables, _at(found, budget_bytes).plan.limits)[:most]:
            if clock.over:
                return found
            point = _at(found, budget_bytes)
            limits = ilp.best_limits(
                profile,
                budget_bytes,
                seconds=min(SECONDS, clock.left_seconds),
                num_branches=1,
                upper_seconds=point.recompute_seconds,
                fixed=_outside(tables, point.plan.limits, range(start, start + WIDTH)),
            )
            if limits is not None:
                found = pareto((*found, *judge_all(profile, "windows", [limits], clock)))
    return found


def _at(points: tuple[FrontierPoint, ...], budget_bytes: int) -> FrontierPoint:
    """Return the cheapest point within a budget that is no less than the least peak."""
    point = cheapest_within(points, budget_bytes)
    assert point is not None
    return point


def _starts(tables: Tables, limits: Limits) -> list[int]:
    """Return the first positions of the windows that recompute anything, those that recompute most first."""
    dropped = {p for p, limit in zip(tables.position, limits, strict=True) if limit != KEEP}
    ranked = []
    for start in range(0, max(1, len(tables.inputs) - WIDTH // 2), WIDTH // 2):
        seconds = sum(tables.seconds[p] for p in range(start, min(start + WIDTH, len(tables.inputs))) if p in dropped)
        if seconds > 0.0:
            ranked.append((-seconds, start))
    return [start for _, start in sorted(ranked)]


def _outside(tables: Tables, limits: Limits, window: range) -> dict[int, int]:
    """Return the limits of the storages that no recipe of the window makes."""
    return {s: limits[s] for s, p in enumerate(tables.position) if p != NO_RECIPE and p not in window}
