"""Compiled steps on a GPU: ``python -m benchmarks.gpu_compiled [FILE] [--cases a,b]``, and a measurement of the first run.

In: cases of :mod:`benchmarks.cuda_cases`. Out: for ``torch.compile``, under its own ``activation_memory_budget`` too, and
for ``backend="inductor"`` at several budgets, the allocated peak of a step beside the one that was told, that of the first
steps, in which Inductor tries kernels, the time of a step, and how far gradients are from those of the compiled step that
keeps all. Budgets are torch.compile's own peaks, the least one and the one half way between it and what a step takes that
keeps all. Several processes may measure at once: steps are timed by one of them at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fxmem
from benchmarks.cuda_cases import CASES, Case
from benchmarks.cuda_memory import loss_of, on_cuda, step_of, train
from benchmarks.gpu_rows import Row, alone, row, stat
from benchmarks.measure import largest_relative_error
from benchmarks.results_file import machine
from benchmarks.ways import least_compiled_bytes
from fxmem.compiled.report import CompiledReport

THEIRS = (0.5, 0.2)
"""Of ``activation_memory_budget``."""
SHARES = (0.5, 0.0)
"""Of the way from the least budget to what a step takes that keeps all."""
NAMES = ("mlp fp32", "causal bf16 autocast", "unet fp32")
"""Of the first run."""
NUM_TIMED = 20


def compiled(names: tuple[str, ...] = NAMES) -> Iterator[Row]:
    """Yield the rows of each case: torch's own, then the budgets."""
    for name in names:
        yield from _rows_of(name, CASES[name])


def _rows_of(name: str, case: Case) -> Iterator[Row]:
    theirs = _theirs(case, 1.0)
    yield row(f"{name}: torch.compile", real=theirs.steady, note=_told(theirs, theirs))
    report, found, _ = _planned(case, None)
    expected, again = found.gradients, largest_relative_error(found.gradients, found.gradients_again)
    note = f"{_told(found, theirs)}, gradients of two such steps {_apart(again)}"
    yield row(f"{name}: keeping all", report.predicted_peak_bytes, None, found.steady, note)
    peaks = [theirs.steady]
    for share in THEIRS:
        peer = _theirs(case, share)
        peaks.append(peer.steady)
        note = f"{_told(peer, theirs)}, gradients {_apart(largest_relative_error(theirs.gradients, peer.gradients))}"
        yield row(f"{name}: torch.compile, its budget {share}", real=peer.steady, note=note)
    whole, least = report.predicted_peak_bytes, _least(case)
    budgets = [least + int(share * max(whole - least, 0)) for share in SHARES]
    for budget in dict.fromkeys([*(peak for peak in peaks if least <= peak < whole), *budgets]):
        report, found, seconds = _planned(case, budget)
        kept = "kept" if max(found.steady, found.first) <= budget else "OVER"
        said = (
            f"{kept}, first steps {found.first:,} of at most {report.most_bytes:,}, {_told(found, theirs)}, gradients "
            f"{_apart(largest_relative_error(expected, found.gradients))}, estimated {report.overhead_ratio:+.1%}, planned "
            f"in {seconds:.0f} s"
        )
        yield row(f"{name}: budget of {budget:,}", report.predicted_peak_bytes, None, found.steady, said)


def _theirs(case: Case, share: float) -> _Measured:
    """Return what was measured of torch.compile under its own budget; 1 is none."""
    with torch._functorch.config.patch(activation_memory_budget=share, enable_autograd_cache=False):
        return _Run(case).compiled().measured()


def _least(case: Case) -> int:
    """Return the least budget; nothing is left on the device."""
    run = _Run(case)
    return least_compiled_bytes(run.model, run.batch, run.options)


def _planned(case: Case, budget: int | None) -> tuple[CompiledReport, _Measured, float]:
    """Return what was told, what was measured, and the seconds of planning."""
    run, start = _Run(case), time.perf_counter()
    run.optimize(budget)
    seconds = time.perf_counter() - start
    found = run.measured()
    return run.model.fxmem.report, found, seconds


@dataclass(frozen=True)
class _Measured:
    first: int
    """Peak of the first steps, in bytes."""
    steady: int
    """Of those that follow."""
    seconds: float
    """Of a step, the median."""
    gradients: dict[str, torch.Tensor]
    gradients_again: dict[str, torch.Tensor]
    """Of another step with the same numbers: kernels that add in any order give others."""


def _apart(error: float) -> str:
    return "equal" if error == 0 else f"{error:.0e} apart"


def _told(found: _Measured, theirs: _Measured) -> str:
    return f"{found.seconds * 1e3:.1f} ms a step, {found.seconds / theirs.seconds:.2f} of torch.compile's"


class _Run:
    """One model on a device with nothing else there."""

    def __init__(self, case: Case) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        self.case = case
        self.model: Any
        self.model, self.batch, self.scaler = on_cuda(case)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def compiled(self) -> _Run:
        """Have torch.compile compile it."""
        self.model = torch.compile(self.model)
        return self

    @property
    def options(self) -> dict[str, Any]:
        """How it is planned."""
        return {"step": step_of(self.case, self.optimizer, self.scaler), "backend": "inductor"}

    def optimize(self, budget: int | None) -> None:
        self.model = fxmem.optimize(self.model, *self.batch, budget=budget, **self.options)

    def measured(self) -> _Measured:
        """Train some steps."""
        torch.cuda.reset_peak_memory_stats()
        gradients, again = self._gradients(), self._gradients()
        self._train(2)
        first = stat("allocated", "peak")
        torch.cuda.reset_peak_memory_stats()
        self._train(2)
        steady, times = stat("allocated", "peak"), []
        with alone():
            for _ in range(NUM_TIMED):
                torch.cuda.synchronize()
                start = time.perf_counter()
                self._train(1)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
        return _Measured(first, steady, statistics.median(times), gradients, again)

    def _gradients(self) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        args, kwargs = self.batch
        with torch.autocast("cuda", self.case.autocast or torch.float16, enabled=self.case.autocast is not None):
            loss = loss_of(self.model(*args, **kwargs))
        loss.backward()
        found = {name: p.grad.cpu() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.zero_grad()
        return found

    def _train(self, num_steps: int) -> None:
        train(self.case, self.model, self.batch, self.optimizer, self.scaler, num_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--cases", default=",".join(NAMES))
    given = parser.parse_args()
    rows: list[Row] = []
    for each in compiled(tuple(given.cases.split(","))):
        rows.append(each)
        print(each, flush=True)
        given.file.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
