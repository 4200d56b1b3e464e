"""Plans put together from two, and the front that simulated runs are measured against."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from fxmem.ir import FrontierPoint, GraphProfile, Plan
from fxmem.planners import local_search, path_relinking, portfolio
from fxmem.planners.incremental import Bases
from fxmem.planners.local_search import improve
from fxmem.planners.pareto import Clock, Front, live, pareto
from fxmem.planners.path_relinking import _pairs, relink_paths
from fxmem.planners.simulate import Run, drop_all, keep_all, simulate, tables_of
from tests.synthetic import hourglass, random_dag, random_limits, residual_blocks


def judged(profile: GraphProfile, plan: Plan) -> FrontierPoint:
    timeline = simulate(profile, plan)
    return FrontierPoint(plan, timeline.peak_bytes, timeline.recompute_seconds)


@pytest.mark.slow
@pytest.mark.parametrize("profile", [residual_blocks(12), hourglass(5)], ids=["blocks", "hourglass"])
def test_splicing_finds_plans_between_keeping_and_dropping_everything(profile: GraphProfile) -> None:
    points = pareto(judged(profile, make(profile)) for make in (keep_all, drop_all))
    found = relink_paths(profile, points, num_trials=200, clock=Clock(60.0))
    assert len(found) > len(points) + 3
    for point in found:
        assert judged(profile, point.plan) == point
    least = [p.recompute_seconds for p in found if p.peak_bytes <= points[-1].peak_bytes]
    assert min(least) < 0.9 * points[-1].recompute_seconds


@pytest.mark.slow
@pytest.mark.parametrize("profile", [residual_blocks(12), hourglass(5)], ids=["blocks", "hourglass"])
def test_what_one_search_has_tried_the_next_one_does_not_run_again(
    profile: GraphProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def counted(*arguments: Any) -> Run | None:
        runs.append(arguments)
        return live(*arguments)

    monkeypatch.setattr(local_search, "live", counted)
    monkeypatch.setattr(path_relinking, "live", counted)

    def searched(shared: Bases | None) -> list[tuple[FrontierPoint, ...]]:
        points, found = pareto(judged(profile, make(profile)) for make in (keep_all, drop_all)), []
        for search in (improve, relink_paths, improve, relink_paths):
            points = search(profile, points, num_trials=120, clock=Clock(60.0), bases=shared)
            found.append(points)
        return found

    apart = searched(None)
    num_apart = len(runs)
    runs.clear()
    assert searched(Bases(tables_of(profile))) == apart
    assert len({limits for _, limits, *_ in runs}) == len(runs) < num_apart


def test_a_narrow_last_step_matters() -> None:
    front = Front()
    for peak_bytes, seconds in ((1_100_000, 0.95), (1_001_000, 1.0), (1_000_000, 5.0)):
        front.add(peak_bytes, seconds, (peak_bytes,))
    cheap, dear = _pairs(front)[0]
    assert (cheap, dear) == ((1_001_000,), (1_000_000,))


def test_splicing_tries_no_more_than_it_may() -> None:
    profile = residual_blocks(12)
    points = pareto(judged(profile, make(profile)) for make in (keep_all, drop_all))
    assert relink_paths(profile, points, num_trials=0, clock=Clock(60.0)) == points


@pytest.mark.parametrize("seed", range(40))
def test_the_forward_at_once_is_the_forward_tick_by_tick(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_dag(seed, rng.randint(2, 30), reach=rng.randint(1, 7))
    tables = tables_of(profile)
    for _ in range(5):
        limits = random_limits(profile, rng)
        whole, slow = Run(tables, limits, record=True), Run(tables, limits, record=True)
        first = whole.advance_prefix()
        least_seconds = whole.least_seconds()
        whole.advance(tables.ticks[first:], first)
        slow.advance(tables.ticks)
        assert first > 0
        assert whole.steps == slow.steps
        assert (whole.peak_bytes, whole.peak_tick) == (slow.peak_bytes, slow.peak_tick)
        assert (whole.alive, whole.in_forward, whole.managed_bytes) == (slow.alive, slow.in_forward, slow.managed_bytes)
        assert least_seconds <= slow.recompute_seconds + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_a_run_is_given_up_only_if_the_front_beats_it(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_dag(seed, 25)
    tables, front = tables_of(profile), Front()
    points = []
    for _ in range(60):
        limits = random_limits(profile, rng)
        point = judged(profile, Plan("random", limits))
        points.append(point)
        run = live(tables, limits, front)
        if run is not None:
            front.add(run.peak_bytes, run.recompute_seconds, limits)
    best = pareto(points)
    assert [(p.peak_bytes, p.recompute_seconds) for p in best] == [row[:2] for row in reversed(front.rows)]


def test_the_area_below_a_staircase_is_that_of_its_steps() -> None:
    plan = Plan("p", ())
    points = [FrontierPoint(plan, peak, seconds) for peak, seconds in ((800, 0.0), (400, 2.0), (100, 3.0))]
    assert portfolio._area(points, points) == pytest.approx(math.log(2) * 2.0 + math.log(4) * 3.0)
    assert portfolio._area([*points, FrontierPoint(plan, 50, 99.0)], points) == portfolio._area(points, points)
    assert portfolio._area(points[:1], points[:1]) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("profile", [residual_blocks(12), hourglass(8)], ids=["blocks", "hourglass"])
def test_improving_and_splicing_in_turn_goes_on_as_long_as_it_helps(
    profile: GraphProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = pareto(judged(profile, make(profile)) for make in (keep_all, drop_all))
    monkeypatch.setattr(portfolio, "MOST_TRIALS", 240)
    areas = []
    for most_turns in (1, 2, 6):
        monkeypatch.setattr(portfolio, "MOST_TURNS", most_turns)
        found = portfolio._polished(profile, points, Clock(60.0), Bases(tables_of(profile)))
        areas.append(portfolio._area(found, points))
    assert areas[0] > areas[1] >= areas[2]
