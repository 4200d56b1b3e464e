"""Models and helpers of the tests of guards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fxmem

ROWS, WIDTH = 32, 8


def network(**like: Any) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 64, **like), nn.Tanh(), nn.Linear(64, 64, **like), nn.Tanh(), nn.Linear(64, 4, **like)]
    return nn.Sequential(*layers)


def recomputing(model: nn.Module, *args: Any, **options: Any) -> fxmem.OptimizedModule:
    """Return ``model`` under plans that drop whatever may be dropped."""
    everything = [(lambda node: True, "recompute")]
    return fxmem.optimize(model, args or None, optimizer=None, planner="chen", policy=everything, **options)


def gradients(run: Callable[[], Tensor], model: nn.Module) -> Iterator[Tensor]:
    model.zero_grad()
    output = run()
    (output.abs() if output.is_complex() else output.square()).sum().backward()
    return (p.grad for p in model.parameters() if p.grad is not None)


def same_gradients(optimized: fxmem.OptimizedModule, *args: Any, **kwargs: Any) -> bool:
    eager = copy.deepcopy(optimized.original)
    expected = list(gradients(lambda: eager(*args, **kwargs), eager))
    actual = list(gradients(lambda: optimized(*args, **kwargs), optimized))
    return len(expected) == len(actual) and all(map(torch.equal, expected, actual))


class Remembering(nn.Module):
    """Reads two buffers, one of which it writes after that."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("state", torch.randn(4, WIDTH))
        self.register_buffer("scale", torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = (self.linear(x.sin()).sin() * self.scale.sin()).exp()
        self.state.add_(1.0)
        return self.linear(y.tanh()).tanh()


class Extras(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: Tensor | None = None, **extras: Tensor) -> Tensor:
        x = self.linear(x)
        for extra in extras.values():
            x = 2 * x + extra
        return x if scale is None else x * scale
