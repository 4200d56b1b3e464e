"""Plans made for one size of a graph, taken over for another: batches of texts have a new length in every step.

In: the profile of a new size, and :class:`Planned` sizes of the same graph. Out: a frontier, or none where planning anew
is likely to find a better plan. Limits mean the same for every size, so what an earlier plan costs here is simulated; how
good that is, the lower bound says (:mod:`fxmem.planners.bound`): a plan is taken over if it is at most a point of the step
farther from its bound than the plan made for the nearest size is from its own, in the same place of the span of budgets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxmem.ir import FrontierPoint, GraphProfile, NodeProfile, Plan
from fxmem.planners.bound import lower_bound
from fxmem.planners.pareto import Clock, cheapest_within, judge_all, pareto
from fxmem.planners.policy import Rule, constrain, enforce
from fxmem.planners.simulate import check_limits, simulate

MOST_WORSE = 0.01
"""Of the step's time."""
SECONDS = 5.0
"""Of CPU time for judging earlier plans, should that take far longer than ever seen."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One size, planned for all budgets."""

    profile: GraphProfile
    points: tuple[FrontierPoint, ...]


def of_same_graph(profile: GraphProfile, planned: Sequence[Planned]) -> list[Planned]:
    """Return the sizes whose plans may serve, first the one whose storages have most nearly as many bytes."""
    shape = _shape(profile)
    same = [one for one in planned if _shape(one.profile) == shape]
    nbytes = _managed_bytes(profile)
    return sorted(same, key=lambda one: abs(math.log(_managed_bytes(one.profile) / nbytes)))


def carried_over(
    profile: GraphProfile, earlier: Sequence[Planned], policy: tuple[Rule, ...]
) -> tuple[FrontierPoint, ...]:
    """Return the frontier that the plans of ``earlier`` sizes make for ``profile``."""
    constrained, recomputed = constrain(profile, policy)
    plans = [p.plan for one in earlier for p in one.points if _may_have(constrained, p.plan)]
    limits = [plan.limits for plan in plans if not plan.offloads]
    points = enforce(constrained, judge_all(constrained, "earlier size", limits, Clock(SECONDS)), recomputed)
    return pareto((*points, *(_judged(constrained, plan) for plan in plans if plan.offloads)))


def _judged(profile: GraphProfile, plan: Plan) -> FrontierPoint:
    """Return a plan that offloads with its peak here; waits for the link are those of the size that it was made for."""
    timeline = simulate(profile, plan)
    return FrontierPoint(replace(plan, planner="earlier size"), timeline.peak_bytes, timeline.recompute_seconds)


def taken_over(
    profile: GraphProfile, earlier: Sequence[Planned], policy: tuple[Rule, ...], budget_bytes: int
) -> tuple[FrontierPoint, ...]:
    """Return the frontier that the plans of ``earlier`` sizes, the nearest first, make for ``profile``; empty if none of
    them is good enough for the budget."""
    points = carried_over(profile, earlier, policy)
    if cheapest_within(points, budget_bytes) is None:
        return ()
    nearest, span = earlier[0], _span(points)
    share = min(1.0, (budget_bytes - span[0]) / max(1, span[1] - span[0]))
    least, most = _span(nearest.points)
    as_planned, _ = constrain(nearest.profile, policy)
    usual = _gap_ratio(as_planned, nearest.points, round(least + share * (most - least)))
    constrained, _ = constrain(profile, policy)
    return points if _gap_ratio(constrained, points, budget_bytes) <= usual + MOST_WORSE else ()


def counterparts(profile: GraphProfile, other: GraphProfile) -> dict[int, int]:
    """Return, by node of ``profile`` that is about a managed storage, the node of ``other``, a size of the same graph."""
    return {node.index: like.index for node, like in zip(_at_work(profile), _at_work(other), strict=True)}


def _at_work(profile: GraphProfile) -> list[NodeProfile]:
    """All nodes but views of inputs and sizes: a graph with symbolic dimensions asks for more of them."""
    return [node for node in profile.nodes if node.reads or node.creates or node.writes]


def _shape(profile: GraphProfile) -> object:
    """Equal for sizes of one graph."""
    return (
        [(node.op, node.reads, node.creates, node.writes, node.saves) for node in _at_work(profile)],
        [(recipe.inputs, recipe.products) for recipe in profile.recipes],
    )


def _managed_bytes(profile: GraphProfile) -> int:
    return 1 + sum(storage.nbytes for storage in profile.storages)


def _may_have(profile: GraphProfile, plan: Plan) -> bool:
    try:
        check_limits(profile, plan)
    except ValueError:
        return False
    return True


def _span(points: Sequence[FrontierPoint]) -> tuple[int, int]:
    peaks = [point.peak_bytes for point in points]
    return min(peaks), max(peaks)


def _gap_ratio(profile: GraphProfile, points: Sequence[FrontierPoint], budget_bytes: int) -> float:
    """Return by how much of the step's time the best point may be dearer than the best plan there is."""
    point = cheapest_within(points, budget_bytes)
    assert point is not None, "a budget within the span of the points"
    gap = point.recompute_seconds - lower_bound(profile, budget_bytes, point.recompute_seconds)
    return gap / (profile.step_seconds or 1.0)
