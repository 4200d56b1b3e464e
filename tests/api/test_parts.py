"""A part of a model optimized, and what of a model cannot be captured whole."""

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.api.module import OptimizedModule
from tests.api.models import WIDTH, assert_same, batch, build, step

# -- a part of a model -------------------------------------------------------------------------------------------------


def test_an_optimized_module_inside_one_is_refused_whenever_it_was_put_there() -> None:
    model = build()
    optimized = fxmem.optimize(model)
    model.last = fxmem.optimize(model.last)
    with pytest.raises(fxmem.InputError, match=r"last is an optimized module inside of Net.*last\.fxmem\.original"):
        fxmem.optimize(model)
    with pytest.raises(fxmem.InputError, match=r"last is an optimized module"):
        step(optimized)


class Around(nn.Module):
    """Hands what ``way`` makes of a value with a history to a part that writes over it."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.way = nn.Linear(WIDTH, WIDTH), way
        self.part = nn.Sequential(nn.ReLU(inplace=True), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.way(self.first(x).sin()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [lambda h: h, lambda h: h.view(2, 16, WIDTH), lambda h: h[4:20], lambda h: h.view(2, 16, WIDTH).mT.mT],
    ids=["value", "view", "rows", "transposed"],
)
def test_a_part_may_be_given_any_value_of_the_model_around_it(way: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    eager = Around(way)
    model = copy.deepcopy(eager)
    part = model.part
    model.part = fxmem.optimize(part, budget="1B", optimizer=None, planner="chen")
    with pytest.raises(fxmem.InfeasibleBudgetError) as info:
        step(model)
    model.part = fxmem.optimize(part, budget=info.value.least_bytes, optimizer=None, planner="chen")
    for m in (eager, model):
        step(m)
    assert model.part.plan.dropped
    assert_same(eager, model)


# -- what cannot be captured whole -------------------------------------------------------------------------------------


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.weigh(x)
        return y.exp() if y.sum() > 0 else y.sin()  # decided by values


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(Residual() for _ in range(4)))
        self.gates = nn.ModuleList([Gate(), Residual()])

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.encoder, *self.gates):
            x = part(x)
        return x


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sigmoid(self.up(self.norm(x))))


@pytest.mark.slow
def test_a_model_that_looks_at_values_is_refused_and_the_advice_works() -> None:
    torch.manual_seed(0)
    eager = Gated()
    model = copy.deepcopy(eager)
    with pytest.raises(fxmem.CaptureError, match=r"in gates\.0 \(test_parts\.py:\d+\)") as info:
        fxmem.optimize(model, batch())
    advice = re.findall(r"(model\S* = fxmem\.optimize\(model\S*), \.\.\.\)", str(info.value))
    assert [line.partition(" ")[0] for line in advice] == ["model.encoder", "model.gates[1]", "model.gates[0].weigh"]
    for line in advice:
        exec(f"{line}, optimizer=None, planner='chen')", {"model": model, "fxmem": fxmem})
    for m in (eager, model):
        step(m)
        step(m, -batch())
    assert_same(eager, model)
    assert [isinstance(part, OptimizedModule) for part in (model.encoder, *model.gates)] == [True, False, True]
