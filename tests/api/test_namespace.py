"""What fxmem says of an optimized module is on one attribute of it; every other name is the model's own."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from tests.exactness import same_bits


class Planner(nn.Module):
    """A model with names that fxmem uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.plan = "of the week"
        self.original = "the model's own"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).tanh()

    def report(self) -> str:
        return "all is well"


def optimized(model: nn.Module | None = None) -> Any:
    return fxmem.optimize(Planner() if model is None else model, torch.randn(2, 4), optimizer=None)


def test_a_models_own_names_are_read_and_written_as_its_own() -> None:
    module = optimized()
    assert (module.plan, module.original, module.report()) == ("of the week", "the model's own", "all is well")
    module.plan = "of the month"
    assert module.plan == module.fxmem.original.plan == "of the month"
    assert isinstance(module.fxmem.plan, fxmem.Plan)
    assert isinstance(module.fxmem.report, fxmem.Report)
    assert isinstance(module.graph_module, torch.fx.GraphModule)  # of which the model has none
    assert module.graph_module is module.fxmem.graph_module


def test_old_names_stay_where_the_model_has_none() -> None:
    model = nn.Linear(4, 4)
    module = optimized(model)
    assert module.original is module.fxmem.original is model
    assert module.plan is module.fxmem.plan
    assert module.report is module.fxmem.report
    assert {"fxmem", "plan", "report", "original", "graph_module", "in_features"} <= set(dir(module))


def test_fxmem_is_the_one_name_that_a_model_may_not_have() -> None:
    model = nn.Linear(4, 4)
    model.fxmem = 3
    with pytest.raises(fxmem.InputError, match="Linear has an attribute 'fxmem'"):
        fxmem.optimize(model)
    with pytest.raises(AttributeError, match="cannot be set"):
        optimized().fxmem = 3


def test_a_plan_is_made_when_it_is_asked_for() -> None:
    module = fxmem.optimize(nn.Linear(4, 4), budget="1MB", optimizer="sgd")
    assert not module.fxmem.is_planned
    with pytest.raises(fxmem.NotPlannedError, match="no plan yet"):
        _ = module.fxmem.report
    report = module.fxmem.prepare(torch.randn(8, 4))
    assert report is module.fxmem.report
    assert report.budget_bytes == 1_000_000
    with pytest.raises(fxmem.InputError, match="eval mode"):
        module.eval().fxmem.prepare(torch.randn(8, 4))


def test_a_module_has_a_length_only_if_its_model_has() -> None:
    sequential = optimized(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    assert len(sequential) == 2
    assert [type(part) for part in sequential] == [nn.Linear, nn.Tanh]
    assert isinstance(sequential[1], nn.Tanh)
    linear = optimized(nn.Linear(4, 4))
    for method in ("__len__", "__iter__", "__getitem__", "__contains__"):
        assert hasattr(sequential, method) == hasattr(nn.Sequential, method)
        assert not hasattr(linear, method)
    with pytest.raises(TypeError, match="has no len"):
        len(linear)
    with pytest.raises(TypeError, match="not iterable"):
        iter(linear)


def test_copies_and_pickles_of_a_container_are_containers() -> None:
    module = optimized(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert len(twin) == 2
        assert twin.fxmem.original is not module.fxmem.original
        assert not twin.fxmem.is_planned


def test_a_pickle_of_version_0_1_loads_and_trains() -> None:
    module = pickle.loads((Path(__file__).parents[1] / "data" / "optimized_0.1.0.pkl").read_bytes())
    assert isinstance(module, fxmem.OptimizedModule)
    settings = module.fxmem.settings
    assert (settings.budget_bytes, settings.step.optimizer, settings.compress_saved) == (10**9, "sgd", True)
    assert settings.step.autocast is None
    eager, x = copy.deepcopy(module.fxmem.original), torch.randn(3, 4)
    for candidate in (module, eager):
        candidate(x).sum().backward()
    assert same_bits(module[0].weight.grad, eager[0].weight.grad)


@pytest.mark.slow
def test_what_is_returned_is_written_down_as_plain_data() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 4)), torch.randn(16, 4)
    estimate, frontier = fxmem.estimate(model, x), fxmem.frontier(model, x)
    module = fxmem.optimize(model, x, budget=estimate.floor_bytes)
    with fxmem.track(model, x) as measurement:
        module(x).sum().backward()
    for value in (estimate, frontier, module.report, module.plan, measurement, estimate.timeline, estimate.breakdown):
        assert json.loads(json.dumps(value.to_dict())) == value.to_dict()
    assert estimate.to_dict()["peak_at"]["phase"] == estimate.peak_at.phase.value
    assert sum(estimate.breakdown.to_dict().values()) == estimate.peak_bytes
    assert module.report.to_dict()["floor_bytes"] == module.report.floor_bytes
    assert frontier.to_dict()["points"][0]["budget_bytes"] == frontier[0].budget_bytes
    assert measurement.to_dict()["peak_bytes"] == measurement.peak_bytes


def test_a_report_that_was_pickled_says_that_it_cannot_plan() -> None:
    report = optimized().fxmem.report
    assert report.to_dict()["floor_bytes"] is None  # nothing was dropped, so nothing was planned
    again = pickle.loads(pickle.dumps(report))
    assert again == report
    with pytest.raises(fxmem.NotPlannedError, match="floor"):
        _ = again.floor_bytes
    assert report.floor_bytes
