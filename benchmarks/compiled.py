"""Compiled steps under a budget: ``python -m benchmarks.compiled [--models NAMES] [--seconds N]``.

In: small models, on one CPU thread. Out: one table, and benchmarks/results/compiled.json, written after every row. Each
model is trained by torch.compile with nothing recomputed (``activation_memory_budget`` 1), at lower budgets of torch's own,
and by ``fxmem.optimize(backend="inductor")`` at shares of what keeping all takes above parameters and batch. Peaks are
those of the CPU allocator's events; gradients are compared with the first way's, bit by bit; times are CPU times in turns.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import fxmem
from benchmarks import models
from benchmarks.batches import images, tokens
from benchmarks.libraries import import_library
from benchmarks.losses import cross_entropy
from benchmarks.measure import allocator_rise_bytes, largest_relative_error
from benchmarks.models import BenchModel
from benchmarks.results_file import RESULTS, machine
from fxmem.profiling.storage_tracker import StorageTracker, tensors_of
from fxmem.profiling.training_step import run_step

SEED = 7
TORCH_BUDGETS = (1.0, 0.5)
SHARES = (0.8, 0.65)
"""fxmem's budgets: shares of what keeping all takes above parameters, batch and optimizer state."""


@dataclass
class Row:
    """One model trained one way."""

    model: str
    way: str
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    fixed_bytes: int | None = None
    """Of the peak: parameters, buffers and batch."""
    time_ratio: float | None = None
    """Median over turns of the step's time over that of the first way."""
    gradients: str | None = None
    """``bitwise`` those of the first way, or the largest relative error."""
    prepare_seconds: float | None = None
    """Planning and compiling."""
    plan_seconds: float | None = None
    problem: str | None = None


def small_models() -> dict[str, BenchModel]:
    """Return the models of this benchmark: two layers or blocks each, so that compiling does not take hours."""
    sizes = models._decoder_sizes
    t5 = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 1, "num_heads": 4}
    found = (
        models.get("gpt2_2l"),
        models._transformers(
            "bert_2l", "BertForMaskedLM", tokens((4, 64), (4, 64)), (), sizes(128, 2, 4, 64), {}, models._ENCODER
        ),
        models._transformers(
            "t5_1l", "T5ForConditionalGeneration", tokens((4, 32), (4, 32)), (), t5, {},
            {"dropout_rate": 0.1, "decoder_start_token_id": 0, "use_cache": False},
        ),
        BenchModel("vit_2l", _vit, images((4, 64), (4, 64)), cross_entropy, ()),
        models.get("resnet18"),
    )  # fmt: skip
    return {bench.name: bench for bench in found}


def _vit(scale: str) -> nn.Module:
    transformer = import_library("torchvision.models.vision_transformer").VisionTransformer
    return transformer(
        image_size=64, patch_size=8, num_layers=2, num_heads=4, hidden_dim=128, mlp_dim=512, dropout=0.1,
        attention_dropout=0.1, num_classes=10,
    ).train()  # fmt: skip


class Racer:
    """A copy of a model, trained one way."""

    def __init__(
        self, bench: BenchModel, initial: nn.Module, batch: models.Batch, compiled: Callable[..., Any]
    ) -> None:
        torch._dynamo.reset()
        self.bench, self.batch, self.module = bench, batch, copy.deepcopy(initial)
        start = time.perf_counter()
        self.forward = compiled(self.module)
        torch.manual_seed(SEED)
        self.step()
        self.gradients = {n: p.grad for n, p in self.module.named_parameters() if p.grad is not None}
        self.prepare_seconds = time.perf_counter() - start

    def step(self) -> None:
        self.module.zero_grad(set_to_none=True)
        args, kwargs = self.batch
        run_step(lambda: self.forward(*args, **kwargs), self.bench.loss)

    def measured_peak_bytes(self) -> int:
        self.step()
        self.module.zero_grad(set_to_none=True)
        gc.collect()
        held = StorageTracker().hold(tensors_of((self.module, self.batch)))
        return held + allocator_rise_bytes(self.step)

    def seconds(self) -> float:
        self.module.zero_grad(set_to_none=True)
        start = time.process_time()
        self.step()
        return time.process_time() - start


def rows_of(bench: BenchModel, seconds: float) -> Iterator[Row]:
    """Yield the row of each way; times are filled in when the last has run."""
    torch.manual_seed(SEED)
    initial = bench.build("cpu")
    if hasattr(initial, "loss_function"):
        initial.loss_type = "ForCausalLM"  # unset, transformers warns in the forward, which breaks the graph
    batch = bench.batch("cpu")
    rows, racers = [], []
    for row, compiled in _ways(bench, batch):
        rows.append(row)
        try:
            racer = Racer(bench, initial, batch, compiled)
        except Exception as error:
            row.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            yield row
            continue
        racers.append((row, racer))
        row.prepare_seconds = racer.prepare_seconds
        error = largest_relative_error(racers[0][1].gradients, racer.gradients)
        row.gradients = "bitwise" if error == 0 else f"{error:.1e}"
        row.measured_peak_bytes = racer.measured_peak_bytes()
        yield row
    _race(racers, seconds)


def _race(racers: list[tuple[Row, Racer]], seconds: float) -> None:
    once = sum(racer.seconds() for _, racer in racers)
    turns = []
    for i in range(int(max(5, min(25, seconds / once)))):
        order = racers if i % 2 else racers[::-1]
        turns.append({row.way: racer.seconds() for row, racer in order})
    first = racers[0][0].way
    for row, _ in racers:
        row.time_ratio = statistics.median(taken[row.way] / taken[first] for taken in turns)


def _ways(bench: BenchModel, batch: models.Batch) -> Iterator[tuple[Row, Callable[[nn.Module], Callable[..., Any]]]]:
    for budget in TORCH_BUDGETS:
        yield Row(bench.name, f"torch {budget:g}"), lambda module, budget=budget: _torch(module, budget)
    keep = Row(bench.name, "fxmem, no budget")
    yield keep, lambda module: _fxmem(keep, bench, batch, module)
    for share in SHARES if keep.predicted_peak_bytes is not None else ():
        assert keep.fixed_bytes is not None
        rise = keep.predicted_peak_bytes - keep.fixed_bytes
        row = Row(bench.name, f"fxmem {share:.0%}", budget_bytes=int(keep.fixed_bytes + share * rise))
        yield row, lambda module, row=row: _fxmem(row, bench, batch, module)


def _torch(module: nn.Module, budget: float) -> Callable[..., Any]:
    from torch._functorch import config

    compiled = torch.compile(module, fullgraph=True, dynamic=False)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
            return compiled(*args, **kwargs)

    return forward


def _fxmem(row: Row, bench: BenchModel, batch: models.Batch, module: nn.Module) -> Callable[..., Any]:
    options: dict[str, Any] = {"optimizer": None, "loss_fn": bench.loss, "cost": "cpu", "backend": "inductor"}
    compiled: Any = fxmem.optimize(module, *batch, budget=row.budget_bytes, **options)
    report = compiled.fxmem.report
    row.predicted_peak_bytes, row.fixed_bytes = report.predicted_peak_bytes, report.fixed_bytes
    row.plan_seconds = report.plan_seconds
    return compiled  # type: ignore[no-any-return]


def table(rows: list[Row]) -> str:
    """Return the rows as a table; MB are of the whole step."""
    mb: Callable[[int | None], str] = lambda n: "" if n is None else f"{n / 1e6:.3f}"  # noqa: E731
    head = (
        "model",
        "way",
        "budget MB",
        "predicted MB",
        "measured MB",
        "time",
        "gradients",
        "ready in s",
        "planned in s",
    )
    lines = [
        (
            r.model, r.way, mb(r.budget_bytes), mb(r.predicted_peak_bytes), mb(r.measured_peak_bytes),
            "" if r.time_ratio is None else f"{r.time_ratio:.3f}", r.problem or r.gradients,
            "" if r.prepare_seconds is None else f"{r.prepare_seconds:.0f}",
            "" if r.plan_seconds is None else f"{r.plan_seconds:.0f}",
        )
        for r in rows
    ]  # fmt: skip
    return tabulate(lines, head, disable_numparse=True)


def main() -> None:
    known = small_models()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(known), help="names, separated by commas")
    parser.add_argument("--seconds", type=float, default=20.0, help="of timed steps for each model")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    path = RESULTS / "compiled.json"
    asked = options.models.split(",")
    before = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    done = [Row(**row) for row in before if row["model"] not in asked]
    for name in asked:
        found: list[Row] = []
        for row in rows_of(known[name], options.seconds):
            found.append(row)
            print(table([row]), flush=True)
        done += found
        body = {"machine": machine(), "rows": [asdict(row) for row in done]}
        path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(table(done))


if __name__ == "__main__":
    main()
