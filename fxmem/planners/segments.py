"""A stretch of a graph as a step of its own, so that its options are judged without the rest.

In: a profile and cuts, which divide the positions into *cells*. Out: for any run of cells a :class:`Part`: simulator
tables of the storages made in it. Those needed in it only are *inside* and may be dropped; those that leave it are
boundaries and kept. What an option of one part does to the step is then one summand of the live bytes, and parts that
are equal up to a constant share one :attr:`Part.signature`.

NOTE [Bytes that are counted once]

1. A storage that spans ``LONG_CELLS`` cells or more, or that no plan may drop, is counted in every tick's *base* with
   its exact lifetime, since it is a boundary in nearly every choice of cuts. A part that holds it inside takes it out
   of its own base.
2. Any other boundary is counted among the kept bytes of the part that makes it, as if it stayed until that part's
   backward. Mostly the next part's backward lets go of it at its very end.
3. A boundary that backward lets go of before this part's backward, but that empty slots of this part still read, is
   counted here from then on, and so may be counted by two parts that read it. Only the simulator's word is final.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxmem.ir import GraphProfile, Phase
from fxmem.planners.cuts import Spans, node_positions
from fxmem.planners.prefix import TickRow, prefix_of
from fxmem.planners.simulate import NO_RECIPE, Tables, tables_of

LONG_CELLS = 3
"""NOTE [Bytes that are counted once], rule 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Recipes ``start`` to ``end`` (exclusive) as simulator tables with local indices."""

    start: int
    end: int
    storages: tuple[int, ...]
    """Global indices of the storages inside; local index by place. Boundaries it makes or reads follow them."""
    tables: Tables
    """Its ticks are those of the forward, relative to ``forward_base_bytes``: all of them its prefix."""
    weights: tuple[float, ...]
    """Bytes that holding each local storage until backward costs; zero for boundaries held anyway."""
    backward: list[TickRow]
    """Relative to ``backward_base_bytes``."""
    forward_base_bytes: int
    backward_base_bytes: int
    signature: tuple[Any, ...]
    """Parts of equal signature have equal options."""


class Parter:
    """A profile divided into cells by ``cuts``; makes parts of them."""

    def __init__(self, profile: GraphProfile, spans: Spans, cuts: list[int]) -> None:
        self.profile, self.spans = profile, spans
        self.edges = [0, *cuts, spans.num_positions]
        self.num_cells = len(self.edges) - 1
        self.cell_of = [self._cell(p) for p in spans.first]
        last_cell = [self._cell(p) for p in spans.last]
        self.in_base = [
            s.recipe is None or last_cell[s.index] - self.cell_of[s.index] >= LONG_CELLS for s in profile.storages
        ]
        self.made_in: dict[int, list[int]] = defaultdict(list)
        for s in profile.storages:
            self.made_in[self.cell_of[s.index]].append(s.index)
        self.created, self.ended = _lifetimes(profile)
        base = self._alive_bytes(s for s, is_long in enumerate(self.in_base) if is_long)
        self.start_bytes = base + np.array([t.start_bytes for t in profile.ticks], dtype=np.int64)
        self.peak_bytes = base + np.array([t.peak_bytes for t in profile.ticks], dtype=np.int64)
        self._assign_ticks()

    def _cell(self, position: int) -> int:
        return min(bisect_right(self.edges, position), self.num_cells) - 1

    def _alive_bytes(self, storages: Iterable[int]) -> NDArray[np.int64]:
        """Bytes of ``storages`` alive at each tick's start, as long as forward and autograd hold them."""
        change = np.zeros(len(self.profile.ticks) + 2, dtype=np.int64)
        for s in storages:
            nbytes = self.profile.storages[s].nbytes
            change[self.created[s] + 1] += nbytes
            change[max(self.ended[s], self.created[s]) + 1] -= nbytes
        alive: NDArray[np.int64] = np.cumsum(change)[: len(self.profile.ticks)]
        return alive

    def _assign_ticks(self) -> None:
        """Find each cell's forward ticks, its range of backward ticks, and what the ticks of no cell hold."""
        position = node_positions(self.profile)
        self.forward_ticks: dict[int, list[int]] = defaultdict(list)
        self.backward_range: dict[int, tuple[int, int]] = {}
        self.outside_bytes = 0
        self.loss_tick = next((n for n, t in enumerate(self.profile.ticks) if t.phase is not Phase.FORWARD), 0)
        for number, tick in enumerate(self.profile.ticks):
            cell = self._cell(position[tick.node]) if tick.node is not None else None
            if cell is None:
                self.outside_bytes = max(self.outside_bytes, int(self.peak_bytes[number]))
            elif tick.phase is Phase.FORWARD:
                self.forward_ticks[cell].append(number)
            else:
                first, _ = self.backward_range.get(cell, (number, number))
                self.backward_range[cell] = (first, number)

    def part(self, first_cell: int, end_cell: int) -> Part:
        """Return the part of cells ``first_cell`` to ``end_cell`` (exclusive)."""
        start, end = self.edges[first_cell], self.edges[end_cell]
        cells = range(first_cell, end_cell)
        made = [s for cell in cells for s in self.made_in[cell]]
        storages, recipes = self.profile.storages, self.profile.recipes[start:end]
        inside = [s for s in made if storages[s].recipe is not None and self.spans.last[s] < end]
        inside_set = set(inside)
        leaving = [s for s in made if s not in inside_set and not self.in_base[s]]
        own = inside_set.union(leaving)
        read = sorted({s for r in recipes for s in r.inputs} - own)
        backward = self._backward_numbers(cells, inside)
        late = {s: self.ended[s] for s in read if backward and self.ended[s] < backward[-1]}
        local = {s: i for i, s in enumerate([*inside, *leaving, *read])}
        tables = self._tables(start, end, inside, leaving, read, local)
        taken_out = self._alive_bytes(s for s in inside if self.in_base[s])
        rows = _Rows(self, {s: local[s] for s in own}, self.start_bytes - taken_out, self.peak_bytes - taken_out)
        early = tuple(local[s] for s, tick in late.items() if tick < self.loss_tick)
        forward_rows = rows.forward([t for cell in cells for t in self.forward_ticks[cell]], early)
        backward_rows = rows.backward(backward, {local[s]: t for s, t in late.items() if t >= self.loss_tick})
        weights = (
            *(float(storages[s].nbytes) for s in inside),
            *(0.0 for _ in leaving),
            *(float(storages[s].nbytes) * (s in late) for s in read),
        )
        return _relative(start, end, tuple(inside), tables, weights, forward_rows, backward_rows)

    def _backward_numbers(self, cells: range, inside: list[int]) -> range:
        ranges = [self.backward_range[cell] for cell in cells if cell in self.backward_range]
        ends = [self.ended[s] for s in inside if self.profile.storages[s].num_saves]
        numbers = [*(n for r in ranges for n in r), *ends]
        return range(min(numbers), max(numbers) + 1) if numbers else range(0)

    def _tables(
        self, start: int, end: int, inside: list[int], leaving: list[int], read: list[int], local: dict[int, int]
    ) -> Tables:
        """Boundaries have no recipe here; those this part only reads have no bytes of saved tensors either."""
        storages, recipes = self.profile.storages, self.profile.recipes[start:end]
        everything = [*inside, *leaving, *read]
        inputs = [tuple(local[s] for s in r.inputs) for r in recipes]
        position = [r - start for s in inside if (r := storages[s].recipe) is not None]
        num_boundaries = len(everything) - len(inside)
        return Tables(
            nbytes=[storages[s].nbytes for s in everything],
            num_saves=[storages[s].num_saves for s in (*inside, *leaving)] + [0] * len(read),
            internal=[storages[s].internal for s in everything],
            position=position + [NO_RECIPE] * num_boundaries,
            slot_inputs=[inputs[p] for p in position] + [()] * num_boundaries,
            inputs=inputs,
            products=[tuple(local[s] for s in r.products if s in local) for r in recipes],
            seconds=tables_of(self.profile).seconds[start:end],
            peak_bytes=[r.peak_bytes for r in recipes],
            capture_peak_bytes=[r.capture_peak_bytes for r in recipes],
            ticks=[],
        )


def _lifetimes(profile: GraphProfile) -> tuple[list[int], list[int]]:
    """Return for each storage the ticks of its creation and of its end, if it is kept and no empty slot reads it."""
    created, ended = [0] * len(profile.storages), [0] * len(profile.storages)
    for number, tick in enumerate(profile.ticks):
        for s in tick.creates:
            created[s] = number
        for s in (*tick.last_used, *tick.releases):
            ended[s] = number
    return created, ended


class _Rows:
    """Makes a part's ticks. ``own`` maps the storages made in it to local indices."""

    def __init__(
        self, parter: Parter, own: dict[int, int], start_bytes: NDArray[np.int64], peak_bytes: NDArray[np.int64]
    ) -> None:
        self.ticks, self.ended, self.own = parter.profile.ticks, parter.ended, own
        self.storages = parter.profile.storages
        self.start_bytes, self.peak_bytes = start_bytes, peak_bytes
        self.held = set(own)  # by the forward, so far

    def _row(self, number: int) -> TickRow:
        tick, own = self.ticks[number], self.own
        return (
            tuple(own[s] for s in tick.unpacks if s in own),
            int(self.start_bytes[number]),
            int(self.peak_bytes[number]),
            tuple(own[s] for s in tick.creates if s in own),
            tuple(own[s] for s in tick.last_used if s in own),
            tuple(own[s] for s in tick.releases if s in own),
        )

    def forward(self, numbers: list[int], early: tuple[int, ...]) -> list[TickRow]:
        """What the forward lets go of in later parts goes at the end of this one.

        ``early``: boundaries this part only reads and that forward alone holds; if empty slots of this part hold them,
        they are created, for these alone, at the end.
        """
        rows = [self._row(number) for number in numbers]
        gone = {s for row in rows for s in row[4]}
        later = tuple(s for s in self.own.values() if s not in gone)
        if rows and (later or early):
            _, start, *_ = rows[-1]
            rows.append(((), start, start, early, later + early, ()))
        self.held = set(later)
        return rows

    def backward(self, numbers: range, late: dict[int, int]) -> list[TickRow]:
        """Rows of the range, runs without events as one.

        ``late``: boundaries this part only reads, and the ticks at which backward lets go of them; if empty slots of
        this part still hold them, they are created, for these alone, there and then.
        """
        if not numbers:
            return []
        begun: dict[int, list[int]] = defaultdict(list)
        for s, end in late.items():
            begun[max(end, numbers[0] - 1)].append(s)
        start = int(self.start_bytes[numbers[0]])
        before = tuple(begun.pop(numbers[0] - 1, ()))
        rows: list[TickRow] = [((), start, start, before, before, self._released_before(numbers[0]))]
        for number in numbers:
            unpacks, start, peak, creates, last_used, releases = self._row(number)
            new = tuple(begun.get(number, ()))
            row = (
                unpacks,
                start,
                peak,
                creates + new,
                new + tuple(s for s in last_used if s not in self.held),
                releases,
            )
            if not any((unpacks, *row[3:])) and not any(rows[-1][3:]):
                unpacks, start, previous_peak, *_ = rows.pop()
                row = (unpacks, start, max(previous_peak, peak), (), (), ())
            rows.append(row)
        return rows

    def _released_before(self, number: int) -> tuple[int, ...]:
        """Boundaries this part makes that backward is through with before it comes here."""
        return tuple(
            i for s, i in self.own.items() if self.ended[s] < number for _ in range(self.storages[s].num_saves)
        )


def _relative(
    start: int, end: int, inside: tuple[int, ...], tables: Tables, weights: tuple[float, ...],
    forward: list[TickRow], backward: list[TickRow],
) -> Part:  # fmt: skip
    forward_base = min((r[1] for r in forward), default=0)
    backward_base = min((r[1] for r in backward), default=0)
    forward = [_lowered(r, forward_base) for r in forward]
    tables = replace(tables, ticks=forward, prefix=prefix_of(forward, tables.nbytes))
    backward = [_lowered(r, backward_base) for r in backward]
    signature = (
        tuple(tables.nbytes), tuple(tables.num_saves), tuple(tables.internal), tuple(tables.position),
        tuple(tables.inputs), tuple(tables.products), tuple(tables.seconds), tuple(tables.peak_bytes),
        tuple(tables.capture_peak_bytes), weights, tuple(forward), tuple(backward),
    )  # fmt: skip
    return Part(start, end, inside, tables, weights, backward, forward_base, backward_base, signature)


def _lowered(row: TickRow, base_bytes: int) -> TickRow:
    unpacks, start, peak, creates, last_used, releases = row
    return unpacks, start - base_bytes, peak - base_bytes, creates, last_used, releases
