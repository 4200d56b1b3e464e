"""``python -m benchmarks.sizes``: what another size of a model costs that was planned for, on the CPU.

One optimized module sees a model at one size after the other, as in training on texts of many lengths or with a last batch
that is smaller, under one budget; beside it each size gets a module of its own, which captures and plans from nothing.
Printed for each size: which planner found the plan, CPU seconds until the first step can run, and the plan's extra time in
percent of the step, both ways. Op times are the CPU preset's, so that plans are the same in every run and nothing is
measured. Results go to ``benchmarks/results/sizes.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass

import torch
from tabulate import tabulate
from torch import nn

import fxmem
from benchmarks import models
from benchmarks.results_file import RESULTS, machine
from fxmem.capture.dynamic_batch import resized
from fxmem.capture.graph import Inputs

PATH = RESULTS / "sizes.json"
SHARE = 0.4
"""The budget, as a share of the way from the floor to eager's peak at the first size."""
SIZES = {"gpt2": (1, (128, 120, 112, 100, 90, 124)), "t5": (1, (64, 60, 52, 48)), "resnet50": (0, (4, 3, 5, 2))}
"""By model: the dimension of its inputs that varies, and the sizes in the order in which they come."""


@dataclass(frozen=True)
class Row:
    """One size of one model; seconds of CPU time, extra time as a share of the step."""

    model: str
    size: int
    planner: str
    seconds: float
    overhead_ratio: float
    anew_seconds: float
    anew_overhead_ratio: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    names = parser.parse_args().models
    torch.set_num_threads(1)
    os.environ["FXMEM_CACHE"] = "0"
    rows = [row for name in names for row in _measure(name)]
    print(tabulate([asdict(row) for row in rows], headers="keys", floatfmt=".3f"))
    PATH.write_text(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0


def _measure(name: str) -> list[Row]:
    bench = models.get(name)
    dim, sizes = SIZES[name]
    model = bench.build("cpu").train()
    args, kwargs = bench.batch("cpu")
    inputs = Inputs.of(tuple(args), dict(kwargs))
    size = inputs.tensors[0].shape[dim]
    dims = frozenset((i, dim) for i, t in enumerate(inputs.leaves) if t.dim() > dim and t.shape[dim] == size)
    report = _optimized(model, bench, None).fxmem.compiled_for(resized(inputs, dims, sizes[0]), None).report
    budget_bytes = report.floor_bytes + round(SHARE * (report.eager_peak_bytes - report.floor_bytes))
    shared = _optimized(model, bench, budget_bytes)
    rows = []
    for size in sizes:
        planner, seconds, overhead_ratio = _first_sight(shared, resized(inputs, dims, size))
        _, anew_seconds, anew_ratio = _first_sight(_optimized(model, bench, budget_bytes), resized(inputs, dims, size))
        rows.append(Row(name, size, planner, seconds, overhead_ratio, anew_seconds, anew_ratio))
    return rows


def _optimized(model: nn.Module, bench: models.BenchModel, budget_bytes: int | None) -> fxmem.OptimizedModule:
    return fxmem.optimize(model, budget=budget_bytes, loss_fn=bench.loss, optimizer="sgd", cost="cpu", cache=False)


def _first_sight(optimized: fxmem.OptimizedModule, inputs: Inputs) -> tuple[str, float, float]:
    start = time.thread_time()
    report = optimized.fxmem.compiled_for(inputs, None).report
    return report.planner, time.thread_time() - start, report.overhead_ratio


if __name__ == "__main__":
    raise SystemExit(main())
