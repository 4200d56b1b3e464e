"""What ``allow=(..., "fuse")`` gains: ``python -m benchmarks.fused_chains [--models NAMES] [--file FILE]``.

In: models of the comparison, on one CPU thread, under a budget halfway between the least reachable peak and eager's. Out: a
table and benchmarks/results/fused_chains.json: which chains of ops run as one kernel each, gradients beside eager's bit by
bit, and, where they are used, the step's time beside that of the same program without them, CPU times in turns.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import fxmem
from benchmarks import models
from benchmarks.measure import quartiles, turns
from benchmarks.models import BenchModel
from benchmarks.results_file import RESULTS, machine

PATH = RESULTS / "fused_chains.json"
MODELS = ("llama", "mixtral", "gpt2", "resnet18", "efficientnet_b0")
LARGER = {"llama": 8, "mixtral": 8, "gpt2": 8}
"""How often their batch is taken too: then no tensor stays in a core's cache."""
ALLOW = ("recompute", "inplace", "fuse")
NUM_STEPS = 3
"""Until steps run as programs."""
SECONDS = 8.0
"""Of timed steps for each model."""


def measured(name: str, times: int = 1) -> dict[str, Any]:
    """Return one row. ``times``: how often the batch is taken."""
    bench = models.get(name)
    torch.manual_seed(0)
    model, (args, kwargs) = bench.build("cpu"), bench.batch("cpu")
    args = tuple(t.repeat(times, *[1] * (t.dim() - 1)) for t in args)
    kwargs = {key: t.repeat(times, *[1] * (t.dim() - 1)) for key, t in kwargs.items()}
    options: dict[str, Any] = {"optimizer": None, "loss_fn": bench.loss}
    estimate: Any = fxmem.estimate(model, args, kwargs, **options)
    budget = (estimate.floor_bytes + estimate.peak_bytes) // 2
    expected = _gradients(model, bench, args, kwargs)
    ways = {}
    for way, more in (("without", {"runtime": "program"}), ("with", {"allow": ALLOW})):
        ways[way] = fxmem.optimize(copy.deepcopy(model), args, kwargs, budget=budget, **options, **more)
        start = time.perf_counter()
        for _ in range(NUM_STEPS):
            found = _gradients(ways[way], bench, args, kwargs)
        seconds = time.perf_counter() - start
        assert all(map(torch.equal, expected, found)), f"{name} {way}: other bits than eager's"
    told = ways["with"].fxmem.fused
    row = {
        "model": name,
        "times": times,
        "budget_bytes": budget,
        "told": told,
        "first_steps_seconds": round(seconds, 1),
    }
    if told.startswith("none"):
        return row

    def seconds_of(way: str) -> float:
        start = time.process_time()
        _gradients(ways[way], bench, args, kwargs)
        return time.process_time() - start

    low, ratio, high = quartiles(t["with"] / t["without"] for t in turns(tuple(ways), seconds_of, SECONDS))
    return {**row, "time_ratio": ratio, "time_ratio_low": low, "time_ratio_high": high}


def _gradients(model: nn.Module, bench: BenchModel, args: Any, kwargs: Any) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    bench.loss(model(*args, **kwargs)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def told() -> str:
    """Return the table for docs/below_the_floor.md."""
    found = json.loads(PATH.read_text())
    rows = []
    for row in found["rows"]:
        name = f"{row['model']}, {row['times']} batches" if row["times"] > 1 else row["model"]
        rows.append((name, row["told"], f"{row['time_ratio'] - 1:+.1%}" if "time_ratio" in row else "-"))
    facts = found["machine"]
    return (
        f"`python -m benchmarks.fused_chains` (one CPU thread, torch {facts['torch']}, {facts['date']}; budgets halfway "
        "between the floor and eager's peak; gradients are eager's bits in all):\n\n"
        + tabulate(rows, ("model", "told", "measured, of the step's time"), tablefmt="github", disable_numparse=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--file", type=Path, default=PATH)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    wanted = [(name, times) for name in given.models for times in (1, *([LARGER[name]] if name in LARGER else []))]
    for name, times in wanted:
        rows.append(measured(name, times))
        print(rows[-1], flush=True)
        given.file.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
