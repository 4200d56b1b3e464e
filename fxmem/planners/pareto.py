"""Sets of judged plans: what every planner returns and how one is picked.

A frontier is a Pareto set: peaks falling, recompute seconds rising. Picking the cheapest point within a budget from one
fixed set makes plans monotone in the budget: more bytes never cost more seconds, and no peak exceeds what was asked for.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from fxmem.ir import FrontierPoint, GraphProfile, Plan
from fxmem.planners.incremental import Base, FullRun, IncrementalRun
from fxmem.planners.simulate import Run, Tables, simulate, tables_of
from fxmem.progress import check_interrupted

Limits = tuple[int, ...]
MOST_RERUNS = 30
"""A plan that reruns the graph's recipes more often than this, on average, is given up."""
LESS = 1 - 1e-9
"""Sums of seconds in another order may differ by so much."""


class Clock:
    """A deadline: the last resort of planners, whose work is otherwise limited by counts.

    It counts the CPU time of this thread, so that a busy machine does not change plans.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.thread_time() + seconds

    @property
    def left_seconds(self) -> float:
        return max(0.0, self._end - time.thread_time())

    @property
    def over(self) -> bool:
        check_interrupted()
        return self.left_seconds == 0.0


def judge(profile: GraphProfile, planner: str, limits: Sequence[int]) -> FrontierPoint:
    """Return the plan with these retain limits and what the simulator says of it."""
    plan = Plan(planner, tuple(limits))
    timeline = simulate(profile, plan)
    return FrontierPoint(plan, timeline.peak_bytes, timeline.recompute_seconds)


def judge_all(
    profile: GraphProfile, planner: str, candidates: Iterable[Limits], clock: Clock
) -> tuple[FrontierPoint, ...]:
    """Return the Pareto set of the candidates judged before the clock is over; the first is always judged."""
    tables = tables_of(profile)
    seen: set[Limits] = set()
    front = Front()
    for limits in candidates:
        if limits not in seen:
            seen.add(limits)
            run = live(tables, limits, front)
            if run is not None:
                front.add(run.peak_bytes, run.recompute_seconds, limits)
        if clock.over:
            break
    return tuple(FrontierPoint(Plan(planner, limits), peak, seconds) for peak, seconds, limits in reversed(front.rows))


class Front:
    """A Pareto set that grows: rows of (peak bytes, seconds, limits), peaks rising and seconds falling."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float, Limits]] = []

    def beats(self, peak_bytes: int, seconds: float) -> bool:
        """Tell whether some row has no higher peak and costs no more."""
        place = bisect_left(self.rows, (peak_bytes + 1,))
        return place > 0 and self.rows[place - 1][1] <= seconds

    def add(self, peak_bytes: int, seconds: float, limits: Limits) -> list[Limits] | None:
        """Add a row unless some other beats it (then None is returned); return the limits of rows it beats."""
        if self.beats(peak_bytes, seconds):
            return None
        start = end = bisect_left(self.rows, (peak_bytes,))
        while end < len(self.rows) and self.rows[end][1] >= seconds:
            end += 1
        beaten = [limits for _, _, limits in self.rows[start:end]]
        self.rows[start:end] = [(peak_bytes, seconds, limits)]
        return beaten


def live(tables: Tables, limits: Limits, front: Front | None = None, base: Base | None = None) -> Run | None:
    """Return the finished run of limits known to fit; None if it reruns recipes again and again, or ``front`` beats it.

    Late refills of long runs cost time quadratic in their length, to simulate as to train with. Peak and seconds so far
    are lower bounds, so most runs that a front beats need not be finished. ``base``: a finished run of similar limits.
    """
    steps: FullRun | IncrementalRun = FullRun(tables, limits) if base is None else IncrementalRun(base, limits)
    run = steps.run
    least_seconds = LESS * run.least_seconds() if front is not None and base is None else 0.0
    most_recomputed = MOST_RERUNS * len(tables.inputs) + 1_000
    while run.num_recomputed <= most_recomputed:
        if front is not None and front.beats(run.peak_bytes, max(least_seconds, run.recompute_seconds)):
            return None
        if not steps.advance():
            return run
    return None


def pareto(points: Iterable[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """Return the points that no other beats, peaks falling and seconds rising; of equal ones the first given."""
    frontier: list[FrontierPoint] = []
    for point in sorted(points, key=lambda p: (p.recompute_seconds, p.peak_bytes)):
        if not frontier or point.peak_bytes < frontier[-1].peak_bytes:
            frontier.append(point)
    return tuple(frontier)


def cheapest_within(points: Iterable[FrontierPoint], budget_bytes: int) -> FrontierPoint | None:
    """Return the point with the least recompute seconds among those whose peak fits, the lower peak of equal ones.

    None if none fits.
    """
    fitting = (p for p in points if p.peak_bytes <= budget_bytes)
    return min(fitting, key=lambda p: (p.recompute_seconds, p.peak_bytes), default=None)
