"""Where arguments, parameters and attributes lie and what they are: another signature is another plan."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
from torch import Tensor, nn

import fxmem
from fxmem.capture.pytrees import flattened, flattened_call
from tests.capture.models import ROWS, WIDTH, Extras, Remembering, gradients, network, recomputing, same_gradients


def test_slices_of_one_tensor_share_a_plan() -> None:
    data = torch.randn(4 * ROWS, WIDTH)
    optimized = recomputing(network(), data[:ROWS])
    assert optimized.plan.dropped
    for start in (ROWS, 7, 0):
        assert same_gradients(optimized, data[start : start + ROWS])
    assert same_gradients(optimized, torch.randn(ROWS, WIDTH))
    assert len(optimized.fxmem.plans.specializations) == 1


class Windows(nn.Module):
    """Looks at overlapping windows of its input; ``asks``: by where that begins on its storage."""

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.inner, self.asks = network(), asks

    def forward(self, x: Tensor) -> Tensor:
        place = (x.storage_offset(),) if self.asks else ()
        return self.inner(x.as_strided((ROWS - 1, 2, WIDTH), (WIDTH, WIDTH, 1), *place)).exp()


@pytest.mark.slow
@pytest.mark.parametrize(("asks", "num_plans"), [(False, 1), (True, 3)])
def test_a_model_that_asks_where_its_input_lies_is_planned_for_each_place(asks: bool, num_plans: int) -> None:
    data = torch.randn(4 * ROWS, WIDTH)
    optimized = recomputing(Windows(asks=asks), data[:ROWS])
    for start in (0, ROWS, 7, 0):
        assert same_gradients(optimized, data[start : start + ROWS])
    assert sum(optimized.fxmem.plans.specializations) == num_plans


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.inner(query, key, value, need_weights=False)[0].exp()


@pytest.mark.slow
def test_arguments_that_are_the_same_tensor_are_another_signature() -> None:
    x, y = torch.randn(3, 4, WIDTH), torch.randn(3, 4, WIDTH)
    optimized = fxmem.optimize(Attention(), (x, x, x), optimizer=None)
    for args in ((x, y, y), (x, x, x), (x, y, x)):
        assert same_gradients(optimized, *args)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return (self.linear(x).exp() @ weight.t()).sin()


def test_an_argument_that_is_a_parameter_is_another_signature() -> None:
    model, x = Tied(), torch.randn(4, WIDTH)
    optimized = fxmem.optimize(model, optimizer=None)
    assert torch.equal(optimized(x, model.linear.weight), model(x, model.linear.weight))
    other = torch.randn(WIDTH, WIDTH)
    assert torch.equal(optimized(x, other), model(x, other))
    assert torch.equal(optimized(x, model.linear.weight[:4]), model(x, model.linear.weight[:4]))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["detach", "data", "one"])
def test_arguments_and_buffers_on_one_memory_are_another_signature(how: str) -> None:
    eager, model, x = Remembering(), Remembering(), torch.randn(4, WIDTH)
    optimized = recomputing(model)
    for module in (eager, optimized):
        module(x).sum().backward()
    if how == "one":
        for one in (eager, model):
            one.scale.data = one.state.data
    arguments = [x if how == "one" else getattr(one.state, how) for one in (eager, model)]
    one, other = (argument() if how == "detach" else argument for argument in arguments)
    expected = list(gradients(lambda: eager(one), eager))
    assert all(map(torch.equal, expected, gradients(lambda: optimized(other), optimized)))
    assert torch.equal(eager.state, model.state)


def transpose(model: nn.Module) -> None:
    for p in model.parameters():
        if p.dim() == 2:
            p.data = p.data.t().contiguous().t()


def flatten(model: nn.Module) -> None:
    flat, start = torch.cat([p.data.reshape(-1) for p in model.parameters()]), 0
    for p in model.parameters():
        p.data = flat[start : start + p.numel()].view_as(p)
        start += p.numel()


@pytest.mark.parametrize("change", [transpose, flatten], ids=lambda change: change.__name__)
def test_parameters_that_lie_otherwise_are_planned_for_anew(change: Callable[[nn.Module], None]) -> None:
    model, x = network(), torch.randn(ROWS, WIDTH)
    optimized = recomputing(model, x)
    change(model)
    eager = network()
    change(eager)
    expected = list(gradients(lambda: eager(x), eager))
    assert all(map(torch.equal, expected, gradients(lambda: optimized(x), optimized)))


def test_channels_last_may_be_asked_for_after_the_first_step() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh()), torch.randn(2, 3, 10, 10)
    optimized = recomputing(model)
    assert same_gradients(optimized, x)
    optimized.to(memory_format=torch.channels_last)
    assert same_gradients(optimized, x)


def test_conjugate_arguments_are_another_signature() -> None:
    x = torch.randn(ROWS, WIDTH, dtype=torch.complex64)
    optimized = recomputing(network(dtype=torch.complex64), x, loss_fn=lambda y: y.abs().sum())
    assert same_gradients(optimized, x.conj())
    assert same_gradients(optimized, x)


def test_extra_keyword_arguments_come_in_the_order_given() -> None:
    model = Extras()
    optimized = fxmem.optimize(model, optimizer=None)
    x, a, b = (torch.randn(4, WIDTH) for _ in range(3))
    for kwargs in ({"q": a, "p": b}, {"p": b, "q": a}, {"z": a, "scale": b, "c": b}):
        assert torch.equal(optimized(x, **kwargs), model(x, **kwargs))
    count = len(optimized.fxmem.plans.specializations)
    optimized(x=x, z=a, c=b, scale=b)
    optimized(x=x, scale=b, z=a, c=b)
    assert len(optimized.fxmem.plans.specializations) == count + 1  # the order of named arguments is no matter


def test_an_op_that_writes_without_raising_a_version_is_not_run_again() -> None:
    def observed() -> nn.Sequential:
        torch.manual_seed(0)
        parts = [
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), quantization.FusedMovingAvgObsFakeQuantize()) for _ in "ab"
        ]
        return nn.Sequential(quantization.FusedMovingAvgObsFakeQuantize(), *parts)

    eager, model, x = observed(), observed(), torch.randn(64, 16)
    optimized = recomputing(model, x)
    assert optimized.plan.dropped
    for step in (1, 2, 3):
        expected = list(gradients(lambda step=step: eager(step * x), eager))
        assert all(map(torch.equal, expected, gradients(lambda step=step: optimized(step * x), optimized)))
    for one, other in zip(eager.buffers(), model.buffers(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.ones(2), 3), {}),
        ((), {"mask": None, "ids": torch.ones(1)}),
        ((torch.ones(1), "name"), {"scale": 0.5}),
        (([torch.ones(1)],), {"more": {"a": torch.ones(1)}}),
        ((), {}),
    ],
)
def test_arguments_that_are_leaves_are_flattened_as_others_are(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    (leaves, spec), (expected, expected_spec) = flattened_call(args, kwargs), flattened((args, kwargs))
    assert spec == expected_spec
    assert len(leaves) == len(expected)
    assert all(map(is_, leaves, expected))
