"""Plans written into joint graphs: whatever is dropped, outputs and gradients are those of keeping all."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fxmem.api.arguments import settings_of
from fxmem.compiled import emit
from fxmem.compiled.fakerun import GraphCall, run_step
from fxmem.compiled.graph_planner import GraphPlanner
from fxmem.compiled.joint import is_tangent, outputs_of
from fxmem.compiled.levers import Levers
from fxmem.compiled.surroundings import Surroundings
from fxmem.ir import KEEP, GraphProfile, Plan
from tests.compiled.interpreted import results_of, values_for
from tests.compiled.random_functions import inputs, random_function
from tests.compiled.seat import in_the_seat
from tests.tiers import representatives

SETTINGS = settings_of({"cost": "cpu", "plan_seconds": 1.0, "optimizer": None, "cache": False})


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


def planner_of(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> tuple[GraphPlanner, list[str]]:
    """Return the planner of a function, and the nodes of its backward as partitioned while it is compiled."""
    found: list[tuple[GraphPlanner, list[str]]] = []

    def look(joint: fx.GraphModule, num_outputs: int, static: Any) -> None:
        planner = GraphPlanner.of(joint, num_outputs, static, Surroundings(), SETTINGS)
        found.append((planner, backward_of(planner)))

    in_the_seat(look, function, *(t.requires_grad_() for t in tensors))
    return found[0]


def backward_of(planner: GraphPlanner) -> list[str]:
    return [str(node) for node in planner.parts(planner.candidates.points[0].plan)[1].graph.nodes]


def test_parts_are_the_same_when_nothing_is_being_compiled() -> None:
    """As steps of several calls are planned: torch puts attention into the backward too where it knows of no fakes."""
    heads = [torch.randn(2, 2, 32, 16) for _ in range(3)]
    planner, expected = planner_of(lambda *qkv: F.scaled_dot_product_attention(*qkv).sum(), *heads)
    assert backward_of(planner) == expected


def test_a_chain_of_ops_without_memory_may_be_long() -> None:
    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(400):
            x = torch.sin(x * w)
        return x.sum()

    _, backward = planner_of(chain, torch.randn(4), torch.randn(4))
    assert len(backward) > 800


def test_code_runs_on_fakes_as_often_as_it_is_asked_to() -> None:
    """The backward is given tensors laid out as the forward saves them, which does not make the forward's inputs so.
    Kernels of a tight one are functions of their own, which are taken to read again what they share."""
    planner, _ = planner_of(
        lambda x, w: F.conv2d(F.conv2d(x, w, padding=1).tanh(), w[:, :1], padding=1, groups=8).relu().mean(),
        *(torch.randn(2, 8, 16, 16), torch.randn(8, 8, 3, 3)),
    )
    code = planner.lowered(planner.candidates.points[0].plan, Levers())
    first, again, tight = (
        run_step([each], [GraphCall()], planner.around, planner.hardware) for each in (code, code, code.tight())
    )
    assert again == first
    assert tight.seconds >= first.seconds
    assert replace(tight, seconds=first.seconds) == first


def test_on_the_cpu_a_boolean_is_saved_as_a_byte_of_the_same_value(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, _ = planner_of(lambda x, w: F.dropout(x @ w, 0.5) @ w, torch.randn(32, 32), torch.randn(32, 32))
    values = values_for([n for n in planner.kernels.joint.inputs if not is_tangent(n)])
    dtypes: list[set[Any]] = []
    results: list[Any] = []
    for is_slow in (emit._is_slow, lambda value: False):
        monkeypatch.setattr(emit, "_is_slow", is_slow)
        forward, backward = planner.parts(planner.candidates.points[0].plan)
        dtypes.append({n.meta["val"].dtype for n in outputs_of(forward)[1:] if isinstance(n, fx.Node)})
        results.append(results_of((forward, backward), 1, values))
    assert torch.uint8 in dtypes[0]
    assert torch.bool not in dtypes[0]
    assert torch.bool in dtypes[1]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_mask_that_is_drawn_again_for_two_kernels_is_a_byte_for_each_element() -> None:
    """Inductor keeps the random numbers instead, unless what reads the mask is told to be memory."""
    planner, _ = planner_of(lambda x, w: F.dropout(x @ w, 0.5) @ w, torch.randn(32, 32), torch.randn(32, 32))
    limits = [KEEP if s.recipe is None else len(planner.profile.recipes) for s in planner.profile.storages]
    code = planner.lowered(Plan("all again", tuple(limits)), Levers(tightness=1))
    run_step([code], [GraphCall()], planner.around, planner.hardware)
    assert code._backward_code is not None
    made = re.findall(r"empty_strided_cpu\(\(32, 32\), \(32, 1\), torch\.(\w+)\)", code._backward_code.source)
    assert made.count("uint8") == 1
    assert set(made) == {"uint8", "float32"}
