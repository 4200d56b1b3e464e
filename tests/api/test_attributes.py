"""Attributes of a model: a change of any kind is noticed; names, signatures and parts are the model's."""

import copy
import enum
import inspect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxmem
from tests.api.models import WIDTH, Net, build
from tests.exactness import same_bits
from tests.tiers import representatives


def test_a_number_replaced_by_an_equal_one_of_another_type_or_sign_is_noticed() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.factor, self.times, self.pair = nn.Linear(4, 4), 0.0, 2, (0.0, 1)

        def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.linear(x) * self.factor, index * self.times, x * self.pair[0], index * self.pair[1]

    model, x, index = Scaled(), torch.randn(3, 4), torch.arange(3)
    optimized = fxmem.optimize(model)
    optimized(x, index)
    model.factor, model.times, model.pair = -0.0, 2.0, (-0.0, 1.0)
    for ours, theirs in zip(optimized(x, index), model(x, index), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.signbit(), theirs.signbit())


@dataclass
class Config:
    factor: Any = 1.0


class Configured(nn.Module):
    """Multiplies by what its attributes say."""

    times = 1.0

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.linear, self.value, self.config, self.ratio = nn.Linear(4, 4), value, Config(), np.float64(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.times * self.config.factor * float(self.ratio) * factor_of(self.value)


def factor_of(value: Any) -> float:
    if callable(value):
        return value()
    for kind, factor in FACTORS.items():
        if isinstance(value, kind):
            return factor(value)
    return 2.0 if value in (torch.float64, Mode.DOUBLE) else 1.0


class Mode(enum.Enum):
    SINGLE, DOUBLE = 1, 2


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Called:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self) -> float:
        return self.factor


class Knot:
    """Knots of a net: each knows all the others."""

    def __init__(self) -> None:
        self.factor, self.others = 1.0, list[Knot]()


def net_of(count: int) -> Knot:
    knots = [Knot() for _ in range(count)]
    for knot in knots:
        knot.others = knots
    return knots[0]


FACTORS: dict[type, Callable[[Any], float]] = {
    SimpleNamespace: lambda value: value.a.factor,
    Slotted: lambda value: value.factor,
    Knot: lambda value: value.others[-1].factor,
    dict: lambda value: value["a"]["b"]["c"]["d"]["e"],
    deque: lambda value: value[0],
    set: len,
    range: len,
    np.ndarray: lambda value: float(value.sum()),
}


def setting(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model, name, value)


CHANGES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "config": (None, lambda model: setattr(model.config, "factor", 2.0)),
    "another_config": (None, setting("config", Config(2.0))),
    "numpy_scalar": (None, setting("ratio", np.float64(2.0))),
    "class_attribute": (None, lambda _: setattr(Configured, "times", 2.0)),
    "record_in_a_record": (SimpleNamespace(a=Config()), lambda model: setattr(model.value.a, "factor", 2.0)),
    "slots": (Slotted(1.0), lambda model: setattr(model.value, "factor", 2.0)),
    "callable": (Called(1.0), lambda model: setattr(model.value, "factor", 2.0)),
    "deep": ({"a": {"b": {"c": {"d": {"e": 1.0}}}}}, lambda model: model.value["a"]["b"]["c"]["d"].update(e=2.0)),
    "net": (net_of(40), lambda model: setattr(model.value.others[-1], "factor", 2.0)),
    "deque": (deque([1.0]), lambda model: model.value.__setitem__(0, 2.0)),
    "set": ({"a"}, lambda model: model.value.add("b")),
    "range": (range(1), setting("value", range(2))),
    "array": (np.ones(1), lambda model: model.value.__setitem__(0, 2.0)),
    "dtype": (torch.float32, setting("value", torch.float64)),
    "enum": (Mode.SINGLE, setting("value", Mode.DOUBLE)),
}


@pytest.mark.parametrize(
    "name", representatives(CHANGES, "class_attribute", "slots", "deep", "deque", "array", quick=["config", "enum"])
)
def test_a_changed_attribute_of_any_kind_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Configured, "times", 1.0)
    value, change = CHANGES[name]
    model, x = Configured(copy.deepcopy(value)), torch.randn(3, 4)
    optimized = fxmem.optimize(model, planner="chen")
    before = optimized(x)
    assert torch.equal(before, optimized(x))
    assert len(optimized.fxmem.plans.specializations) == 1
    change(model)
    assert torch.equal(optimized(x), 2 * before)
    assert torch.equal(model(x), 2 * before)


@pytest.mark.slow
def test_an_attribute_that_changes_in_every_step_is_warned_of() -> None:
    model, x = Configured(None), torch.randn(3, 4)
    optimized = fxmem.optimize(model, planner="chen")
    for factor in range(7):
        model.config.factor = factor
        optimized(x)
    model.config.factor = 7
    with pytest.warns(UserWarning, match=r"Configured was called with its attributes in 8 different states"):
        assert torch.equal(optimized(x), model(x))


def test_what_a_first_forward_leaves_in_a_config_asks_for_no_second_plan() -> None:
    class Settling(Configured):
        def forward(self, x: Tensor) -> Tensor:
            if self.config.factor is None:
                self.config.factor = 2.0
            return super().forward(x)

    model, x = Settling(None), torch.randn(3, 4)
    model.config.factor = None
    optimized = fxmem.optimize(model, x, planner="chen")
    planned = optimized.report
    assert torch.equal(optimized(x), model(x))
    assert optimized.report is planned
    model.config.factor = 3.0
    assert torch.equal(optimized(x), model(x))
    assert optimized.report is not planned


def test_an_optimized_sequential_has_its_parts_by_number() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimized = fxmem.optimize(model, torch.randn(2, WIDTH), optimizer=None)
    assert optimized[0] is model[0]
    assert list(optimized) == list(model)
    assert len(optimized) == len(optimized[:2]) + 1 == 3
    assert model[1] in optimized
    assert "append" in dir(optimized)
    optimized[1] = nn.ReLU()
    x = torch.randn(2, WIDTH)
    assert same_bits(optimized(x), model(x))
    assert fxmem.optimize(Net(), optimizer=None)  # which has no length
    with pytest.raises(TypeError, match="not subscriptable"):
        fxmem.optimize(Net(), optimizer=None)[0]


def test_forward_has_the_models_signature_and_may_be_wrapped() -> None:
    model = build()
    optimized = fxmem.optimize(model, optimizer=None)
    assert inspect.signature(optimized.forward) == inspect.signature(model.forward)
    assert optimized.forward == optimized.forward
    assert optimized.forward.__self__ is optimized
    plain, x = optimized.forward, torch.randn(4, WIDTH)
    optimized._original_forward = plain
    assert "_original_forward" in vars(optimized)
    optimized.forward = lambda *args, **kwargs: plain(*args, **kwargs).double()  # as accelerate does
    assert optimized(x).dtype == torch.float64
    assert optimized.plan
    optimized.eval()
    assert same_bits(optimized(x).float(), model(x))
    del optimized.forward
    assert same_bits(optimized(x), model(x))


def test_a_module_without_a_plan_may_be_probed_and_traced() -> None:
    optimized = fxmem.optimize(build(), optimizer=None)
    assert not hasattr(optimized, "report")
    with pytest.raises(fxmem.NotPlannedError, match="no plan yet"):
        _ = optimized.report
    x = torch.randn(4, WIDTH)
    traced = torch.jit.trace(optimized.eval(), x)
    assert same_bits(traced(x), optimized(x))
