"""Compiled steps in the loops that people write: what is there as a forward begins is within the budget too."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from benchmarks.measure import allocator_rise_bytes
from fxmem.compiled.calls import MOST_KEPT
from tests.compiled.models import Block

ROWS, WIDTH = 256, 64
OUTPUT_BYTES = ROWS * 17 * WIDTH * 4
OUTSIDE = 12
"""Bytes of a loss outside of the graph, its number of elements: scalars that are told of, and no step holds them twice."""


class Wide(nn.Module):
    """Returns what its loss is of, and features that take much."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(WIDTH), Block(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.blocks(x)
        return x, x.detach().repeat(1, 16)


def loss_of(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return output[0].square().mean()


class Case:
    """A model in a training loop. ``order``: what the loop does when."""

    def __init__(self, order: str, budget: int | None = None, **options: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.eager, self.x, self.order = Wide(), torch.randn(ROWS, WIDTH), order
        self.optimizer, self.output = torch.optim.AdamW(self.eager.parameters()), loss_of
        options |= {"optimizer": self.optimizer, "loss_fn": loss_of, "cost": "cpu", "plan_seconds": 2.0}
        self.model: Any = fxmem.optimize(self.eager, self.x, budget=budget, backend="inductor", **options)

    @property
    def report(self) -> fxmem.CompiledReport:
        report: fxmem.CompiledReport = self.model.fxmem.report
        return report

    def step(self) -> None:
        if self.order == "cleared before the forward":
            self.optimizer.zero_grad()
        output = self.model(self.x)
        if self.order == "output carried":
            self.output = output
        loss = loss_of(output)
        if self.order == "cleared before the backward":
            self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        if self.order in ("cleared at the end", "output carried", "output returned"):
            self.optimizer.zero_grad()
        if self.order == "output returned":
            self.output = output
        if self.order == "one stays":
            for parameter in list(self.eager.parameters())[:-1]:
                parameter.grad = None
        if self.order == "filled with zeros":
            self.optimizer.zero_grad(set_to_none=False)

    def measured_bytes(self) -> int:
        """Return the peak of a step like those that came before it, which has left what it leaves."""
        for _ in range(3):
            self.step()
        self.optimizer.zero_grad()
        self.output = loss_of
        gc.collect()
        state = [t for each in self.optimizer.state.values() for t in each.values()]
        here = sum(t.nbytes for t in (*self.eager.parameters(), self.x, *state))

        def later_step() -> None:
            if self.order != "cleared at the end":
                for parameter in self.eager.parameters():
                    parameter.grad = torch.randn_like(parameter)
            self.step()

        return here + allocator_rise_bytes(later_step)


def least_bytes(**options: Any) -> int:
    """Return the least budget of a step that begins with nothing."""
    with pytest.raises(fxmem.InfeasibleBudgetError) as caught:
        Case("cleared at the end", 100_000, **options)
    return caught.value.least_bytes


@pytest.mark.slow
@pytest.mark.parametrize("order", ["cleared before the forward", "cleared before the backward", "cleared at the end"])
def test_gradients_of_the_step_before_are_within_the_budget(order: str) -> None:
    case = Case(order, int(0.97 * Case(order).report.predicted_peak_bytes))
    foretold, measured = case.report, case.measured_bytes()
    assert case.report.budget_bytes is not None
    assert abs(measured - case.report.predicted_peak_bytes) <= OUTSIDE
    assert measured <= case.report.budget_bytes
    is_another = order == "cleared before the backward"
    assert len(case.model.fxmem.reports) == 1 + is_another
    assert (case.report.keep_all_peak_bytes > foretold.keep_all_peak_bytes) == is_another


@pytest.mark.slow
def test_a_budget_that_gradients_filled_with_zeros_exceed_is_told_of_with_one_that_is_kept() -> None:
    case = Case("filled with zeros", least_bytes())
    with pytest.warns(UserWarning, match="gradients are there, which the loop does not clear.* or raise the") as told:
        measured = case.measured_bytes()
    assert abs(measured - case.report.predicted_peak_bytes) <= OUTSIDE
    least = int(str(told[0].message).split("budget to ")[1].split()[0])
    assert Case("filled with zeros", least).measured_bytes() <= least


@pytest.mark.slow
def test_a_gradient_that_one_parameter_has_is_seen() -> None:
    """As where a part of the model is stepped less often. All gradients are taken to be there then."""
    case = Case("one stays", int(1.02 * Case("one stays").report.predicted_peak_bytes))
    for _ in range(4):
        case.step()
    assert case.report.fixed_bytes > case.model.fxmem.reports[0].fixed_bytes


@pytest.mark.slow
def test_an_output_of_the_step_before_is_within_the_budget() -> None:
    budget = int(0.97 * Case("output carried").report.predicted_peak_bytes)
    case = Case("output carried", budget)
    foretold = case.report
    for _ in range(3):
        case.step()
    assert foretold.predicted_peak_bytes + OUTPUT_BYTES > budget
    assert len(case.model.fxmem.reports) == 2
    case.output = loss_of
    case.optimizer.zero_grad()
    gc.collect()
    state = [t for each in case.optimizer.state.values() for t in each.values()]
    here = sum(t.nbytes for t in (*case.eager.parameters(), case.x, *state))
    assert here + allocator_rise_bytes(lambda: (case.step(), case.step())) <= budget


@pytest.mark.slow
def test_an_output_of_the_step_before_that_stays_through_the_backward_is_within_the_budget() -> None:
    """As where a function runs a step and returns its output."""
    budget = int(0.97 * Case("output returned").report.predicted_peak_bytes) + OUTPUT_BYTES
    case = Case("output returned", budget)
    case.step()
    with pytest.warns(UserWarning, match="outputs of steps before, .* more than the budget; from the next step on"):
        case.step()
    case.step()
    assert len(case.model.fxmem.reports) == 2
    gc.collect()
    state = [t for each in case.optimizer.state.values() for t in each.values()]
    here = sum(t.nbytes for t in (*case.eager.parameters(), case.x, *state)) + OUTPUT_BYTES
    measured = here + allocator_rise_bytes(case.step)
    assert abs(measured - case.report.predicted_peak_bytes) <= OUTSIDE
    assert measured <= budget


class Recurrent(nn.Module):
    """Replaces a state that it is given, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.state = Block(WIDTH), torch.zeros(ROWS, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x + self.state)
        self.state = y.detach()
        return y


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_a_state_that_each_call_is_given_and_replaces_is_not_counted_twice(backend: str) -> None:
    x, options = torch.randn(ROWS, WIDTH), {"optimizer": None, "cost": "cpu", "backend": backend}
    options["loss_fn"] = torch.sum
    peak = fxmem.optimize(Recurrent(), x, budget="1GB", **options).fxmem.report.predicted_peak_bytes
    model = fxmem.optimize(Recurrent(), x, budget=peak, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            model(x).sum().backward()
            model.zero_grad()


@pytest.mark.slow
def test_outputs_that_get_more_each_step_are_planned_for_a_few_times_and_told_of() -> None:
    case, outputs = Case("output returned", int(1.01 * Case("output returned").report.predicted_peak_bytes)), []

    def steps() -> None:
        for _ in range(8):
            case.step()
            outputs.append(case.output)

    with pytest.warns(UserWarning, match="outputs of steps before") as told:
        steps()
    assert len(case.model.fxmem.reports) <= 3 + MOST_KEPT
    assert sum("no plan is for" in str(each.message) for each in told) == 1


def test_a_loop_that_was_told_of_is_planned_for_at_once() -> None:
    alone = Case("cleared before the backward").report
    loop = fxmem.Loop(zero_grad_before_backward=True)
    told = Case("cleared before the backward", loop=loop)
    gradients = sum(p.nbytes for p in told.eager.parameters())
    assert alone.predicted_peak_bytes < told.report.predicted_peak_bytes <= alone.predicted_peak_bytes + gradients


def test_an_output_that_is_let_go_takes_nothing_in_the_backward() -> None:
    kept, gone = (Case("", loop=fxmem.Loop(keeps_output=keeps)).report for keeps in (True, False))
    assert gone.predicted_peak_bytes < kept.predicted_peak_bytes


def test_loops_that_are_no_step_of_one_forward_are_refused_by_name() -> None:
    with pytest.raises(fxmem.InputError, match="takes keeps_output= and zero_grad_before_backward="):
        fxmem.backend(budget="1GB", loop=fxmem.Loop(backwards=2))
