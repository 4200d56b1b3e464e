"""Budgets as people write them, what stands for an optimizer, and what is printed of it all."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from fxmem.planners.registry import AT_BUDGET


def net() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)))


def batch() -> torch.Tensor:
    return torch.randn(64, 16)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"budget": 8}, r"budget=8 is 8 bytes; did you mean budget_gb=8\?"),
        ({"budget": 1.5}, r"did you mean budget_gb=1.5\?"),
        ({"budget": "0%"}, "above 0 % of eager's peak"),
        ({"budget_mb": 0}, "budget_mb must be above 0"),
        ({"budget_mb": "8"}, r"budget_mb must be a number of MB \(1,000,000 bytes\)"),
        ({"budget_mb": 8, "budget_gb": 8}, "pass one of budget_gb, budget_mb and budget"),
    ],
)
def test_a_slip_in_a_budget_is_named_at_once(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(fxmem.BudgetError, match=message):
        fxmem.optimize(net(), **wanted)


@pytest.mark.parametrize(("given", "meant"), [(8, "budget_gb=8"), (0.5, "budget_gb=0.5"), ("8GB", "budget='8GB'")])
def test_a_budget_in_the_place_of_an_example_is_told_so(given: Any, meant: str) -> None:
    with pytest.raises(fxmem.InputError, match=rf"did you mean fxmem\.optimize\(model, {meant}\)\?"):
        fxmem.optimize(net(), given)


def test_a_budget_in_megabytes() -> None:
    assert fxmem.optimize(net(), budget_mb=1.5).fxmem.settings.budget_bytes == 1_500_000


@pytest.mark.slow
def test_a_share_of_eagers_peak_is_of_each_kind_of_call_its_own() -> None:
    optimized = fxmem.optimize(net(), budget="80%", optimizer=None, planner="chen")
    for size in (64, 256):
        optimized(torch.randn(size, 16)).sum().backward()
        report = optimized.fxmem.report
        assert report.budget_bytes == int(0.8 * report.eager_peak_bytes)
        assert report.predicted_peak_bytes <= report.budget_bytes
    with pytest.raises(fxmem.InfeasibleBudgetError, match="below the least reachable peak"):
        fxmem.optimize(net(), batch(), budget="1%", optimizer=None, planner="chen")
    with pytest.raises(fxmem.BudgetError, match=r"only fxmem\.optimize takes"):
        fxmem.estimate(net(), batch(), optimizer=None, planner="chen").fits("50%")


def test_an_optimizer_may_be_made_by_a_function_of_the_parameters() -> None:
    def momentum(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    model, x = net(), batch()
    instance = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = fxmem.estimate(model, x, optimizer=momentum, planner="chen")
    assert made.peak_bytes == fxmem.estimate(model, x, optimizer=instance, planner="chen").peak_bytes
    assert made.peak_bytes > fxmem.estimate(model, x, optimizer="sgd", planner="chen").peak_bytes
    with pytest.raises(fxmem.InputError, match="one of the parameters that it"):
        fxmem.estimate(model, x, optimizer=lambda _: instance)
    with pytest.raises(fxmem.InputError, match=r"must make a torch\.optim\.Optimizer, not 3"):
        fxmem.estimate(model, x, optimizer=lambda _: 3)  # type: ignore[arg-type,return-value]


def test_what_is_printed_is_short_and_in_units() -> None:
    model, x = net(), batch()
    estimate = fxmem.estimate(model, x, optimizer=None, planner="chen")
    assert re.fullmatch(r"Estimate\(peak 0\.\d+ MB\)", repr(estimate))
    assert estimate.floor_bytes  # planned for now that it is asked for
    assert re.fullmatch(r"Estimate\(peak 0\.\d+ MB, least reachable 0\.\d+ MB\)", repr(estimate))
    optimized = fxmem.optimize(model, x, budget="0.3MB", optimizer=None, planner="chen")
    assert "budget 0.3 MB" in repr(optimized)
    assert repr(optimized.fxmem.report).startswith("Report(budget 0.3 MB, peak 0.")
    assert "budget 50% of eager's peak" in repr(fxmem.optimize(net(), budget="50%"))
    assert repr(fxmem.frontier(model, x, optimizer=None, planner="chen")).startswith("(BudgetPoint(0.")
    with fxmem.track(model, x) as memory:
        pass
    assert repr(memory) == "Measurement(peak 38.14 kB, 38.14 kB at the start)"


@pytest.mark.slow
def test_plans_are_searched_for_at_the_budget_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def search(profile: Any, points: Any, budget_bytes: int, *, seconds: float) -> Any:
        asked.append(budget_bytes)
        return points

    monkeypatch.setitem(AT_BUDGET, "auto", search)
    estimate = fxmem.estimate(net(), batch(), cache=False)
    budget = (estimate.floor_bytes + estimate.peak_bytes) // 2
    assert asked == []
    for planner in ("auto", "chen"):
        fxmem.optimize(net(), batch(), budget=budget, planner=planner, cache=False)
    assert asked == [budget]
