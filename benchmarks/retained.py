"""Graphs that are gone through more than once: ``python -m benchmarks.retained``.

The measured peak of a CPU step, gradients included, in bytes of PyTorch's own storages: eager, with
``torch.utils.checkpoint`` around each block (``use_reentrant=False``), and under fxmem at a budget of 2 % above its least
peak for one loss and one backward. No plan keeps that where a graph is retained: fxmem warns, and goes on with the least
that it finds for the loop. A GPT of 12 blocks without
dropout; ``create_graph`` differentiates the norm of the gradient.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxmem
from benchmarks.results_file import RESULTS, machine

PATH = RESULTS / "retained.json"
WIDTH, BLOCKS, BATCH, LENGTH = 64, 12, 8, 64


@dataclass(frozen=True)
class Retained:
    """Peaks of one kind of loop, in bytes, and whether fxmem's gradients are bitwise eager's."""

    loop: str
    eager_bytes: int
    checkpoint_bytes: int
    fxmem_bytes: int
    """In the first step, planned as one forward and one backward."""
    planned_bytes: int
    """In the third, by when the loop was planned for."""
    same_bits: bool


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).split(WIDTH, -1)
        weights = (q @ k.transpose(1, 2) / WIDTH**0.5).softmax(-1)
        x = x + self.proj(weights @ v)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.per_block = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.per_block else block(x)
        return self.one(x), self.other(x)


def losses(output: Any) -> tuple[Tensor, Tensor]:
    return output[0].square().mean(), output[1].square().mean()


def one_backward(output: Any, model: nn.Module) -> None:
    sum(losses(output)).backward()  # type: ignore[union-attr]


def retain_graph(output: Any, model: nn.Module) -> None:
    sum(losses(output)).backward(retain_graph=True)  # type: ignore[union-attr,call-arg]


def same_loss_twice(output: Any, model: nn.Module) -> None:
    loss: Any = sum(losses(output))
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses(output: Any, model: nn.Module) -> None:
    first, second = losses(output)
    first.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    second.backward()  # type: ignore[no-untyped-call]


def create_graph(output: Any, model: nn.Module) -> None:
    loss: Any = sum(losses(output))
    norm: Any = sum(g.square().sum() for g in torch.autograd.grad(loss, list(model.parameters()), create_graph=True))
    norm.backward()


LOOPS = (one_backward, retain_graph, same_loss_twice, two_losses, create_graph)


def step(model: nn.Module, x: Tensor, loop: Callable[[Any, nn.Module], None]) -> tuple[int, list[Tensor]]:
    """Return the peak of a step in bytes, and the gradients it leaves."""
    with fxmem.track(model, x) as memory:
        output = model(x)
        loop(output, model)
        del output
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    return memory.peak_bytes, gradients


def measured(loop: Callable[[Any, nn.Module], None], net: Net, x: Tensor, budget: int) -> Retained:
    """Measure one kind of loop three ways."""
    optimized = fxmem.optimize(net, x, optimizer=None, loss_fn=loss_fn, cost="cpu", budget=budget)
    eager_bytes, expected = step(net, x, loop)
    net.per_block = True
    checkpoint_bytes, _ = step(net, x, loop)
    net.per_block = False
    steps = [step(optimized, x, loop) for _ in range(3)]
    same = all(torch.equal(a, b) for _, grads in steps for a, b in zip(expected, grads, strict=True))
    return Retained(loop.__name__, eager_bytes, checkpoint_bytes, steps[0][0], steps[2][0], same)


def loss_fn(output: Any) -> Tensor:
    return sum(losses(output))  # type: ignore[return-value]


def main() -> int:
    """Print and save the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, x = Net(), torch.randn(BATCH, LENGTH, WIDTH)
    budget = int(1.02 * fxmem.estimate(net, x, optimizer=None, loss_fn=loss_fn, cost="cpu").floor_bytes)
    rows = []
    for loop in LOOPS:
        rows.append(measured(loop, net, x, budget))
        print(rows[-1], flush=True)
    table = {"budget_bytes": budget, "rows": [asdict(row) for row in rows]}
    PATH.write_text(json.dumps({"machine": machine(), **table}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
