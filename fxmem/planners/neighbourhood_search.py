"""Plans re-chosen a neighbourhood at a time by the integer program, where local search moves too little at once.

In: a frontier. Out: a frontier at least as good. Near the floor a better plan often differs from a good one in all
storages of a stretch together, and no few moves lead there. So one plan's limits are held fast but for those of a few
recipes that read from each other, which :mod:`fxmem.planners.ilp` chooses anew within the same budget; so small a
program's root takes a tenth to half of a second in graphs of 30 to 140 recipes. Neighbourhoods overlap; those
that recompute most come first; they are gone through again as long as that helps. In small graphs wider ones follow at the
floor, as in a variable neighbourhood descent (Hansen & Mladenovic 2001). Where many equal layers follow each other, a
program without solution takes a hundred times as long as others of its size: so what may be tried in vain is limited.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fxmem.ir import KEEP, FrontierPoint, GraphProfile
from fxmem.planners import ilp
from fxmem.planners.pareto import Clock, Limits, cheapest_within, judge_all, pareto
from fxmem.planners.simulate import NO_RECIPE, Tables, tables_of

WIDTH, SMALL_WIDTH = 8, 10
"""Recipes of a neighbourhood; the latter in graphs of at most ..."""
SMALL = 48
"""... so many recipes, where the whole program is small."""
WIDER, MOST_WIDER = (14, 18, 24), 2
"""There, at the least peak: further widths, and how many neighbourhoods of each are tried, ..."""
WIDER_AFTER = 3
"""... if so many narrower ones helped."""
MOST_VARIABLES = 1_200
"""Of a wider one's program; its root takes some two seconds then."""
BUDGET_SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5)
"""Budgets worked on, as shares of the way from the least peak to eager's; each with half of the windows left."""
IN_VAIN, IN_VAIN_AGAIN = 20_000, 10_000
"""Factors in the programs that may be solved in vain; so many more for each that helped."""
LEAST_GAIN = 0.99
"""What is sought costs at most this part of what is known: where there is none, the program soon says so."""
SECONDS = 60.0
"""For one neighbourhood, should that take far longer than ever seen."""


def search_neighbourhoods(
    profile: GraphProfile, points: Iterable[FrontierPoint], *, num_windows: int, clock: Clock
) -> tuple[FrontierPoint, ...]:
    """Return the Pareto set of ``points`` and of what choosing at most ``num_windows`` neighbourhoods anew brings."""
    tables, descent = tables_of(profile), _Descent(profile, pareto(points), clock)
    low, high = descent.points[-1].peak_bytes, descent.points[0].peak_bytes
    is_small = len(tables.inputs) <= SMALL
    windows = neighbourhoods(tables, SMALL_WIDTH if is_small else WIDTH)
    num_helped = []
    for share in BUDGET_SHARES:
        budget_bytes = round(low + share * (high - low))
        num_windows -= descent.go_through(windows, budget_bytes, (num_windows + 1) // 2)
        num_helped.append(descent.num_helped)
    descent.in_vain = math.inf
    for width in WIDER:
        if is_small and num_helped[0] >= WIDER_AFTER and width < len(tables.inputs):
            descent.go_through(neighbourhoods(tables, width), low, MOST_WIDER, MOST_VARIABLES)
    return descent.points


def search_at(
    profile: GraphProfile, points: Iterable[FrontierPoint], budget_bytes: int, *, num_windows: int, clock: Clock
) -> tuple[FrontierPoint, ...]:
    """As :func:`search_neighbourhoods`, for one budget that a point keeps."""
    tables, descent = tables_of(profile), _Descent(profile, pareto(points), clock)
    descent.go_through(neighbourhoods(tables, WIDTH), budget_bytes, num_windows)
    return descent.points


class _Descent:
    """A frontier on its way down, one neighbourhood after the other."""

    def __init__(self, profile: GraphProfile, points: tuple[FrontierPoint, ...], clock: Clock) -> None:
        self.profile, self.tables, self.points, self.clock = profile, tables_of(profile), points, clock
        self.num_helped = 0
        """So far, of all windows."""
        self.in_vain: float = IN_VAIN
        """Factors that are left to be solved in vain."""

    def go_through(
        self, windows: list[frozenset[int]], budget_bytes: int, most_tried: int, most_variables: float = math.inf
    ) -> int:
        """Choose the windows anew for a budget, until none helps there any more; return how many were tried."""
        num_tried, before = 0, None
        while before != self._at(budget_bytes):
            before = self._at(budget_bytes)
            for window in _by_seconds(self.tables, before.plan.limits, windows):
                if num_tried == most_tried or self.in_vain < 0 or self.clock.over:
                    return num_tried
                num_tried += 1
                self._rechoose(window, budget_bytes, most_variables)
        return num_tried

    def _at(self, budget_bytes: int) -> FrontierPoint:
        """Return the cheapest point within a budget that is no less than the least peak."""
        point = cheapest_within(self.points, budget_bytes)
        assert point is not None
        return point

    def _rechoose(self, window: frozenset[int], budget_bytes: int, most_variables: float) -> None:
        """Add a plan, if there is one, that is cheaper for the budget and other in what the window's recipes make."""
        point = self._at(budget_bytes)
        fixed = {
            s: point.plan.limits[s] for s, p in enumerate(self.tables.position) if p != NO_RECIPE and p not in window
        }
        found = ilp.best_limits(
            self.profile,
            budget_bytes,
            seconds=min(SECONDS, self.clock.left_seconds),
            num_branches=1,
            upper_seconds=LEAST_GAIN * point.recompute_seconds,
            fixed=fixed,
            most_variables=most_variables,
        )
        if found.limits is not None:
            better = judge_all(self.profile, "neighbourhood search", [found.limits], self.clock)
            self.points = pareto((*self.points, *better))
        helped = self._at(budget_bytes) != point
        self.num_helped += helped
        self.in_vain += IN_VAIN_AGAIN if helped else -found.num_factors


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
