"""Numbers that come anew with each call: those that a forward makes no use of cost no planning."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem

Forward = Callable[[Any, Tensor, Any, Tensor], Any]


class Numbered(nn.Module):
    """Calls a function with its hidden state and a number."""

    def __init__(self, use: Forward) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(8, 8), use

    def forward(self, x: Tensor, number: Any, flags: Tensor) -> Any:
        return self.use(self, self.layer(x).tanh(), number, flags)


def passes_by(self: Any, hidden: Tensor, number: Any, flags: Tensor) -> Any:
    return hidden if number is not None else hidden.sin()


def multiplies(self: Any, hidden: Tensor, number: Any, flags: Tensor) -> Any:
    return hidden * number


def writes(self: Any, hidden: Tensor, number: Any, flags: Tensor) -> Any:
    assert f"step {number}"
    return hidden


def branches(self: Any, hidden: Tensor, number: Any, flags: Tensor) -> Any:
    return hidden * 2 if number % 2 else hidden


def returns(self: Any, hidden: Tensor, number: Any, flags: Tensor) -> Any:
    return hidden, number


def catches(self: Any, hidden: Tensor, number: Any, flags: Tensor) -> Any:
    try:
        return hidden * number
    except Exception:
        return hidden


def follows_values(self: Any, hidden: Tensor, number: Any, flags: Tensor) -> Any:
    return hidden * number if flags.max() > 0 else hidden


def trained(use: Forward) -> int:
    """Train for some steps with a number each; return how many graphs that took."""
    torch.manual_seed(0)
    eager = Numbered(use)
    model = fxmem.optimize(Numbered(use), cost="cpu")
    model.load_state_dict(eager.state_dict())
    x = torch.randn(4, 8)
    for number in range(4):
        flags = torch.tensor([number % 2, 0])
        expected, found = (m(x, number, flags) for m in (eager, model))
        if use is returns:
            assert found[1] == number
            expected, found = expected[0], found[0]
        assert torch.equal(expected, found)
        found.sum().backward()
    return len(model.fxmem.plans.asked._compiled)


def test_a_number_that_is_not_used_costs_no_planning() -> None:
    assert trained(passes_by) == 1


@pytest.mark.parametrize("use", [multiplies, writes, branches, returns, catches, follows_values])
def test_a_number_that_is_used_is_a_constant_of_its_graph(use: Forward) -> None:
    assert trained(use) == 4


class Named(nn.Linear):
    def forward(self, x: Tensor, number: int, name: str) -> Tensor:  # type: ignore[override]
        return super().forward(x) * number


def test_of_several_numbers_those_that_are_not_used_count_as_one() -> None:
    model, x = fxmem.optimize(Named(8, 8), cost="cpu"), torch.randn(4, 8)
    for number, name in ((1, "a"), (1, "b"), (2, "c"), (2, "d")):
        assert torch.equal(model(x, number, name), F.linear(x, model.weight, model.bias) * number)
    assert len(model.fxmem.plans.asked._compiled) == 2
