"""Planners against brute force, against each other, and against what every frontier must be."""

from __future__ import annotations

import itertools
import random

import pytest

from fxmem.ir import KEEP, FrontierPoint, GraphProfile, Plan
from fxmem.planners.pareto import cheapest_within, pareto
from fxmem.planners.registry import PLANNERS
from fxmem.planners.simulate import keep_all, simulate
from tests.synthetic import Op, build, chain, hourglass, random_dag, residual_blocks
from tests.tiers import representatives

GRAPHS = {
    "chain": chain(40, nbytes=4, grad_bytes=1),
    "blocks": residual_blocks(5, grad_bytes=3),
    "hourglass": hourglass(4, grad_bytes=2),
    "random": random_dag(3, 40),
    "one op": build([Op()]),
    "two ops": chain(2),
    "all impure": build([Op((i - 1,) if i else (), recomputable=False) for i in range(6)]),
}


def frontier_of(planner: str, graph: str) -> tuple[FrontierPoint, ...]:
    return PLANNERS[planner](GRAPHS[graph], seconds=20.0)


def best_seconds(points: tuple[FrontierPoint, ...], budget_bytes: int) -> float:
    point = cheapest_within(points, budget_bytes)
    return float("inf") if point is None else point.recompute_seconds


def brute_force(profile: GraphProfile) -> tuple[FrontierPoint, ...]:
    """Every combination of keeping, refilling late and refilling on the way."""
    last = len(profile.recipes) - 1
    choices = [(KEEP,) if s.recipe is None else tuple(dict.fromkeys((KEEP, s.recipe, last))) for s in profile.storages]
    points = []
    for limits in itertools.product(*choices):
        timeline = simulate(profile, Plan("brute force", limits))
        points.append(FrontierPoint(Plan("brute force", limits), timeline.peak_bytes, timeline.recompute_seconds))
    return pareto(points)


@pytest.mark.slow
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_frontier_is_a_pareto_set_and_the_simulator_agrees_with_it(planner: str, graph: str) -> None:
    profile = GRAPHS[graph]
    points = frontier_of(planner, graph)
    assert points
    for point in points:
        timeline = simulate(profile, point.plan)
        assert (timeline.peak_bytes, timeline.recompute_seconds) == (point.peak_bytes, point.recompute_seconds)
    for left, right in itertools.pairwise(points):
        assert left.peak_bytes > right.peak_bytes
        assert left.recompute_seconds < right.recompute_seconds


@pytest.mark.slow
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_budget_that_eager_meets_costs_nothing(planner: str, graph: str) -> None:
    profile = GRAPHS[graph]
    eager_bytes = simulate(profile, keep_all(profile)).peak_bytes
    assert best_seconds(frontier_of(planner, graph), eager_bytes) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("graph", GRAPHS)
def test_more_budget_never_costs_more_and_no_peak_exceeds_it(graph: str) -> None:
    points = frontier_of("auto", graph)
    costs = []
    for budget_bytes in range(points[-1].peak_bytes, points[0].peak_bytes + 2):
        point = cheapest_within(points, budget_bytes)
        assert point is not None
        assert point.peak_bytes <= budget_bytes
        costs.append(point.recompute_seconds)
    assert costs == sorted(costs, reverse=True)


@pytest.mark.slow
@pytest.mark.usefixtures("planned_anew")
@pytest.mark.parametrize("planner", PLANNERS)
def test_equal_profiles_get_equal_plans(planner: str) -> None:
    first = PLANNERS[planner](random_dag(11, 30), seconds=60.0)
    assert first == PLANNERS[planner](random_dag(11, 30), seconds=60.0)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("whole_search", "planned_anew")
def test_equal_profiles_get_equal_plans_of_a_whole_search() -> None:
    test_equal_profiles_get_equal_plans("auto")


@pytest.mark.parametrize("graph", representatives(GRAPHS, *GRAPHS, quick=["random", "one op", "two ops", "all impure"]))
def test_auto_is_at_least_as_good_as_every_other_planner(graph: str) -> None:
    auto = frontier_of("auto", graph)
    for planner in PLANNERS.keys() - {"auto"}:
        for point in frontier_of(planner, graph):
            assert best_seconds(auto, point.peak_bytes) <= point.recompute_seconds


@pytest.mark.slow
@pytest.mark.usefixtures("whole_search")
@pytest.mark.parametrize("seed", range(8))
def test_auto_is_close_to_brute_force_on_random_graphs(seed: int) -> None:
    profile = random_dag(seed, 8, reach=3)
    best = brute_force(profile)
    auto = PLANNERS["auto"](profile, seconds=60.0)
    for point in best:
        assert best_seconds(auto, point.peak_bytes) <= 1.1 * point.recompute_seconds
    assert auto[-1].peak_bytes <= best[-1].peak_bytes


@pytest.mark.usefixtures("whole_search")
@pytest.mark.parametrize("num_ops", range(2, 9))
def test_auto_equals_brute_force_on_chains(num_ops: int) -> None:
    profile = chain(num_ops, nbytes=3, grad_bytes=1)
    auto = PLANNERS["auto"](profile, seconds=60.0)
    for point in brute_force(profile):
        assert best_seconds(auto, point.peak_bytes) <= point.recompute_seconds


def test_chen_reaches_the_square_root_of_a_long_chain() -> None:
    profile = chain(400)
    floor_bytes = PLANNERS["chen"](profile, seconds=20.0)[-1].peak_bytes
    assert simulate(profile, keep_all(profile)).peak_bytes > 400
    assert floor_bytes <= 3 * 400**0.5


@pytest.mark.slow
def test_chen_recursion_goes_below_the_square_root() -> None:
    profile = chain(2048)
    floor = PLANNERS["chen"](profile, seconds=60.0)[-1]
    assert floor.peak_bytes <= 40
    assert len(set(floor.plan.limits)) > 45  # nested: many different limits


def test_a_nested_plan_recomputes_more_and_holds_less_than_plain_segments() -> None:
    points = PLANNERS["chen"](chain(900), seconds=60.0)
    plain = [p for p in points if p.recompute_seconds < 900]
    nested = [p for p in points if p.recompute_seconds > 900]
    assert min(p.peak_bytes for p in nested) < min(p.peak_bytes for p in plain)


@pytest.mark.slow
@pytest.mark.usefixtures("whole_search")
def test_cheap_ops_are_dropped_before_dear_ones() -> None:
    profile = residual_blocks(4, width=8)
    points = PLANNERS["auto"](profile, seconds=20.0)
    point = cheapest_within(points, round(0.8 * points[0].peak_bytes))
    assert point is not None
    dear = {s.index for s in profile.storages if s.recipe is not None and profile.recipes[s.recipe].seconds == 8.0}
    assert point.plan.dropped
    assert not dear.intersection(s for s in point.plan.dropped if profile.storages[s].num_saves)


@pytest.mark.slow
def test_impure_ops_are_never_dropped() -> None:
    profile = random_dag(17, 40)
    impure = {s.index for s in profile.storages if s.recipe is None}
    for point in PLANNERS["auto"](profile, seconds=20.0):
        assert impure.isdisjoint(point.plan.dropped)


@pytest.mark.slow
def test_cheapest_within_is_none_below_the_floor() -> None:
    points = frontier_of("auto", "chain")
    assert cheapest_within(points, points[-1].peak_bytes - 1) is None


def test_pareto_drops_beaten_points_and_keeps_the_first_of_equal_ones() -> None:
    def point(name: str, peak_bytes: int, seconds: float) -> FrontierPoint:
        return FrontierPoint(Plan(name, ()), peak_bytes, seconds)

    kept = pareto(
        [point("c", 9, 2.0), point("a", 10, 0.0), point("b", 10, 1.0), point("d", 7, 3.0), point("e", 7, 3.0)]
    )
    assert [p.plan.planner for p in kept] == ["a", "c", "d"]


@pytest.mark.slow
@pytest.mark.usefixtures("whole_search")
def test_a_long_graph_is_planned_within_its_time() -> None:
    profile = residual_blocks(250, grad_bytes=1)
    rng = random.Random(0)
    points = PLANNERS["auto"](profile, seconds=30.0)
    eager_bytes = points[0].peak_bytes
    assert points[-1].peak_bytes < 0.2 * eager_bytes
    assert best_seconds(points, rng.randint(eager_bytes // 2, eager_bytes)) < 0.05 * profile.step_seconds
