"""How far a plan is from the best there could be: its seconds against the best lower bound that is cheap to know."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from fxmem.planners.bound import Relaxation
from fxmem.planners.frontier import Clock
from fxmem.planners.ilp import optimum
from fxmem.simulate import tables_of
from fxmem.types import FrontierPoint, GraphProfile

MOST_ILP_RECIPES = 24
"""Graphs of at most so many recipes are also given to the integer program."""
ILP_SECONDS = 1.0
NUM_STEPS = 60
"""Steps of the relaxation for one budget."""


def lower_bound(profile: GraphProfile, budget_bytes: int, upper_seconds: float, *, seconds: float = 2.0) -> float:
    """Return seconds below which no plan within ``budget_bytes`` recomputes; ``upper_seconds`` is what one plan costs."""
    clock = Clock(seconds)
    relaxation = Relaxation(tables_of(profile))
    best = relaxation.bound(budget_bytes, upper_seconds=upper_seconds, num_steps=NUM_STEPS, clock=clock).seconds
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
