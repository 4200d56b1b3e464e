"""Local search: a frontier improved one storage at a time, each step judged on the whole training step.

In: a profile and judged points. Out: a frontier at least as good. It finds what planners that always keep boundaries
cannot: boundaries that are cheap to recompute, and storages that need not be dropped since they are not there at the
peak. Moves of a point, most promising first: keep a dropped storage that would not live at the peak's tick (fewer seconds
for free), drop a kept one that does (most bytes for each second), refill later one that does (only when asked for, or
only by what backward asks for after the peak).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations, zip_longest

from fxmem.planners.frontier import Clock, Front, Limits, live, pareto
from fxmem.simulate import NO_RECIPE, Tables, tables_of
from fxmem.types import KEEP, FrontierPoint, GraphProfile, Plan

_Move = tuple[float, int, int]  # rank, storage, new limit
MOVES_AT_ONCE = 6
"""Moves tried from a point before the next one has its turn."""


def improve(
    profile: GraphProfile, points: Iterable[FrontierPoint], *, num_trials: int, clock: Clock
) -> tuple[FrontierPoint, ...]:
    """Return the Pareto set of ``points`` and of what at most ``num_trials`` simulated moves from them find."""
    front = pareto(points)
    search = _Search(tables_of(profile))
    for point in evenly(front, max(MOVES_AT_ONCE, num_trials)):
        search.consider(point.plan.limits)
    search.walk(num_trials, clock)
    found = (FrontierPoint(Plan("search", limits), peak, cost) for peak, cost, limits in search.front.rows)
    return pareto((*front, *found))


def evenly(points: Sequence[FrontierPoint], count: int) -> list[FrontierPoint]:
    """Return at most ``count`` of the points, evenly by place."""
    step = max(1, -(-len(points) // count))
    return list(points[::step])


class _Search:
    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.last = len(tables.inputs) - 1
        self.created, self.ended = _lifetimes(tables)
        self.reached = reached_positions(tables)
        self.front = Front()
        self.moves: dict[Limits, Iterator[Limits]] = {}
        self.seen: set[Limits] = set()

    def survivors(self) -> list[Limits]:
        return [limits for _, _, limits in self.front.rows]

    def consider(self, limits: Limits) -> None:
        """Judge a plan; if no other beats it, it joins the front."""
        self.seen.add(limits)
        run = live(self.tables, limits, self.front)
        if run is None:
            return
        beaten = self.front.add(run.peak_bytes, run.recompute_seconds, limits)
        if beaten is not None:
            for other in beaten:
                del self.moves[other]
            self.moves[limits] = self._moves(limits, run.peak_tick)

    def walk(self, num_trials: int, clock: Clock) -> None:
        """Let the points of the front take turns until trials, time or moves are used up."""
        first = len(self.seen)
        while self.moves:
            for limits in self.survivors():
                if limits not in self.moves or self._turn(limits):
                    continue
                self.moves[limits] = iter(())
            if len(self.seen) - first >= num_trials or clock.over:
                return
            if all(not self._has_moves(limits) for limits in self.survivors()):
                return

    def _has_moves(self, limits: Limits) -> bool:
        """Look one move ahead."""
        following = next(self.moves[limits], None)
        if following is not None:
            self.moves[limits] = chain((following,), self.moves[limits])
        return following is not None

    def _turn(self, limits: Limits) -> bool:
        """Try some moves from a point; false if it had none left."""
        moves = self.moves[limits]
        for _ in range(MOVES_AT_ONCE):
            following = next(moves, None)
            if following is None:
                return False
            if following not in self.seen:
                self.consider(following)
            if limits not in self.moves:
                return True
        return True

    def _moves(self, limits: Limits, peak_tick: int) -> Iterator[Limits]:
        """Single moves, most promising first; then pairs of them."""
        single = self._single_moves(limits, peak_tick)
        for s, limit in single:
            yield (*limits[:s], limit, *limits[s + 1 :])
        for (s, limit), (t, other_limit) in combinations(single, 2):
            if s != t:
                pair = list(limits)
                pair[s], pair[t] = limit, other_limit
                yield tuple(pair)

    def _single_moves(self, limits: Limits, peak_tick: int) -> list[tuple[int, int]]:
        """Return pairs of storage and new limit."""
        tables = self.tables
        after = self.reached[peak_tick] - 1
        keep: list[_Move] = []
        drop: list[_Move] = []
        later: list[_Move] = []
        rest: list[_Move] = []
        for s, (limit, position) in enumerate(zip(limits, tables.position, strict=True)):
            if position == NO_RECIPE or not tables.nbytes[s]:
                continue
            at_peak = self.created[s] < peak_tick <= self.ended[s]
            cost = tables.seconds[position] / tables.nbytes[s]
            if limit == KEEP:
                for other in sorted({self.last, position} | ({after} if position < after < self.last else set())):
                    (drop if at_peak else rest).append((cost, s, other))
            else:
                (rest if at_peak else keep).append((-tables.seconds[position], s, KEEP))
                for other in sorted({self.last, position, after} - {limit}):
                    if other >= position:
                        (later if at_peak and other < limit else rest).append((cost, s, other))
        rows = zip_longest(sorted(keep), sorted(drop), sorted(later))
        ordered = [move for move in chain.from_iterable(rows) if move is not None] + sorted(rest)
        return [(s, limit) for _, s, limit in ordered]


def reached_positions(tables: Tables) -> list[int]:
    """Return for each tick the position of the target unpacked there, or last before; past the end at first."""
    reached, latest = [], len(tables.inputs)
    for unpacks, *_ in tables.ticks:
        latest = max((tables.position[s] for s in unpacks if tables.position[s] != NO_RECIPE), default=latest)
        reached.append(latest)
    return reached


def _lifetimes(tables: Tables) -> tuple[list[int], list[int]]:
    """Return for each storage, if kept, the tick that creates it and the one after which autograd is done with it."""
    created, ended = [0] * len(tables.nbytes), [0] * len(tables.nbytes)
    for number, (_, _, _, creates, lets_go, releases) in enumerate(tables.ticks):
        for s in creates:
            created[s] = number
        for s in (*lets_go, *releases):
            ended[s] = number
    return created, ended
