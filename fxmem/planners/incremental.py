"""Runs of plans that differ little from one already run: only the ticks that the difference touches are lived through.

In: a plan's limits, run once with a mark every few ticks; other limits. Out: a :class:`fxmem.planners.simulate.Run`
with the same figures as one from the start. The planners that try many neighbours of one plan spend most of their time
on runs; a neighbour's run takes a third of a whole one, or less.

NOTE [What a difference touches]

1. Storages whose limit differs are *changed*; so are those held by more or fewer empty slots for it after the forward.
2. Until the first tick after the prefix that reads or writes anything of a changed storage (unpacks, releases, creates
   it or lets go of it, runs a recipe that makes or reads it, lets an empty slot that holds it go), both runs do the
   same; live bytes differ by a constant. So the run starts at the last mark before that tick.
3. At a mark where both runs are in the same state, and no storage of different limits is empty, the rest is the same.

The seconds are sums of multiples of a power of two (see :class:`Tables`), hence the same in whatever order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, count
from operator import ne

import numpy as np

from fxmem.ir import KEEP
from fxmem.planners.simulate import Mark, Run, Tables

Limits = tuple[int, ...]
TICKS_AT_ONCE = 32
NUM_MARKS, FEWEST_TICKS = 32, 8
"""Marks of a run, and the least number of ticks between two."""
MOST_BYTES = 2**26
"""What bases that are kept may take up."""
MOST_CHANGES = 4
"""Limits by which plans may differ from a base that is not their own."""


class FullRun:
    """A run from the start."""

    def __init__(self, tables: Tables, limits: Limits) -> None:
        self.run = Run(tables, limits)
        self._next = self.run.advance_prefix()

    def advance(self) -> bool:
        """Live through some ticks; false if the step is over."""
        ticks, first = self.run.tables.ticks, self._next
        if first >= len(ticks):
            return False
        self._next += TICKS_AT_ONCE
        self.run.advance(ticks[first : self._next], first)
        return True


class Base:
    """A finished run that others start from."""

    def __init__(self, tables: Tables, limits: Limits) -> None:
        self.tables, self.limits = tables, limits
        self.run = run = Run(tables, limits, record=True)
        self.begin = run.advance_prefix()
        num_ticks = len(tables.ticks) - self.begin
        self.width = max(FEWEST_TICKS, -(-num_ticks // NUM_MARKS))
        self.marks: list[Mark] = [run.mark()]
        for first in range(self.begin, len(tables.ticks), self.width):
            run.advance(tables.ticks[first : first + self.width], first)
            self.marks.append(run.mark())
        assert run.steps is not None
        self.live_bytes = np.array([live for _, _, live in run.steps], dtype=np.int64)
        self.step_ticks = [tick for tick, _, _ in run.steps]
        self.first_touched = self._first_touched()

    def _first_touched(self) -> list[int]:
        """Return for each storage the first tick after the prefix that touches it, or an earlier one."""
        tables, start = self.tables, self.marks[0]
        first = list(tables.prefix.next_event)
        assert self.run.steps is not None
        ran: dict[int, int] = {}
        for tick, recipe, _ in self.run.steps:
            if recipe is not None:
                ran.setdefault(recipe, tick)
        for recipe, tick in ran.items():
            for s in (*tables.products[recipe], *tables.inputs[recipe]):
                first[s] = min(first[s], tick)
        for position in range(len(tables.inputs) - 1, -1, -1):  # a slot that goes lets go of what it holds
            for s in tables.products[position]:
                if not start.full[s] and start.owners[s]:
                    for i in tables.slot_inputs[s]:
                        first[i] = min(first[i], first[s])
        return first


class Bases:
    """Bases by limits, the latest few of them, and what else searches through one profile's plans have found out."""

    def __init__(self, tables: Tables, most: int | None = None) -> None:
        """``most``: how many; by default as many as ``MOST_BYTES`` hold."""
        self.tables = tables
        self._bases: dict[Limits, Base] = {}
        self._most = most or max(4, MOST_BYTES // (12 * NUM_MARKS * (len(tables.nbytes) + 1)))
        self._peak_ticks: dict[Limits, int] = {}
        self.judged: set[Limits] = set()
        """Plans tried so far: all that these brought is in a front at least as good as the one they were tried for."""

    def of(self, limits: Limits) -> Base:
        """Return a base near enough to ``limits``; its own, unless another was lent."""
        if limits not in self._bases:
            self._put(limits, Base(self.tables, limits))
        return self._bases[limits]

    def peak_tick(self, limits: Limits) -> int:
        """Return the tick of the peak under ``limits``."""
        if limits not in self._peak_ticks:
            self._peak_ticks[limits] = self.of(limits).run.peak_tick
        return self._peak_ticks[limits]

    def lend(self, limits: Limits, base: Base, peak_tick: int) -> None:
        """Let ``limits``, whose peak is at ``peak_tick``, use the base of others, if it is near."""
        self._peak_ticks[limits] = peak_tick
        if sum(map(ne, limits, base.limits)) <= MOST_CHANGES:
            self._put(limits, base)

    def _put(self, limits: Limits, base: Base) -> None:
        self._bases[limits] = base
        if len(self._bases) > self._most:
            del self._bases[next(iter(self._bases))]


class IncrementalRun:
    """A run of ``limits`` that starts where it first differs from ``base``."""

    def __init__(self, base: Base, limits: Sequence[int]) -> None:
        self.base = base
        self.differing = list(compress(count(), map(ne, base.limits, limits)))
        tables, start = base.tables, base.marks[0]
        full, owners = start.full.copy(), start.owners.copy()
        changed = set(self.differing)
        for s in self.differing:
            self._switch(s, limits[s] == KEEP, full, owners, changed)
        touched = min(map(base.first_touched.__getitem__, changed), default=len(tables.ticks))
        self.number = min((touched - base.begin) // base.width, len(base.marks) - 1)
        mark = base.marks[self.number]
        state = mark.copy()
        lives = base.live_bytes[: mark.num_steps].copy()
        for s in changed:
            state.full[s], state.owners[s] = full[s], owners[s]
            gone = tables.prefix.gone.get(s)
            if gone is None:
                continue
            held_before, held = bool(start.full[s] and start.owners[s]), bool(full[s] and owners[s])
            if held != held_before:
                rise_bytes = tables.nbytes[s] if held else -tables.nbytes[s]
                lives[gone + 1 :] += rise_bytes
                state.managed_bytes += rise_bytes
                state.alive[s] = held
        self.run = run = Run(tables, limits, start=state)
        if len(lives):
            place = int(lives.argmax())
            run.peak_bytes, run.peak_tick = int(lives[place]), base.step_ticks[place]

    def _switch(self, s: int, keep: bool, full: bytearray, owners: list[int], changed: set[int]) -> None:
        """Keep or drop ``s``; a slot that comes to be, or to be no more, changes what its inputs are held by."""
        if bool(full[s]) == keep:
            return
        full[s] = keep
        if not owners[s]:
            return
        change = -1 if keep else 1
        stack = [s]
        while stack:
            for i in self.base.tables.slot_inputs[stack.pop()]:
                before = owners[i]
                owners[i] += change
                changed.add(i)
                if not full[i] and not (before and owners[i]):
                    stack.append(i)

    def advance(self) -> bool:
        """Live on to the next mark; false if the step is over."""
        base, run = self.base, self.run
        if self.number == len(base.marks) - 1:
            return False
        mark = base.marks[self.number]
        if mark.is_state_of(run) and all(map(run.full.__getitem__, self.differing)):
            self._follow(mark)
            self.number = len(base.marks) - 1
            return False
        first = base.begin + self.number * base.width
        run.advance(base.tables.ticks[first : first + base.width], first)
        self.number += 1
        return True

    def _follow(self, mark: Mark) -> None:
        """Take the rest over from the base."""
        base, run = self.base, self.run
        lives = base.live_bytes[mark.num_steps :]
        if len(lives):
            place = int(lives.argmax())
            if lives[place] > run.peak_bytes:
                run.peak_bytes, run.peak_tick = int(lives[place]), base.step_ticks[mark.num_steps + place]
        run.recompute_seconds += base.run.recompute_seconds - mark.recompute_seconds
        run.num_recomputed += base.run.num_recomputed - mark.num_recomputed
