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

from fxmem.ir import KEEP, FrontierPoint, GraphProfile, Plan
from fxmem.planners.incremental import Bases
from fxmem.planners.pareto import Clock, Front, Limits, live, pareto
from fxmem.planners.simulate import NO_RECIPE, Tables, tables_of

_Move = tuple[float, int, int]  # rank, storage, new limit
FEWEST_MOVES, MOST_MOVES = 1, 12
"""Moves tried from a point before the next one has its turn: the more, the more it recomputes."""


def improve(
    profile: GraphProfile,
    points: Iterable[FrontierPoint],
    *,
    num_trials: int,
    clock: Clock,
    bases: Bases | None = None,
) -> tuple[FrontierPoint, ...]:
    """Return the Pareto set of ``points`` and of what at most ``num_trials`` moves from them find.

    ``bases``: of earlier searches, whose results ``points`` are at least as good as. What these tried is not run again.
    """
    front = pareto(points)
    beginning = evenly(front, max(MOST_MOVES, num_trials))
    search = _Search(bases or Bases(tables_of(profile)), is_whole=len(beginning) == len(front))
    for point in beginning:
        search.join(point.peak_bytes, point.recompute_seconds, point.plan.limits)
    search.walk(num_trials, clock)
    found = (FrontierPoint(Plan("local search", limits), peak, cost) for peak, cost, limits in search.front.rows)
    return pareto((*front, *found))


def evenly(points: Sequence[FrontierPoint], count: int) -> list[FrontierPoint]:
    """Return at most ``count`` of the points, evenly by place."""
    step = max(1, -(-len(points) // count))
    return list(points[::step])


class _Search:
    def __init__(self, bases: Bases, *, is_whole: bool) -> None:
        """``is_whole``: no known point is left out, so that a plan tried before brings nothing."""
        self.bases, self.is_whole = bases, is_whole
        self.tables = tables = bases.tables
        self.last = len(tables.inputs) - 1
        self.created, self.ended = _lifetimes(tables)
        self.reached = reached_positions(tables)
        self.droppable = [
            (s, p, tables.seconds[p], tables.seconds[p] / tables.nbytes[s])
            for s, p in enumerate(tables.position)
            if p != NO_RECIPE and tables.nbytes[s]
        ]
        self.front = Front()
        self.moves: dict[Limits, Iterator[Limits]] = {}
        self.seen: set[Limits] = set()

    def join(self, peak_bytes: int, seconds: float, limits: Limits) -> bool:
        """Take a judged plan into the front if no other beats it, and those out that it beats."""
        self.seen.add(limits)
        beaten = self.front.add(peak_bytes, seconds, limits)
        if beaten is None:
            return False
        for other in beaten:
            del self.moves[other]
        self.moves[limits] = self._moves(limits)
        return True

    def consider(self, limits: Limits, near: Limits) -> None:
        """Judge a plan, which differs little from ``near``, and let it join the front."""
        self.seen.add(limits)
        if self.is_whole and limits in self.bases.judged:
            return
        self.bases.judged.add(limits)
        base = self.bases.of(near)
        run = live(self.tables, limits, self.front, base)
        if run is not None and self.join(run.peak_bytes, run.recompute_seconds, limits):
            self.bases.lend(limits, base, run.peak_tick)

    def walk(self, num_trials: int, clock: Clock) -> None:
        """Let the points of the front take turns until trials, time or moves are used up."""
        first = len(self.seen)
        while self.moves:
            most_seconds = self.front.rows[0][1] or 1.0
            for _, seconds, limits in self.front.rows.copy():
                num_moves = FEWEST_MOVES + round((MOST_MOVES - FEWEST_MOVES) * seconds / most_seconds)
                if limits in self.moves and not self._turn(limits, num_moves):
                    self.moves[limits] = iter(())
            if len(self.seen) - first >= num_trials or clock.over:
                return
            if not any(self._has_moves(limits) for _, _, limits in self.front.rows):
                return

    def _has_moves(self, limits: Limits) -> bool:
        """Look one move ahead."""
        following = next(self.moves[limits], None)
        if following is not None:
            self.moves[limits] = chain((following,), self.moves[limits])
        return following is not None

    def _turn(self, limits: Limits, num_moves: int) -> bool:
        """Try some moves from a point; false if it had none left."""
        moves = self.moves[limits]
        for _ in range(num_moves):
            following = next(moves, None)
            if following is None:
                return False
            if following not in self.seen:
                self.consider(following, limits)
            if limits not in self.moves:
                return True
        return True

    def _moves(self, limits: Limits) -> Iterator[Limits]:
        """Single moves, most promising first; then pairs of them."""
        single: list[tuple[int, int]] = []
        for moves in (self._promising, self._others):
            for _, s, limit in moves(limits, self.bases.peak_tick(limits)):
                single.append((s, limit))
                yield (*limits[:s], limit, *limits[s + 1 :])
        for (s, limit), (t, other_limit) in combinations(single, 2):
            if s != t:
                pair = list(limits)
                pair[s], pair[t] = limit, other_limit
                yield tuple(pair)

    def _promising(self, limits: Limits, peak_tick: int) -> Iterator[_Move]:
        """Yield what may lower the peak, or the seconds without a higher peak, each kind in turn."""
        keep: list[_Move] = []
        drop: list[_Move] = []
        later: list[_Move] = []
        after = self.reached[peak_tick] - 1
        for s, position, seconds, cost in self.droppable:
            limit = limits[s]
            if self.created[s] < peak_tick <= self.ended[s]:
                moves, below = (drop, self.last + 1) if limit == KEEP else (later, limit)
                for other in self._refills(position, after):
                    if other < below:
                        moves.append((cost, s, other))
            elif limit != KEEP:
                keep.append((-seconds, s, KEEP))
        rows = zip_longest(sorted(keep), sorted(drop), sorted(later))
        return (move for move in chain.from_iterable(rows) if move is not None)

    def _others(self, limits: Limits, peak_tick: int) -> Iterator[_Move]:
        """Yield the other single moves."""
        rest: list[_Move] = []
        after = self.reached[peak_tick] - 1
        for s, position, seconds, cost in self.droppable:
            limit = limits[s]
            at_peak = self.created[s] < peak_tick <= self.ended[s]
            if at_peak and limit != KEEP:
                rest.append((-seconds, s, KEEP))
            above = -1 if not at_peak else self.last if limit == KEEP else limit
            rest += [(cost, s, other) for other in self._refills(position, after) if other > above and other != limit]
        return iter(sorted(rest))

    def _refills(self, position: int, after: int) -> tuple[int, ...]:
        """Return the limits tried for what is dropped: only when asked for, what is asked for later, on the way."""
        return (position, after, self.last) if position < after < self.last else (position, self.last)


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
    for number, (_, _, _, creates, last_used, releases) in enumerate(tables.ticks):
        for s in creates:
            created[s] = number
        for s in (*last_used, *releases):
            ended[s] = number
    return created, ended
