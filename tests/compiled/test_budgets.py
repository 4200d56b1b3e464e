"""Budgets of compiled steps: none is exceeded, and less memory never costs less time."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx

import fxmem
from benchmarks.measure import allocator_rise_bytes
from fxmem.api.arguments import settings_of
from fxmem.compiled import choice
from fxmem.compiled.graph_planner import GraphPlanner
from fxmem.compiled.joint import is_tangent
from fxmem.compiled.report import CompiledReport
from fxmem.compiled.surroundings import Surroundings
from fxmem.ir import Plan
from tests.compiled.interpreted import results_of, values_for
from tests.compiled.random_functions import WITHOUT_RANDOM, inputs, random_function
from tests.compiled.seat import in_the_seat
from tests.tiers import representatives

OPTIONS: dict[str, Any] = {"cost": "cpu", "plan_seconds": 1.0, "optimizer": None, "cache": False}


Planned = tuple[Plan, CompiledReport]


def plans_within(planner: GraphPlanner, budgets: list[int]) -> list[Planned]:
    """Return plan and report of each budget, falling, after those of none.

    A budget that no plan fits is replaced by the least that was reached.
    """
    found = []
    for budget in [None, *sorted(budgets, reverse=True)]:
        try:
            found.append(planner.within(budget))
        except fxmem.InfeasibleBudgetError as error:
            found.append(planner.within(error.least_bytes))
    return [(taken.point.plan, report) for taken, report in found]


def check_plans(planner: GraphPlanner, plans: list[Planned]) -> None:
    """Each budget is kept, a lower one costs no less time, and gradients are those of keeping all.

    Gradients are those of the partitioned graphs, interpreted: of kernels the benchmark of compiled steps tells.
    """
    joint, reports = planner.kernels.joint, [report for _, report in plans]
    assert all(r.budget_bytes is None or r.predicted_peak_bytes <= r.budget_bytes for r in reports)
    seconds = [report.overhead_seconds for report in reports]
    assert seconds == sorted(seconds)
    values = values_for([n for n in joint.inputs if not is_tangent(n)])
    expected, *found = (results_of(planner.parts(plan), joint.num_outputs, values) for plan, _ in plans)
    for report, tensors in zip(reports[1:], found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True)), report


@pytest.mark.slow
@pytest.mark.parametrize("seed", representatives(range(100), 0))
def test_no_budget_is_exceeded_and_less_memory_never_costs_less_time(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "NUM_CANDIDATES", 6)
    draw = random.Random(seed)
    seen: list[tuple[GraphPlanner, list[Planned]]] = []

    def look(joint: fx.GraphModule, num_outputs: int, static: Any) -> None:
        planner = GraphPlanner.of(joint, num_outputs, static, Surroundings(), settings_of(OPTIONS))
        most = planner.within(None)[1].predicted_peak_bytes
        seen.append((planner, plans_within(planner, [int(most * draw.uniform(0.5, 1.1)) for _ in range(6)])))

    in_the_seat(look, random_function(seed), *inputs())
    check_plans(*seen[0])


def gradients(function: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of all but the first tensor, in double precision; zeros where one is not read."""
    x, *weights = (t.detach() for t in tensors)
    weights = [w.requires_grad_() for w in weights]
    found = torch.autograd.grad(function(x, *weights), weights, allow_unused=True, materialize_grads=True)
    return [g.double() for g in found]


def rounding_errors(function: Any) -> list[float]:
    """Return how far eager's gradients are off, each at its most on six inputs that are nearly the same: a step that
    magnifies what is rounded has little of it to magnify on some."""
    errors = []
    for seed in range(6):
        draw = torch.Generator().manual_seed(seed)
        nearby = [t.detach() * (1 + 2**-20 * torch.randn(t.shape, generator=draw)) for t in inputs()]
        precise = gradients(function, [t.double() for t in nearby])
        errors.append([(a - b).norm().item() for a, b in zip(gradients(function, nearby), precise, strict=True)])
    return [max(each) for each in zip(*errors, strict=True)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(30))
def test_gradients_of_compiled_steps_are_eagers_but_for_rounding(seed: int) -> None:
    """What is generated for kernels is right: keeping all, and at the least peak."""
    function = random_function(seed, (8, 16), WITHOUT_RANDOM)
    precise, errors = gradients(function, [t.double() for t in inputs()]), rounding_errors(function)
    with pytest.raises(fxmem.InfeasibleBudgetError) as refused:
        torch.compile(function, backend=fxmem.backend(budget="1kB", **OPTIONS), dynamic=False)(*inputs())
    for budget in (refused.value.least_bytes, "1GiB"):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=fxmem.backend(budget=budget, **OPTIONS), dynamic=False)
        for found, right, error in zip(gradients(compiled, inputs()), precise, errors, strict=True):
            assert (found - right).norm() <= 3 * error + 1e-5 * right.norm()


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(10))
def test_compiled_steps_keep_random_budgets_with_the_compilers_own_gradients(seed: int) -> None:
    """What is measured is what was told, and gradients are bitwise those of the step that keeps all."""
    function, share = random_function(seed), random.Random(seed).uniform(0.0, 0.95)
    x, *weights = inputs()
    found: list[list[torch.Tensor]] = []
    with pytest.raises(fxmem.InfeasibleBudgetError) as refused:
        torch.compile(function, backend=fxmem.backend(budget="1kB", **OPTIONS), dynamic=False)(x, *weights)
    budget: int | None = None
    for _ in range(2):
        torch._dynamo.reset()
        backend = fxmem.backend(budget=budget or "1GiB", **OPTIONS)
        compiled = torch.compile(function, backend=backend, dynamic=False)

        def step(compiled: Any = compiled) -> list[torch.Tensor]:
            torch.manual_seed(1)
            return list(torch.autograd.grad(compiled(x, *weights), weights, allow_unused=True))

        found.append([g for g in step() if g is not None])
        report = backend.reports[0]
        gc.collect()
        measured = report.fixed_bytes + allocator_rise_bytes(step)
        assert abs(measured - report.predicted_peak_bytes) <= 0.001 * measured
        assert budget is None or report.predicted_peak_bytes <= budget
        least_bytes = refused.value.least_bytes
        budget = int(least_bytes + share * max(0, report.predicted_peak_bytes - least_bytes))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
