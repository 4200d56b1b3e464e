"""The Lagrangian bound: below every plan, and close to the best ones."""

from __future__ import annotations

import math

import pytest

from fxmem.ir import FrontierPoint, GraphProfile
from fxmem.planners.bound import Relaxation
from fxmem.planners.pareto import Clock
from fxmem.planners.registry import PLANNERS
from fxmem.planners.simulate import tables_of
from tests.planners.test_frontiers import brute_force
from tests.synthetic import chain, hourglass, random_dag, residual_blocks


def bounds(profile: GraphProfile, points: tuple[FrontierPoint, ...]) -> list[float]:
    relaxation = Relaxation(tables_of(profile))
    return [
        relaxation.bound(p.peak_bytes, upper_seconds=p.recompute_seconds, num_steps=60, clock=Clock(60.0))
        for p in points
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_no_plan_of_a_random_graph_is_below_the_bound(seed: int) -> None:
    profile = random_dag(seed, 7, reach=3)
    points = brute_force(profile)
    relaxation = Relaxation(tables_of(profile))
    for point in points:
        # the true optimum is not given away: any upper bound must do
        bound = relaxation.bound(point.peak_bytes, upper_seconds=99.0, num_steps=60, clock=Clock(60.0))
        assert bound <= point.recompute_seconds + 1e-6
    for point in points:
        assert relaxation.known(point.peak_bytes) <= point.recompute_seconds + 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("whole_search")
@pytest.mark.parametrize(
    "profile",
    [
        pytest.param(chain(60, nbytes=4), id="chain"),
        pytest.param(residual_blocks(8), id="blocks", marks=pytest.mark.exhaustive),
        pytest.param(hourglass(5), id="hourglass", marks=pytest.mark.slow),
    ],
)
def test_the_bound_is_close_to_the_plans_found_in_the_upper_half(profile: GraphProfile) -> None:
    points = PLANNERS["auto"](profile, seconds=60.0)
    middle_bytes = (points[0].peak_bytes + points[-1].peak_bytes) // 2
    upper = tuple(p for p in points if p.peak_bytes >= middle_bytes)
    for point, bound_seconds in zip(upper, bounds(profile, upper), strict=True):
        assert bound_seconds <= point.recompute_seconds
        assert point.recompute_seconds - bound_seconds <= 0.02 * profile.step_seconds


def test_keeping_everything_has_no_gap_and_an_impossible_budget_an_infinite_bound() -> None:
    relaxation = Relaxation(tables_of(chain(10)))
    assert relaxation.bound(1000, upper_seconds=0.0, num_steps=9, clock=Clock(9.0)) == 0.0
    assert math.isinf(relaxation.bound(1, upper_seconds=99.0, num_steps=9, clock=Clock(9.0)))
