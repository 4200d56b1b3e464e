"""Is advice right? Each habit that can be had on the CPU, applied and measured: ``python -m benchmarks.advice [NAME...]``.

In: names of benchmark models, at their small sizes. Out: a table, and ``results/advice.json``: for every habit of
:data:`fxmem.advice.habits.HABITS` the peak that :func:`fxmem.advise` tells, and the peak of a real step of the changed
model, both in bytes, which must be equal; with ``--times``, the changed step's time over the original's, the median of
pairs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

import fxmem
from benchmarks import models
from benchmarks.results_file import RESULTS, save_rows
from fxmem.advice.habits import HABITS, Habit
from fxmem.advice.subject import Subject
from fxmem.profiling.storage_tracker import StorageTracker, tensors_of
from fxmem.profiling.training_step import TrainingStep, optimizer_class, run_step
from fxmem.runtime.autocast import Autocast

PATH = RESULTS / "advice.json"
NAMES = ("resnet50", "unet", "gpt2", "vit")
PLANNING: dict[str, Any] = {"plan_seconds": 2.0, "cost": "cpu"}
"""Options of the plans."""
NUM_PAIRS = 5


@dataclass(frozen=True)
class Row:
    """One habit on one model; bytes are None where it cannot be had, and ``note`` says why."""

    model: str
    habit: str
    told_bytes: int | None
    measured_bytes: int | None
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
        cls: Any = optimizer_class(given) if isinstance(given, str) else given
        self.optimizer = None if cls is None else cls([p for p in subject.model.parameters() if p.requires_grad])

    def step(self, with_optimizer: bool = True) -> None:
        """Run a step, or all of it before the optimizer."""
        subject = self.subject
        region = Autocast("cpu", subject.step.autocast) if subject.step.autocast else None
        optimizer = self.optimizer if with_optimizer else None
        run_step(lambda: subject.model(*subject.args, **subject.kwargs), subject.step.loss_fn, optimizer, region)

    def peak_bytes(self) -> int:
        """Return the measured peak of a step of the steady state."""
        self.step()
        if self.subject.step.accumulate:
            self.step(with_optimizer=False)
        tracker = StorageTracker()
        tracker.hold(tensors_of((self.subject.model, self.optimizer or [], self.subject.tensors)))
        with tracker:
            self.step()
        return tracker.peak_bytes

    def seconds(self) -> float:
        """Return the CPU time of a step."""
        start = time.process_time()
        self.step()
        return time.process_time() - start


def applied(habit: Habit, subject: Subject, budget: int | None = None, **planning: Any) -> Subject:
    """Return the real subject with the habit, ready to run; a plan is for ``budget``, else for the least."""
    changed = habit.change(subject.with_model())
    if habit.measured_as == "step":
        return changed
    options: dict[str, Any] = {"step": changed.step, **(planning or PLANNING)}
    if habit.measured_as == "graph":
        options |= {"inplace": False, "compress_saved": False}
    elif budget is None:
        found = fxmem.estimate(changed.model, changed.args, changed.kwargs, **options)
        options["budget"] = found.floor_bytes
    else:
        options["budget"] = budget
    model = fxmem.optimize(changed.model, changed.args, changed.kwargs, **options)
    return Subject(model, changed.args, changed.kwargs, changed.step)


def rows_of(name: str, times: bool) -> Iterator[Row]:
    """Yield the row of each habit on one model."""
    bench = models.get(name)
    torch.manual_seed(0)
    args, kwargs = bench.batch("cpu")
    subject = Subject(bench.build("cpu"), args, kwargs, TrainingStep(loss_fn=bench.loss, optimizer="adamw"))
    advice = fxmem.advise(subject.model, args, kwargs, step=subject.step, **PLANNING)
    yield Row(name, "as it is", advice.peak_bytes, Stepper(subject.with_model()).peak_bytes())
    for habit in HABITS:
        told = advice[habit.name]
        if told.peak_bytes is None:
            yield Row(name, habit.name, None, None, told.note)
            continue
        stepper = Stepper(applied(habit, subject))
        measured = stepper.peak_bytes()
        yield Row(
            name, habit.name, told.peak_bytes, measured, told.note, _time_ratio(stepper, subject) if times else None
        )


def _time_ratio(stepper: Stepper, subject: Subject) -> float:
    plain = Stepper(subject.with_model())
    plain.step()
    pairs = [(stepper.seconds(), plain.seconds()) for _ in range(NUM_PAIRS)]
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
        rows += rows_of(name, arguments.times)
    print(table(rows))
    if tuple(arguments.names) == NAMES:
        save_rows(PATH, rows)
    return int(not all(row.exact for row in rows))


def table(rows: list[Row]) -> str:
    """Return the rows as a table."""
    body = [
        (r.model, r.habit, r.told_bytes, r.measured_bytes, ("NO", "yes")[r.exact] if r.told_bytes else "", r.time_ratio)
        for r in rows
    ]
    return tabulate(body, headers=("model", "habit", "told, bytes", "measured, bytes", "equal", "time"), floatfmt=".2f")


if __name__ == "__main__":
    raise SystemExit(main())
