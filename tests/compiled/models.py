"""A small residual network with dropout, and a function, whose kernels compile in seconds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks and a head."""

    def __init__(self, width: int = 32, *, blocks: int = 1) -> None:
        super().__init__()
        self.first = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x))


OPTIONS = {"cost": "cpu", "plan_seconds": 2.0, "backend": "inductor"}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(64, 32), torch.randint(10, (64,))


def transposed_and_summed(w: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Return what needs a transposed matrix by rows twice: Inductor's loops over them are in tiles."""
    a, b, c, d = others
    x = (w.T * a + b) * c + d * a
    return x * 64 - x.sum(-1, keepdim=True) - a * (x * a).sum(-1, keepdim=True)
