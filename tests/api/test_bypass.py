"""Training calls that no plan is for are told of once, with remedies that work; other methods can be planned."""

from __future__ import annotations

import copy
import re
import warnings
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import fxmem
from tests.api.models import WIDTH, assert_same, batch
from tests.exactness import same_bits

QUICK: dict[str, Any] = {"optimizer": None, "planner": "chen"}


class Auto(nn.Module):
    """An autoencoder, trained by its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Dropout(0.1))
        self.decoder, self.loss = nn.Linear(2 * WIDTH, WIDTH), nn.MSELoss()

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def decode(self, z: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.decoder(z).sigmoid() * scale

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def training_step(self, x: Tensor) -> Tensor:
        return self.loss(self.decode(self.encode(x)), x)


def auto() -> Auto:
    torch.manual_seed(0)
    return Auto()


def told_by(action: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(w.message) for w in caught if "outside of the plan" in str(w.message)]


def test_a_method_that_goes_around_the_plan_is_named_once_with_a_way_that_works() -> None:
    model = fxmem.optimize(auto(), **QUICK)
    (message,) = told_by(lambda: [model.training_step(batch()).backward() for _ in range(3)])
    assert message.startswith(
        "Auto.training_step called model.encoder in training mode, which runs outside of the plan"
    )
    methods = re.search(r"methods=(\(.*?\))", message)
    assert methods is not None
    again = fxmem.optimize(auto(), methods=eval(methods.group(1)), **QUICK)
    assert not told_by(lambda: again.training_step(batch()).backward())
    assert again.fxmem.methods["training_step"].is_planned
    line = re.search(r"(model\S* = fxmem\.optimize\(model\S*), \.\.\.\)", message)
    assert line is not None
    parts = auto()
    exec(f"{line.group(1)}, optimizer=None)", {"model": parts, "fxmem": fxmem})
    assert not told_by(lambda: parts.training_step(batch()))
    assert parts.encoder.fxmem.is_planned


def test_a_submodule_called_directly_is_named() -> None:
    model = fxmem.optimize(nn.Sequential(auto(), nn.Linear(WIDTH, WIDTH)), **QUICK)
    (message,) = told_by(lambda: [model[0](batch()) for _ in range(2)])
    assert message.startswith("model[0], a submodule of an optimized Sequential, was called in training mode")
    assert told_by(lambda: [part(batch()) for part in model]) == []
    other = fxmem.optimize_(auto(), **QUICK)
    (message,) = told_by(lambda: other.encoder[0](batch()))
    assert message.startswith("model.encoder[0], a submodule")


def test_calls_that_train_nothing_or_are_planned_are_not_told_of() -> None:
    model, x = fxmem.optimize(auto(), **QUICK), batch()

    def harmless() -> None:
        model(x).sum().backward()
        assert model.encoder is not None
        model(x).sum().backward()
        with torch.no_grad():
            model.encode(x)
        model.loss(x, x)
        model.decoder.weight.norm()
        auto()(x)
        model.eval().encode(x)

    assert told_by(harmless) == []


def test_looking_at_calls_ends_with_the_next_planned_call_and_is_in_no_graph() -> None:
    model, x = fxmem.optimize(auto(), **QUICK), batch()
    other = fxmem.optimize(auto(), **QUICK)
    assert model.encoder is not None
    assert torch_module._global_forward_pre_hooks
    other(x)
    assert not [node for node in other.fxmem.graph_module.graph.nodes if "opaque" in node.name]
    model(x)
    assert not torch_module._global_forward_pre_hooks
    assert model.encoder is not None
    del model
    nn.Linear(2, 2).requires_grad_()(torch.ones(2))
    assert not torch_module._global_forward_pre_hooks, "nobody is left to tell"


@pytest.mark.slow
@pytest.mark.parametrize("way", [fxmem.optimize, fxmem.optimize_])
def test_methods_are_planned_each_by_itself_and_train_to_the_same_bits(way: Any) -> None:
    eager = auto()
    model = way(copy.deepcopy(eager), methods=("forward", "encode", "decode"), **QUICK)
    for m in (eager, model):
        torch.manual_seed(1)
        z = m.encode(batch())
        (m.decode(z, scale=2.0) - batch()).square().mean().backward()
    assert_same(eager, model)
    assert [planned.is_planned for planned in model.fxmem.methods.values()] == [True, True]
    assert not model.fxmem.is_planned
    assert model.fxmem.methods["encode"].report.predicted_peak_bytes
    for m in (eager, model):
        torch.manual_seed(1)
        m(batch()).sum().backward()
    assert_same(eager, model)
    assert same_bits(eager.eval().encode(batch()).detach(), model.eval().encode(batch()).detach())
    twin = copy.deepcopy(model)
    assert list(twin.fxmem.methods) == ["encode", "decode"]


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.GELU()))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def with_loss(self: Any, x: Tensor) -> Tensor:
    return self.body(x).square().mean()


def around(self: Any, x: Tensor) -> Tensor:
    return type(self).forward(self, x) * 2


@pytest.mark.slow
def test_a_forward_that_is_set_later_and_trains_submodules_is_planned_from_its_second_call_on() -> None:
    torch.manual_seed(0)
    eager, x = Body(), torch.randn(64, WIDTH)
    model = copy.deepcopy(eager)
    eager.forward = MethodType(with_loss, eager)
    asked = fxmem.estimate(eager, x, cost="cpu", **QUICK)
    for budget in ((asked.floor_bytes + asked.peak_bytes) // 2, asked.floor_bytes - 1):
        optimized = fxmem.optimize_(copy.deepcopy(model), budget=budget, cost="cpu", **QUICK)
        optimized.forward = MethodType(with_loss, optimized)
        peaks = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                with fxmem.track(optimized, x) as memory:
                    loss = optimized(x)
                    loss.backward()
                peaks.append(memory.peak_bytes)
                del loss
                optimized.zero_grad()
        said = [str(w.message) for w in caught if "trains body around the plan" in str(w.message)]
        (message,) = said
        assert "Body.forward was replaced after the model was optimized: with_loss trains body" in message
        assert f"{asked.peak_bytes} bytes" in message
        assert f"above the budget of {budget} bytes" in message
        assert max(peaks[2:]) <= budget or f"Raise the budget to {asked.floor_bytes} bytes" in message
        eager.zero_grad()
        eager(x).backward()
        loss = optimized(x)
        loss.backward()
        assert_same(eager, optimized)


def test_a_forward_that_is_set_later_and_calls_the_planned_one_stays_around_the_plan() -> None:
    model = fxmem.optimize_(Body(), **QUICK)
    model.forward = MethodType(around, model)
    assert told_by(lambda: [model(batch()).sum().backward() for _ in range(2)]) == []
    assert not model.fxmem.set_forwards
    assert model.fxmem.is_planned


@pytest.mark.slow
def test_a_plan_of_the_first_method_counts_what_others_take_after_it() -> None:
    torch.manual_seed(0)
    eager = Auto()
    eager.encoder = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))
    eager.decoder = copy.deepcopy(eager.encoder)
    peaks, budget_bytes, planned = [], 0, eager
    for _ in range(2):
        for _ in range(3):
            x = torch.randn(256, WIDTH)
            with fxmem.track(planned, x) as memory:
                loss = (planned.decode(planned.encode(x)) - x).square().mean()
                loss.backward()
            planned.zero_grad()
            del loss
        peaks.append(memory.peak_bytes)
        if planned is eager:
            budget_bytes = int(0.7 * memory.peak_bytes)
            planned = fxmem.optimize(eager, methods=("encode", "decode"), budget=budget_bytes, cost="cpu", **QUICK)
    assert peaks[1] == planned.fxmem.methods["encode"].report.predicted_peak_bytes <= budget_bytes < peaks[0]
