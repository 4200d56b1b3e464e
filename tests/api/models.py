"""Models and helpers of the tests of optimized modules."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.exactness import same_bits

WIDTH = 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH)
        self.dropout, self.last = nn.Dropout(0.2), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.last(self.dropout(torch.relu(self.norm(self.first(x * scale)))))


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*(shape or (32, WIDTH)), generator=torch.Generator().manual_seed(3)).to(dtype)


def step(model: nn.Module, x: Tensor | None = None, **kwargs: Any) -> None:
    torch.manual_seed(1)
    model.zero_grad()
    model(batch() if x is None else x, **kwargs).square().mean().backward()


def assert_same(eager: nn.Module, model: nn.Module) -> None:
    for (name, a), b in zip(eager.named_parameters(), model.parameters(), strict=True):
        assert same_bits(a.grad, b.grad), name
        assert same_bits(a.detach(), b.detach()), name
    for (name, a), b in zip(eager.named_buffers(), model.buffers(), strict=True):
        assert same_bits(a, b), name
