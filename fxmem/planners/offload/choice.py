"""Which values wait for the backward in host memory: plans that keep, recompute and offload.

In: a profile, the Pareto set of plans that recompute, a :class:`Link`. Out: a Pareto set at least as good.

From some of the points, the same with offloads in place of the dearest recomputations, and from the plan that offloads
all that is saved, greedy walks: what lies idle at the peak goes to host memory, until nothing idle is
left there. One walk takes the largest first, one what was made early, whose copies have the most time. What is kept, and
what a recomputation refilled, is treated alike; what is offloaded already but was fetched on the way is fetched later.
Each plan of these walks is judged by the simulator, with the time that it takes if its copies are hidden. Those on the
Pareto set are timed: originals stay until their copies are made, fetches start ahead of their use, all of them or as many
as the peak allows. Not modelled: parts of a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fxmem.ir import KEEP, FrontierPoint, GraphProfile, Offload, Phase, Plan
from fxmem.planners.offload.link import Link, fetched_in_time, left_in_time, priced
from fxmem.planners.offload.recipes import sent, slots_of, with_offloads
from fxmem.planners.pareto import Clock, pareto
from fxmem.planners.simulate import Run, run_of, simulate, tables_of

MOST_STARTS, FEWEST_STARTS = 8, 2
"""Points that walks start from: fewer in graphs of more than ``LONG`` recipes."""
STEP_SHARE = 0.01
"""Of the span between the first peak and what cannot be helped: bytes that one step of a walk takes from the peak; more in
longer graphs."""
LONG = 300
WALK_SHARE = 0.7
"""Of the time: for walks; the rest is for starting fetches ahead."""
PATIENCE = 12
"""Steps of a walk that may leave the peak where it is."""
LARGE = (1.0, 0.125)
"""Of the largest idle value: what one walk, and the other, offloads first, in the order in which it is made."""
MOST_TIMED, FEWEST_TIMED = 40, 10
"""Points whose fetches are started ahead; fewer in longer graphs."""

NAME = "offload"

Points = tuple[FrontierPoint, ...]


def with_offloading(
    profile: GraphProfile, points: Sequence[FrontierPoint], link: Link, *, never: frozenset[int], seconds: float
) -> Points:
    """Return the Pareto set of ``points`` and of plans that offload, found within ``seconds`` of CPU time.

    ``points``: the first keeps all that may be kept. ``never``: storages that are not to be offloaded.
    """
    clock, walking, length = Clock(seconds), Clock(WALK_SHARE * seconds), max(1.0, len(profile.recipes) / LONG)
    starts = _starts(profile, points, max(FEWEST_STARTS, round(MOST_STARTS / length)))
    plans = [offload_all(profile, points[0].plan, never)]
    plans += [_instead_of_recomputing(profile, start.plan, link, never) for start in starts]
    found = list(points)
    for start in (*starts, *(_at_best(profile, plan, link) for plan in plans)):
        for large in LARGE:
            found += _walk(profile, start, link, (never, large), length * STEP_SHARE, walking)
    timed = list(points)
    offloading = [p for p in pareto(found) if p.plan.offloads]
    for point in reversed(_spread(offloading, max(FEWEST_TIMED, round(MOST_TIMED / length)))):
        if clock.over:
            break
        timed += [_judged(profile, point.plan, link), *_in_time(profile, point, link)]
    return pareto(timed)


def _starts(profile: GraphProfile, points: Sequence[FrontierPoint], most: int) -> list[FrontierPoint]:
    """Return points that walks start from, of the least peak first: those that recompute no more than one forward pass, for
    offloads are to take the place of dear recomputations, and the very last."""
    cheap = [p for p in points if p.recompute_seconds <= profile.forward_seconds]
    starts = _spread(cheap, most)[::-1]
    return starts if points[-1] in starts else [*starts, points[-1]]


def offload_all(profile: GraphProfile, plan: Plan, never: frozenset[int] = frozenset()) -> Plan:
    """Return ``plan`` with all that is saved and may be dropped fetched when it is asked for."""
    limits, offloads = list(plan.limits), []
    for recipe in profile.recipes:
        saved = [s for s in recipe.products if profile.storages[s].num_saves and profile.storages[s].recipe is not None]
        if saved and never.isdisjoint(recipe.products):
            offloads.append(Offload(recipe.index))
            for s in saved:
                limits[s] = recipe.index
    return Plan(NAME, tuple(limits), tuple(offloads))


def _spread(points: Sequence[FrontierPoint], most: int) -> list[FrontierPoint]:
    """Return at most so many points, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(k * (len(points) - 1) / (most - 1))] for k in range(most)]


def _judged(profile: GraphProfile, plan: Plan, link: Link) -> FrontierPoint:
    plan = priced(profile, plan, link)
    timeline = simulate(profile, plan)
    return FrontierPoint(plan, timeline.peak_bytes, timeline.recompute_seconds)


def _at_best(profile: GraphProfile, plan: Plan, link: Link) -> FrontierPoint:
    """Return ``plan`` with its peak, and the seconds that it takes if its copies have all the time that hides them."""
    hidden = _judged(profile, _hidden(profile, plan, link), link)
    return FrontierPoint(plan, simulate(profile, plan).peak_bytes, hidden.recompute_seconds)


def _hidden(profile: GraphProfile, plan: Plan, link: Link) -> Plan:
    return left_in_time(profile, fetched_in_time(profile, plan, link), link)


def _in_time(profile: GraphProfile, point: FrontierPoint, link: Link) -> Iterator[FrontierPoint]:
    """Yield the point's plan with copies hidden, all of them, and then ever fewer, until its peak is what it was."""
    plan = _hidden(profile, point.plan, link)
    stays = _stays(profile, plan)
    while True:
        judged = _judged(profile, plan, link)
        yield judged
        peak = simulate(profile, plan).peak_step
        fewer = tuple(
            replace(
                o,
                left=None if peak in stays[o.recipe][0] else o.left,
                after=None if peak in stays[o.recipe][1] else o.after,
            )
            for o in plan.offloads
        )
        if judged.peak_bytes <= point.peak_bytes or fewer == plan.offloads:
            return
        plan = replace(plan, offloads=fewer)


def _stays(profile: GraphProfile, plan: Plan) -> dict[int, tuple[range, range]]:
    """Return, by recipe, the ticks in which it is on the device for its copies' sake: in the forward, in the backward."""
    asked: dict[int, int] = {}
    used: dict[int, int] = {}
    left = {tick.node: t for t, tick in enumerate(profile.ticks) if tick.phase is Phase.FORWARD}
    for t, tick in enumerate(profile.ticks):
        for s in tick.unpacks:
            asked.setdefault(s, t)
        used |= {r: t for s in tick.last_used if (r := profile.storages[s].recipe) is not None}
    demanded = replace(plan, offloads=tuple(replace(o, after=None) for o in plan.offloads))
    steps = run_of(with_offloads(profile, demanded), plan.limits, record=True).steps or ()
    fetched = {recipe: tick for tick, recipe, _ in reversed(steps) if recipe is not None}
    return {
        o.recipe: (
            range(used.get(o.recipe, 0), left.get(o.left, -1) + 1),
            range(0 if o.after is None else asked[o.after], fetched.get(o.recipe, -1) + 1),
        )
        for o in plan.offloads
    }


# -- walks -------------------------------------------------------------------------------------------------------------


def _walk(
    profile: GraphProfile,
    start: FrontierPoint,
    link: Link,
    order: tuple[frozenset[int], float],
    step_share: float,
    clock: Clock,
) -> Iterator[FrontierPoint]:
    """Yield ``start`` and then plans of falling peaks: each offloads more of what lies idle at the peak of the last.

    ``order``: what is never offloaded, and the share of the largest idle value from which on a value goes first.
    ``step_share``: :data:`STEP_SHARE` of this graph.
    """
    point, best_bytes, patience = start, start.peak_bytes, PATIENCE
    step_bytes = max(1, round(step_share * (start.peak_bytes - profile.static.total_bytes)))
    while patience and not clock.over:
        yield point
        taken_bytes, plan = 0, point.plan
        for nbytes, recipe in _idle_at_peak(profile, plan, *order):
            plan, taken_bytes = _offloaded(profile, plan, recipe), taken_bytes + nbytes
            if taken_bytes >= step_bytes:
                break
        if not taken_bytes:
            return
        point = _at_best(profile, plan, link)
        patience = PATIENCE if point.peak_bytes < best_bytes else patience - 1
        best_bytes = min(best_bytes, point.peak_bytes)


def _idle_at_peak(profile: GraphProfile, plan: Plan, never: frozenset[int], large: float) -> list[tuple[int, int]]:
    """Return ``(bytes, recipe)`` of what lies idle at the peak and may be offloaded, or fetched later: first what has at
    least ``large`` of the most bytes, in the order in which it is made."""
    tables = tables_of(with_offloads(profile, plan))
    peak = simulate(profile, plan).peak_step
    run = Run(tables, plan.limits)
    run.advance(tables.ticks[:peak])
    asked, idle = profile.ticks[peak].unpacks, dict[int, int]()
    for s, storage in enumerate(profile.storages):
        recipe = storage.recipe
        if recipe is None or s in never or s in asked or not run.alive[s] or run.in_forward[s]:
            continue
        if recipe not in plan.fetched or plan.limits[s] != recipe:
            idle[recipe] = idle.get(recipe, 0) + storage.nbytes
    first_bytes = large * max(idle.values(), default=0)
    moves = ((nbytes, recipe) for recipe, nbytes in idle.items())
    return sorted(moves, key=lambda move: (move[0] < first_bytes, move[1]))


def _offloaded(profile: GraphProfile, plan: Plan, recipe: int) -> Plan:
    """Return ``plan`` with what ``recipe`` makes offloaded: what was kept is held from the first fetch on; what was not, or
    is offloaded already, only when it is asked for."""
    limits, last = list(plan.limits), len(profile.recipes) - 1
    for s in profile.recipes[recipe].products:
        if profile.storages[s].recipe == recipe:
            limits[s] = last if limits[s] == KEEP else recipe
    offloads = plan.offloads if recipe in plan.fetched else (*plan.offloads, Offload(recipe))
    return replace(plan, planner=NAME, limits=tuple(limits), offloads=offloads)


def _instead_of_recomputing(profile: GraphProfile, plan: Plan, link: Link, never: frozenset[int]) -> Plan:
    """Return ``plan`` with what costs most to recompute for the time that its copy takes offloaded, as much of it as the
    link carries while the forward computes."""
    slots, gains = slots_of(profile, plan), list[tuple[float, float, int]]()
    for recipe in profile.recipes:
        seconds = link.seconds(sum(profile.storages[s].nbytes for s in sent(profile, plan, slots, recipe.index)))
        if seconds and recipe.index not in plan.fetched and never.isdisjoint(recipe.products):
            gains.append((recipe.seconds / seconds, seconds, recipe.index))
    left_seconds, offloads = profile.forward_seconds, list(plan.offloads)
    for _, seconds, dearest in sorted(gains, reverse=True):
        if seconds <= left_seconds:
            left_seconds -= seconds
            offloads.append(Offload(dearest))
    return replace(plan, planner=NAME, offloads=tuple(offloads))
