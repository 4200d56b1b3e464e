"""A part of a model optimized, and what of a model cannot be captured whole."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
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


QUICK: dict[str, Any] = {"optimizer": None, "planner": "chen"}


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
def test_a_model_that_looks_at_values_is_planned_in_parts_under_one_budget() -> None:
    torch.manual_seed(0)
    eager, x = Gated(), batch()
    eager.gates[0].weigh.bias.data.fill_(-10.0)  # the way that is counted
    with pytest.warns(UserWarning, match=r"Gated is planned in parts.*encoder, gates\.1.*one budget") as heard:
        floor = fxmem.optimize(copy.deepcopy(eager), x, **QUICK).fxmem.report.floor_bytes
    assert len(heard) == 1
    for budget in ("90%", floor):
        model = copy.deepcopy(eager)
        with pytest.warns(UserWarning, match="planned in parts"):
            optimized = fxmem.optimize(model, x, budget=budget, **QUICK)
        report = optimized.fxmem.report
        with fxmem.track(model, x) as memory:
            output = optimized(x)
            loss = output.sum()
            loss.backward()
        assert memory.peak_bytes == report.predicted_peak_bytes <= report.budget_bytes < report.eager_peak_bytes
        assert report.dropped_bytes > 0
        other = copy.deepcopy(eager)
        expected = other(x)
        expected.sum().backward()
        assert torch.equal(output, expected)
        assert_same(other, model)
        for m in (other, optimized):  # the other way at the gate
            m.gates[0].weigh.bias.data.fill_(10.0)
            step(m, x)
        assert_same(other, model)
    with pytest.raises(fxmem.InfeasibleBudgetError, match="the step of Gated, of which 2 parts are planned") as info:
        fxmem.optimize(copy.deepcopy(eager), x, budget=floor - 1, **QUICK)
    assert info.value.least_bytes == floor


class Ranged(Gated):
    """Keeps a running range, as quantizing layers do: each forward assigns another tensor to the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Residual(), Residual())
        self.register_buffer("range", torch.zeros(1024))

    def forward(self, x: Tensor) -> Tensor:
        self.range = self.range * 0.9 + x.detach().max() * 0.1
        return super().forward(x)


@pytest.mark.slow
def test_a_buffer_that_each_forward_assigns_anew_is_no_other_state_and_the_one_before_goes() -> None:
    torch.manual_seed(0)
    model, x = Ranged(), batch()
    model.gates[0].weigh.bias.data.fill_(-10.0)
    with pytest.warns(UserWarning, match="planned in parts"):
        optimized = fxmem.optimize(model, x, budget="95%", **QUICK)
    for _ in range(2):  # which show how the loop uses the model
        step(optimized, x)
        optimized.zero_grad()
    for _ in range(2):
        planned = optimized.fxmem.plans.latest
        assert planned is not None
        optimized.zero_grad()
        with fxmem.track(model, x) as memory:
            step(optimized, x)
        assert optimized.fxmem.plans.latest is planned
        assert memory.peak_bytes == planned.report.predicted_peak_bytes


class Scaled(Gated):
    """Can be captured whole without its gate; what the graph then has of it is the buffer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Residual(), Residual())
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor, gated: bool = True) -> Tensor:
        return super().forward(x) if gated else self.encoder(x * self.scale)


@pytest.mark.slow
def test_another_buffer_is_read_by_calls_that_are_captured_whole_of_a_model_that_is_also_planned_in_parts() -> None:
    torch.manual_seed(0)
    eager, x = Scaled(), batch()
    eager.gates[0].weigh.bias.data.fill_(-10.0)
    model = copy.deepcopy(eager)
    with pytest.warns(UserWarning, match="planned in parts"):
        optimized = fxmem.optimize(model, x, budget="95%", **QUICK)
    for scale in (1.0, 2.0, 3.0):
        outputs = []
        for m in (eager, optimized):
            m.scale = torch.full((WIDTH,), scale)
            outputs.append(m(x, gated=False))
            outputs[-1].square().sum().backward()
            step(m, x)
        assert torch.equal(*outputs)
        assert_same(eager, model)


class Keeping(nn.Module):
    """Keeps a record of its calls, and looks at the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))
        self.losses: list[float] = []
        self.num_calls = 0

    def forward(self, x: Tensor, number: int) -> Tensor:
        loss = self.body(x).square().mean()
        self.losses.append(loss.item())
        self.num_calls += number
        return loss


@pytest.mark.slow
def test_what_the_models_own_code_changes_and_is_given_makes_no_other_call_in_parts() -> None:
    torch.manual_seed(0)
    eager = Keeping()
    x = torch.randn(512, WIDTH)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = fxmem.optimize(copy.deepcopy(eager), (x, 1), budget="80%", optimizer=None, cost="cpu")
        for number in range(1, 6):
            for m in (eager, model):
                m(x, number).backward()
    assert len([w for w in said if "planned in parts" in str(w.message)]) == 1
    assert (model.losses, model.num_calls) == (eager.losses, 15)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), eager.parameters(), strict=True))
