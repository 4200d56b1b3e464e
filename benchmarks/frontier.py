"""``python -m benchmarks.frontier``: what each peak costs, from eager's down to the floor, beside the design's figures.

Nine architectures at one size each; the whole step is followed allocation by allocation on fakes, without optimizer
state, op times are an A100's roofline, the step is three times the forward. Printed for each: the floor and the bound
below which no plan's peak can go, as shares of eager's peak; the extra recompute in percent of the step at peaks of 75,
50, 35 and 25 % of the way from the floor to eager's peak, once from our own floor and once from the design's (the same
share of eager's peak for both); and what near-floor peaks cost. The design's figures are those of its prototype, whose
sizes are not recorded: they compare where parameters and activations have like shares and the bound lets them.

``--floors``: the least measured peaks of sqrt(n), per-block checkpointing, checkpoint_sequential and the compiler's
partitioner on the comparison's models, beside fxmem's.

Results go to ``benchmarks/results/frontier.json``; a second run goes on where the first stopped (``--again`` does not).
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxmem
from benchmarks import models
from benchmarks.libraries import import_library, import_torchvision
from benchmarks.losses import cross_entropy, inception_loss, own_loss
from benchmarks.measure import LEARNING_RATE, SEED, Racer, peak_of
from benchmarks.models import Batch, BenchModel, UNet
from benchmarks.results_file import RESULTS, load_rows, machine
from benchmarks.ways import COMPILE_BUDGETS, EAGER, Way
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.ir import GraphProfile
from fxmem.passes.context import CompileContext, Settings
from fxmem.passes.contract import run_passes
from fxmem.pipeline import PASSES
from fxmem.planners.bound import Relaxation
from fxmem.planners.pareto import Clock, cheapest_within
from fxmem.planners.registry import PLANNERS
from fxmem.planners.simulate import tables_of
from fxmem.profiling.roofline import PRESETS
from fxmem.profiling.training_step import TrainingStep

PATH = RESULTS / "frontier.json"
SHARES = (0.75, 0.5, 0.35, 0.25)
NEAR = (0.1, 0.05, 0.03, 0.01, 0.0)
"""Shares of the same span at which near-floor plans are priced."""
PLAN_SECONDS = 600.0
PEERS = ("per block", "sequential, best", "partitioner, best", "sqrt(n)")
FLOOR_COLUMNS = ("floor", "certain", "chen_floor", "design_floor", "design_sqrt_floor", "num_recipes", "plan_seconds")


@dataclass(frozen=True)
class Entry:
    """One architecture, and the design's figures for it: floor and sqrt(n)'s floor over eager, percent at SHARES."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    loss: Callable[[Any], Tensor]
    floor: float
    sqrt_floor: float
    percents: tuple[float, float, float, float]


@dataclass(frozen=True)
class Row:
    """What one architecture's frontier says; percents are of the step's time, floors are shares of eager's peak."""

    model: str
    num_recipes: int
    eager_bytes: int
    floor: float
    certain: float
    """No plan's peak is lower: parameters, gradients, what backward holds at one time in any case."""
    chen_floor: float
    percents: list[float | None]
    bounds: list[float]
    """No plan recomputes for less (the Lagrangian bound, not tight)."""
    near_percents: list[float | None]
    percents_at_design_peaks: list[float | None]
    """None: the design's peak lies below our floor."""
    design_floor: float
    design_sqrt_floor: float
    design_percents: list[float]
    num_points: int
    plan_seconds: float


# -- the architectures -----------------------------------------------------------------------------------------------------


def gpt(num_layers: int) -> Callable[[], nn.Module]:
    """Return the maker of a GPT-2 of width 512, context 512 and 8,192 tokens."""

    def build() -> nn.Module:
        transformers = import_library("transformers")
        config = transformers.GPT2Config(
            n_layer=num_layers, n_embd=512, n_head=8, n_positions=512, vocab_size=8192, use_cache=False
        )
        model: nn.Module = transformers.GPT2LMHeadModel(config)
        return model

    return build


def mlp(num_layers: int, width: int, activation: type[nn.Module]) -> nn.Module:
    """Return ``num_layers`` linear layers, each with its activation."""
    return nn.Sequential(*(m for _ in range(num_layers) for m in (nn.Linear(width, width), activation())))


def _tokens() -> tuple[tuple[Any, ...], dict[str, Any]]:
    ids = torch.zeros(8, 512, dtype=torch.long)
    return (), {"input_ids": ids, "labels": ids}


def _images(batch: int, size: int) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda: ((torch.empty(batch, 3, size, size),), {})


def _vision(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: import_torchvision().models.get_model(name, weights=None, **options)


def _sum(output: Tensor) -> Tensor:
    return output.sum()


def _hrnet() -> nn.Module:
    model: nn.Module = import_library("timm").create_model("hrnet_w18", pretrained=False)
    return model


ENTRIES = (
    Entry("GPT, 6 layers", gpt(6), _tokens, own_loss, 0.37, 0.49, (2.8, 7.1, 10.6, 12.9)),
    Entry("GPT, 24 layers", gpt(24), _tokens, own_loss, 0.32, 0.37, (1.4, 5.6, 10.8, 14.3)),
    Entry("ResNet-18", _vision("resnet18"), _images(8, 224), cross_entropy, 0.74, 0.83, (1.2, 2.3, 3.1, 4.4)),
    Entry("ResNet-50", _vision("resnet50"), _images(32, 224), cross_entropy, 0.30, 0.34, (1.6, 4.4, 6.9, 8.9)),
    Entry("UNet", UNet, _images(8, 256), cross_entropy, 0.34, 0.53, (2.5, 5.9, 8.4, 10.2)),
    Entry("DenseNet-121", _vision("densenet121"), _images(32, 224), cross_entropy, 0.21, 0.25, (3.6, 8.0, 11.7, 14.4)),
    Entry(
        "Inception v3", _vision("inception_v3", init_weights=False), _images(32, 299), inception_loss,
        0.25, 0.32, (2.4, 5.0, 7.2, 9.7),
    ),
    Entry("HRNet-W18", _hrnet, _images(32, 224), cross_entropy, 0.29, 0.38, (2.9, 6.5, 9.3, 11.8)),
    Entry(
        "MLP, 1000 layers, GELU", lambda: mlp(1000, 256, nn.GELU), lambda: ((torch.empty(1024, 256),), {}), _sum,
        0.23, 0.24, (7.0, 14.0, 18.0, 21.0),
    ),
    Entry(
        "MLP, 1000 layers, ReLU", lambda: mlp(1000, 256, nn.ReLU), lambda: ((torch.empty(1024, 256),), {}), _sum,
        0.23, 0.24, (7.0, 14.0, 18.0, 21.0),
    ),
)  # fmt: skip


# -- frontiers -------------------------------------------------------------------------------------------------------------


def profile_of(entry: Entry) -> GraphProfile:
    """Return the profile of the entry's step; only parameters and the batch are allocated."""
    model, inputs = entry.build().train(), Inputs.of(*entry.batch())
    settings = Settings(
        budget_bytes=None,
        step=TrainingStep(loss_fn=entry.loss, optimizer=None),
        planner="auto",
        plan_seconds=PLAN_SECONDS,
        hardware=PRESETS["a100"],
        cache=False,
    )
    context = CompileContext(model, inputs, settings)
    return context.profile_of(run_passes(capture(model, inputs), PASSES, context)).profile


def row_of(entry: Entry) -> Row:
    """Return the entry's row."""
    profile = profile_of(entry)
    start = time.process_time()
    points = PLANNERS["auto"](profile, seconds=PLAN_SECONDS)
    plan_seconds = time.process_time() - start
    relaxation = Relaxation(tables_of(profile))
    low, high = points[-1].peak_bytes, points[0].peak_bytes
    unit = profile.step_seconds / 100

    def percent(peak_bytes: float) -> float | None:
        point = cheapest_within(points, round(peak_bytes))
        return None if point is None else point.recompute_seconds / unit

    def bound(peak_bytes: int) -> float:
        cost = percent(peak_bytes)
        assert cost is not None
        return relaxation.bound(peak_bytes, upper_seconds=cost * unit, num_steps=40, clock=Clock(PLAN_SECONDS)) / unit

    own = [round(low + share * (high - low)) for share in SHARES]
    return Row(
        model=entry.name,
        num_recipes=len(profile.recipes),
        eager_bytes=high,
        floor=low / high,
        certain=float(relaxation.certain_bytes.max()) / high,
        chen_floor=PLANNERS["chen"](profile, seconds=PLAN_SECONDS)[-1].peak_bytes / high,
        percents=[percent(peak) for peak in own],
        bounds=[bound(peak) for peak in own],
        near_percents=[percent(low + share * (high - low)) for share in NEAR],
        percents_at_design_peaks=[percent(high * (entry.floor + s * (1 - entry.floor))) for s in SHARES],
        design_floor=entry.floor,
        design_sqrt_floor=entry.sqrt_floor,
        design_percents=list(entry.percents),
        num_points=len(points),
        plan_seconds=plan_seconds,
    )


def print_frontiers(rows: list[dict[str, Any]]) -> None:
    """Print the rows as two tables."""
    floors = [[r["model"], *(r[k] for k in FLOOR_COLUMNS)] for r in rows]
    print(tabulate(floors, headers=["floors, share of eager", *FLOOR_COLUMNS], floatfmt=".3f"))
    costs, blank = [], [""] * len(NEAR)
    for r in rows:
        costs.append([r["model"], "own peaks", *r["percents"], *r["near_percents"]])
        costs.append(["", "no plan below", *r["bounds"], *blank])
        costs.append(["", "design's peaks", *r["percents_at_design_peaks"], *blank])
        costs.append(["", "design", *r["design_percents"], *blank])
    shares = [f"{share:.0%}" for share in (*SHARES, *NEAR)]
    print(tabulate(costs, headers=["percent of the step at", "", *shares], floatfmt=".2f", missingval="below floor"))


# -- peers' floors ---------------------------------------------------------------------------------------------------------


def floor_row(name: str) -> dict[str, Any]:
    """Return the least whole-step peaks of the peers and of fxmem on a model of the comparison, measured, in bytes.

    Per-block checkpointing and the compiler's partitioner at all of its budgets are taken from the comparison's results
    (``python -m benchmarks``) where these have them; checkpoint_sequential is run with every number of segments up to
    3 * sqrt(n), fxmem at its floor. ``failed``: the ways that raised, with the reason.
    """
    compared = [row for row in load_rows(RESULTS / "compare_cpu.json") if row.model == name and row.peak_bytes]
    bench = models.get(name)
    torch.manual_seed(SEED)
    initial, batch = bench.build("cpu"), bench.batch("cpu")
    optimizer = torch.optim.SGD(initial.parameters(), lr=LEARNING_RATE)
    failed: dict[str, str] = {}

    def least(ways: list[Way]) -> int | None:
        known = [row.peak_bytes for row in compared if row.kind == ways[0].kind] if ways else []
        return min(
            known or [_peak_bytes(way, initial, bench, batch, failed) for way in ways],
            key=_or_most,
            default=None,
        )

    planned = {
        planner: fxmem.frontier(
            initial, *batch, optimizer=optimizer, loss_fn=bench.loss, planner=planner, plan_seconds=PLAN_SECONDS
        )
        for planner in ("auto", "chen")
    }
    floor_bytes = planned["auto"][-1].predicted_peak_bytes
    most = 0 if bench.chain is None else round(3 * len(bench.chain(copy.deepcopy(initial))) ** 0.5)
    sequential = [
        _peak_bytes(Way(f"checkpoint_sequential {k}", "sequential", float(k)), initial, bench, batch, failed)
        for k in range(2, most + 1)
    ]
    return {
        "model": name,
        "eager": peak_of(Racer(EAGER, initial, bench, batch)).tracked_bytes,
        "per block": least([Way("checkpoint per block", "checkpoint")]),
        "sequential, best": min(sequential, key=_or_most, default=None),
        "partitioner, best": least([Way(f"partitioner {b:g}", "partitioner", b) for b in COMPILE_BUDGETS]),
        "sqrt(n)": planned["chen"][-1].predicted_peak_bytes,
        "fxmem, planned": floor_bytes,
        "fxmem, measured": _floor_peak_bytes(floor_bytes, initial, bench, batch),
        "failed": failed,
    }


def _floor_peak_bytes(floor_bytes: int, initial: nn.Module, bench: BenchModel, batch: Batch) -> int:
    """Return the peak measured at fxmem's floor: ``floor_bytes`` or, planned with measured times, a little more."""
    try:
        return peak_of(Racer(Way("fxmem", "fxmem", float(floor_bytes)), initial, bench, batch)).tracked_bytes
    except fxmem.InfeasibleBudgetError as error:
        least = float(error.least_bytes)
    return peak_of(Racer(Way("fxmem", "fxmem", least), initial, bench, batch)).tracked_bytes


def _peak_bytes(way: Way, initial: nn.Module, bench: BenchModel, batch: Batch, failed: dict[str, str]) -> int | None:
    """Return the measured peak; None if the way has no meaning for the model or raises, which ``failed`` then tells."""
    try:
        return peak_of(Racer(way, initial, bench, batch)).tracked_bytes
    except Exception as error:
        failed[way.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        return None


def _or_most(peak_bytes: int | None) -> float:
    return float("inf") if peak_bytes is None else peak_bytes


def print_floors(rows: list[dict[str, Any]]) -> None:
    """Print the floors as shares of eager's peak."""
    table = []
    for r in rows:
        peaks = [r[column] for column in PEERS]
        lowest = "yes" if r["fxmem, measured"] <= min(peaks, key=_or_most) else "NO"
        own = (r["fxmem, planned"], r["fxmem, measured"])
        table.append([r["model"], *(p and p / r["eager"] for p in (*peaks, *own)), lowest])
    headers = ["least peak over eager's", *PEERS, "fxmem, planned", "fxmem, measured", "lowest"]
    print(tabulate(table, headers=headers, floatfmt=".3f", missingval="-"))
    for r in rows:
        for way, reason in r["failed"].items():
            print(f"{r['model']}, {way}: {reason}")


# -- the command -----------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="models whose name holds this")
    parser.add_argument(
        "--floors", action="store_true", help="the peers' least peaks on the comparison's models instead"
    )
    parser.add_argument("--again", action="store_true", help="measure what has been measured, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    body = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {"frontiers": [], "floors": []}
    part = "floors" if options.floors else "frontiers"
    makers: dict[str, Callable[[], dict[str, Any]]] = (
        {name: partial(floor_row, name) for name in models.MODELS}
        if options.floors
        else {entry.name: partial(_plain, entry) for entry in ENTRIES}
    )
    todo = [name for name in makers if options.only in name]
    for i, name in enumerate(todo):
        if not options.again and any(row["model"] == name for row in body[part]):
            continue
        start = time.perf_counter()
        row = makers[name]()
        body[part] = [r for r in body[part] if r["model"] != name] + [row]
        RESULTS.mkdir(exist_ok=True)
        PATH.write_text(json.dumps({"machine": machine()} | body, indent=1) + "\n", encoding="utf-8")
        print(f"[{i + 1}/{len(todo)}] {name}: {time.perf_counter() - start:.0f} s", flush=True)
    order = list(makers)
    rows = sorted((r for r in body[part] if r["model"] in todo), key=lambda r: order.index(r["model"]))
    (print_floors if options.floors else print_frontiers)(rows)
    return 0


def _plain(entry: Entry) -> dict[str, Any]:
    return asdict(row_of(entry))


if __name__ == "__main__":
    raise SystemExit(main())
