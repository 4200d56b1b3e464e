"""Small residual models with norms, dropout and shared weights; twins of them; the least budget."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from fxmem.api.module import OptimizedModule
from fxmem.planners.simulate import drop_all
from tests.exactness import passing, same_bits, tightest

WIDTH = 16


HARD = (drop_all, passing, tightest)


class Layer(nn.Module):
    """A residual MLP layer; ``norm`` and ``dropout`` as asked for; checkpointed by torch if asked for."""

    def __init__(self, norm: type[nn.Module] | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = norm(WIDTH) if norm is not None else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def stack(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(layer() for layer in layers), nn.Linear(WIDTH, WIDTH))


def least(model: nn.Module, *args: Any, spare_bytes: int = 0, **options: Any) -> OptimizedModule:
    """Return ``model`` optimized to the least budget that fits, and ``spare_bytes`` more."""
    with pytest.raises(fxmem.InfeasibleBudgetError) as info:
        fxmem.optimize(model, args, budget="1B", **options)
    return fxmem.optimize(model, args, budget=info.value.least_bytes + spare_bytes, **options)


def twins(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(build())
    return made[0], made[1]


def batch(*shape: int) -> Tensor:
    return torch.randn(*(shape or (8, WIDTH)))


def assert_same_gradients(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert same_bits(p.grad, q.grad), name


# -- regions inside regions, and inside the user's -------------------------------------------------------------------------


class Shared(nn.Module):
    """Two layers and a weight used twice; ``around(self, x)`` is the forward."""

    def __init__(self, around: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self, x).float()


def plain(model: Any, x: Tensor) -> Tensor:
    return F.linear(F.linear(model.first(x).sin(), model.weight).sin(), model.weight)
