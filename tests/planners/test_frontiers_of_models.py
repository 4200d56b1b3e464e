"""Frontiers of real models' profiles: monotone, sound, near the bound, and not thrown off by wrong op times."""

from __future__ import annotations

import dataclasses
import functools
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.ir import FrontierPoint, GraphProfile
from fxmem.planners.bound import with_bounds
from fxmem.planners.pareto import cheapest_within
from fxmem.planners.plan_check import check_plan
from fxmem.planners.registry import PLANNERS
from fxmem.planners.simulate import simulate
from fxmem.profiling.profile import profile
from fxmem.profiling.roofline import PRESETS
from tests.synthetic import random_dag
from tests.tiers import representatives


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 8), (8, 8), (8, 16), (16, 16)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 64, 4))


MODELS = {
    "transformer": (lambda: nn.Sequential(*(Block(16) for _ in range(3))), (8, 32, 16)),
    "convolutions": (convolutions, (8, 3, 16, 16)),
    "mlp": (lambda: nn.Sequential(*(m for _ in range(20) for m in (nn.Linear(16, 16), nn.Tanh()))), (128, 16)),
}


@functools.cache
def graph_of(name: str) -> GraphProfile:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    inputs = Inputs.of((torch.randn(*shape),), {})
    return profile(capture(build().train(), inputs), inputs, PRESETS["a100"].seconds).profile


def check_frontier(graph: GraphProfile, points: tuple[FrontierPoint, ...]) -> None:
    assert points[0].recompute_seconds == 0.0
    for left, right in pairwise(points):
        assert left.peak_bytes > right.peak_bytes
        assert left.recompute_seconds < right.recompute_seconds
    for point in points:
        check_plan(graph, point.plan)
        timeline = simulate(graph, point.plan)
        assert (timeline.peak_bytes, timeline.recompute_seconds) == (point.peak_bytes, point.recompute_seconds)
    for point in with_bounds(graph, points):
        assert 0.0 <= point.bound_seconds <= point.recompute_seconds


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_frontiers_of_models_are_sound_and_monotone(name: str) -> None:
    check_frontier(graph_of(name), PLANNERS["auto"](graph_of(name), seconds=120.0))


@pytest.mark.slow
@given(st.integers(0, 10_000), st.integers(2, 30), st.integers(1, 8))
def test_fuzz_frontiers_of_random_graphs_are_sound_and_monotone(seed: int, num_ops: int, reach: int) -> None:
    graph = random_dag(seed, num_ops, reach=reach)
    check_frontier(graph, PLANNERS["intervals"](graph, seconds=60.0))


@pytest.mark.slow
@pytest.mark.usefixtures("whole_search")
@pytest.mark.parametrize("name", representatives(MODELS, "convolutions"))
def test_op_times_off_by_a_third_cost_at_most_a_point_of_the_step(name: str) -> None:
    graph, rng = graph_of(name), random.Random(0)
    factors = [rng.uniform(2 / 3, 4 / 3) for _ in graph.nodes]
    nodes = tuple(dataclasses.replace(n, seconds=n.seconds * f) for n, f in zip(graph.nodes, factors, strict=True))
    recipes = tuple(dataclasses.replace(r, seconds=sum(nodes[k].seconds for k in r.nodes)) for r in graph.recipes)
    noisy = PLANNERS["auto"](dataclasses.replace(graph, nodes=nodes, recipes=recipes), seconds=120.0)
    points = PLANNERS["auto"](graph, seconds=120.0)
    low, high = max(points[-1].peak_bytes, noisy[-1].peak_bytes), points[0].peak_bytes
    for share in (0.25, 0.5, 0.75):
        budget_bytes = round(low + share * (high - low))
        best, misled = cheapest_within(points, budget_bytes), cheapest_within(noisy, budget_bytes)
        assert best is not None
        assert misled is not None
        truth = simulate(graph, misled.plan)
        assert truth.peak_bytes == misled.peak_bytes <= budget_bytes
        assert truth.recompute_seconds - best.recompute_seconds <= 0.01 * graph.step_seconds
