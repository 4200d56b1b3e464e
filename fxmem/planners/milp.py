"""A small way of writing down mixed integer programs, solved by HiGHS."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

Expression = tuple[float, tuple[tuple[int, float], ...]]
"""A constant, and pairs of variable and factor in order of variables."""
ZERO: Expression = (0.0, ())
ONE: Expression = (1.0, ())


@dataclass(frozen=True, slots=True)
class Optimum:
    """What the solver proved."""

    recompute_seconds: float
    """Of the best schedule found; infinite if none was."""
    bound_seconds: float
    """No plan within the budget recomputes for less; infinite if there is none."""
    values: tuple[float, ...] = ()
    """Of the variables, in the best schedule found."""

    def true(self, expression: Expression) -> bool:
        """Tell whether a 0-1 expression is 1 in the best schedule found."""
        return expression[0] + sum(factor * self.values[v] for v, factor in expression[1]) > 0.5


def term(variable: int) -> Expression:
    return (0.0, ((variable, 1.0),))


def plus(left: Expression, *right: tuple[Expression, float]) -> Expression:
    """Return ``left`` plus each of ``right`` times its factor."""
    constant, factors = left[0], dict(left[1])
    for (other, terms), times in right:
        constant += times * other
        for variable, factor in terms:
            factors[variable] = factors.get(variable, 0.0) + times * factor
    return (constant, tuple(sorted((v, f) for v, f in factors.items() if f)))


def minus(left: Expression, right: Expression) -> Expression:
    if not right[1]:
        return (left[0] - right[0], left[1])
    if not left[1]:
        return (left[0] - right[0], tuple([(variable, -factor) for variable, factor in right[1]]))
    return plus(left, (right, -1.0))


class Milp:
    """Variables between 0 and 1, and constraints."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.integral: list[int] = []
        self.certain_cost = 0.0
        self.rows: dict[tuple[tuple[int, float], ...], float] = {}
        """The least upper bound of each sum."""
        self.impossible = False
        self.largest_of: dict[tuple[Expression, ...], Expression] = {}

    @property
    def num_variables(self) -> int:
        return len(self.cost)

    @property
    def num_factors(self) -> int:
        """In all constraints."""
        return sum(map(len, self.rows))

    def binary(self) -> int:
        return self._variable(1)

    def pay(self, expression: Expression, cost: float) -> None:
        """Add an expression to the cost."""
        self.certain_cost += cost * expression[0]
        for variable, factor in expression[1]:
            self.cost[variable] += cost * factor

    def _variable(self, integral: int) -> int:
        self.cost.append(0.0)
        self.integral.append(integral)
        return len(self.cost) - 1

    def at_most(self, expression: Expression, upper: float = 0.0, *, scale: float = 1.0) -> None:
        constant, terms = expression
        if terms:
            row = terms if scale == 1.0 else tuple([(v, f * scale) for v, f in terms])
            self.rows[row] = min(self.rows.get(row, math.inf), (upper - constant) * scale)
        elif constant > upper:
            self.impossible = True

    def largest(self, expressions: list[Expression]) -> Expression:
        """Return an expression that is at least zero and all of these, each of which is at most one."""
        if ONE in expressions:
            return ONE
        key = tuple(sorted({e for e in expressions if e != ZERO}))
        if not key:
            return ZERO
        if len(key) == 1 and _never_negative(key[0]):
            return key[0]
        if key not in self.largest_of:
            result = self.largest_of[key] = term(self._variable(0))
            for expression in key:
                self.at_most(minus(expression, result))
        return self.largest_of[key]

    def solve(self, seconds: float, lower: float, upper: float | None, nodes: int | None = None) -> Optimum:
        """Return what minimizing the cost within ``seconds`` proves, given that it lies between two numbers.

        ``nodes``: most branches to look at.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp  # half a second, which only those who solve wait for
        from scipy.sparse import csr_array

        if self.impossible:
            return Optimum(float("inf"), float("inf"))
        if not self.rows and not any(self.cost):
            return Optimum(self.certain_cost, self.certain_cost, (0.0,) * len(self.cost))
        certain, unit = self.certain_cost, max(self.cost) or 1.0  # of cost, so that the solver's tolerances fit
        cost = np.array(self.cost) / unit
        entries = [(r, v, f) for r, terms in enumerate(self.rows) for v, f in terms]
        entries += [(len(self.rows), v, float(c)) for v, c in enumerate(cost) if c]
        rows, columns, values = zip(*entries, strict=True)
        shape = (len(self.rows) + 1, len(cost))
        matrix = csr_array((np.array(values), (np.array(rows), np.array(columns))), shape=shape)
        least = np.full(shape[0], -np.inf)
        least[-1] = (lower * (1 - 1e-7) - certain) / unit
        most = np.array([*self.rows.values(), np.inf])
        if upper is not None:
            most[-1] = (upper * (1 + 1e-6) - certain) / unit + 1e-9
        result = milp(
            cost,
            integrality=np.array(self.integral),
            bounds=Bounds(np.zeros(len(cost)), np.ones(len(cost))),
            constraints=LinearConstraint(matrix, least, most),
            options={"time_limit": seconds, "mip_rel_gap": 1e-5} | ({} if nodes is None else {"node_limit": nodes}),
        )
        if result.status == 2:  # infeasible
            return Optimum(float("inf"), float("inf") if upper is None else upper)
        found = float("inf") if result.x is None else certain + float(result.fun) * unit
        bound = getattr(result, "mip_dual_bound", None)
        values = () if result.x is None else tuple(result.x.tolist())
        return Optimum(found, lower if bound is None else max(lower, certain + float(bound) * unit), values)


def _never_negative(expression: Expression) -> bool:
    """True of a variable, and of one less a variable."""
    constant, terms = expression
    return constant + sum(min(0.0, factor) for _, factor in terms) >= 0.0
