"""Plans written into joint graphs: whatever is dropped, outputs and gradients are those of keeping all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

from fxmem.api.arguments import settings_of
from fxmem.compiled.graph_planner import GraphPlanner
from fxmem.compiled.joint import is_tangent
from fxmem.compiled.surroundings import Surroundings
from fxmem.ir import KEEP, GraphProfile, Plan
from tests.compiled.interpreted import results_of, values_for
from tests.compiled.random_functions import inputs, random_function
from tests.compiled.seat import in_the_seat
from tests.tiers import representatives

SETTINGS = settings_of({"cost": "cpu", "plan_seconds": 1.0, "optimizer": None, "cache": False})


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def random_plan(profile: GraphProfile, draw: random.Random) -> Plan:
    limits = []
    for storage in profile.storages:
        may_go = storage.recipe is not None and draw.random() < 0.7
        limits.append(draw.randint(storage.recipe or 0, len(profile.recipes)) if may_go else KEEP)
    return Plan("random", tuple(limits))


@pytest.mark.slow
@pytest.mark.parametrize("seed", representatives(range(100), 0, 1, 2, quick=(3,)))
def test_outputs_and_gradients_are_those_of_keeping_all(seed: int) -> None:
    found: list[tuple[GraphPlanner, int]] = []

    def look(joint: fx.GraphModule, num_outputs: int, static: Any) -> None:
        found.append((GraphPlanner.of(joint, num_outputs, static, Surroundings(), SETTINGS), num_outputs))

    in_the_seat(look, random_function(seed), *inputs())
    planner, num_outputs = found[0]
    values = values_for([n for n in planner.kernels.joint.inputs if not is_tangent(n)])
    points, draw = planner.candidates.points, random.Random(seed)
    plans = [*(random_plan(planner.profile, draw) for _ in range(4)), draw.choice(points).plan, points[-1].plan]
    expected = results_of(planner.parts(points[0].plan), num_outputs, values)
    for plan in plans:
        again = results_of(planner.parts(plan), num_outputs, values)
        assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True)), plan
