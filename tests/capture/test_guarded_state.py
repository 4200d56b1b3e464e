"""State of a model that is watched, and what calls are told of it."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from tests.capture.models import ROWS, WIDTH, Extras, network, recomputing, same_gradients

# -- errors and warnings -----------------------------------------------------------------------------------------------


class Adjustable(nn.Module):
    """A network whose forward follows what lies in its attributes."""

    def __init__(self) -> None:
        super().__init__()
        shared, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([shared, shared, other])
        self.before, self.after = nn.Linear(WIDTH, WIDTH), None
        self.flags = {"sine": True}
        self.config = SimpleNamespace(activation=torch.tanh, layer=nn.Linear, slope=1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.before is None else self.before(x).exp()
        for layer in self.layers:
            x = self.config.slope * self.config.activation(layer(x))
        x = x if self.after is None else self.after(x)
        return x.sin() if "sine" in self.flags else x.square()


def another_layer_of_its_own(model: Adjustable) -> None:
    model.layers[1] = model.layers[2]


def a_layer_elsewhere(model: Adjustable) -> None:
    model.before, model.after = None, model.before


def another_key(model: Adjustable) -> None:
    model.flags["cosine"] = model.flags.pop("sine")


def a_number_beside_functions(model: Adjustable) -> None:
    model.config.slope = 2.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [another_layer_of_its_own, a_layer_elsewhere, another_key, a_number_beside_functions]
)
def test_what_lies_elsewhere_in_a_model_is_planned_for_anew(change: Callable[[Adjustable], None]) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    optimized = recomputing(Adjustable(), x)
    assert same_gradients(optimized, x)
    change(optimized.original)
    assert same_gradients(optimized, x)
    assert len(optimized.fxmem.plans.specializations) == 2


class Scaled(nn.Module):
    """Scales by a helper object, which holds a number beside a tensor that is none of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.helper = SimpleNamespace(slope=1.0, table=torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.helper.slope).sin() * self.helper.table.sum()


@pytest.mark.slow
def test_numbers_and_tensors_of_a_helper_object_are_watched() -> None:
    x = torch.randn(ROWS, WIDTH)
    optimized = recomputing(Scaled(), x)
    helper = optimized.original.helper
    assert same_gradients(optimized, x)
    helper.slope = 3.0
    assert same_gradients(optimized, x)
    helper.table.mul_(2.0)
    assert same_gradients(optimized, x)
    helper.table = torch.full((2,), 5.0)
    assert same_gradients(optimized, x)
    assert len(optimized.fxmem.plans.specializations) == 4


@pytest.mark.slow
def test_a_new_function_is_never_taken_for_one_that_is_gone() -> None:
    model, x = Adjustable(), torch.randn(ROWS, WIDTH)
    optimized = fxmem.optimize(model, optimizer=None)
    for factor in range(5):  # each is freed by the next, whose address may be the same
        model.config = SimpleNamespace(activation=lambda y, by=factor: y.tanh() * by, slope=1.0)
        assert torch.equal(optimized(x), model(x))


@pytest.mark.slow
def test_replaced_parameters_are_let_go_of() -> None:
    optimized, x = recomputing(network()), torch.randn(ROWS, WIDTH)
    replaced = []
    for _ in range(3):
        assert same_gradients(optimized, x)
        replaced += [weakref.ref(p) for p in optimized.parameters()]
        optimized.load_state_dict({name: t.clone() for name, t in optimized.state_dict().items()}, assign=True)
    optimized(x)
    gc.collect()
    assert not [parameter for parameter in replaced if parameter() is not None]


@pytest.mark.slow
def test_numbers_that_change_from_call_to_call_are_warned_of() -> None:
    class Scaled(Extras):
        def forward(self, x: Tensor, factor: float) -> Tensor:  # type: ignore[override]
            return self.linear(x) * factor

    optimized = fxmem.optimize(Scaled(), optimizer=None, planner="chen")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(10):
            optimized(torch.ones(2, WIDTH), 0.1 * k)
    assert [str(w.message) for w in caught if "no tensors" in str(w.message)] == [
        "Scaled was called with 8 different values of arguments that are no tensors; each is captured and planned anew. "
        "Pass what changes from step to step as a tensor."
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (torch.zeros(1, WIDTH), "Expected more than 1 value per channel"),
        (torch.zeros(4, WIDTH + 1), "reduction dim"),
        (None, "must be Tensor, not NoneType"),
    ],
)
def test_what_the_model_itself_does_not_take_is_said_so(argument: Any, message: str, caplog: Any) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4))
    optimized = fxmem.optimize(model, optimizer=None)
    for rows in (4, 6):
        optimized(torch.randn(rows, WIDTH))
    caplog.clear()
    with pytest.raises(fxmem.InputError, match=f"does not take these arguments, without fxmem either.*{message}"):
        optimized(argument)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("kind", ["item", "data_ptr", "nonzero"])
def test_a_model_that_looks_at_values_is_not_said_to_refuse_its_arguments(kind: str) -> None:
    class Looking(Extras):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            if kind == "item" and self.linear.weight.std().item() > 0.45:
                raise ValueError("diverged")
            if kind == "data_ptr" and not x.data_ptr():
                raise ValueError("no memory")
            return self.linear(x)[(x > 0).nonzero()[:, 0]] if kind == "nonzero" else self.linear(x)

    with pytest.raises(fxmem.CaptureError):
        fxmem.optimize(Looking(), torch.randn(4, WIDTH), optimizer=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_the_floor_is_that_of_a_training_call_wherever_it_is_asked_for(context: Callable[[], Any]) -> None:
    x = torch.randn(ROWS, WIDTH)
    expected = fxmem.optimize(network(), x, optimizer=None, planner="chen").report.floor_bytes
    optimized = fxmem.optimize(network(), x, optimizer=None, planner="chen")
    with context():
        assert optimized.report.floor_bytes == expected


@pytest.mark.slow
def test_the_floor_of_a_call_in_an_autocast_region_is_that_of_a_budget_too_small() -> None:
    def call(budget: int) -> fxmem.OptimizedModule:
        optimized = fxmem.optimize(network(), budget=budget, optimizer=None, planner="chen")
        with torch.autocast("cpu", torch.bfloat16):
            optimized(torch.randn(ROWS, WIDTH))
        return optimized

    floor = call(1 << 30).report.floor_bytes
    assert call(floor).report.predicted_peak_bytes == floor
    with pytest.raises(fxmem.InfeasibleBudgetError) as caught:
        call(floor - 1)
    assert caught.value.least_bytes == floor
