"""Random budgets of compiled steps: ``python -m benchmarks.compiled_budgets [--models NAMES] [--functions N]``.

In: the models of :mod:`benchmarks.compiled`, and random functions of a few matrices. Out: a table, and
benchmarks/results/compiled_budgets.json, written after every model. Each step is compiled with nothing recomputed, then at
random budgets between its least reachable peak and what that takes; a plan that several budgets share is compiled and run
once. Peaks are those of the CPU allocator's events, gradients are compared with those of nothing recomputed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxmem
from benchmarks.compiled import SEED, Racer, cases, on_one_thread, options_of, told_of_its_loss
from benchmarks.measure import largest_relative_error
from benchmarks.models import Batch, BenchModel
from benchmarks.results_file import RESULTS, machine, where_measured
from benchmarks.ways import least_compiled_bytes
from fxmem.compiled.report import CompiledReport
from tests.compiled.random_functions import inputs, random_function

PATH = RESULTS / "compiled_budgets.json"
FUNCTIONS, BUDGETS_OF_A_FUNCTION, BUDGETS = 20, 5, 10
NUM_STEPS = 8, 16
"""Of random functions."""
RANDOM = "random_"


@dataclass(frozen=True)
class Row:
    """One model's step under one budget."""

    model: str
    budget_bytes: int | None
    """None: nothing is recomputed."""
    predicted_peak_bytes: int
    measured_peak_bytes: int
    estimated_ratio: float
    """Estimated time of the step over that of nothing recomputed."""
    num_recomputed: int
    error: float
    """The largest relative error of a gradient beside nothing recomputed; 0: all bits are the same."""
    cpu: str | None = None
    date: str | None = None
    eager_error: float | None = None
    """The same beside eager; None where random numbers are drawn, which are others."""


class RandomModel(nn.Module):
    """A random function as a model that returns its loss."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.function = random_function(seed, NUM_STEPS)
        self.weights = nn.ParameterList(inputs()[1:])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights)


def random_bench(seed: int) -> BenchModel:
    """Return a random function of ``seed`` as a model of the benchmarks."""
    return BenchModel(
        f"{RANDOM}{seed}", lambda scale: RandomModel(seed), lambda scale: ((inputs()[0],), {}), lambda loss: loss, ()
    )


def rows_of(bench: BenchModel, num_budgets: int) -> Iterator[Row]:
    """Yield the row of nothing recomputed, then those of random budgets, falling."""
    torch._dynamo.reset()
    torch.manual_seed(SEED)
    initial, batch = bench.build("cpu"), bench.batch("cpu")
    told_of_its_loss(initial)
    options = options_of(bench)
    known: dict[tuple[object, ...], tuple[int, dict[str, Tensor]]] = {}

    def trained(budget_bytes: int | None) -> tuple[CompiledReport, int, dict[str, Tensor]]:
        planned: Any = fxmem.optimize(initial, *batch, budget=budget_bytes, **options)
        report: CompiledReport = planned.fxmem.report
        plan = report.predicted_peak_bytes, report.saved_bytes, report.overhead_seconds, report.num_recomputed
        if plan not in known:
            racer = Racer(bench, initial, batch, lambda module: fxmem.optimize(module, budget=budget_bytes, **options))
            known[plan] = racer.measured_peak_bytes(), racer.gradients
        return report, *known[plan]

    draw = random.Random(bench.name)
    eager = _eager_gradients(bench, initial, batch)
    report, most_bytes, expected = trained(None)

    def row(report: CompiledReport, measured_bytes: int, gradients: dict[str, Tensor]) -> Row:
        error = largest_relative_error(expected, gradients)
        eager_error = None if eager is None else largest_relative_error(eager, gradients)
        return _row(bench.name, report, measured_bytes, error, eager_error)

    yield row(report, most_bytes, expected)
    least_bytes = least_compiled_bytes(initial, batch, options)
    budgets = [
        int(draw.uniform(least_bytes, max(least_bytes, report.predicted_peak_bytes))) for _ in range(num_budgets)
    ]
    for budget in sorted(budgets, reverse=True):
        yield row(*trained(budget))


def _eager_gradients(bench: BenchModel, initial: nn.Module, batch: Batch) -> dict[str, Tensor] | None:
    """Return eager's gradients; None where random numbers are drawn."""
    eager = Racer(bench, initial, batch, lambda module: module)
    state = torch.get_rng_state()
    eager.step()
    return eager.gradients if torch.equal(state, torch.get_rng_state()) else None


def _row(name: str, report: CompiledReport, measured_bytes: int, error: float, eager_error: float | None) -> Row:
    return Row(
        name, report.budget_bytes, report.predicted_peak_bytes, measured_bytes, 1 + report.overhead_ratio,
        report.num_recomputed, error, machine()["cpu"], machine()["date"], eager_error,
    )  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What the budgets of one or several models came to."""

    num_budgets: int
    num_plans: int
    exceeded: int
    apart: float
    """The largest relative difference between predicted and measured peaks."""
    not_bitwise: int
    largest_error: float
    eager_error: float
    """The largest beside eager's gradients, of models that draw no random numbers."""
    falling: int
    """Budgets of which a higher one has a plan that is estimated to be slower."""

    @staticmethod
    def of(rows: list[Row]) -> Verdict:
        budgeted = [row for row in rows if row.budget_bytes is not None]
        return Verdict(
            len(budgeted),
            len({(row.model, row.predicted_peak_bytes, row.estimated_ratio) for row in rows}),
            sum(row.measured_peak_bytes > (row.budget_bytes or 0) for row in budgeted),
            max(abs(row.predicted_peak_bytes / row.measured_peak_bytes - 1) for row in rows),
            sum(row.error > 0 for row in budgeted),
            max((row.error for row in budgeted), default=0.0),
            max((row.eager_error for row in rows if row.eager_error is not None), default=math.nan),
            sum(a.model == b.model and b.estimated_ratio < a.estimated_ratio for a, b in pairwise(rows)),
        )


def table(rows: list[Row], style: str = "simple") -> str:
    """Return a line for each model; random functions share one."""
    names = dict.fromkeys(_group(row) for row in rows)
    head = (
        "model", "budgets", "plans", "exceeded", "predicted apart", "not bitwise", "largest error", "beside eager",
        "falling",
    )  # fmt: skip
    lines = []
    for name in names:
        v = Verdict.of([row for row in rows if _group(row) == name])
        counts = v.num_budgets, v.num_plans, v.exceeded
        beside_eager = "" if math.isnan(v.eager_error) else f"{v.eager_error:.0e}"
        errors = v.not_bitwise, f"{v.largest_error:.0e}", beside_eager
        lines.append((name, *counts, f"{v.apart:.3%}", *errors, v.falling))
    return tabulate(lines, head, tablefmt=style, disable_numparse=True)


def _group(row: Row) -> str:
    return "random functions" if row.model.startswith(RANDOM) else row.model


def told() -> str:
    """Return the committed results in words and as a table."""
    results = json.loads(PATH.read_text(encoding="utf-8"))
    rows = [Row(**row) for row in results["rows"]]
    verdict = Verdict.of(rows)
    beside_eager = "" if math.isnan(verdict.eager_error) else (
        f" Where no random numbers are drawn, gradients are eager's but for {verdict.eager_error:.0e}."
    )  # fmt: skip
    functions = len({row.model for row in rows if row.model.startswith(RANDOM)})
    return (
        f"{verdict.num_budgets} random budgets between the least reachable peak and what keeping all takes, on "
        f"{functions} random functions and on small models (one CPU thread, torch {results['machine']['torch']}, "
        f"{where_measured(rows)}): {verdict.exceeded} exceeded, predicted and measured peaks at most "
        f"{verdict.apart:.2%} apart, {verdict.falling} times a lower budget is estimated to be faster, "
        f"{verdict.not_bitwise} times gradients are not bit by bit those of keeping all (largest relative error "
        f"{verdict.largest_error:.0e}).{beside_eager}\n\n{table(rows, 'github')}"
    )


def main() -> None:
    known = cases()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(known), help="names, separated by commas; may be empty")
    parser.add_argument("--functions", type=int, default=FUNCTIONS, help="random functions")
    parser.add_argument("--budgets", type=int, default=BUDGETS, help="of each model")
    options = parser.parse_args()
    on_one_thread()
    rows = [Row(**r) for r in json.loads(PATH.read_text(encoding="utf-8"))["rows"]] if PATH.exists() else []
    todo = [(random_bench(seed), BUDGETS_OF_A_FUNCTION) for seed in range(options.functions)]
    todo += [(known[name].bench, options.budgets) for name in options.models.split(",") if name]
    for bench, num_budgets in todo:
        found = list(rows_of(bench, num_budgets))
        rows = [row for row in rows if row.model != bench.name] + found
        print(table(found), flush=True)
        body = {"machine": machine(), "rows": [asdict(row) for row in rows]}
        PATH.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
