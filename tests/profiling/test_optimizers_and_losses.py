"""Optimizers and losses: what they hold, and which are refused."""

from typing import Any

import pytest
import torch
from torch import nn

import fxmem

# -- optimizers and losses ---------------------------------------------------------------------------------------------


def test_gradients_that_the_optimizer_does_not_hold_stay() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 8))
    x, optimizer = torch.randn(16, 64), torch.optim.SGD(model[-1].parameters(), lr=0.1)
    optimized = fxmem.optimize(model, x, optimizer=optimizer)
    for _ in range(2):  # the first step leaves the gradients that the second one finds
        with fxmem.track(model, x, optimizer) as tracked:
            output = optimized(x)
            output.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            del output
    assert tracked.peak_bytes == optimized.report.predicted_peak_bytes


def test_nadam_divides_by_what_it_reads() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    assert fxmem.estimate(model, x, optimizer="nadam").peak_bytes == fxmem.estimate(model, x).peak_bytes + 2 * 4


@pytest.mark.parametrize(
    ("optimizer", "match"),
    [
        ("lbfgs", r"LBFGS could not be made or stepped .*closure.* Pass an optimizer that is like it"),
        ("muon", r"Muon could not be made or stepped .*2D"),
    ],
)
def test_an_optimizer_that_cannot_be_stepped_is_refused_by_name(optimizer: str, match: str) -> None:
    with pytest.raises(fxmem.InputError, match=match):
        fxmem.optimize(nn.Linear(8, 8), torch.randn(4, 8), optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_fn", "match"),
    [
        (
            nn.CrossEntropyLoss(),
            "loss_fn failed on fake tensors: .*missing 1 required .*the model's output and targets=",
        ),
        (lambda y: y[y > y.mean()].mean(), "loss_fn failed on fake tensors: .*nonzero.* may not look at values"),
        (lambda y: (y.sum(), 1), "must return a tensor of one element, not "),
        (lambda y: y, r"must return a tensor of one element, not a tensor of shape \(4, 8\)"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_by_name(loss_fn: Any, match: str) -> None:
    for planned in (fxmem.optimize, fxmem.estimate):
        with pytest.raises(fxmem.InputError, match=match):
            planned(nn.Linear(8, 8), torch.randn(4, 8), loss_fn=loss_fn)
