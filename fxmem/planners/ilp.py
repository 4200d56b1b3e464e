"""Checkmate's integer program: the least recompute seconds any schedule could have, as a yardstick on small graphs.

In: a profile, a budget, a time limit. Out: an :class:`Optimum`: the best schedule's seconds and the bound proved. Jain et
al. 2020 (arXiv:1910.02653), solved by HiGHS through :func:`scipy.optimize.milp`.

Legend (the paper's letters). Stages t: one for each forward tick, one for each saved tensor that backward unpacks.
S[t, s]: storage s is in memory when stage t begins. R[t, k]: recipe k reruns in stage t. N[t, s]: it makes a new copy of s
there. FREE[t, s, k]: s goes as soon as k has rerun in stage t. U[t, k]: bytes in memory before recipe k of stage t.

Every plan is a schedule of this program, but not the other way around (a schedule may drop a storage again and again), so
its bound holds for plans. Not modelled, all in the bound's favour: captured internals' workspace, and storages that may
not be dropped but that empty slots hold longer than forward and autograd do.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from fxmem.simulate import NO_RECIPE, Tables, tables_of
from fxmem.types import GraphProfile


@dataclass(frozen=True, slots=True)
class Optimum:
    """What the solver proved."""

    recompute_seconds: float
    """Of the best schedule found; infinite if none was."""
    bound_seconds: float
    """No plan within the budget recomputes for less; infinite if there is none."""


@dataclass(frozen=True, slots=True)
class _Stage:
    tick: int
    target: int | None
    """The storage unpacked; None in forward."""
    held: tuple[int, ...]
    """Storages unpacked earlier at this tick: they stay until it ends."""
    ends_tick: bool


def optimum(profile: GraphProfile, budget_bytes: int, *, seconds: float) -> Optimum:
    """Return the least recompute seconds within ``budget_bytes``, as far as ``seconds`` of solving tell."""
    return _Program(tables_of(profile), budget_bytes).solve(seconds)


class _Program:
    def __init__(self, tables: Tables, budget_bytes: int) -> None:
        self.tables, self.budget_bytes = tables, budget_bytes
        self.droppable = [s for s, p in enumerate(tables.position) if p != NO_RECIPE]
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.integral: list[int] = []
        self.terms: list[tuple[int, int, float]] = []  # row, column, value
        self.row_upper: list[float] = []
        self.created, self.gone = self._forward_lifetimes()
        self.base_bytes = self._undroppable_bytes()
        self.stages = self._list_stages()
        self.S: dict[tuple[int, int], int] = {}
        for t in range(len(self.stages) + 1):
            for s in self.droppable:
                exists = t < len(self.stages) and self.created[s] < self.stages[t].tick
                self.S[t, s] = self._variable(upper=1.0 if exists else 0.0)
        for t, stage in enumerate(self.stages):
            if stage.target is None:
                self._forward_stage(t, stage)
            else:
                self._backward_stage(t, stage)

    def _variable(self, *, cost: float = 0.0, upper: float = 1.0, integral: bool = True) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.integral.append(int(integral))
        return len(self.cost) - 1

    def _at_most(self, upper: float, *terms: tuple[float, int]) -> None:
        """Add the constraint that the terms' sum is at most ``upper``."""
        row = len(self.row_upper)
        self.terms += [(row, column, value) for value, column in terms]
        self.row_upper.append(upper)

    def _forward_lifetimes(self) -> tuple[list[int], list[int]]:
        """Ticks at which storages are created, and after which the forward holds them no longer."""
        created, gone = [0] * len(self.tables.nbytes), [0] * len(self.tables.nbytes)
        for number, (_, _, _, creates, lets_go, _) in enumerate(self.tables.ticks):
            for s in creates:
                created[s] = number
            for s in lets_go:
                gone[s] = number
        return created, gone

    def _undroppable_bytes(self) -> list[int]:
        ended = list(self.gone)
        for number, row in enumerate(self.tables.ticks):
            for s in row[5]:
                ended[s] = max(ended[s], number)
        held = [s for s, p in enumerate(self.tables.position) if p == NO_RECIPE]
        return [
            sum(self.tables.nbytes[s] for s in held if self.created[s] < number <= ended[s])
            for number in range(len(self.tables.ticks))
        ]

    def _list_stages(self) -> list[_Stage]:
        stages = []
        for number, (unpacks, *_) in enumerate(self.tables.ticks):
            targets = [s for s in dict.fromkeys(unpacks) if self.tables.position[s] != NO_RECIPE]
            if not targets:
                stages.append(_Stage(number, None, (), True))
            for i, target in enumerate(targets):
                stages.append(_Stage(number, target, tuple(targets[:i]), i == len(targets) - 1))
        return stages

    def _forward_stage(self, t: int, stage: _Stage) -> None:
        """A tick in which nothing is unpacked, hence nothing reruns."""
        _, _, peak_bytes, creates, _, _ = self.tables.ticks[stage.tick]
        live = [(float(self.tables.nbytes[s]), self.S[t, s]) for s in self.droppable]
        self._at_most(self.budget_bytes - self.base_bytes[stage.tick] - peak_bytes, *live)  # (8)
        for s in self.droppable:
            if s not in creates:  # (1c): what is there was there
                self._at_most(0.0, (1.0, self.S[t + 1, s]), (-1.0, self.S[t, s]))
            if self.created[s] < stage.tick <= self.gone[s]:  # forward still refers to it
                self._at_most(-1.0, (-1.0, self.S[t, s]))

    def _backward_stage(self, t: int, stage: _Stage) -> None:
        tables, target = self.tables, stage.target
        assert target is not None
        R = [self._variable(cost=cost) for cost in tables.seconds]
        N = {s: self._variable(integral=False) for s in self.droppable}
        stays = {target, *stage.held}
        for k, inputs in enumerate(tables.inputs):  # (1b): what a rerun reads is there or made
            for s in inputs:
                if tables.position[s] != NO_RECIPE:
                    self._at_most(0.0, (1.0, R[k]), (-1.0, self.S[t, s]), (-1.0, R[tables.position[s]]))
        for s in self.droppable:
            k, S, after = tables.position[s], self.S[t, s], self.S[t + 1, s]
            self._at_most(0.0, (1.0, after), (-1.0, S), (-1.0, R[k]))  # (1c)
            self._at_most(0.0, (1.0, R[k]), (-1.0, S), (-1.0, N[s]))  # a rerun makes what is not there
            if s in stays:
                self._at_most(-1.0, (-1.0, S), (-1.0, R[k]))  # (1d): what is unpacked is there
            if s in stays and not stage.ends_tick:
                self._at_most(-1.0, (-1.0, after))
        self._memory(t, stage, R, N, stays)

    def _memory(self, t: int, stage: _Stage, R: list[int], N: dict[int, int], stays: set[int]) -> None:
        """U[t, k] as a running sum: (2) at the stage's start, (3) after each recipe, (8) while it runs."""
        tables = self.tables
        _, start_bytes, peak_bytes, *_ = tables.ticks[stage.tick]
        base_bytes = self.base_bytes[stage.tick]
        U = [(float(tables.nbytes[s]), self.S[t, s]) for s in self.droppable]
        users: dict[int, list[int]] = defaultdict(list)
        for k, inputs in enumerate(tables.inputs):
            for s in inputs:
                users[s].append(k)
        for k, inputs in enumerate(tables.inputs):
            self._at_most(self.budget_bytes - base_bytes - start_bytes, *U, (float(tables.peak_bytes[k]), R[k]))
            products = [s for s in tables.products[k] if tables.position[s] == k]
            U += [(float(tables.nbytes[s]), N[s]) for s in products]
            for s in (*products, *inputs):
                if tables.position[s] != NO_RECIPE and s not in stays:
                    free = self._free(t, s, k, R, N, users[s])
                    U.append((-float(tables.nbytes[s]), free))
        if stage.ends_tick:
            self._at_most(self.budget_bytes - base_bytes - peak_bytes, *U)

    def _free(self, t: int, s: int, k: int, R: list[int], N: dict[int, int], users: list[int]) -> int:
        """FREE[t, s, k]: (5) to (7), as upper bounds: it runs, s is there, and nobody needs s afterwards."""
        free = self._variable(integral=False)
        self._at_most(0.0, (1.0, free), (-1.0, R[k]))
        self._at_most(0.0, (1.0, free), (-1.0, self.S[t, s]), (-1.0, N[s]))
        self._at_most(1.0, (1.0, free), (1.0, self.S[t + 1, s]))
        for j in users:
            if j > k:
                self._at_most(1.0, (1.0, free), (1.0, R[j]))
        return free

    def solve(self, seconds: float) -> Optimum:
        rows, columns, values = zip(*self.terms, strict=True) if self.terms else ((), (), ())
        shape = (len(self.row_upper), len(self.cost))
        matrix = csr_array((np.array(values, dtype=np.float64), (rows, columns)), shape=shape)
        result = milp(
            np.array(self.cost),
            integrality=np.array(self.integral),
            bounds=Bounds(np.zeros(len(self.cost)), np.array(self.upper)),
            constraints=LinearConstraint(matrix, ub=np.array(self.row_upper)),
            options={"time_limit": seconds},
        )
        if result.status == 2:  # infeasible
            return Optimum(float("inf"), float("inf"))
        found = float("inf") if result.x is None else float(result.fun)
        bound = getattr(result, "mip_dual_bound", None)
        return Optimum(found, 0.0 if bound is None else max(0.0, float(bound)))
