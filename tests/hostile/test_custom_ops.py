"""Custom ops are opaque: what one draws inside shows neither in its fake nor, mostly, in a tag."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fxmem


@torch.library.custom_op("fxmem_tests::dropped", mutates_args=())
def dropped(x: torch.Tensor) -> torch.Tensor:
    return x * (torch.rand_like(x) > 0.5) * 2


@dropped.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient * (ctx.saved_tensors[0] != 0) * 2


def _save(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


dropped.register_autograd(_backward, setup_context=_save)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = dropped(torch.tanh(layer(x))) + x
        return x.square().mean()


def gradients_of(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(model(x), list(model.parameters())))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_custom_op_draws_the_same_when_it_runs_again(backend: str) -> None:
    torch.manual_seed(0)
    model, x, options = Dropping(), torch.randn(128, 32), {"backend": backend, "optimizer": None, "cost": "cpu"}
    with pytest.raises(fxmem.InfeasibleBudgetError) as caught:
        fxmem.optimize(copy.deepcopy(model), x, budget=1000, **options)
    optimized = fxmem.optimize(copy.deepcopy(model), x, budget=caught.value.least_bytes, **options)
    expected, found = gradients_of(model, x), gradients_of(optimized, x)
    if backend == "eager":
        assert all(map(torch.equal, expected, found))
    else:
        torch.testing.assert_close(found, expected)
