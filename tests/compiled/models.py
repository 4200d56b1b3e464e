"""A small residual network with dropout, whose kernels compile in seconds."""

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
    """Blocks and a head; ``breaks``: with a graph break between them."""

    def __init__(self, width: int = 32, *, blocks: int = 1, breaks: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 10)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.head(x)


OPTIONS = {"cost": "cpu", "plan_seconds": 2.0, "backend": "inductor"}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(64, 32), torch.randint(10, (64,))
