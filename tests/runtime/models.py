"""Models and helpers of the tests of autograd's promises."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from fxmem.api.module import OptimizedModule
from tests.exactness import same_bits

ROWS, WIDTH = 32, 8
LEAST_BYTES: dict[Any, int] = {}
"""The least budgets found so far, by model and batch."""


class Block(nn.Module):
    """Dropout, BatchNorm and ops that save inputs, outputs and internals."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(F.gelu(self.up(x)), 0.3)
        return x + self.norm(self.down(y)).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"hidden": x.sin(), "out": self.head(x).exp()}


class Smooth(nn.Module):
    """No op whose double backward is undefined or random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = F.softplus(layer(x)) * x.tanh()
        return {"hidden": x.sin(), "out": x.exp()}


def pair(
    make: Callable[[], nn.Module] = Net, batch: Tensor | None = None, **others: Any
) -> tuple[nn.Module, OptimizedModule, Tensor]:
    """Return an eager model, its twin optimized to the least budget, and a batch that requires grad.

    ``others``: further options, such as another budget.
    """
    x = (torch.randn(ROWS, WIDTH) if batch is None else batch).requires_grad_()
    torch.manual_seed(0)
    eager = make()
    torch.manual_seed(0)
    model = make()
    options: dict[str, Any] = {"optimizer": None, "loss_fn": loss_of, "planner": "intervals", **others}
    question = (make, x.shape, x.dtype) if not others else object()
    if "budget" not in options and question not in LEAST_BYTES:
        with pytest.raises(fxmem.InfeasibleBudgetError) as info:
            fxmem.optimize(model, x, budget="1B", **options)
        LEAST_BYTES[question] = info.value.least_bytes
    options.setdefault("budget", LEAST_BYTES.get(question))
    optimized = fxmem.optimize(model, x, **options)
    assert optimized.plan.dropped
    return eager, optimized, x


def loss_of(output: dict[str, Tensor]) -> Tensor:
    return output["out"].mean() + output["hidden"].square().sum()


def assert_both_do(
    action: Callable[[nn.Module, Tensor], Any],
    make: Callable[[], nn.Module] = Net,
    before: Callable[[nn.Module], Any] = lambda model: None,
    **others: Any,
) -> None:
    """Assert that ``action(model, x)`` returns and leaves behind the same bits on eager and optimized model.

    ``others``: as :func:`pair`.
    """
    eager, optimized, x = pair(make, **others)
    results = []
    for model in (eager, optimized):
        before(model)
        torch.manual_seed(5)
        mine = x.detach().clone().requires_grad_()
        returned = action(model, mine)
        returned = list(returned) if isinstance(returned, tuple | list) else [returned]
        tensors = [t for t in returned if isinstance(t, Tensor)]
        state = [*(p.grad for p in model.parameters()), *model.buffers(), mine.grad, torch.get_rng_state()]
        results.append([None if t is None else t.detach().clone() for t in (*tensors, *state)])
    assert len(results[0]) == len(results[1])
    wrong = [i for i, (a, b) in enumerate(zip(*results, strict=True)) if not same_bits(a, b)]
    assert wrong == []
