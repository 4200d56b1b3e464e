"""The integer program: a bound below every plan, equal to brute force where schedules can do no more than plans."""

from __future__ import annotations

import math

import pytest

from fxmem.ir import Plan
from fxmem.planners.ilp import best_limits, optimum
from fxmem.planners.registry import PLANNERS
from fxmem.planners.simulate import simulate
from tests.planners.test_frontiers import best_seconds, brute_force
from tests.synthetic import chain, hourglass, random_dag, residual_blocks


@pytest.mark.parametrize("num_ops", [2, 4, 6])
def test_the_optimum_of_a_chain_equals_brute_force(num_ops: int) -> None:
    profile = chain(num_ops, nbytes=3, grad_bytes=1)
    for point in brute_force(profile):
        best = optimum(profile, point.peak_bytes, seconds=20.0)
        assert best.recompute_seconds == pytest.approx(point.recompute_seconds)
        assert best.bound_seconds == pytest.approx(point.recompute_seconds)


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_is_below_every_plan_of_a_random_graph(seed: int) -> None:
    profile = random_dag(seed, 7, reach=3)
    for point in brute_force(profile):
        assert optimum(profile, point.peak_bytes, seconds=20.0).bound_seconds <= point.recompute_seconds + 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("whole_search")
@pytest.mark.parametrize("profile", [residual_blocks(2), hourglass(2)], ids=["blocks", "hourglass"])
def test_auto_is_within_a_tenth_of_the_bound(profile) -> None:
    points = PLANNERS["auto"](profile, seconds=60.0)
    low, high = points[-1].peak_bytes, points[0].peak_bytes
    for share in (0.75, 0.5, 0.25):
        budget_bytes = round(low + share * (high - low))
        bound_seconds = optimum(profile, budget_bytes, seconds=20.0).bound_seconds
        assert bound_seconds <= best_seconds(points, budget_bytes) <= 1.1 * bound_seconds + 1e-6


def test_a_budget_below_the_data_itself_is_infeasible() -> None:
    best = optimum(chain(4), 1, seconds=5.0)
    assert math.isinf(best.recompute_seconds)
    assert math.isinf(best.bound_seconds)


@pytest.mark.parametrize("seed", range(8))
def test_the_best_schedule_is_a_plan_and_no_plan_is_better(seed: int) -> None:
    profile = random_dag(seed, 7, reach=3)
    for point in brute_force(profile):
        limits = best_limits(
            profile, point.peak_bytes, seconds=20.0, num_branches=10_000, upper_seconds=point.recompute_seconds
        ).limits
        assert limits is not None
        timeline = simulate(profile, Plan("ilp", limits))
        assert timeline.peak_bytes <= point.peak_bytes
        assert timeline.recompute_seconds <= point.recompute_seconds


def test_what_is_known_beforehand_does_not_change_the_optimum() -> None:
    profile = random_dag(4, 14)
    budget_bytes = PLANNERS["intervals"](profile, seconds=60.0)[-1].peak_bytes
    best = optimum(profile, budget_bytes, seconds=20.0)
    again = optimum(
        profile,
        budget_bytes,
        seconds=20.0,
        lower_seconds=0.9 * best.bound_seconds,
        upper_seconds=best.recompute_seconds,
    )
    assert again.bound_seconds == pytest.approx(best.bound_seconds)
