"""plan="background": a quick plan for the first steps, the better one once it is found, and eager's bits all along."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fxmem
from fxmem.planners import background

STEPS, HALF = 20, 10


def network() -> nn.Sequential:
    layers = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2))]
    return nn.Sequential(*layers)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def optimized(model: nn.Module, batch: torch.Tensor, plan: str = "background") -> fxmem.FxMemModule:
    return fxmem.optimize(model, batch, budget="75%", optimizer="sgd", loss_fn=loss_of, cache=False, plan=plan)


@pytest.fixture
def batch() -> torch.Tensor:
    return torch.randn(128, 32)


def losses(model: nn.Module, batch: torch.Tensor, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for _ in range(steps):
        loss = loss_of(model(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.slow
def test_the_steps_before_and_after_the_better_plan_are_bitwise_eagers(batch: torch.Tensor) -> None:
    model = network()
    eager, now = copy.deepcopy(model), optimized(copy.deepcopy(model), batch, "now")
    module = optimized(model, batch)
    assert module.fxmem.plan.planner == "chen"
    torch.manual_seed(0)
    ours = losses(module, batch, HALF)  # draws while the planner runs beside
    module.fxmem.finish_planning()
    assert module.fxmem.plan == now.fxmem.plan
    assert module.fxmem.report.predicted_peak_bytes == now.fxmem.report.predicted_peak_bytes
    ours += losses(module, batch, STEPS - HALF)
    torch.manual_seed(0)
    assert ours == losses(eager, batch, STEPS)
    assert all(map(torch.equal, model.parameters(), eager.parameters()))
    assert module.fxmem.plan == now.fxmem.plan


@pytest.mark.slow
def test_the_better_plan_is_taken_at_the_first_step_after_it_is_found(batch: torch.Tensor) -> None:
    module = optimized(network(), batch)
    quick = module.fxmem.plans.latest
    assert quick is not None
    assert quick.later is not None
    quick.later.planning._process.wait()
    output = module(batch)
    assert module.fxmem.plans.latest is not quick
    output.sum().backward()


@pytest.mark.slow
def test_a_search_that_fails_warns_once_and_the_quick_plan_stays(
    batch: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MODULE", "fxmem.no_such_module")
    module = optimized(network(), batch)
    with pytest.warns(UserWarning, match=r"no plan was found in the background for Sequential .*no_such_module"):
        module.fxmem.finish_planning()
    assert module.fxmem.plan.planner == "chen"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses(module, batch, 2)
        module.fxmem.finish_planning()


@pytest.mark.slow
def test_copies_and_pickles_leave_the_search_alone_and_it_ends_with_its_module(batch: torch.Tensor) -> None:
    module = optimized(network(), batch)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.state_dict().keys() == module.state_dict().keys()
        assert not other.fxmem.is_planned
        other.fxmem.finish_planning()
    quick = module.fxmem.plans.latest
    assert quick is not None
    assert quick.later is not None
    process, folder = quick.later.planning._process, Path(quick.later.planning._folder.name)
    assert folder.exists()
    del module, other, quick
    gc.collect()
    assert process.poll() is not None
    assert not folder.exists()


@pytest.mark.slow
def test_the_planning_process_needs_no_torch() -> None:
    code = "import sys, fxmem.planners.background; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_another_word_for_plan_names_the_known_ones(batch: torch.Tensor) -> None:
    with pytest.raises(fxmem.InputError, match="unknown plan 'later'; known: background, now"):
        optimized(network(), batch, "later")
    with pytest.raises(fxmem.InputError, match='plan= are not for backend="inductor"'):
        fxmem.optimize(network(), batch, plan="background", backend="inductor")
