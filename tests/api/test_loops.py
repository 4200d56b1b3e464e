"""The step that a training loop really makes is seen as it runs, and planned for, or told of once with its peak."""

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from fxmem.api.module import OptimizedModule
from fxmem.api.planning_hints import option_for, said_of
from tests.exactness import same_bits

ROWS, WIDTH, LAYERS = 64, 16, 6
BATCHES = tuple(torch.randn(ROWS, WIDTH) for _ in range(2))
Step = Callable[[nn.Module, torch.optim.Optimizer, dict[str, Any]], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x)).sin()
        return x


def total(output: Tensor) -> Tensor:
    return output.sum()


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, names: dict[str, Any]) -> None:
    output = model(BATCHES[0])
    output.sum().backward()
    del output
    optimizer.step()
    optimizer.zero_grad()


def micro_batches(model: nn.Module, optimizer: torch.optim.Optimizer, names: dict[str, Any]) -> None:
    for _ in range(2):
        output = model(BATCHES[0])
        output.sum().backward()
        del output
    optimizer.step()
    optimizer.zero_grad()


def siamese(model: nn.Module, optimizer: torch.optim.Optimizer, names: dict[str, Any]) -> None:
    one, other = model(BATCHES[0]), model(BATCHES[1])
    (one.sum() + other.sum()).backward()
    del one, other
    optimizer.step()
    optimizer.zero_grad()


def same_loss_twice(model: nn.Module, optimizer: torch.optim.Optimizer, names: dict[str, Any]) -> None:
    loss = model(BATCHES[0]).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    del loss
    optimizer.step()
    optimizer.zero_grad()


def graph_left(model: nn.Module, optimizer: torch.optim.Optimizer, names: dict[str, Any]) -> None:
    names["output"] = model(BATCHES[0])
    names["loss"] = names["output"].sum()
    names["loss"].backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()


def cleared_late(model: nn.Module, optimizer: torch.optim.Optimizer, names: dict[str, Any]) -> None:
    output = model(BATCHES[0])
    loss = output.sum()
    optimizer.zero_grad()
    loss.backward()
    del output, loss
    optimizer.step()


def cleared_late_after_a_skipped_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: dict[str, Any]
) -> None:
    """As a GradScaler does whose first scale is too large."""
    output = model(BATCHES[0])
    loss = output.sum()
    optimizer.zero_grad()
    loss.backward()
    del output, loss
    if names.setdefault("skipped", []):
        optimizer.step()
    names["skipped"].append(True)


def cleared_late_in_the_first_micro_batch(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: dict[str, Any]
) -> None:
    cleared_late(model, torch.optim.SGD(model.parameters(), lr=0.0), names)
    model(BATCHES[0]).sum().backward()
    optimizer.step()


def zeros_left(model: nn.Module, optimizer: torch.optim.Optimizer, names: dict[str, Any]) -> None:
    model(BATCHES[0]).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


ASKED: dict[str, Any] = {"loss_fn": total, "cost": "cpu", "planner": "intervals"}


@functools.cache
def least_and_most_bytes() -> tuple[int, int]:
    """Return the floor and eager's peak of one forward and one backward."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    estimate = fxmem.estimate(model, BATCHES[0], optimizer=optimizer, **ASKED)
    return estimate.floor_bytes, estimate.peak_bytes


def made(share: float, **options: Any) -> tuple[OptimizedModule, torch.optim.Optimizer]:
    """Return a model whose budget for one forward and one backward lies at this share between floor and eager peak."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    least, most = least_and_most_bytes()
    budget = int(least + share * (most - least))
    return fxmem.optimize(model, BATCHES[0], budget=budget, optimizer=optimizer, **ASKED, **options), optimizer


def peaks(
    model: OptimizedModule, optimizer: torch.optim.Optimizer, step: Step, number: int = 4, targets: Tensor | None = None
) -> tuple[list[int], list[str]]:
    """Return the peaks of steps, and what was warned of. A step before which something is planned runs once more."""
    names: dict[str, Any] = {}
    used = (BATCHES[:2] if step is siamese else BATCHES[:1], targets)
    found, said = [], []
    for _ in range(number):
        with warnings.catch_warnings(record=True) as caught, fxmem.track(model, optimizer, used) as memory:
            warnings.simplefilter("always")
            step(model, optimizer, names)
        found.append(memory.peak_bytes)
        said += [str(w.message) for w in caught if "fxmem.optimize(..., " in str(w.message)]
    return found, said


def assert_trained_as_eager(model: nn.Module, step: Step, number: int = 4) -> None:
    """Assert that so many steps of eager mode lead to the same bits."""
    torch.manual_seed(0)
    eager = Net()
    optimizer = torch.optim.SGD(eager.parameters(), lr=1e-3)
    for _ in range(number):
        step(eager, optimizer, {})
    assert all(same_bits(a, b) for a, b in zip(model.parameters(), eager.parameters(), strict=True))


@pytest.mark.slow
def test_a_plain_loop_is_planned_for_once() -> None:
    model, optimizer = made(0.3)
    found, said = peaks(model, optimizer, plain)
    assert max(found) <= model.fxmem.settings.budget_bytes
    assert not said
    assert len(model.fxmem.plans._caches) == 1


@pytest.mark.slow
def test_outputs_that_stay_through_the_next_backward_are_told_of_where_they_exceed_the_budget() -> None:
    """As where a function runs a step and returns its output."""
    model, optimizer = made(0.3)
    outputs: list[Tensor] = []

    def step() -> None:
        output = model(BATCHES[0])
        output.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs[:] = [output]

    for _ in range(3):
        step()
    with pytest.warns(UserWarning, match="stayed through the backward of the latest step") as told:
        step()
    with fxmem.track(model, optimizer, (BATCHES[0], outputs)) as memory:
        step()
    assert f"{memory.peak_bytes} bytes" in str(told[0].message)
    model, optimizer = made(1.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            step()


@pytest.mark.slow
def test_gradients_of_micro_batches_are_found_at_the_second_one() -> None:
    model, optimizer = made(0.3)
    assert model.fxmem.report.static.gradients_bytes == 0
    found, said = peaks(model, optimizer, micro_batches)
    assert model.fxmem.report.static.gradients_bytes == sum(p.nbytes for p in model.parameters())
    assert max(found[1:]) <= model.fxmem.settings.budget_bytes  # the first has planning in it
    assert not said, "it was planned for in time"
    assert_trained_as_eager(model, micro_batches)


@pytest.mark.slow
def test_gradients_that_go_between_forward_and_backward_are_planned_for_until_then() -> None:
    model, optimizer = made(0.3)
    found, said = peaks(model, optimizer, cleared_late)
    report = model.fxmem.report
    assert found[1:] == [report.predicted_peak_bytes] * 3
    assert max(found) <= model.fxmem.settings.budget_bytes
    assert report.static.gradients_bytes == 0
    assert not said
    assert len(model.fxmem.plans._caches) == 2
    assert_trained_as_eager(model, cleared_late)


@pytest.mark.slow
def test_gradients_that_go_before_the_backward_need_less_than_those_that_are_added_to() -> None:
    model, optimizer = made(0.01)
    budget = model.fxmem.settings.budget_bytes
    found, said = peaks(model, optimizer, cleared_late)
    assert max(found) <= budget < fxmem.estimate(Net(), BATCHES[0], accumulate=True, **ASKED).floor_bytes
    assert not said
    step = replace(model.fxmem.settings.step, loop=fxmem.Loop(zero_grad_before_backward=True))
    (text,) = said_of(model.fxmem.settings.step, step)
    assert "zero_grad() comes after it, before the backward" in text
    assert option_for(model.fxmem.settings.step, step) == "loop=fxmem.Loop(zero_grad_before_backward=True)"


@pytest.mark.slow
def test_gradients_of_a_skipped_step_are_seen_to_go_before_the_backward() -> None:
    model, optimizer = made(0.3)
    found, said = peaks(model, optimizer, cleared_late_after_a_skipped_step)
    assert model.fxmem.report.static.gradients_bytes == 0
    assert found[-1] == model.fxmem.report.predicted_peak_bytes
    assert max(found) <= model.fxmem.settings.budget_bytes
    assert not said


@pytest.mark.slow
@pytest.mark.parametrize("step", [cleared_late_in_the_first_micro_batch, zeros_left])
def test_gradients_that_are_added_to_are_planned_for_as_such(step: Step) -> None:
    model, optimizer = made(0.3)
    found, said = peaks(model, optimizer, step)
    assert model.fxmem.report.static.gradients_bytes == sum(p.nbytes for p in model.parameters())
    assert max(found[1:]) <= model.fxmem.settings.budget_bytes
    assert not said
    assert_trained_as_eager(model, step)


def test_gradients_that_go_before_the_backward_may_be_asked_for() -> None:
    """With and without an optimizer that is counted."""
    loop = fxmem.Loop(zero_grad_before_backward=True)
    model, optimizer = made(0.5, loop=loop)
    found, said = peaks(model, optimizer, cleared_late, 2)
    assert found[-1] == model.fxmem.report.predicted_peak_bytes
    assert not said
    uncounted = fxmem.TrainingStep(loss_fn=total, optimizer=None, loop=loop)
    assert fxmem.estimate(Net(), BATCHES[0], step=uncounted).peak_bytes == (
        fxmem.estimate(Net(), BATCHES[0], step=replace(uncounted, optimizer="sgd")).peak_bytes
    )
    with pytest.raises(fxmem.InputError, match="gradients that accumulate are not cleared before the backward"):
        fxmem.TrainingStep(accumulate=True, loop=loop)


@pytest.mark.slow
@pytest.mark.parametrize("step", [siamese, same_loss_twice, graph_left])
def test_another_loop_is_told_of_once_with_its_peak_and_then_planned_for(step: Step) -> None:
    model, optimizer = made(0.3)
    budget = model.fxmem.settings.budget_bytes
    found, said = peaks(model, optimizer, step)
    assert len(said) == 1
    assert f"above the budget of {budget} bytes" in said[0]
    if step is not graph_left:  # the first has no step before
        assert f"the step's peak is {found[0]} bytes" in said[0]
        assert found[0] > budget
    held = 0 if step is not graph_left else BATCHES[0].nbytes + 4  # what fxmem.track was given
    assert max(found[2:]) - held <= budget
    assert_trained_as_eager(model, step)


@pytest.mark.slow
def test_a_loop_that_no_plan_keeps_within_the_budget_is_told_of_with_the_least_peak() -> None:
    model, optimizer = made(0.02)
    found, said = peaks(model, optimizer, siamese)
    assert len(said) == 1
    assert f"the step's peak is {found[-1]} bytes" in said[0]
    assert f"Raise the budget to {found[-1]} bytes" in said[0]


@pytest.mark.slow
def test_a_loop_may_be_asked_for_from_the_start() -> None:
    model, optimizer = made(0.3, loop=fxmem.Loop(forwards=2))
    found, said = peaks(model, optimizer, siamese, 2)
    assert max(found) == model.fxmem.report.predicted_peak_bytes <= model.fxmem.settings.budget_bytes
    assert not said


@pytest.mark.slow
def test_targets_follow_the_batch_and_a_smaller_last_batch_trains() -> None:
    labels = torch.randint(WIDTH, (ROWS,))
    asked: dict[str, Any] = {"loss_fn": F.cross_entropy, "targets": labels, "optimizer": None}
    model = fxmem.optimize(Net(), BATCHES[0], budget=10**9, cost="cpu", **asked)
    for rows in (ROWS, ROWS // 2, 3):
        with fxmem.track(model, BATCHES[0][:rows].clone(), labels[:rows].clone()) as memory:
            x, y = BATCHES[0][:rows].clone(), labels[:rows].clone()
        with fxmem.track(model, x, y) as memory:
            output = model(x)
            loss = F.cross_entropy(output, y)
            loss.backward()
            del output, loss
            for parameter in model.parameters():
                parameter.grad = None
        assert model.fxmem.report.static.inputs_bytes == x.nbytes + y.nbytes
        if rows == ROWS:
            assert memory.peak_bytes == model.fxmem.report.predicted_peak_bytes


def test_targets_without_a_loss_are_rejected() -> None:
    with pytest.raises(fxmem.InputError, match="arguments of loss_fn=, which is missing"):
        fxmem.TrainingStep(targets=BATCHES[0])


@pytest.mark.parametrize("number", [0, 1.5, True])
def test_numbers_of_a_loop_are_checked(number: Any) -> None:
    with pytest.raises(fxmem.InputError, match="forwards of a loop must be a number above 0"):
        fxmem.Loop(forwards=number)


def total_of_floats(output: Tensor) -> Tensor:
    return output.float().sum()


def under_autocast(model: nn.Module, optimizer: torch.optim.Optimizer, names: dict[str, Any]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        output = model(BATCHES[0])
        loss = total_of_floats(output)
    loss.backward()
    del output, loss
    optimizer.step()
    optimizer.zero_grad()


def backward_under_autocast(model: nn.Module, optimizer: torch.optim.Optimizer, names: dict[str, Any]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        output = model(BATCHES[0])
        total_of_floats(output).backward()
        del output
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.slow
def test_a_backward_inside_of_autocast_is_seen_and_told_of() -> None:
    step = fxmem.TrainingStep(optimizer="sgd", autocast=torch.bfloat16, loss_fn=total_of_floats)
    floor = fxmem.estimate(Net(), BATCHES[0], step=step).floor_bytes

    def trained(way: Step) -> tuple[int, int, list[str]]:
        model = fxmem.optimize(Net(), budget=floor, step=step)
        found, said = peaks(model, torch.optim.SGD(model.parameters(), lr=1e-3), way)
        return found[-1], model.fxmem.report.predicted_peak_bytes, said

    peak, told, said = trained(under_autocast)
    assert peak <= told == floor
    assert not said
    peak, told, said = trained(backward_under_autocast)
    assert peak == told > floor
    (text,) = said
    assert "the backward runs inside of the autocast region" in text
    assert f"is {told} bytes" in text
