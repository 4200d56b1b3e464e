"""Prices where the host launches and the device works behind it (NOTE [Launches] in fxmem/profiling/roofline.py)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxmem
from fxmem.api.arguments import settings_of
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.ir import GraphProfile
from fxmem.passes.context import CompileContext
from fxmem.planners.registry import PLANNERS
from fxmem.profiling.op_benchmark import with_times_like
from fxmem.profiling.roofline import PRESETS, VIEW_SHARE, priced_by_bound
from tests.synthetic import Op, build

US = 1e-6


def graph_of(ops: list[Op], moving: bool = True) -> GraphProfile:
    graph = build(ops)
    nodes = tuple(dataclasses.replace(node, moved_bytes=int(moving)) for node in graph.nodes)
    return dataclasses.replace(graph, nodes=nodes)


def context_of(model: nn.Module, x: torch.Tensor) -> CompileContext:
    settings = settings_of({"optimizer": None, "cost": "h100"})
    return CompileContext(model, Inputs.of((x,), {}), settings)


def seconds_of(graph: GraphProfile) -> list[float]:
    return [node.seconds for node in graph.nodes]


def test_a_step_that_the_device_bounds_is_priced_by_the_device() -> None:
    graph = graph_of([Op(seconds=1.0), Op((0,), seconds=3.0)])
    priced = priced_by_bound(graph, 10 * US)
    assert seconds_of(priced) == pytest.approx([1.0, 3.0])
    assert priced.step_seconds == pytest.approx(12.0)
    assert priced.launches is not None
    assert not priced.launches.bound_by_host
    assert priced.launches.host_seconds == pytest.approx(60 * US)


def test_a_step_that_the_host_bounds_is_priced_by_launches() -> None:
    graph = graph_of([Op(seconds=US), Op((0,), seconds=3 * US)])
    priced = priced_by_bound(graph, 10 * US)
    assert seconds_of(priced) == pytest.approx([10 * US, 10 * US])
    assert priced.step_seconds == pytest.approx(60 * US)
    assert priced.recipes[0].seconds == pytest.approx(10 * US)
    assert priced.launches is not None
    assert priced.launches.bound_by_host
    assert seconds_of(priced_by_bound(graph_of([Op(seconds=US)], moving=False), 10 * US)) == [10 * US * VIEW_SHARE]


def test_at_another_size_launches_take_as_long_and_computing_its_own_time() -> None:
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(64, 64), nn.GELU())))
    context = [context_of(model, torch.ones(rows, 64)) for rows in (32, 64)]
    captured = [capture(each.model, each.inputs) for each in context]
    own, other = (each.profile_of(graph) for each, graph in zip(context, captured, strict=True))
    counterparts = {node.index: node.index for node in own.profile.nodes}
    for launch_seconds in (1.0, 1e-9):
        like = priced_by_bound(own.profile, launch_seconds)
        timed = with_times_like(other, like, counterparts, PRESETS["h100"].seconds).profile
        assert timed.launches == like.launches
        expected = like if launch_seconds == 1.0 else other.profile
        assert seconds_of(timed) == pytest.approx(seconds_of(expected))
        assert timed.backward_seconds == pytest.approx(expected.backward_seconds)


def test_where_the_host_computes_nothing_changes() -> None:
    graph = graph_of([Op(seconds=US)])
    assert PRESETS["cpu"].launch_seconds == 0.0
    assert priced_by_bound(graph, 0.0) is graph


@given(st.lists(st.tuples(st.floats(0.01, 100.0), st.booleans()), min_size=1, max_size=12), st.floats(0.1, 50.0))
def test_what_is_run_again_never_adds_more_than_its_prices(ops: list[tuple[float, bool]], launch: float) -> None:
    graph = graph_of([Op((i - 1,) if i else (), seconds=seconds) for i, (seconds, _) in enumerate(ops)])
    priced = priced_by_bound(graph, launch)
    again = [i for i, (_, runs_again) in enumerate(ops) if runs_again]
    launches = priced.launches
    assert launches is not None
    host = launches.host_seconds + launch * len(again)
    device = launches.device_seconds + sum(graph.nodes[i].seconds for i in again)
    added = max(host, device) - max(launches.host_seconds, launches.device_seconds)
    assert added <= sum(priced.nodes[i].seconds for i in again) * (1 + 1e-9)


def test_a_step_that_launches_bound_runs_fewer_ops_again() -> None:
    """One of two values must go: five cheap ops make the one, a dear op the other."""
    first = Op((), 1, US)
    chain = [Op((i,), 8, US, saves_inputs=False) for i in range(4)]
    cheap, dear = Op((4,), 8, US, saves_inputs=False), Op((0,), 8, 20 * US, saves_inputs=False)
    graph = graph_of([first, *chain, cheap, dear, Op((5, 6), 1, US), Op((7,), 1, US, workspace_bytes=99)])

    def dropped_first(priced: GraphProfile) -> int:
        """The larger value that the cheapest plan that saves its bytes drops."""
        points = PLANNERS["auto"](priced, seconds=5.0)
        point = next(p for p in points if p.peak_bytes <= points[0].peak_bytes - 7)
        (dropped,) = {5, 6} & set(point.plan.dropped)
        return dropped

    assert dropped_first(graph) == 5
    assert dropped_first(priced_by_bound(graph, 100 * US)) == 6


@pytest.mark.slow
@pytest.mark.parametrize(("width", "batch", "bound"), [(64, 32, "host"), (2048, 16384, "device")])
def test_a_report_says_which_of_the_two_bounds_the_step(width: int, batch: int, bound: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))))
        x = torch.empty(batch, width)
    estimate = fxmem.estimate(model, x, device="cuda:h100", optimizer=None)
    report = estimate.report((estimate.floor_bytes + estimate.peak_bytes) // 2)
    assert report.launches is not None
    assert report.launches.bound_by_host == (bound == "host")
    assert f"the {bound} bounds the step: " in str(report)
    assert report.to_dict()["launches"]["device_seconds"] == report.launches.device_seconds
