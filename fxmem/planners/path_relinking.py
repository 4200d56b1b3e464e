"""Plans put together from two: a cheap one that exceeds a budget, and a dear one that meets it.

In: a frontier. Out: a frontier at least as good. Planners that reach low peaks often recompute far more than those peaks
ask for, and in all of the graph, where a cheaper plan exceeds the budget only in a stretch of it. So stretches of the
dear plan are exchanged for the cheap one's, long stretches first, then ever shorter ones, as long as the peak stays
below the dear one's: in the end the dear plan is left where it is needed only. Every plan on the way is judged.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise

from fxmem.ir import FrontierPoint, GraphProfile, Plan
from fxmem.planners.incremental import Bases
from fxmem.planners.pareto import Clock, Front, Limits, live
from fxmem.planners.simulate import NO_RECIPE, tables_of

NUM_LEVELS = 5
"""Stretches are halved so often."""
LEAST_WIDTH = 0.003
"""A step of the staircase counts as at least so wide, as a logarithm of bytes: who asks for the least peak pays for the
last step, however narrow it is."""
RISES = (1.0, 1.03, 1.1, 1.3)
"""Cheap plans tried with a dear one: those next above so many times its peak."""


def relink_paths(
    profile: GraphProfile,
    points: Iterable[FrontierPoint],
    *,
    num_trials: int,
    clock: Clock,
    bases: Bases | None = None,
) -> tuple[FrontierPoint, ...]:
    """Return the Pareto set of ``points`` and of what at most about ``num_trials`` combinations bring.

    ``bases``: of earlier searches, whose results ``points`` are at least as good as. What these tried is not run again.
    """
    front = Front()
    names: dict[Limits, str] = {}
    for point in points:
        front.add(point.peak_bytes, point.recompute_seconds, point.plan.limits)
        names[point.plan.limits] = point.plan.planner
    splicer = _Splicer(bases or Bases(tables_of(profile)), front)
    tried: set[tuple[Limits, Limits]] = set()
    while splicer.num_trials < num_trials and not clock.over:
        pair = next((pair for pair in _pairs(front) if pair not in tried), None)
        if pair is None:
            break
        tried.add(pair)
        splicer.run(*pair)
    return tuple(
        FrontierPoint(Plan(names.get(limits, "path relinking"), limits), peak_bytes, seconds)
        for peak_bytes, seconds, limits in reversed(front.rows)
    )


def _pairs(front: Front) -> list[tuple[Limits, Limits]]:
    """Return pairs of a cheap plan and a dear one, by the corner of the staircase between them, largest first."""
    ranked = []
    for number, (dear, above) in enumerate(pairwise(front.rows)):
        size = max(LEAST_WIDTH, math.log(above[0] / dear[0])) * (dear[1] - above[1])
        for k, rise in enumerate(RISES):
            place = bisect_left(front.rows, (rise * dear[0],), lo=number + 1)
            cheap = front.rows[place] if place < len(front.rows) else above
            ranked.append((-size, k, cheap[2], dear[2]))
    ranked.sort(key=lambda row: row[:2])
    return [(cheap, dear) for _, _, cheap, dear in ranked]


class _Splicer:
    def __init__(self, bases: Bases, front: Front) -> None:
        self.bases, self.tables, self.front, self.num_trials = bases, bases.tables, front, 0
        self._made = sorted((p, s) for s, p in enumerate(self.tables.position) if p != NO_RECIPE)
        """Position and number of each storage that a recipe makes."""

    def run(self, cheap: Limits, dear: Limits) -> None:
        """Exchange stretches of ``dear`` for those of ``cheap`` while the peak stays below that of ``dear``."""
        most_bytes = next(row[0] for row in self.front.rows if row[2] == dear)
        num_positions = len(self.tables.inputs)
        for level in range(1, NUM_LEVELS + 1):
            for piece in range(1 << level):
                start, end = (num_positions * (piece + k) >> level for k in (0, 1))
                spliced = list(dear)
                for _, s in self._made[bisect_left(self._made, (start,)) : bisect_left(self._made, (end,))]:
                    spliced[s] = cheap[s]
                trial = tuple(spliced)
                if trial != dear and self._judged(trial, most_bytes, dear):
                    dear = trial

    def _judged(self, limits: Limits, most_bytes: int, near: Limits) -> bool:
        """Judge a plan, add it to the front, and tell whether it is a good one within ``most_bytes``. ``near``: another,
        from which it may differ little."""
        self.num_trials += 1
        if limits in self.bases.judged:
            return False
        self.bases.judged.add(limits)
        base = self.bases.of(near)
        run = live(self.tables, limits, self.front, base)
        if run is None or self.front.add(run.peak_bytes, run.recompute_seconds, limits) is None:
            return False
        self.bases.lend(limits, base, run.peak_tick)
        return run.peak_bytes <= most_bytes
