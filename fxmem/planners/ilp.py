"""The least recompute seconds any plan could have, as an integer program: a yardstick on small graphs.

In: a profile, a budget, a time limit. Out: an :class:`Optimum`: the best schedule's seconds and the bound proved. The
program is that of Jain et al. 2020 (arXiv:1910.02653; numbers in brackets are its equations), stated for this runtime
(:mod:`fxmem.planners.simulate`), which makes it far smaller: a forward happens once, what is refilled stays, and only
the first unpacking of a storage can start a recomputation. Solved by HiGHS through :func:`scipy.optimize.milp`.

Legend (the paper's letters where it has one). Stages t: 0 is the forward, then one for the first unpacking of each
storage that may be dropped. F[t, s]: storage s is full after stage t (the paper's S, but never falling; F[0, s]: kept).
R[t, k]: recipe k reruns in stage t. E, W: a slot is empty and someone may ask for it; of a recipe's, any is. G[t, s]: s is
held after stage t. L[t, s, k]: s is in memory when recipe k of stage t begins (it takes the place of the paper's FREE, and
the sum over s that of U). C[t, k]: the rerun captures internals.

The schedules of this program are those that retain limits can express, nearly always, so a plan solves it. Not modelled,
in the bound's favour: storages that autograd saves and releases without ever unpacking them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fxmem.ir import KEEP, GraphProfile
from fxmem.planners.lifetimes import Events, events_of, holders_of
from fxmem.planners.milp import ONE, ZERO, Expression, Milp, Optimum, minus, plus, term
from fxmem.planners.simulate import NO_RECIPE, Tables, tables_of


def optimum(
    profile: GraphProfile,
    budget_bytes: int,
    *,
    seconds: float,
    lower_seconds: float = 0.0,
    upper_seconds: float | None = None,
) -> Optimum:
    """Return the least recompute seconds within ``budget_bytes``, as far as ``seconds`` of solving tell.

    ``lower_seconds`` and ``upper_seconds``: what is known already (a bound, a plan's cost); both speed up the proof.
    """
    program = _Program(tables_of(profile), budget_bytes)
    program.build()
    return program.milp.solve(seconds, lower_seconds, upper_seconds)


@dataclass(frozen=True, slots=True)
class Found:
    """What a program was solved for."""

    limits: tuple[int, ...] | None
    """Of the best schedule found; None if none was."""
    num_factors: int
    """In all constraints of the program."""


def best_limits(
    profile: GraphProfile,
    budget_bytes: int,
    *,
    seconds: float,
    num_branches: int,
    upper_seconds: float,
    fixed: Mapping[int, int] = MappingProxyType({}),
    most_variables: float = math.inf,
) -> Found:
    """Return what solving for retain limits within ``budget_bytes`` that cost at most ``upper_seconds`` finds.

    ``fixed``: limits of storages that are not to be chosen; with each the program gets smaller. ``most_variables``: larger
    programs are not solved.
    """
    program = _Program(tables_of(profile), budget_bytes, fixed)
    program.build()
    if program.milp.num_variables > most_variables:
        return Found(None, 0)
    found = program.milp.solve(seconds, 0.0, upper_seconds, num_branches)
    limits = program.limits(found) if found.recompute_seconds < math.inf else None
    return Found(limits, program.milp.num_factors)


@dataclass(frozen=True, slots=True)
class _Stage:
    tick: int
    target: int
    ends_tick: bool


class _Program:
    def __init__(self, tables: Tables, budget_bytes: int, fixed: Mapping[int, int] = MappingProxyType({})) -> None:
        self.tables, self.budget_bytes, self.fixed = tables, budget_bytes, fixed
        self.events = events_of(tables)
        self.milp = Milp()
        self.stages = _stages(tables, self.events)
        self.full: list[list[Expression]] = []
        """F after each stage; stages that rerun nothing share one list."""
        self.held: dict[tuple[int, int], dict[int, Expression]] = {}
        """G by identity of F and tick."""
        self.slots: dict[int, list[tuple[int, list[tuple[int, Expression]]]]] = {}
        """By identity of F, which storages may be empty."""
        self.holders = holders_of(tables)
        self.passed: list[list[tuple[int, Expression, Expression]]] = [[] for _ in tables.nbytes]
        self.made = [[s for s in made if tables.position[s] == k] for k, made in enumerate(tables.products)]
        self.readers: list[list[int]] = [[] for _ in tables.nbytes]
        for k, inputs in enumerate(tables.inputs):
            for s in inputs:
                self.readers[s].append(k)

    def build(self) -> None:
        tables = self.tables
        F = [ONE if p == NO_RECIPE else self._kept(s) for s, p in enumerate(tables.position)]
        self._forward(F)
        self.full.append(F)
        for t, stage in enumerate(self.stages):
            R = self._reruns(stage, F)
            if R:
                before, F = F, self._filled(stage, F, R)
                self._memory(stage, before, F, R)
            self.full.append(F)
            if stage.ends_tick:
                end = self.stages[t + 1].tick if t + 1 < len(self.stages) else len(tables.ticks)
                self._ticks(range(stage.tick, end), F)

    def _kept(self, s: int) -> Expression:
        if s not in self.fixed:
            return term(self.milp.binary())
        return ONE if self.fixed[s] == KEEP else ZERO

    def _reruns(self, stage: _Stage, F: list[Expression]) -> dict[int, Expression]:
        """R: the recipes that a recomputation of the target may run, in order; ONE for those it certainly runs.

        (1b): what a rerun reads is there or made.
        """
        tables, milp, R = self.tables, self.milp, {}
        empty = minus(ONE, F[stage.target])  # nothing reruns for a full target
        needs: dict[int, list[Expression]] = {tables.position[stage.target]: [empty]} if empty != ZERO else {}
        while needs:
            k = max(needs)
            needed = needs.pop(k)
            if ONE in needed:
                R[k] = ONE
            else:
                R[k] = term(milp.binary())
                milp.at_most(minus(R[k], empty))
                for need in needed:
                    milp.at_most(minus(need, R[k]))
            milp.pay(R[k], tables.seconds[k])
            for s in tables.inputs[k]:
                need = minus(R[k], F[s])
                if tables.position[s] != NO_RECIPE and F[s] != ONE and need != ZERO:
                    needs.setdefault(tables.position[s], []).append(need)
        return dict(sorted(R.items()))

    def _filled(self, stage: _Stage, before: list[Expression], R: dict[int, Expression]) -> list[Expression]:
        """Return F after a stage."""
        milp, position = self.milp, self.tables.position[stage.target]
        F = list(before)
        for k, rerun in R.items():
            for s in self.made[k]:
                if before[s] == ONE:
                    continue
                if s == stage.target:
                    F[s] = ONE
                    continue
                if self.fixed.get(s, position) < position:
                    continue  # stays as it is: this target lies past its limit
                certain = s in self.fixed or k == position  # no limit lies before the own position
                if certain and before[s] == ZERO:
                    F[s] = rerun
                    continue
                F[s] = term(milp.binary())
                milp.at_most(minus(before[s], F[s]))  # full stays full
                milp.at_most(minus(F[s], plus(before[s], (rerun, 1.0))))  # (1c): what becomes full is rerun; (1d)
                if certain:
                    milp.at_most(minus(rerun, F[s]))
                else:
                    self._passed(s, position, minus(F[s], before[s]), rerun, F[s])
        return F

    def _passed(self, s: int, position: int, filled: Expression, rerun: Expression, full: Expression) -> None:
        """What is filled for a target of this position would have been, by any earlier one of no higher position."""
        for earlier_position, earlier_rerun, earlier_full in self.passed[s]:
            if earlier_position <= position:
                refused = minus(earlier_rerun, earlier_full)
                self.milp.at_most(plus(refused, (filled, 1.0)), 1.0)
        self.passed[s].append((position, rerun, full))

    def limits(self, found: Optimum) -> tuple[int, ...]:
        """Return limits by which each storage is refilled when the target of its stage of the schedule is."""
        limits = []
        for s, position in enumerate(self.tables.position):
            stages = (t for t, F in enumerate(self.full) if found.true(F[s]))
            first = next(stages, None)
            if s in self.fixed:
                limits.append(self.fixed[s])
            elif first == 0:
                limits.append(KEEP)
            else:
                limits.append(position if first is None else self.tables.position[self.stages[first - 1].target])
        return tuple(limits)

    # -- who holds what ---------------------------------------------------------------------------------------------------

    def _wants(self, F: list[Expression], tick: int) -> dict[int, Expression]:
        """W: for each recipe, whether the slot of some storage it makes is empty and someone may still ask for it."""
        unpacked, W = self.events.unpacked, dict[int, Expression]()
        for k, slots in self._slots(F):
            empties: list[Expression] = []
            for s, empty in slots:
                if unpacked.get(s, -1) >= tick:
                    empties.append(empty)
                else:
                    empties += [minus(W[j], F[s]) for j in self.readers[s] if j in W]
            if empties:
                W[k] = self.milp.largest(empties)
        return W

    def _slots(self, F: list[Expression]) -> list[tuple[int, list[tuple[int, Expression]]]]:
        """Return, for the recipes from last to first, the storages they make that may be empty, with whether they are."""
        if id(F) not in self.slots:
            every = [(k, [(s, minus(ONE, F[s])) for s in made if F[s] != ONE]) for k, made in enumerate(self.made)]
            self.slots[id(F)] = [(k, slots) for k, slots in reversed(every) if slots]
        return self.slots[id(F)]

    def _held(self, F: list[Expression], tick: int) -> dict[int, Expression]:
        """G, where it may be other than 0: what is held at the start of ``tick`` (rules 1 to 3 of NOTE [Who holds a managed
        storage])."""
        key = (id(F), tick)
        if key not in self.held:
            self.held[key] = self._new_held(F, tick)
        return self.held[key]

    def _new_held(self, F: list[Expression], tick: int) -> dict[int, Expression]:
        in_forward, saved, late = self.holders[tick]
        W, G = self._wants(F, tick), dict.fromkeys(in_forward, ONE)
        G |= {s: F[s] for s in saved if F[s] != ZERO}
        for s in late if W else ():
            full = F[s]
            if full != ZERO and (wanting := [W[k] for k in self.readers[s] if k in W]):
                empty = minus(ONE, full)
                G[s] = self.milp.largest(wanting if full == ONE else [minus(w, empty) for w in wanting])
        return G

    # -- memory -----------------------------------------------------------------------------------------------------------

    def _within(
        self, held: Iterable[tuple[int, Expression]], rest_bytes: float, *more: tuple[Expression, float]
    ) -> None:
        """(8): the bytes of ``held``, of ``rest_bytes`` and of ``more`` are within the budget."""
        certain_bytes, weighed = rest_bytes, list(more)
        for s, expression in held:
            if expression == ONE:
                certain_bytes += self.tables.nbytes[s]
            elif expression != ZERO:
                weighed.append((expression, float(self.tables.nbytes[s])))
        self.milp.at_most(
            plus(ZERO, *weighed), self.budget_bytes - certain_bytes, scale=1.0 / max(1, self.budget_bytes)
        )

    def _forward(self, F: list[Expression]) -> None:
        """Ticks before the first stage, those left out that hold no more than a later one."""
        end = self.stages[0].tick if self.stages else len(self.tables.ticks)
        events, nbytes, highest = self.events, self.tables.nbytes, -1
        for tick in reversed(range(end)):
            certain = [s for s in range(len(nbytes)) if events.created[s] < tick <= events.gone[s]]
            bytes_then = sum(nbytes[s] for s in certain) + self.tables.ticks[tick][2]
            if bytes_then > highest:
                highest = bytes_then
                self._within(self._held(F, tick).items(), self.tables.ticks[tick][2])

    def _ticks(self, ticks: range, F: list[Expression]) -> None:
        """Ticks after a stage and before the next; of those between which nothing goes, the highest."""
        highest: dict[tuple[tuple[int, Expression], ...], int] = {}
        for tick in ticks:
            held = tuple(self._held(F, tick).items())
            highest[held] = max(highest.get(held, -1), self.tables.ticks[tick][2])
        for held, peak_bytes in highest.items():
            self._within(held, peak_bytes)

    def _memory(self, stage: _Stage, before: list[Expression], F: list[Expression], R: dict[int, Expression]) -> None:
        """What is in memory when each recipe of a stage begins, and how far it rises above that."""
        tables, milp, tick = self.tables, self.milp, stage.tick
        start_bytes = tables.ticks[tick][1]
        G_before, G_after = self._held(before, tick), self._held(F, tick)
        concerned = [
            (s, maker)
            for s, maker in enumerate(tables.position)
            if s in G_before or s in G_after or not R.keys().isdisjoint(self.readers[s])
        ]
        for k, rerun in R.items():
            L = []
            for s, maker in concerned:
                held = G_before.get(s, ZERO)
                if maker < k and (maker != NO_RECIPE or held not in (ONE, ZERO)):
                    held = milp.largest([G_after.get(s, ZERO), *(R[j] for j in self.readers[s] if j >= k and j in R)])
                if held != ZERO:
                    L.append((s, held))
            C = milp.largest([minus(F[s], before[s]) for s in self.made[k] if tables.internal[s] and F[s] != before[s]])
            more_bytes = float(tables.capture_peak_bytes[k] - tables.peak_bytes[k])
            self._within(L, start_bytes, (rerun, float(tables.peak_bytes[k])), (C, more_bytes))


def _stages(tables: Tables, events: Events) -> list[_Stage]:
    order = [
        (tick, s)
        for tick, row in enumerate(tables.ticks)
        for s in dict.fromkeys(row[0])
        if events.unpacked[s] == tick and tables.position[s] != NO_RECIPE
    ]
    return [_Stage(tick, s, i + 1 == len(order) or order[i + 1][0] != tick) for i, (tick, s) in enumerate(order)]
