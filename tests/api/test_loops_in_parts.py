"""The steps of a loop are seen of a model that is planned in parts too: planned for, or told of once with their peak."""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from fxmem.api.module import OptimizedModule
from fxmem.partial import PartsGraph
from tests.api.test_loops import (
    BATCHES,
    WIDTH,
    Step,
    micro_batches,
    peaks,
    plain,
    same_loss_twice,
    siamese,
    total,
)
from tests.exactness import same_bits

CLASSES = 64
ASKED: dict[str, Any] = {"loss_fn": total, "cost": "cpu", "planner": "chen"}
LABELS = torch.randint(0, CLASSES, (len(BATCHES[0]),))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x)).sin()
        return x


class Looking(nn.Module):
    """Runs a part as often as a buffer says, then looks at what came out."""

    def __init__(self, most: int = 2) -> None:
        super().__init__()
        self.part, self.head = Net(), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("most", torch.tensor(float(most)))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(self.most)):
            x = self.part(x)
        return self.head(x.exp() if x.sum() > 1e9 else x)


@functools.cache
def least_and_most_bytes() -> tuple[int, int]:
    """Return the floor and eager's peak of one forward and one backward."""
    torch.manual_seed(0)
    model = Looking()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    report = planned(model, optimizer=optimizer, **ASKED).fxmem.report
    return report.floor_bytes, report.eager_peak_bytes


def planned(model: nn.Module, **options: Any) -> OptimizedModule:
    with pytest.warns(UserWarning, match=r"Looking is planned in parts"):
        optimized = fxmem.optimize(model, BATCHES[0], **options)
    assert isinstance(optimized.fxmem.plans.latest.captured, PartsGraph)
    return optimized


def made(share: float, **options: Any) -> tuple[OptimizedModule, torch.optim.Optimizer]:
    """Return a model whose budget for one forward and one backward lies at this share between floor and eager peak."""
    torch.manual_seed(0)
    model = Looking()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    least, most = least_and_most_bytes()
    asked = {**ASKED, "budget": int(least + share * (most - least)), "optimizer": optimizer, **options}
    return planned(model, **asked), optimizer


def assert_trained_as_eager(model: nn.Module, train: Callable[[nn.Module, torch.optim.Optimizer], None]) -> None:
    torch.manual_seed(0)
    eager = Looking()
    train(eager, torch.optim.SGD(eager.parameters(), lr=1e-3))
    assert all(same_bits(a, b) for a, b in zip(model.parameters(), eager.parameters(), strict=True))


def again(step: Step, number: int = 4) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(number):
            step(model, optimizer, {})

    return train


@pytest.mark.slow
def test_gradients_of_micro_batches_are_found_at_the_second_one() -> None:
    model, optimizer = made(0.4)
    found, said = peaks(model, optimizer, micro_batches)
    assert max(found[1:]) == model.fxmem.report.predicted_peak_bytes <= model.fxmem.settings.budget_bytes
    assert not said, "it was planned for in time"
    assert_trained_as_eager(model, again(micro_batches))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "share"), [(siamese, 0.6), pytest.param(same_loss_twice, 0.02, marks=pytest.mark.exhaustive)]
)
def test_another_loop_is_told_of_once_with_its_peak_and_then_planned_for(step: Step, share: float) -> None:
    model, optimizer = made(share)
    budget = model.fxmem.settings.budget_bytes
    found, said = peaks(model, optimizer, step)
    assert found[0] > budget or step is same_loss_twice, "nothing that is dropped is kept for the second backward"
    assert [f"the step's peak is {found[0]} bytes" in message for message in said] == [True] * (found[0] > budget)
    assert max(found[2:]) <= budget or f"Raise the budget to {max(found[2:])} bytes" in said[0]
    assert_trained_as_eager(model, again(step))


def criterion(model: nn.Module, optimizer: torch.optim.Optimizer, names: dict[str, Any]) -> None:
    loss = F.cross_entropy(model(BATCHES[0]), LABELS)
    loss.backward()
    del loss
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.exhaustive
def test_a_loss_outside_is_told_of_once_with_its_peak_and_then_planned_for() -> None:
    model, optimizer = made(0.05, loss_fn=None)
    budget = model.fxmem.settings.budget_bytes
    found, said = peaks(model, optimizer, criterion, targets=LABELS)
    (message,) = said
    assert "the loss is computed outside of the model" in message
    assert f"the step's peak is {found[0]} bytes" in message
    assert max(found[2:]) <= budget or f"Raise the budget to {max(found[2:])} bytes" in message
    assert_trained_as_eager(model, again(criterion))


@pytest.mark.slow
def test_more_calls_of_a_part_than_planned_for_are_told_of_once_with_the_peak_and_then_planned_for() -> None:
    model, optimizer = made(0.6)
    budget = model.fxmem.settings.budget_bytes
    before, predicted = copy.deepcopy(model.state_dict()), model.fxmem.report.predicted_peak_bytes
    found, said = [], []
    for most in (2, 3, 3, 3):
        with torch.no_grad():
            model.most.fill_(most)
        with warnings.catch_warnings(record=True) as caught, fxmem.track(model, optimizer, BATCHES[0]) as memory:
            warnings.simplefilter("always")
            plain(model, optimizer, {})
        found.append(memory.peak_bytes)
        said += [str(w.message) for w in caught if "in a forward" in str(w.message)]
    (message,) = said
    assert "parts of it were called 3 times in a forward, planned for were 2" in message
    assert found[0] == predicted <= budget, "two calls were planned for"
    assert f"the step's peak is {found[1]} bytes" in message
    assert found[1] > budget >= found[3]

    def train(eager: Any, optimizer: torch.optim.Optimizer) -> None:
        eager.load_state_dict(before)
        for most in (2, 3, 3, 3):
            eager.most.fill_(most)
            plain(eager, optimizer, {})

    assert_trained_as_eager(model, train)


class Scaling:
    def __init__(self, model: Any) -> None:
        self.scale = float(model.scale)


class Making(Looking):
    """Makes an object that reads a number in the first forward, as YOLO does its criterion."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "scaling", None) is None:
            self.scaling = Scaling(self)
        return super().forward(x) * self.scaling.scale


class Alternating(Looking):
    """Looks at one more value in every second forward."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x * float(self.most) if self.num_calls % 2 == 0 else x)


def found_in_the_first_calls(kind: type[Looking]) -> tuple[list[int], str, int]:
    """Return the peaks of steps of a model that is planned in its first call, what is told in the second, in which the loss
    that was seen outside is planned for, and the budget."""
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    budget = sum(least_and_most_bytes()) // 2
    optimized = fxmem.optimize(model, budget=budget, optimizer=optimizer, cost="cpu", planner="chen")
    found, (message,) = peaks(optimized, optimizer, criterion, targets=LABELS)
    assert isinstance(optimized.fxmem.plans.latest.captured, PartsGraph)
    torch.manual_seed(0)
    eager = kind()
    again(criterion)(eager, torch.optim.SGD(eager.parameters(), lr=1e-3))
    assert all(same_bits(a, b) for a, b in zip(optimized.parameters(), eager.parameters(), strict=True))
    return found, message, budget


@pytest.mark.slow
def test_what_only_the_first_forward_makes_is_not_looked_for_in_the_next() -> None:
    found, message, budget = found_in_the_first_calls(Making)
    assert f"the step's peak is {found[0]} bytes" in message
    assert max(found[1:]) <= budget


@pytest.mark.slow
def test_a_forward_that_looks_at_more_than_the_one_before_is_followed_as_it_is() -> None:
    """What is told is of the call that is planned for, under the plan before: of one more value than the first step."""
    found, message, budget = found_in_the_first_calls(Alternating)
    assert f"the step's peak is {found[0] + BATCHES[0].nbytes} bytes" in message
    assert max(found[1:]) <= budget


class Choosing(nn.Module):
    """Goes on with the rows that a mask chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.rest = Net(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rest(x)
        return self.part(y[y.sum(-1) > 0])


@pytest.mark.slow
def test_shapes_that_follow_from_values_are_counted_as_they_are() -> None:
    torch.manual_seed(0)
    eager = Choosing()
    before = copy.deepcopy(eager.state_dict())
    options: dict[str, Any] = {"optimizer": None, "loss_fn": total, "cost": "cpu", "planner": "chen"}
    with pytest.warns(UserWarning, match=r"Choosing is planned in parts.*part"):
        model = fxmem.optimize(copy.deepcopy(eager), BATCHES[0], budget="80%", **options)
    report = model.fxmem.report
    with fxmem.track(model, BATCHES[0]) as memory:
        output = model(BATCHES[0])
        loss = total(output)
        loss.backward()
    assert memory.peak_bytes == report.predicted_peak_bytes <= report.budget_bytes < report.eager_peak_bytes
    total(eager(BATCHES[0])).backward()
    assert all(same_bits(a.grad, b.grad) for a, b in zip(model.parameters(), eager.parameters(), strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "no trace is left"


class Dropping(Looking):
    """Draws in its part and around it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(self.part, nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.2))


def two_views(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    first, second = model(x), model(x)
    loss = F.cross_entropy(first, LABELS) + (first - second).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.slow
def test_what_a_part_draws_stays_eagers_where_plans_change_in_mid_training() -> None:
    def trained(optimized: bool) -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = Dropping()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if optimized:
            with pytest.warns(UserWarning, match="Dropping is planned in parts"):
                model = fxmem.optimize(model, BATCHES[0], budget="80%", optimizer=optimizer, **ASKED)
        torch.manual_seed(1)
        for _ in range(4):
            two_views(model, optimizer, BATCHES[0])
        return model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Dropping:")
        ours = trained(True)
    assert ours.fxmem.plans.latest is not ours.fxmem.plans.asked.latest, "the step was planned for anew"  # type: ignore[union-attr]
    assert all(same_bits(a, b) for a, b in zip(ours.parameters(), trained(False).parameters(), strict=True))
