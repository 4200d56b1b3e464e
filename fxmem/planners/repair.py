"""Plans for one budget, made from plans that exceed it: near the floor, where many ticks have nearly the same peak.

In: a profile, a budget, limits to start from. Out: limits that fit, if it gets there. The local search of
:mod:`fxmem.planners.local_search` sees the highest tick only, so where several blocks peak alike no single move helps
it. Here the measure is the *excess*: the sum over all moments of the bytes above the budget. A step takes the move that
lowers it most for each second; once nothing is left of it, storages are kept again as far as the budget allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxmem.ir import KEEP
from fxmem.planners.incremental import Bases, IncrementalRun
from fxmem.planners.lifetimes import events_of
from fxmem.planners.local_search import reached_positions
from fxmem.planners.pareto import MOST_RERUNS, Limits
from fxmem.planners.simulate import NO_RECIPE, Tables

NUM_MOVES = 12
"""Moves tried at one step, ..."""
MOST_MOVES = 150
"""... and if none of these helps."""


@dataclass(frozen=True, slots=True)
class State:
    """A plan as one budget sees it."""

    limits: Limits
    excess_bytes: float
    seconds: float
    peak_bytes: int
    peak_tick: int


class Repair:
    """Repairs plans of one profile; ``num_runs`` counts what that has cost."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.events = events_of(tables)
        self.reached = reached_positions(tables)
        self.bases = Bases(tables)
        self.num_runs = 0

    def fit(self, limits: Limits, budget_bytes: int, most_runs: int) -> Iterator[Limits]:
        """Yield plans on the way to one that fits, the last ones being those that do."""
        state, end = self._state(limits, budget_bytes), self.num_runs + most_runs
        while state.excess_bytes > 0.0 and self.num_runs < end:
            better = self._best_move(state, budget_bytes)
            if better is None:
                return
            state = better
        if state.excess_bytes == 0.0:
            yield state.limits
            yield self._kept_again(state, budget_bytes, end).limits

    def _state(
        self, limits: Limits, budget_bytes: int, *, near: Limits | None = None, most_excess_bytes: float = float("inf")
    ) -> State:
        """Return what ``limits`` bring; of those that exceed the budget by so much, only that they do.

        ``near``: limits that differ little.
        """
        self.num_runs += 1
        base = self.bases.of(limits if near is None else near)
        steps = IncrementalRun(base, limits, record=True)
        run, most = steps.run, MOST_RERUNS * len(self.tables.inputs) + 1_000
        excess_bytes, seen = _excess_bytes(steps.lives_before, budget_bytes), 0
        assert run.steps is not None
        more = True
        while more:
            if run.num_recomputed > most or excess_bytes >= most_excess_bytes:
                return State(limits, float("inf"), float("inf"), run.peak_bytes, run.peak_tick)
            more = steps.advance()
            excess_bytes += sum(live - budget_bytes for _, _, live in run.steps[seen:] if live > budget_bytes)
            seen = len(run.steps)
        excess_bytes += _excess_bytes(steps.lives_after, budget_bytes)
        if near is not None and excess_bytes < most_excess_bytes:
            self.bases.lend(limits, base)
        return State(limits, float(excess_bytes), run.recompute_seconds, run.peak_bytes, run.peak_tick)

    def _best_move(self, state: State, budget_bytes: int) -> State | None:
        """Return the neighbour that lowers the excess most for each second; one that costs nothing at once."""
        best, best_rate = None, 0.0
        for number, limits in enumerate(self._moves(state)):
            if best is not None and number >= NUM_MOVES:
                break
            other = self._state(limits, budget_bytes, near=state.limits, most_excess_bytes=state.excess_bytes)
            gain, cost = state.excess_bytes - other.excess_bytes, other.seconds - state.seconds
            if gain <= 0.0:
                continue
            if cost <= 0.0:
                return other
            if gain / cost > best_rate:
                best, best_rate = other, gain / cost
        return best

    def _moves(self, state: State) -> Iterator[Limits]:
        tables, tick = self.tables, state.peak_tick
        after = self.reached[tick] - 1
        last = len(tables.inputs) - 1
        ranked: list[tuple[float, int, int]] = []
        for s, (limit, position) in enumerate(zip(state.limits, tables.position, strict=True)):
            if position == NO_RECIPE or not tables.nbytes[s]:
                continue
            if not self.events.created[s] < tick <= max(self.events.gone[s], self.events.released.get(s, tick)):
                continue
            rate = (tables.seconds[position] + 1e-12) / tables.nbytes[s]
            for other in (last, after, position):
                if other >= position and (limit == KEEP or other < limit):
                    ranked.append((rate * (1.0 if limit == KEEP else 0.5), s, other))
            if limit != KEEP and position <= self.reached[tick]:  # a shorter recomputation
                ranked.append((rate * 0.7, s, KEEP))
        ranked.sort()
        for _, s, limit in ranked[:MOST_MOVES]:
            yield (*state.limits[:s], limit, *state.limits[s + 1 :])

    def _kept_again(self, state: State, budget_bytes: int, end: int) -> State:
        """Return a plan that keeps, or refills earlier, what the budget allows, dearest first."""
        tables, last = self.tables, len(self.tables.inputs) - 1
        order = sorted((-tables.seconds[p], s) for s, p in enumerate(tables.position) if p != NO_RECIPE)
        for _, s in order:
            for limit in (KEEP, last):
                if state.limits[s] == KEEP or self.num_runs >= end:
                    break
                kept = (*state.limits[:s], limit, *state.limits[s + 1 :])
                other = self._state(kept, budget_bytes, near=state.limits, most_excess_bytes=1.0)
                if other.excess_bytes == 0.0 and other.seconds < state.seconds:
                    state = other
        return state


def _excess_bytes(live_bytes: NDArray[np.int64], budget_bytes: int) -> int:
    return int(np.maximum(live_bytes - budget_bytes, 0).sum())
