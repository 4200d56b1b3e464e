"""How much recomputation no plan can do without: a lower bound on seconds for every budget.

In: a profile. Out: seconds. Lagrangian relaxation: each tick's limit on live bytes gets a price; at given prices
the best choice is a minimum cut (:mod:`fxmem.planners.mincut`), whose value is a lower bound for every budget at once,
and linear in it. Subgradient steps of Polyak's length look for the prices that are best for one budget.

NOTE [What every plan holds]

1. What may not be dropped, and what the forward refers to, at all times it does.
2. A storage that autograd unpacks, from its first unpacking to its last release: kept or dropped, it is there.
3. If its recipe never reruns, such a storage also from the forward's letting go to the first unpacking.
4. A storage that autograd does not ask for, if its recipe never reruns but one that reads it does: at least up to the
   first tick at which that rerun could be wanted.

Not modelled, all in the bound's favour: the working set of recomputations, and recipes that rerun more than once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fxmem.ir import FrontierPoint, GraphProfile
from fxmem.planners.ilp import optimum
from fxmem.planners.lifetimes import events_of
from fxmem.planners.mincut import Network
from fxmem.planners.pareto import Clock
from fxmem.planners.simulate import NO_RECIPE, Tables, tables_of

STEP_SHARE = 1.0
"""Polyak's factor at the start; halved when steps no longer help."""
PATIENCE = 4
NUM_STARTS = 6
"""Ticks tried as the only priced one before the first step."""


class Relaxation:
    """The relaxation of one profile; what it learns for one budget helps with the others."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.nbytes = np.asarray(tables.nbytes, dtype=np.float64)
        self.starts, self.ends = _optional_ticks(tables)
        self.certain_bytes = certain_bytes(tables) + np.array([row[2] for row in tables.ticks], dtype=np.float64)
        self.network = Network(tables, (self.ends > self.starts).astype(np.float64))
        self.lines: list[tuple[float, float]] = []  # at budget b, value - price * b is a bound
        self.best_prices: list[NDArray[np.float64]] = []

    def known(self, budget_bytes: int) -> float:
        """Return the best bound that earlier work gives for this budget."""
        if budget_bytes < self.certain_bytes.max(initial=0.0):
            return float("inf")
        return max((value - price * budget_bytes for value, price in self.lines), default=0.0)

    def bound(self, budget_bytes: int, *, upper_seconds: float, num_steps: int, clock: Clock) -> float:
        """Return the seconds below which no plan within a budget recomputes; infinite if none can fit.

        ``upper_seconds``: the cost of a plan that fits.
        """
        known = self.known(budget_bytes)
        if upper_seconds <= known or not self.network.num_edges:
            return known
        prices = self._first_prices(budget_bytes, upper_seconds)
        share, waited, best = STEP_SHARE, 0, (-1.0, prices)
        for _ in range(num_steps):
            value, excess = self._evaluate(prices, budget_bytes)
            waited = 0 if value > best[0] * (1 + 1e-4) else waited + 1
            best = max(best, (value, prices), key=lambda pair: pair[0])
            if waited >= PATIENCE:
                share, waited, prices = share / 2, 0, best[1]
                value, excess = self._evaluate(prices, budget_bytes)
            excess[(prices <= 0.0) & (excess < 0.0)] = 0.0
            length = float(excess @ excess)
            if clock.over or length == 0.0 or value >= upper_seconds * (1 - 1e-6):
                break
            prices = np.maximum(0.0, prices + share * (upper_seconds - value) / length * excess)
        self.best_prices.append(best[1])
        return min(upper_seconds, max(0.0, self.known(budget_bytes)))

    def _first_prices(self, budget_bytes: int, upper_seconds: float) -> NDArray[np.float64]:
        """Return the best of earlier prices and of single ticks at which keeping everything exceeds the budget most."""
        everything = self._held_bytes(self.nbytes * (self.network.position != NO_RECIPE) * self.network.saved)
        excess = everything + self.certain_bytes - budget_bytes
        candidates = [np.zeros(len(excess)), *self.best_prices[-4:]]
        for tick in _peaks(excess, NUM_STARTS):
            prices = np.zeros(len(excess))
            prices[tick] = upper_seconds / max(1.0, float(excess[tick]))
            candidates.append(prices)
        return max(candidates, key=lambda prices: self._evaluate(prices, budget_bytes)[0])

    def _evaluate(self, prices: NDArray[np.float64], budget_bytes: int) -> tuple[float, NDArray[np.float64]]:
        """Return the bound at ``prices``, and by how much each tick exceeds the budget there."""
        sums = np.concatenate([[0.0], np.cumsum(prices)])
        self.network.weigh(self.nbytes * (sums[self.ends] - sums[self.starts]))
        least, reruns = self.network.cut(1.0)
        line = (least + float(prices @ self.certain_bytes), float(sums[-1]))
        self.lines.append(line)
        held = self._held_bytes(self.nbytes * self.network.held(reruns))
        return line[0] - line[1] * budget_bytes, held + self.certain_bytes - budget_bytes

    def _held_bytes(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return for each tick the sum of ``weights`` of the storages whose optional ticks it is one of."""
        num_ticks = len(self.certain_bytes)
        begun = np.bincount(self.starts, weights=weights, minlength=num_ticks + 1)
        ended = np.bincount(self.ends, weights=weights, minlength=num_ticks + 1)
        held: NDArray[np.float64] = np.cumsum(begun - ended)[:num_ticks]
        return held


def _peaks(values: NDArray[np.float64], count: int) -> list[int]:
    """Return the highest place of each of ``count`` equal stretches of the values above zero."""
    places = np.flatnonzero(values > 0.0)
    return [int(stretch[np.argmax(values[stretch])]) for stretch in np.array_split(places, count) if len(stretch)]


def _optional_ticks(tables: Tables) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ticks, end exclusive, at which each storage is there if it is held (rules 3 and 4)."""
    events = events_of(tables)
    unpacked, gone = events.unpacked, events.gone
    never = len(tables.ticks)
    wanted = _wanted(tables, unpacked)
    starts, ends = [], []
    until = [never if not n else 0 for n in tables.num_saves]
    for p, inputs in enumerate(tables.inputs):
        for s in inputs:
            until[s] = min(until[s], wanted[p])
    for s, num_saves in enumerate(tables.num_saves):
        end = unpacked.get(s, 0) if num_saves else until[s]
        starts.append(gone[s] + 1)
        ends.append(max(gone[s] + 1, end if end < never else 0))
    return np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)


def _wanted(tables: Tables, unpacked: dict[int, int]) -> list[int]:
    """Return for each recipe the first tick at which a rerun could be wanted; the number of ticks if never."""
    wanted = [len(tables.ticks)] * len(tables.inputs)
    for p in reversed(range(len(tables.inputs))):
        for s in tables.products[p]:
            wanted[p] = min(wanted[p], unpacked.get(s, wanted[p]))
        for s in tables.inputs[p]:
            maker = tables.position[s]
            if maker != NO_RECIPE:
                wanted[maker] = min(wanted[maker], wanted[p])
    return wanted


def certain_bytes(tables: Tables) -> NDArray[np.float64]:
    """Return for each tick the managed bytes that are there under every plan, but for those created in it."""
    num_ticks = len(tables.ticks)
    events = events_of(tables)
    created, gone, unpacked, released = events.created, events.gone, events.unpacked, events.released
    change = np.zeros(num_ticks + 2)
    for s, nbytes in enumerate(tables.nbytes):
        spans = [(created[s] + 1, gone[s])]
        if tables.position[s] == NO_RECIPE:
            spans = [(created[s] + 1, max(gone[s], released.get(s, 0)))]
        elif s in unpacked:
            spans.append((max(unpacked[s], gone[s] + 1), released.get(s, 0)))
        for first, last in spans:
            if last >= first:
                change[first] += nbytes
                change[last + 1] -= nbytes
    certain: NDArray[np.float64] = np.cumsum(change)[:num_ticks]
    return certain


# -- how far a plan is from the best there could be ------------------------------------------------------------------

MOST_ILP_RECIPES = 24
"""Graphs of at most so many recipes are also given to the integer program."""
ILP_SECONDS = 1.0
NUM_STEPS = 60
"""Steps of the relaxation for one budget."""


def lower_bound(profile: GraphProfile, budget_bytes: int, upper_seconds: float, *, seconds: float = 2.0) -> float:
    """Return seconds below which no plan within ``budget_bytes`` recomputes; ``upper_seconds`` is what one plan costs."""
    clock = Clock(seconds)
    relaxation = Relaxation(tables_of(profile))
    best = relaxation.bound(budget_bytes, upper_seconds=upper_seconds, num_steps=NUM_STEPS, clock=clock)
    if best < upper_seconds and len(profile.recipes) <= MOST_ILP_RECIPES:
        limit = min(ILP_SECONDS, clock.left_seconds)
        proved = optimum(profile, budget_bytes, seconds=limit, lower_seconds=best, upper_seconds=upper_seconds)
        best = max(best, proved.bound_seconds)
    return min(best, upper_seconds)


def with_bounds(
    profile: GraphProfile, points: Iterable[FrontierPoint], *, seconds: float = 2.0, num_budgets: int = 12
) -> tuple[FrontierPoint, ...]:
    """Return the points, each with the bound at its own peak; the relaxation looks for prices at some of them only."""
    points, clock = tuple(points), Clock(seconds)
    relaxation = Relaxation(tables_of(profile))
    for point in points[:: max(1, len(points) // num_budgets)]:
        relaxation.bound(point.peak_bytes, upper_seconds=point.recompute_seconds, num_steps=NUM_STEPS // 2, clock=clock)
    return tuple(
        dataclasses.replace(p, bound_seconds=min(p.recompute_seconds, relaxation.known(p.peak_bytes))) for p in points
    )
