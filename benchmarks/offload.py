"""Values that wait for the backward in host memory: ``python -m benchmarks.offload``.

Three tables. The least peak of a step, planned at training sizes on fakes: with recomputation alone, with offloads too,
and what every plan holds at some moment (:mod:`fxmem.planners.bound`, whatever it recomputes or offloads), below which none
can go. What budgets cost, as shares of the eager step's time, by link: roofline times of an H100, copies by the model of
:mod:`fxmem.planners.offload.link`; recomputation is planned by "intervals". And steps that ran on the CPU at its scale, at
the least budget with offloads: the planned peak beside the measured one, whose device bytes leave out the copies, and
whether gradients are bitwise eager's. Losses, no optimizer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tabulate import tabulate

import fxmem
from benchmarks import models
from benchmarks.results_file import RESULTS, machine
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.errors import InfeasibleBudgetError
from fxmem.frontiers import frontier_of
from fxmem.ir import FrontierPoint
from fxmem.passes.context import CompileContext, Settings
from fxmem.pipeline import profile_for_short_memory
from fxmem.planners.bound import Relaxation
from fxmem.planners.offload.choice import with_offloading
from fxmem.planners.offload.link import LINKS, sent_bytes
from fxmem.planners.pareto import cheapest_within
from fxmem.planners.simulate import tables_of
from fxmem.profiling.profile import Profiled
from fxmem.profiling.roofline import PRESETS
from fxmem.profiling.storage_tracker import StorageTracker, tensors_of
from fxmem.profiling.training_step import TrainingStep, run_step

PATH = RESULTS / "offload.json"
NAMES = ("gpt2", "resnet50", "unet")
LINK_NAMES = ("pcie4", "pcie5", "nvlink-c2c")
SHARES = (0.6, 0.4, 0.2, 0.0)
"""Of the way from the least peak with recomputation alone to eager's: budgets of the second table."""
SECONDS = 60.0
ALLOWED = ("recompute", "inplace", "offload")


@dataclass(frozen=True)
class Floor:
    """Least peaks of one model's step, in bytes."""

    model: str
    eager_bytes: int
    recompute_bytes: int
    offload_bytes: int
    held_bytes: int
    """What every plan holds at some moment."""


@dataclass(frozen=True)
class Cost:
    """What one budget costs over one link, as shares of the eager step's time."""

    model: str
    link: str
    budget_bytes: int
    recompute_ratio: float
    offload_ratio: float
    sent_bytes: int


@dataclass(frozen=True)
class Measured:
    """A step at the least budget with offloads that ran on the CPU; bytes."""

    model: str
    eager_bytes: int
    recompute_bytes: int
    """The least budget without offloads."""
    planned_bytes: int
    measured_bytes: int
    host_bytes: int
    same_bits: bool


# -- planned at training sizes -----------------------------------------------------------------------------------------


def planned(name: str) -> tuple[Profiled, tuple[FrontierPoint, ...]]:
    """Return the profile of a step at training size on an H100, and its frontier without offloads."""
    bench = models.get(name)
    model, (args, kwargs) = bench.build("gpu"), bench.batch("gpu")
    step = TrainingStep(loss_fn=bench.loss, optimizer=None)
    inputs = Inputs.of(args, kwargs)
    context = CompileContext(model, inputs, Settings(None, step, "intervals", SECONDS, PRESETS["h100"]))
    profiled = profile_for_short_memory(capture(model, inputs), context)
    return profiled, frontier_of(profiled.profile, context)


def plan_rows(name: str) -> tuple[Floor, list[Cost]]:
    """Return the rows of the first two tables."""
    profiled, points = planned(name)
    profile = profiled.profile
    most, least = points[0].peak_bytes, points[-1].peak_bytes
    costs, floor_bytes = [], least
    for link_name in LINK_NAMES:
        found = with_offloading(profile, points, LINKS[link_name], never=frozenset(), seconds=4 * SECONDS)
        floor_bytes = min(floor_bytes, found[-1].peak_bytes)
        for share in SHARES:
            budget_bytes = round(least + share * (most - least))
            alone, mixed = cheapest_within(points, budget_bytes), cheapest_within(found, budget_bytes)
            assert alone is not None, "a budget that recomputation alone keeps"
            assert mixed is not None, "nothing is lost"
            ratios = (p.recompute_seconds / profile.step_seconds for p in (alone, mixed))
            sent = sum(sent_bytes(profile, mixed.plan).values())
            costs.append(Cost(name, link_name, budget_bytes, *ratios, sent))
    held_bytes = int(Relaxation(tables_of(profile)).certain_bytes.max())
    return Floor(name, most, least, floor_bytes, held_bytes), costs


# -- measured on the CPU -----------------------------------------------------------------------------------------------


def measured(name: str) -> Measured:
    """Run a step at the least budget with offloads, and eager's."""
    bench = models.get(name)
    torch.manual_seed(0)
    model, (args, kwargs) = bench.build("cpu"), bench.batch("cpu")
    options: Any = {"loss_fn": bench.loss, "optimizer": None, "planner": "intervals", "cost": "cpu"}
    recompute_bytes = least_budget(model, args, kwargs, options)
    options["allow"] = ALLOWED
    least_bytes = least_budget(model, args, kwargs, options)
    eager, expected = ran(model, args, kwargs, bench.loss)
    optimized = fxmem.optimize(model, args, kwargs, budget=least_bytes, **options)
    tracker, gradients = ran(optimized, args, kwargs, bench.loss)
    same = all(torch.equal(a, b) for a, b in zip(expected, gradients, strict=True))
    planned_bytes = optimized.fxmem.report.predicted_peak_bytes
    return Measured(
        name, eager.peak_bytes, recompute_bytes, planned_bytes, tracker.peak_bytes, tracker.host_peak_bytes, same
    )


def least_budget(model: torch.nn.Module, args: Any, kwargs: Any, options: Any) -> int:
    """Return the least budget that a plan keeps."""
    try:
        fxmem.optimize(model, args, kwargs, budget="1B", **options)
    except InfeasibleBudgetError as error:
        return error.least_bytes
    raise AssertionError("a step takes more than a byte")


def ran(model: torch.nn.Module, args: Any, kwargs: Any, loss: Any) -> tuple[StorageTracker, list[torch.Tensor]]:
    """Run a step; return what it took and the gradients it left."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    tracker = StorageTracker()
    tracker.hold(tensors_of([model, args, kwargs]))
    with tracker:
        run_step(lambda: model(*args, **kwargs), loss)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    return tracker, gradients


# -- the tables --------------------------------------------------------------------------------------------------------


def told() -> str:
    """Return the section of docs/offload.md: these tables."""
    found = json.loads(PATH.read_text(encoding="utf-8"))
    floors, costs = ([kind(**row) for row in found[key]] for kind, key in ((Floor, "floors"), (Cost, "costs")))
    steps, facts = [Measured(**row) for row in found["steps"]], found["machine"]
    reached = [row.model for row in floors if row.offload_bytes == row.held_bytes]
    others = [row.model for row in floors if row.offload_bytes > row.held_bytes]
    return "\n\n".join(
        (
            f"From `benchmarks/results/offload.json` (torch {facts['torch']}, {facts['date']}).",
            "The least peak, in GB, at training sizes. *every plan holds*: what is alive at some moment whatever is "
            "recomputed or offloaded, an op's own inputs and outputs with parameters and gradients; below it nothing but "
            f"smaller ops goes. Offloads reach it on {', '.join(reached)}, and not on {', '.join(others) or 'none'}.",
            floor_table(floors, "github"),
            "What a budget costs, of the eager step's time: recomputation alone, and with offloads by link, with what goes "
            "over it. Over PCI Express little can be hidden behind so fast a card; NVLink-C2C hides most.",
            cost_table(costs, "github"),
            "Steps that ran on a CPU at the least budget with offloads, in MB: planned and measured peaks, and whose bits "
            "the gradients have.",
            measured_table(steps, "github"),
        )
    )


def floor_table(rows: Sequence[Floor], style: str = "simple") -> str:
    headers = ("model", "eager GB", "recompute", "+ offload", "of it", "every plan holds", "of it")
    table = [
        (
            row.model,
            f"{row.eager_bytes / 1e9:.2f}",
            f"{row.recompute_bytes / 1e9:.3f}",
            f"{row.offload_bytes / 1e9:.3f}",
            f"{row.offload_bytes / row.recompute_bytes:.2f}",
            f"{row.held_bytes / 1e9:.3f}",
            f"{row.held_bytes / row.recompute_bytes:.2f}",
        )
        for row in rows
    ]
    return tabulate(table, headers, tablefmt=style, disable_numparse=True)


def cost_table(rows: Sequence[Cost], style: str = "simple") -> str:
    headers = ("model", "budget GB", "recompute alone", *(f"+ offload, {name}" for name in LINK_NAMES))
    table = []
    for row in (row for row in rows if row.link == LINK_NAMES[0]):
        same = [r for r in rows if (r.model, r.budget_bytes) == (row.model, row.budget_bytes)]
        cells = (f"{r.offload_ratio:.1%} ({r.sent_bytes / 1e9:.2f} GB)" for r in same)
        table.append((row.model, f"{row.budget_bytes / 1e9:.2f}", f"{row.recompute_ratio:.1%}", *cells))
    return tabulate(table, headers, tablefmt=style, disable_numparse=True)


def measured_table(rows: Sequence[Measured], style: str = "simple") -> str:
    headers = ("model", "eager MB", "recompute", "+ offload", "measured", "in host memory", "bits")
    table = [
        (
            row.model,
            *(f"{n / 1e6:.3f}" for n in (row.eager_bytes, row.recompute_bytes, row.planned_bytes, row.measured_bytes)),
            f"{row.host_bytes / 1e6:.3f}",
            "eager's" if row.same_bits else "OTHERS",
        )
        for row in rows
    ]
    return tabulate(table, headers, tablefmt=style, disable_numparse=True)


def rows_of(names: Sequence[str]) -> Iterator[tuple[Floor, list[Cost], Measured]]:
    for name in names:
        yield (*plan_rows(name), measured(name))


def main() -> int:
    """Plan, measure, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=NAMES, help="models of benchmarks.models")
    floors: list[Floor] = []
    costs: list[Cost] = []
    steps: list[Measured] = []
    for floor, more, step in rows_of(parser.parse_args().names):
        floors.append(floor)
        costs += more
        steps.append(step)
        print("\n\n".join((floor_table([floor]), cost_table(more), measured_table([step]))), flush=True)
        tables = {"floors": floors, "costs": costs, "steps": steps}
        text = {"machine": machine(), **{key: [asdict(row) for row in rows] for key, rows in tables.items()}}
        PATH.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    print("\n\n".join(("", floor_table(floors), cost_table(costs), measured_table(steps))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
