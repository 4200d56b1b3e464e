"""Windows of a plan chosen anew by the integer program."""

from __future__ import annotations

import random

import pytest

from fxmem.ir import FrontierPoint, GraphProfile
from fxmem.planners import neighbourhood_search
from fxmem.planners.ilp import best_limits
from fxmem.planners.neighbourhood_search import search_at, search_neighbourhoods
from fxmem.planners.pareto import Clock, cheapest_within, judge, pareto
from fxmem.planners.registry import AT_BUDGET, PLANNERS
from fxmem.planners.simulate import drop_all, keep_all
from tests.synthetic import hourglass, random_dag, random_limits, residual_blocks


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_that_is_fixed_whole_is_what_the_program_returns(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_dag(seed, 10, reach=3)
    limits = random_limits(profile, rng)
    point = judge(profile, "random", limits)
    found = best_limits(
        profile,
        point.peak_bytes,
        seconds=20.0,
        num_branches=1_000,
        upper_seconds=point.recompute_seconds,
        fixed=dict(enumerate(limits)),
    )
    assert found.limits == tuple(limits)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_chosen_anew_fits_and_costs_no_more_and_the_rest_stays(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_dag(seed, 12, reach=3)
    limits = random_limits(profile, rng)
    point = judge(profile, "random", limits)
    fixed = {s: limit for s, limit in enumerate(limits) if s % 3}
    found = best_limits(
        profile,
        point.peak_bytes,
        seconds=20.0,
        num_branches=1_000,
        upper_seconds=point.recompute_seconds,
        fixed=fixed,
    ).limits
    assert found is not None
    assert {s: found[s] for s in fixed} == fixed
    again = judge(profile, "ilp", found)
    assert again.peak_bytes <= point.peak_bytes
    assert again.recompute_seconds <= point.recompute_seconds * (1 + 1e-6)


def _ends(profile: GraphProfile) -> tuple[FrontierPoint, ...]:
    return pareto(judge(profile, "ends", make(profile).limits) for make in (keep_all, drop_all))


@pytest.mark.slow
@pytest.mark.parametrize("profile", [residual_blocks(6), hourglass(4)], ids=["blocks", "hourglass"])
def test_windows_make_plans_cheaper_and_are_judged(profile: GraphProfile) -> None:
    points = _ends(profile)
    found = search_neighbourhoods(profile, points, num_windows=6, clock=Clock(60.0))
    for point in found:
        assert judge(profile, point.plan.planner, point.plan.limits) == point
    at_floor = cheapest_within(found, points[-1].peak_bytes)
    assert at_floor is not None
    assert at_floor.recompute_seconds < 0.9 * points[-1].recompute_seconds
    assert search_neighbourhoods(profile, points, num_windows=6, clock=Clock(60.0)) == found


@pytest.mark.slow
@pytest.mark.parametrize("profile", [residual_blocks(6), hourglass(4)], ids=["blocks", "hourglass"])
def test_windows_for_one_budget_make_its_plan_cheaper(profile: GraphProfile) -> None:
    most, least = _ends(profile)
    budget_bytes = (most.peak_bytes + 3 * least.peak_bytes) // 4
    found = search_at(profile, (most, least), budget_bytes, num_windows=12, clock=Clock(60.0))
    point = cheapest_within(found, budget_bytes)
    assert point is not None
    assert point.recompute_seconds < 0.9 * least.recompute_seconds
    assert judge(profile, point.plan.planner, point.plan.limits) == point
    assert AT_BUDGET["auto"](profile, (most, least), least.peak_bytes - 1, seconds=60.0) == (most, least)
    assert AT_BUDGET["auto"](profile, (most, least), most.peak_bytes, seconds=60.0) == (most, least)


@pytest.mark.slow
def test_wider_windows_go_on_where_narrow_ones_helped(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = hourglass(5)
    wide = search_neighbourhoods(profile, _ends(profile), num_windows=40, clock=Clock(60.0))
    monkeypatch.setattr(neighbourhood_search, "WIDER", ())
    narrow = search_neighbourhoods(profile, _ends(profile), num_windows=40, clock=Clock(60.0))
    assert wide[-1].peak_bytes == narrow[-1].peak_bytes
    assert wide[-1].recompute_seconds < 0.95 * narrow[-1].recompute_seconds < 0.9 * _ends(profile)[-1].recompute_seconds


def test_no_more_windows_than_it_may() -> None:
    profile = residual_blocks(6)
    points = _ends(profile)
    assert search_neighbourhoods(profile, points, num_windows=0, clock=Clock(60.0)) == points


@pytest.mark.slow
@pytest.mark.usefixtures("whole_search")
def test_auto_uses_windows_on_graphs_too_large_for_the_whole_program() -> None:
    points = PLANNERS["auto"](residual_blocks(10, grad_bytes=1), seconds=60.0)
    assert any(point.plan.planner == "neighbourhood search" for point in points)
