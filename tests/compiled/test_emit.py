"""Plans written into joint graphs: whatever is dropped, outputs and gradients are those of keeping all.

Forward and backward are interpreted op by op, without Inductor's kernels. Random numbers come from a stand-in that is a
function of the seed, as Inductor's own are, so that a mask that is computed again is the same mask.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

from fxmem.api.arguments import settings_of
from fxmem.compiled import emit
from fxmem.compiled.graph_planner import GraphPlanner
from fxmem.compiled.surroundings import Surroundings
from fxmem.ir import KEEP, GraphProfile, Plan
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


class Interpreter(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "inductor_random" in str(target):
            size, seed, mode = args[:3]
            generator = torch.Generator().manual_seed(int(seed))
            return getattr(torch, mode)(size, generator=generator)
        return super().call_function(target, args, kwargs)


def results_of(parts: emit.Partitioned, num_outputs: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return outputs and gradients."""
    forward, backward = parts
    torch.manual_seed(3)
    results = Interpreter(forward).run(*inputs)
    outputs, saved = results[:num_outputs], results[num_outputs:]
    gradients = Interpreter(backward).run(*saved, torch.ones_like(outputs[0]))
    return [r for r in (*outputs, *gradients) if isinstance(r, torch.Tensor)]


@pytest.mark.parametrize("seed", representatives(range(100), 0, 1, 2, quick=(3,)))
def test_outputs_and_gradients_are_those_of_keeping_all(seed: int) -> None:
    found: list[tuple[GraphPlanner, int]] = []

    def look(joint: fx.GraphModule, num_outputs: int, static: Any) -> None:
        found.append((GraphPlanner.of(joint, num_outputs, static, Surroundings(), SETTINGS), num_outputs))

    in_the_seat(look, random_function(seed), *inputs())
    planner, num_outputs = found[0]
    names = [n.name for n in planner.kernels.joint.inputs if "tangents" not in n.name]
    assert names == [f"primals_{i + 1}" for i in range(len(names))]
    read = [n.meta["val"] for n in planner.kernels.joint.inputs]
    values = [
        torch.randn(t.shape, generator=torch.Generator().manual_seed(i)) for i, t in enumerate(read[: len(names)])
    ]
    points, draw = planner.candidates.points, random.Random(seed)
    plans = [*(random_plan(planner.profile, draw) for _ in range(4)), draw.choice(points).plan, points[-1].plan]
    expected = results_of(planner.parts(points[0].plan), num_outputs, values)
    for plan in plans:
        again = results_of(planner.parts(plan), num_outputs, values)
        assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True)), plan
