"""What reports tell of time: ``python -m benchmarks.report_time [--models NAMES] [--seconds N]``.

In: models of the comparison, on one CPU thread. Out: a table, and benchmarks/results/report_time.json, written after every
model. Each model is trained under three budgets, shares of the way from its least peak to eager's, in turns with the same
without a budget and with eager. Told is the report's ``overhead_ratio``: what recomputing takes, as a share of a step that
keeps all. Measured is the median over the turns of a step's CPU time over that of the step without a budget, less 1.

glibc gives memory back to the system and takes it again, page by page, which makes equal steps differ by 5 % and more. Here
it keeps its pages, as CUDA's allocator does (:data:`KEEP_PAGES`); equal steps are then within 1 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tabulate import tabulate

from benchmarks import models
from benchmarks.measure import SEED, Racer, quartiles, seconds_of, turns
from benchmarks.results_file import RESULTS, machine
from benchmarks.ways import EAGER, Way

PATH = RESULTS / "report_time.json"
MODELS = ("gpt2", "bert", "t5", "llama", "whisper", "vit", "swin_t", "resnet50", "unet", "mobilenet_v3_large")
SHARES = (0.75, 0.5, 0.25)
LEAST_TURNS, MOST_TURNS = 12, 60
KEEP_PAGES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**37), "MALLOC_TOP_PAD_": str(2**28)}
"""Settings of glibc."""
NEAR = 0.03
"""Of a step: what is told is near what is measured."""


@dataclass(frozen=True)
class Row:
    """One model under one budget."""

    model: str
    share: float
    """Of the way from the least peak to eager's."""
    told: float
    measured: float
    low: float
    """The first quartile of turns, of which ``measured`` is the median."""
    high: float
    """The third."""
    free_of_eager: float
    """Median of the time of a step without a budget over eager's."""
    num_turns: int
    step_seconds: float
    runtime: str

    @property
    def points(self) -> float:
        """Measured less told, in points of a step."""
        return 100 * (self.measured - self.told)


def rows_of(name: str, seconds: float) -> list[Row]:
    """Return the rows of one model. ``seconds``: CPU time that the turns may take."""
    bench = models.get(name)
    torch.manual_seed(SEED)
    initial, batch = bench.build("cpu"), bench.batch("cpu")
    eager = Racer(EAGER, initial, bench, batch)
    free = Racer(Way("fxmem, no budget", "fxmem"), initial, bench, batch)
    report: Any = free.contender.module.report
    span = report.eager_peak_bytes - report.floor_bytes
    ways = [Way(f"fxmem {share:.0%}", "fxmem", report.floor_bytes + int(share * span)) for share in SHARES]
    budgeted = [Racer(way, initial, bench, batch) for way in ways]
    taken_in = turns([eager, free, *budgeted], seconds_of, seconds, least=LEAST_TURNS, most=MOST_TURNS)
    eager_ratio = statistics.median(taken[free] / taken[eager] for taken in taken_in)
    step_seconds = statistics.median(taken[free] for taken in taken_in)
    rows = []
    for share, racer in zip(SHARES, budgeted, strict=True):
        low, middle, high = quartiles(taken[racer] / taken[free] - 1 for taken in taken_in)
        module: Any = racer.contender.module
        measured = middle, low, high, eager_ratio, len(taken_in), step_seconds
        rows.append(Row(name, share, module.report.overhead_ratio, *measured, module.fxmem.runtime))
    return rows


def table(rows: list[Row], style: str = "simple") -> str:
    head = ("model", "of the span", "told", "measured", "quartiles", "points", "no budget / eager", "turns")
    lines = [
        (
            row.model, f"{row.share:.0%}", f"{row.told:+.1%}", f"{row.measured:+.1%}", f"{row.low:+.1%} {row.high:+.1%}",
            f"{row.points:+.1f}", f"{row.free_of_eager:.2f}", row.num_turns,
        )
        for row in rows
    ]  # fmt: skip
    return tabulate(lines, head, tablefmt=style, disable_numparse=True)


def told() -> str:
    """Return the committed results in words and as a table."""
    results = json.loads(PATH.read_text(encoding="utf-8"))
    rows = [Row(**row) for row in results["rows"]]
    torch_version, date = results["machine"]["torch"], results["machine"]["date"]
    return (
        "What a report tells of the time that recomputing takes, beside what it takes (CPU, one thread, torch "
        f"{torch_version}, {date}, `python -m benchmarks.report_time`): of {len(rows)} budgets {_num_near(rows)} are told "
        f"within {NEAR:.0%} of a step of what is measured beside the same model without a budget. glibc keeps its pages "
        f"there, as CUDA's allocator does; where it does not, equal steps differ by more.\n\n{table(rows, 'github')}"
    )


def _num_near(rows: list[Row]) -> int:
    return sum(abs(row.points) <= 100 * NEAR for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="names, separated by commas")
    parser.add_argument("--seconds", type=float, default=60, help="CPU time of one model's turns")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in KEEP_PAGES.items()):
        os.execve(
            sys.executable, [sys.executable, "-m", "benchmarks.report_time", *sys.argv[1:]], os.environ | KEEP_PAGES
        )
    torch.set_num_threads(1)
    rows = [Row(**row) for row in json.loads(PATH.read_text(encoding="utf-8"))["rows"]] if PATH.exists() else []
    for name in options.models.split(","):
        found = rows_of(name, options.seconds)
        gc.collect()
        rows = [row for row in rows if row.model != name] + found
        print(table(found), flush=True)
        body = {"machine": machine(), "rows": [asdict(row) for row in rows]}
        PATH.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(f"{_num_near(rows)} of {len(rows)} within {NEAR:.0%} of a step")


if __name__ == "__main__":
    main()
