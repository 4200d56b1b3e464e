"""What an offloading plan makes of a profile: recipes that fetch their products from host memory instead of computing them.

In: a :class:`GraphProfile` and a :class:`Plan`. Out: a profile on which all that knows recipes and retain limits (the
judge, planners, what is emitted) works as on any other.

NOTE [Offloads as recipes]

1. What a plan offloads is a dropped storage whose recipe is a fetch: it reads nothing on the device, takes the time that
   the step waits for the link, and makes what is asked for of its products and no more. All rules above hold for it.
2. In the forward it is let go of like any dropped storage: the copy is over by then, or the step waits for it.
3. A fetch ahead of its use is one that the unpacking of another storage asks for. It fills slots as its use would.
4. Bytes in host memory weigh nothing.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from fxmem.ir import KEEP, GraphProfile, Plan


def with_offloads(profile: GraphProfile, plan: Plan) -> GraphProfile:
    """Return ``profile`` with recipes as ``plan`` has them: those whose products it fetches need nothing on the device,
    and a tick after whose unpacking a fetch is started ahead asks for its products, too (NOTE [Offloads as recipes])."""
    if not plan.offloads:
        return profile
    recipes, ahead = list(profile.recipes), dict[int, list[int]]()
    for offload in plan.offloads:
        recipe = recipes[offload.recipe]
        recipes[offload.recipe] = replace(
            recipe, inputs=(), seconds=offload.stall_seconds, peak_bytes=0, capture_peak_bytes=0
        )
        if offload.after is not None:
            ahead.setdefault(offload.after, []).extend(fetched_ahead(profile, plan, offload.recipe))
    ticks = list(profile.ticks)
    for number, tick in enumerate(ticks):
        if ahead and not ahead.keys().isdisjoint(tick.unpacks):
            asked = chain.from_iterable((s, *ahead.pop(s, ())) for s in tick.unpacks)
            ticks[number] = replace(tick, unpacks=tuple(asked))
    return replace(profile, recipes=tuple(recipes), ticks=tuple(ticks))


def fetched_ahead(profile: GraphProfile, plan: Plan, recipe: int) -> tuple[int, ...]:
    """Return the products of ``recipe`` that a fetch ahead of their use brings: those that are saved and dropped."""
    products = profile.recipes[recipe].products
    return tuple(s for s in products if profile.storages[s].num_saves and plan.limits[s] != KEEP)
