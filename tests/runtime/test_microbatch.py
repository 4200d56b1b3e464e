"""A batch in pieces, in one call: the whole batch's outputs and gradients, planned to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxmem

ALLOW = ("recompute", "inplace", "microbatch")


def build(probability: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    dropout = nn.Dropout(probability)
    return nn.Sequential(nn.Linear(16, 128), nn.GELU(), dropout, nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 4))


def batch(size: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 16, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def floor_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> int:
    return fxmem.estimate(model, x, cost="cpu", plan_seconds=1, loss_fn=F.cross_entropy, targets=y).floor_bytes


def optimized(model: nn.Module, share: float = 0.7, size: int = 256, **options: Any) -> fxmem.FxMemModule:
    x, y = batch(size)
    budget = int(share * floor_of(model, x, y))
    step = {"loss_fn": F.cross_entropy, "targets": y, "plan_seconds": 1, **options}
    return fxmem.optimize(model, x, budget=budget, cost="cpu", allow=ALLOW, **step)


@pytest.mark.slow
def test_a_model_that_does_not_fit_trains_within_the_budget_in_pieces() -> None:
    model, (x, y) = build(0.3), batch()
    module = optimized(model)
    report, optimizer = module.fxmem.report, torch.optim.AdamW(model.parameters())
    for _ in range(3):
        with fxmem.track(module, optimizer, [x, y]) as measured:
            output = module(x)
            loss = F.cross_entropy(output, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del output, loss
    assert report.budget_bytes is not None
    assert measured.peak_bytes == report.predicted_peak_bytes <= report.budget_bytes
    assert "microbatch: " in report.notes[-1]
    assert "pieces, each of them once more in the backward" in report.notes[-1]


@pytest.mark.slow
def test_outputs_and_gradients_are_those_of_the_whole_batch() -> None:
    model, (x, y) = build().double(), batch()
    x = x.double()
    module = fxmem.optimize(
        model, x, budget=int(0.7 * floor_of(model, x, y)), cost="cpu", loss_fn=F.cross_entropy, targets=y, allow=ALLOW
    )
    output = module(x)
    assert output.shape == (256, 4)
    F.cross_entropy(output, y).backward()
    ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    expected = model(x)
    F.cross_entropy(expected, y).backward()
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-14)
    for found, parameter in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-9, atol=1e-14)


@pytest.mark.slow
def test_dropout_draws_in_the_backward_what_it_drew_in_the_forward() -> None:
    model, (x, _) = build(0.5), batch()
    module = optimized(model)
    torch.manual_seed(3)
    output = module(x)
    drawn = torch.rand(())
    loss = output.square().sum()
    loss.backward()
    after = torch.rand(())
    # the loss of the forward's masks falls along its gradient
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p -= 1e-5 * p.grad
    slope = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    torch.manual_seed(3)
    again = module(x).square().sum()
    assert torch.equal(drawn, torch.rand(()))
    assert torch.equal(after, torch.rand(()))
    assert float(loss.detach() - again.detach()) == pytest.approx(1e-5 * slope, rel=0.05)


@pytest.mark.slow
def test_what_keeps_a_batch_whole_is_refused_by_name() -> None:
    norm = nn.Sequential(build(), nn.BatchNorm1d(4))
    with pytest.raises(
        fxmem.InputError, match=r"BatchNorm in training mode takes its statistics over all samples .* at 1"
    ):
        optimized(norm)

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x).square().mean()

    with pytest.raises(fxmem.InputError, match=r"samples of a batch meet at .* take the loss of them outside"):
        fxmem.optimize(Mean(), batch()[0], budget="300kB", cost="cpu", plan_seconds=1, allow=ALLOW)
    with pytest.raises(fxmem.InputError, match="each piece would step parameters"):
        fxmem.optimize(
            build(),
            batch()[0],
            budget="100kB",
            cost="cpu",
            optimizer=torch.optim.SGD,
            allow=(*ALLOW, "optimizer_in_backward"),
        )
    with pytest.raises(fxmem.InfeasibleBudgetError, match="its batch in pieces of one sample"):
        optimized(build(), 0.01, size=4)


@pytest.mark.slow
def test_gradients_that_do_not_reach_the_parameters_are_refused() -> None:
    model, (x, _) = build(), batch()
    module = optimized(model)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(module(x).sum(), list(model.parameters()))
    given = x.clone().requires_grad_()
    with pytest.raises(fxmem.InputError, match=r"micro-batches add to the .grad of parameters"):
        torch.autograd.grad(module(given).sum(), given)
    module(given).sum().backward()
    assert given.grad is not None
    ours, given.grad = given.grad, None
    model(given).sum().backward()
    torch.testing.assert_close(ours, given.grad)
    loss = module(x).sum()
    with torch.no_grad():
        next(model.parameters()).mul_(1.0)
    with pytest.raises(fxmem.SavedTensorModifiedError, match="a parameter was written to between forward and backward"):
        loss.backward()


@pytest.mark.slow
def test_batches_of_other_sizes_are_planned_too() -> None:
    model = build()
    module = optimized(model)
    for size in (192, 320, 256):
        x, y = batch(size)
        F.cross_entropy(module(x), y).backward()
        ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for found, parameter in zip(ours, model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6)
        model.zero_grad()
