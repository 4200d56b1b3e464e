"""Whether a plan may be emitted at all: every dropped value can be made again, from what is there.

In: a profile and a plan. Out: nothing, or ``ValueError``. Planners only make such plans; this says so independently of
them, from the nodes up.
"""

from __future__ import annotations

from fxmem.ir import KEEP, GraphProfile, Plan, Recipe
from fxmem.planners.simulate import check_limits


def check_plan(profile: GraphProfile, plan: Plan) -> None:
    """Raise ``ValueError`` unless all of this holds.

    1. The limits fit the storages; nothing is dropped that has no recipe (outputs, for one).
    2. The recipe of a dropped storage makes it, and none of its nodes is one that may never run again.
    3. Its inputs are there when it reruns: kept, or dropped and made by recipes of lower position.
    4. It writes nothing but what it makes.

    Of what is fetched from host memory only the first and that the recipe makes it: nothing runs again for it.
    """
    check_limits(profile, plan)
    for s in plan.dropped:
        position = profile.storages[s].recipe
        assert position is not None  # check_limits
        recipe = profile.recipes[position]
        if s not in recipe.products:
            raise ValueError(f"recipe {position} does not make {profile.storages[s].name}, which the plan drops")
        if position not in plan.fetched:
            _check_recipe(profile, plan, recipe)


def _check_recipe(profile: GraphProfile, plan: Plan, recipe: Recipe) -> None:
    made = {s for k in recipe.nodes for s in profile.nodes[k].creates}
    for k in recipe.nodes:
        node = profile.nodes[k]
        if node.why_not:
            raise ValueError(f"the plan reruns {node.name}, which may never run again: {node.why_not}")
        foreign = [profile.storages[s].name for s in node.writes if s not in made]
        if foreign:
            raise ValueError(f"the plan reruns {node.name}, which would write {', '.join(foreign)} again")
        for s in node.reads:
            if s not in made and s not in recipe.inputs:
                raise ValueError(
                    f"the rerun of {node.name} needs {profile.storages[s].name}, which nobody holds for it"
                )
    for s in recipe.inputs:
        maker = profile.storages[s].recipe
        if plan.limits[s] != KEEP and (maker is None or maker >= recipe.index):
            raise ValueError(
                f"{profile.storages[s].name} is dropped and made by recipe {maker}, after recipe {recipe.index} reads it"
            )
