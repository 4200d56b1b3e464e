"""What an offloading plan makes of a profile: recipes that fetch their products from host memory instead of computing them.

In: a :class:`GraphProfile` and a :class:`Plan`. Out: a profile on which all that knows recipes and retain limits (the
judge, planners, what is emitted) works as on any other.

NOTE [Offloads as recipes]

1. What a plan offloads is a dropped storage whose recipe is a fetch: it reads nothing on the device, takes the time that
   the step waits for the link, shared by all fetches of it, and makes what is asked for of its products and no more. All
   rules above hold for it.
2. In the forward it is let go of like any dropped storage, or after a later node that the plan names: the copy is over by
   then, or the step waits for it.
3. A fetch ahead of its use is one that the unpacking of another storage asks for. It fills slots as its use would.
4. Bytes in host memory weigh nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from fxmem.ir import KEEP, GraphProfile, Phase, Plan, Tick


def with_offloads(profile: GraphProfile, plan: Plan) -> GraphProfile:
    """Return ``profile`` with recipes as ``plan`` has them: those whose products it fetches need nothing on the device,
    and a tick after whose unpacking a fetch is started ahead asks for its products, too (NOTE [Offloads as recipes])."""
    if not plan.offloads:
        return profile
    slots = slots_of(profile, plan)
    recipes, ahead, left = list(profile.recipes), dict[int, list[int]](), dict[int, int]()
    for offload in plan.offloads:
        recipe = recipes[offload.recipe]
        seconds = offload.stall_seconds / offload.num_fetches
        recipes[offload.recipe] = replace(recipe, inputs=(), seconds=seconds, peak_bytes=0, capture_peak_bytes=0)
        if offload.left is not None:
            left |= dict.fromkeys(sent(profile, plan, slots, offload.recipe), offload.left)
        if offload.after is not None:
            ahead.setdefault(offload.after, []).extend(fetched_ahead(profile, plan, offload.recipe))
    ticks = _let_go_later(profile.ticks, left) if left else list(profile.ticks)
    for number, tick in enumerate(ticks):
        if ahead and not ahead.keys().isdisjoint(tick.unpacks):
            asked = chain.from_iterable((s, *ahead.pop(s, ())) for s in tick.unpacks)
            ticks[number] = replace(tick, unpacks=tuple(asked))
    return replace(profile, recipes=tuple(recipes), ticks=tuple(ticks))


def slots_of(profile: GraphProfile, plan: Plan) -> frozenset[int]:
    """Return the dropped storages that have a slot: saved ones, and those that a recipe which runs again for one reads."""
    stack = [s.index for s in profile.storages if plan.limits[s.index] != KEEP and s.num_saves]
    found, fetched = set(stack), plan.fetched
    while stack:
        recipe = profile.storages[stack.pop()].recipe
        if recipe is None or recipe in fetched:
            continue
        for s in profile.recipes[recipe].inputs:
            if plan.limits[s] != KEEP and s not in found:
                found.add(s)
                stack.append(s)
    return frozenset(found)


def sent(profile: GraphProfile, plan: Plan, slots: frozenset[int], recipe: int) -> tuple[int, ...]:
    """Return the products of ``recipe``, which ``plan`` offloads, that are copied. ``slots``: :func:`slots_of` the plan."""
    return tuple(s for s in profile.recipes[recipe].products if s in slots and profile.storages[s].recipe == recipe)


def _let_go_later(ticks: Sequence[Tick], left: dict[int, int]) -> list[Tick]:
    """Return the ticks with storages that the forward lets go of after another node than it uses them last."""
    let_go: dict[int, list[int]] = {}
    for s, node in left.items():
        let_go.setdefault(node, []).append(s)
    return [
        tick
        if tick.phase is not Phase.FORWARD
        else replace(
            tick,
            last_used=(
                *(s for s in tick.last_used if s not in left),
                *let_go.get(-1 if tick.node is None else tick.node, ()),
            ),
        )
        for tick in ticks
    ]


def fetched_ahead(profile: GraphProfile, plan: Plan, recipe: int) -> tuple[int, ...]:
    """Return the products of ``recipe`` that a fetch ahead of their use brings: those that are saved and dropped."""
    products = profile.recipes[recipe].products
    return tuple(s for s in products if profile.storages[s].num_saves and plan.limits[s] != KEEP)
