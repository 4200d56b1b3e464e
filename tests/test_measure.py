"""Measured op times: plausible, kept on disk, and never in the way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxmem
from fxmem import measure
from fxmem.capture import Inputs, capture
from fxmem.measure import with_measured_times
from fxmem.profile import Profiled, profile
from fxmem.timing import PRESETS


def profiled_model() -> Profiled:
    model = nn.Sequential(nn.Embedding(10, 256), nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 256))
    inputs = Inputs.of((torch.randint(0, 10, (64,)),), {})
    return profile(capture(model.train(), inputs), inputs, PRESETS["cpu"].seconds)


def test_ops_of_equal_geometry_get_equal_times_and_recipes_are_sums_of_their_nodes() -> None:
    graph = with_measured_times(profiled_model(), cache=False).profile
    linears = [node.seconds for node in graph.nodes if "linear" in node.op]
    assert all(seconds > 0.0 for seconds in linears)
    for recipe in graph.recipes:
        assert recipe.seconds == sum(graph.nodes[k].seconds for k in recipe.nodes)
    assert graph.backward_seconds == pytest.approx(2 * graph.forward_seconds)


def test_measuring_leaves_the_random_state_alone() -> None:
    profiled = profiled_model()
    state = torch.get_rng_state()
    with_measured_times(profiled, cache=False)
    assert torch.equal(torch.get_rng_state(), state)


def test_known_times_are_not_measured_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FXMEM_CACHE", "1")
    monkeypatch.setenv("FXMEM_CACHE_DIR", str(tmp_path))
    profiled = profiled_model()
    first = with_measured_times(profiled)

    def never(*_: object) -> float:
        raise AssertionError("measured again")

    monkeypatch.setattr(measure, "_measure", never)
    assert with_measured_times(profiled).profile == first.profile
    for file in tmp_path.iterdir():
        file.write_bytes(b"no such thing")
    with pytest.raises(AssertionError, match="measured again"):
        with_measured_times(profiled)


def test_an_op_that_does_not_run_on_made_up_values_keeps_its_estimate(monkeypatch) -> None:
    def fails(*_: object) -> float:
        raise RuntimeError("no")

    monkeypatch.setattr(measure, "_median_seconds", fails)
    profiled = profiled_model()
    assert with_measured_times(profiled, cache=False).profile == profiled.profile


def test_optimize_measures_when_asked_to() -> None:
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)), torch.randn(64, 32)
    optimized = fxmem.optimize(model, x, cost="measure")
    optimized(x).sum().backward()
    with pytest.raises(fxmem.InputError, match="unknown cost 'measured'; known: a100, auto, "):
        fxmem.optimize(model, x, cost="measured")
