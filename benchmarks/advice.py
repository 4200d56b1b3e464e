"""Is advice right? Each habit that can be had on the CPU, applied and measured: ``python -m benchmarks.advice [NAME...]``.

In: names of benchmark models, at their small sizes. Out: a table, and ``results/advice.json``: for every habit of
:data:`fxmem.advice.habits.HABITS` the peak that :func:`fxmem.advise` tells, and the peak of a real step of the changed
model, both in bytes, which must be equal, and what torch's profiler sees of it at the allocator; for plans under a budget;
evaluation and what cycles hold, too; with ``--times``, the changed step's time over the original's, the median of
pairs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from tabulate import tabulate

import fxmem
from benchmarks import models
from benchmarks.measure import allocator_rise_bytes
from benchmarks.results_file import RESULTS, save_rows
from fxmem.advice.evaluate import BESIDE, plan_options
from fxmem.advice.habits import HABITS, Habit
from fxmem.advice.subject import Subject
from fxmem.profiling.storage_tracker import StorageTracker, tensors_of
from fxmem.profiling.training_step import TrainingStep, loss_of, optimizer_class, run_step
from fxmem.runtime.autocast import Autocast

PATH = RESULTS / "advice.json"
NAMES = ("resnet50", "unet", "gpt2", "vit")
PLANNING: dict[str, Any] = {"plan_seconds": 2.0, "cost": "cpu"}
"""Options of the plans."""
SHARE = 0.8
"""The budget of the plans, of the step's own peak."""
NUM_PAIRS = 5
MOST_SKIPPED = 30
"""Steps that a GradScaler may leave out, its scale being too large at first: until then the optimizer has no state."""


@dataclass(frozen=True)
class Row:
    """One habit on one model; bytes are None where it cannot be had, and ``note`` says why."""

    model: str
    habit: str
    told_bytes: int | None = None
    measured_bytes: int | None = None
    allocator_bytes: int | None = None
    """The same step seen by torch's profiler at the CPU's allocator, with what kernels take inside."""
    note: str = ""
    time_ratio: float | None = None

    @property
    def exact(self) -> bool:
        """Whether the peak is the one told."""
        return self.told_bytes == self.measured_bytes


class Stepper:
    """A subject with a real optimizer, ready to step."""

    def __init__(self, subject: Subject) -> None:
        self.subject, given = subject, subject.step.optimizer
        self.scaler = None if subject.step.scaler is None else torch.amp.GradScaler("cpu")
        model: Any = subject.model
        if subject.step.in_backward:
            self.optimizer = model.fxmem.optimizer
            return
        cls: Any = optimizer_class(given) if isinstance(given, str) else given
        self.optimizer = None if cls is None else cls([p for p in model.parameters() if p.requires_grad])

    def step(self, with_optimizer: bool = True) -> None:
        """Run a step, or all of it before the optimizer."""
        subject = self.subject
        region = Autocast("cpu", subject.step.autocast) if subject.step.autocast else None
        optimizer = self.optimizer if with_optimizer else None
        run_step(self._forward, subject.step.loss_fn, optimizer, region, scaler=self.scaler)

    def _forward(self) -> Any:
        return self.subject.model(*self.subject.args, **self.subject.kwargs)

    def peak_bytes(self) -> int:
        """Return the measured peak of a step of the steady state."""
        for _ in range(MOST_SKIPPED):
            self.step()
            if self.scaler is None or self.optimizer is None or self.optimizer.state:
                break
        self._accumulate()
        tracker = self._tracker()
        with tracker:
            self.step()
        return tracker.peak_bytes

    def allocator_bytes(self) -> int:
        """Return the peak of such a step as torch's profiler sees it, after :meth:`peak_bytes`."""
        self._accumulate()
        return self._tracker().live_bytes + allocator_rise_bytes(self.step)

    def _accumulate(self) -> None:
        if self.subject.step.accumulate:
            self.step(with_optimizer=False)

    def _tracker(self) -> StorageTracker:
        tracker = StorageTracker()
        tracker.hold(tensors_of((self.subject.model, self.optimizer or [], self.scaler or [], self.subject.tensors)))
        return tracker

    def evaluation_bytes(self, no_grad: bool) -> int:
        """Return the measured peak of a forward and loss in eval mode, after a step."""
        self.subject.model.eval()
        tracker = self._tracker()
        with tracker, torch.set_grad_enabled(not no_grad):
            output = self._forward()
            _loss = loss_of([output], self.subject.step.loss_fn)
        return tracker.peak_bytes

    def cyclic_bytes(self) -> int:
        """Return what is alive after a step until garbage is collected."""
        tracker = self._tracker()
        gc.collect()
        gc.disable()
        with tracker:
            self.step()
            before = tracker.live_bytes
            gc.collect()
        gc.enable()
        return before - tracker.live_bytes

    def seconds(self, num_parts: int = 1) -> float:
        """Return the CPU time of a step over ``num_parts`` micro-batches."""
        start = time.process_time()
        for part in range(num_parts):
            self.step(with_optimizer=part == num_parts - 1)
        return time.process_time() - start


def applied(habit: Habit, subject: Subject, budget: int | None = None, **planning: Any) -> Subject:
    """Return the real subject with the habit, ready to run; a plan is for ``budget``, else for the least."""
    changed = habit.change(subject.with_model())
    if habit.measured_as not in ("plan", "graph"):
        return changed
    step = changed.step
    if in_backward := "optimizer_in_backward" in habit.allow:  # which wants what makes the optimizer
        step = replace(step, optimizer=optimizer_class(step.optimizer))
    options: dict[str, Any] = {"step": step, **(planning or PLANNING), **plan_options([habit])}
    if habit.measured_as == "graph":
        options["budget"] = None
    elif budget is None:
        found = fxmem.estimate(changed.model, changed.args, changed.kwargs, **options)
        options["budget"] = found.floor_bytes
    else:
        options["budget"] = budget
    model = fxmem.optimize(changed.model, changed.args, changed.kwargs, **options)
    return Subject(model, changed.args, changed.kwargs, replace(step, in_backward=in_backward))


def rows_of(name: str, times: bool) -> Iterator[Row]:
    """Yield the row of each habit on one model."""
    bench = models.get(name)
    torch.manual_seed(0)
    args, kwargs = bench.batch("cpu")
    subject = Subject(bench.build("cpu"), args, kwargs, TrainingStep(loss_fn=bench.loss, optimizer="adamw"))
    found = fxmem.estimate(subject.model, args, kwargs, step=subject.step)
    stepper = Stepper(subject.with_model())
    yield Row(name, "as it is", found.peak_bytes, stepper.peak_bytes(), stepper.allocator_bytes())
    yield Row(name, "held by cycles", found.cyclic_bytes(), stepper.cyclic_bytes())
    for no_grad in (False, True):
        what = f"evaluation, {'no_grad' if no_grad else 'with gradients on'}"
        told_bytes = found.evaluation_peak_bytes(no_grad=no_grad)
        yield Row(name, what, told_bytes, stepper.evaluation_bytes(no_grad))
    budget = int(SHARE * found.peak_bytes)
    advice = fxmem.advise(subject.model, args, kwargs, step=subject.step, budget=budget, **PLANNING)
    for habit in (habit for habit in HABITS if habit.measured_as not in BESIDE):
        told = advice[habit.name]
        if told.peak_bytes is None:
            yield Row(name, habit.name, note=told.note)
            continue
        stepper = Stepper(applied(habit, subject, max(budget, told.peak_bytes)))
        measured, allocator = stepper.peak_bytes(), stepper.allocator_bytes()
        ratio = _time_ratio(stepper, subject) if times else None
        yield Row(name, habit.name, told.peak_bytes, measured, allocator, told.note, ratio)


def _time_ratio(stepper: Stepper, subject: Subject) -> float:
    plain = Stepper(subject.with_model())
    plain.step()
    in_parts = stepper.subject.step.accumulate and not subject.step.accumulate
    num_parts = subject.batch // stepper.subject.batch if in_parts else 1
    pairs = [(stepper.seconds(num_parts), plain.seconds()) for _ in range(NUM_PAIRS)]
    return statistics.median(changed / original for changed, original in pairs)


def main() -> int:
    """Print and write the table; the exit status is 1 if a peak is not the one told."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES, help=f"models of the benchmarks ({', '.join(NAMES)})")
    parser.add_argument("--times", action="store_true", help="measure times too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in arguments.names:
        for row in rows_of(name, arguments.times):
            rows.append(row)
            print(name, row.habit, row.told_bytes, row.measured_bytes, flush=True)
        save_rows(PATH, [*_rows_of_others({row.model for row in rows}), *rows])
    print(table(rows))
    return int(not all(row.exact for row in rows))


def _rows_of_others(names: set[str]) -> list[Row]:
    """Return the rows of the file that are of other models."""
    rows = json.loads(PATH.read_text(encoding="utf-8"))["rows"] if PATH.exists() else []
    return [Row(**row) for row in rows if row["model"] not in names]


def table(rows: list[Row]) -> str:
    """Return the rows as a table."""
    body = [
        (
            r.model,
            r.habit,
            r.told_bytes,
            r.measured_bytes,
            ("NO", "yes")[r.exact] if r.told_bytes is not None else "",
            r.allocator_bytes,
            r.time_ratio,
        )
        for r in rows
    ]
    heads = ("model", "habit", "told, bytes", "measured, bytes", "equal", "profiler, bytes", "time")
    return tabulate(body, headers=heads, floatfmt=".2f")


if __name__ == "__main__":
    raise SystemExit(main())
