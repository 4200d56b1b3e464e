"""What fxmem does, on a real model: train eager, train inside half the memory, compare.

``python -m benchmarks.demo`` (``make demo``) optimizes torchvision's ResNet-50 at three budgets and prints, for each,
predicted peak, measured peak, time of a step and whether every gradient is bitwise eager's.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxmem
from fxmem.profiling.training_step import run_step
from tests import zoo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="a name of tests/zoo.py")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # so that eager itself gives the same bits twice
    entry = zoo.get(arguments.model)
    torch.manual_seed(0)
    initial = entry.build().train()
    args, kwargs = entry.batch(arguments.batch)

    print(f"{arguments.model}, batch {arguments.batch}, CPU. Where one eager training step's memory is at its peak:")
    print(fxmem.estimate(initial, args, kwargs, optimizer="sgd", loss_fn=entry.loss))
    planned = fxmem.optimize(copy.deepcopy(initial), args, kwargs, optimizer="sgd", loss_fn=entry.loss).report
    floor_bytes, eager_bytes = planned.floor_bytes, planned.eager_peak_bytes
    models: list[tuple[str, nn.Module]] = [("eager", copy.deepcopy(initial))]
    for share in (0.5, 0.25, 0.0):
        budget = floor_bytes + int(share * (eager_bytes - floor_bytes))
        optimized = fxmem.optimize(
            copy.deepcopy(initial), args, kwargs, budget=budget, optimizer="sgd", loss_fn=entry.loss
        )
        models.append((f"budget {budget / 1e9:.4f} GB", optimized))

    print(f"\ntraining {arguments.steps} steps each, interleaved")
    runs = [Run(name, model, (args, kwargs), entry.loss) for name, model in models]
    for step in range(arguments.steps):
        for run in runs:
            run.step(seed=step)
    print(tabulate([run.row(runs[0]) for run in runs], headers=HEADERS, disable_numparse=True))
    print()
    print(models[1][1].report)


HEADERS = ("way", "predicted peak GB", "measured peak GB", "s / step", "x eager", "loss", "gradients")


class Run:
    """One model in training: peaks, times, and the last step's numbers."""

    def __init__(self, name: str, model: nn.Module, batch: Any, loss_fn: Callable[[Any], Tensor]) -> None:
        self.name, self.model, self.batch, self.loss_fn = name, model, batch, loss_fn
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.seconds: list[float] = []
        self.peak_bytes = 0
        self.loss = torch.zeros(())
        self.gradients: list[Tensor | None] = []

    def step(self, seed: int) -> None:
        """Train one measured and one timed step's worth: the first step is tracked, the others are timed."""
        args, kwargs = self.batch
        torch.manual_seed(seed)

        def loss_fn(output: Any) -> Tensor:
            self.loss = self.loss_fn(output)
            return self.loss

        if not self.peak_bytes:
            with fxmem.track(self.model, self.optimizer, args, kwargs) as memory:
                run_step(lambda: self.model(*args, **kwargs), loss_fn, self.optimizer)
            self.peak_bytes = memory.peak_bytes
            return
        start = time.perf_counter()
        loss_fn(self.model(*args, **kwargs)).backward()
        self.seconds.append(time.perf_counter() - start)
        self.gradients = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def row(self, eager: Run) -> tuple[str, ...]:
        """Return this run's line of the table."""
        planned = isinstance(self.model, fxmem.OptimizedModule)
        ratios = [a / b for a, b in zip(self.seconds, eager.seconds, strict=True)]
        same = all(_same(a, b) for a, b in zip(self.gradients, eager.gradients, strict=True))
        return (
            self.name,
            f"{self.model.report.predicted_peak_bytes / 1e9:.6f}" if planned else "",
            f"{self.peak_bytes / 1e9:.6f}",
            f"{statistics.median(self.seconds):.3f}",
            f"{statistics.median(ratios):.2f}",
            f"{self.loss.item():.6f}",
            "bitwise equal" if same else "DIFFER",
        )


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


if __name__ == "__main__":
    main()
