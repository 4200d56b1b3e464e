"""What a planner finds for a profile under the user's policy: now, or in the background under a plan found at once.

In: a profile, a context. Out: a Pareto set. With ``plan="background"``: an emitted plan that keeps the budget, and a
:class:`~fxmem.planners.background.Planning` whose points are completed later.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from fxmem.emitted import Emitted, emit_cheapest, keeping_all
from fxmem.ir import FrontierPoint, GraphProfile
from fxmem.passes.context import CompileContext, Settings
from fxmem.planners import frontier_cache
from fxmem.planners.background import Planning
from fxmem.planners.offload.choice import with_offloading
from fxmem.planners.offload.link import link_of
from fxmem.planners.pareto import pareto
from fxmem.planners.policy import constrain, enforce
from fxmem.planners.registry import AT_BUDGET, PLANNERS
from fxmem.profiling.profile import Profiled
from fxmem.progress import stage
from fxmem.user_frames import level_of_user

QUICK_PLANNER, QUICK_SECONDS = "chen", 2.0
"""What finds the plan of the first steps, and the CPU time it may take."""


def frontier_of(profile: GraphProfile, context: CompileContext) -> tuple[FrontierPoint, ...]:
    """Return the planner's points under the policy; keeping all it lets is always one of them."""
    settings = context.settings
    points = at_budget(profile, settings, recomputing_frontier(profile, settings))
    if "offload" in settings.allow:
        stage(f"planning offloads among {len(profile.storages)} values")
        constrained, recomputed = constrain(profile, settings.policy)
        link = link_of(context.hardware.name)
        points = with_offloading(constrained, points, link, never=recomputed, seconds=settings.plan_seconds)
    return points


def recomputing_frontier(profile: GraphProfile, settings: Settings) -> tuple[FrontierPoint, ...]:
    """Return those of :func:`frontier_of` that keep values or recompute them."""
    if "recompute" not in settings.allow:
        return (keeping_all(profile),)
    constrained, _ = constrain(profile, settings.policy)
    name, seconds = settings.planner, settings.plan_seconds

    def find() -> tuple[FrontierPoint, ...]:
        stage(f"planning {len(profile.nodes)} ops")
        return PLANNERS[name](constrained, seconds=seconds)

    points = frontier_cache.kept(constrained, name, seconds, find) if settings.cache else find()
    return _completed(profile, settings, points)


def found(profile: GraphProfile, settings: Settings, points: tuple[FrontierPoint, ...]) -> tuple[FrontierPoint, ...]:
    """Return what is planned with, of what the planner found now; it is kept on disk, if that is asked for."""
    if settings.cache:
        constrained, _ = constrain(profile, settings.policy)
        frontier_cache.store(constrained, settings.planner, settings.plan_seconds, points)
    return at_budget(profile, settings, _completed(profile, settings, points))


def at_budget(
    profile: GraphProfile, settings: Settings, points: tuple[FrontierPoint, ...]
) -> tuple[FrontierPoint, ...]:
    """Return ``points`` with what the planner finds for the budget itself, if it looks for that."""
    budget_bytes, search = settings.plan_bytes, AT_BUDGET.get(settings.planner)
    if budget_bytes is None or search is None or "recompute" not in settings.allow:
        return points
    constrained, _ = constrain(profile, settings.policy)

    def find() -> tuple[FrontierPoint, ...]:
        return search(constrained, points, budget_bytes, seconds=settings.plan_seconds)

    what = f"{settings.planner} at {budget_bytes}"
    found = frontier_cache.kept(constrained, what, settings.plan_seconds, find) if settings.cache else find()
    return _completed(profile, settings, found)


def _completed(profile: GraphProfile, settings: Settings, points: Sequence[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    constrained, recomputed = constrain(profile, settings.policy)
    return pareto(enforce(constrained, pareto((keeping_all(profile), *points)), recomputed))


def begin_in_background(profiled: Profiled, context: CompileContext) -> tuple[Emitted, Planning] | None:
    """Emit a plan that is found at once, and begin to search for the others. None where there is nothing to search for, the
    frontier is on disk, or no quick plan keeps the budget: then it is planned now."""
    profile, settings = profiled.profile, context.settings
    if "offload" in settings.allow or "recompute" not in settings.allow:
        return None
    constrained, _ = constrain(profile, settings.policy)
    name, seconds = settings.planner, settings.plan_seconds
    if settings.cache and frontier_cache.load(constrained, name, seconds) is not None:
        return None
    stage("finding a quick plan")
    quick = _completed(profile, settings, PLANNERS[QUICK_PLANNER](constrained, seconds=QUICK_SECONDS))
    emitted = emit_cheapest(profiled, context, quick)
    if emitted is None:
        return None
    try:
        return emitted, Planning(constrained, name, seconds)
    except OSError as error:
        warnings.warn(
            f"no process to plan in could be started ({error}): it is planned now", stacklevel=level_of_user()
        )
        return None
