"""``python -m benchmarks.ablation``: what each stage of the default planner brings, seen by leaving it out.

In: models of the other benchmarks at their CPU size, profiled with the roofline's times for a CPU, so that every run finds
the same plans; and graphs of :mod:`benchmarks.optimality`, some small enough for the integer program. For each stage the
frontier is planned without it. Printed and written to ``benchmarks/results/ablation.json``: what step time is lost at four
budgets, in points of the step's time; how much the floor rises; the CPU seconds that the stage takes. A stage that wins
neither ``LEAST_POINTS`` nor ``LEAST_FLOOR_PERCENT`` on any of them does not pay.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

import torch
from tabulate import tabulate

from benchmarks import models, optimality
from benchmarks.results_file import RESULTS, machine
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.ir import FrontierPoint, GraphProfile
from fxmem.passes.context import CompileContext, Settings
from fxmem.pipeline import profile_for_short_memory
from fxmem.planners.incremental import Bases
from fxmem.planners.pareto import Clock, cheapest_within
from fxmem.planners.portfolio import STAGES, Points, Stage, frontier
from fxmem.profiling.roofline import PRESETS
from fxmem.profiling.training_step import TrainingStep

PATH = RESULTS / "ablation.json"
MODELS = (
    *("resnet18", "gpt2_2l", "unet", "vgg16", "mobilenet_v2", "bert", "googlenet", "vit", "resnet50", "mlp_mixer"),
    "swin_t",
)
GRAPHS = ("chain 32", "random 28.0", "random 28.1", "MLP, 8 layers", "GPT, 1 layer", "UNet")
SHARES = (0.0, 0.25, 0.5, 0.75)
"""Budgets, as shares of the way from the floor to the peak of keeping everything."""
SECONDS = 100_000.0
"""No clock shall decide."""
LEAST_POINTS, LEAST_FLOOR_PERCENT = 0.3, 1.0


@dataclass(frozen=True)
class Row:
    """What is lost where one stage is left out of planning for one graph."""

    graph: str
    num_recipes: int
    stage: str
    lost_points: tuple[float, ...]
    """Percentage points of the step's time, for each of ``SHARES``; below zero where the stage did harm. The first is at
    the higher one of the two floors."""
    worst_points: float
    """The same, at the worst of all budgets at which the whole frontier has a point."""
    floor_percent: float
    """By how much the floor rises."""
    stage_seconds: float
    """CPU time of the stage where none is left out."""
    all_seconds: float
    """CPU time of all stages."""

    @property
    def pays(self) -> bool:
        return max(self.lost_points) >= LEAST_POINTS or self.floor_percent >= LEAST_FLOOR_PERCENT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="graphs whose name holds this; nothing is written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name, make in graphs():
        if options.only in name:
            found = list(measured(name, make()))
            rows += found
            print(tabulate([_cells(row) for row in found], headers="keys", floatfmt=".2f"), "\n", flush=True)
    print(tabulate([asdict(each) for each in summary(rows)], headers="keys", floatfmt=".2f"))
    if not options.only:
        body = {"machine": machine(), "shares": SHARES, "rows": [asdict(row) for row in rows]}
        body["removed"] = [asdict(each) for each in load_removed()]
        body["removed_together"] = [asdict(each) for each in load_together()]
        PATH.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return 0


def graphs() -> Iterator[tuple[str, Callable[[], GraphProfile]]]:
    """Yield the graphs' names and what makes their profiles."""
    for name in MODELS:
        yield name, lambda name=name: _profile_of(models.get(name))  # type: ignore[misc]
    for name, make in optimality.graphs(full=False):
        if name in GRAPHS:
            yield name, make


def _profile_of(bench: models.BenchModel) -> GraphProfile:
    torch.manual_seed(0)
    inputs = Inputs.of(*bench.batch("cpu"))
    step = TrainingStep(loss_fn=bench.loss, optimizer=None)
    context = CompileContext(bench.build("cpu"), inputs, Settings(None, step, "auto", SECONDS, PRESETS["cpu"]))
    return profile_for_short_memory(capture(context.model, inputs), context).profile


def measured(name: str, profile: GraphProfile) -> Iterator[Row]:
    """Yield what each stage brings to the frontier of ``profile``."""
    seconds: dict[str, float] = {}
    timed = {stage: _timed(run, stage, seconds) for stage, run in STAGES.items()}
    whole = frontier(profile, seconds=SECONDS, stages=timed)
    for stage in STAGES:
        without = frontier(profile, seconds=SECONDS, stages=_without(stage))
        yield Row(
            graph=name,
            num_recipes=len(profile.recipes),
            stage=stage,
            lost_points=lost_points(whole, without, profile.step_seconds),
            worst_points=worst_points(whole, without, profile.step_seconds),
            floor_percent=100 * (without[-1].peak_bytes / whole[-1].peak_bytes - 1),
            stage_seconds=seconds[stage],
            all_seconds=sum(seconds.values()),
        )


def _without(left_out: str) -> Mapping[str, Stage]:
    return {name: stage for name, stage in STAGES.items() if name != left_out}


def _timed(stage: Stage, name: str, seconds: dict[str, float]) -> Stage:
    def run(profile: GraphProfile, points: Points, clock: Clock, bases: Bases) -> Points:
        start = time.thread_time()
        found = stage(profile, points, clock, bases)
        seconds[name] = time.thread_time() - start
        return found

    return run


def lost_points(whole: Points, without: Points, step_seconds: float) -> tuple[float, ...]:
    """Return how much more recomputation ``without`` takes at the budgets, in percent of the step."""
    low, high = max(whole[-1].peak_bytes, without[-1].peak_bytes), whole[0].peak_bytes
    budgets = [max(low, round(whole[-1].peak_bytes * (1 - share) + high * share)) for share in SHARES]
    return tuple(
        100 * (_within(without, budget).recompute_seconds - _within(whole, budget).recompute_seconds) / step_seconds
        for budget in budgets
    )


def worst_points(whole: Points, without: Points, step_seconds: float) -> float:
    """Return the most that ``without`` takes more at a budget above its floor, in percent of the step."""
    reached = [point for point in whole if point.peak_bytes >= without[-1].peak_bytes]
    more = (_within(without, point.peak_bytes).recompute_seconds - point.recompute_seconds for point in reached)
    return 100 * max(more, default=0.0) / step_seconds


def _within(points: Points, budget_bytes: int) -> FrontierPoint:
    found = cheapest_within(points, budget_bytes)
    assert found is not None, "both floors are below every budget"
    return found


# -- what is printed -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """What one stage brings over all graphs."""

    stage: str
    most_points: float
    most_on: str
    """The graph where ``most_points`` are lost."""
    worst_points: float
    mean_points_at_floor: float
    least_points: float
    floor_percent: float
    seconds_percent: float
    """Of the CPU time of all stages."""
    pays: bool


@dataclass(frozen=True)
class Removed:
    """What a stage brought that went, as measured while all others were there."""

    stage: str
    most_points: float
    least_points: float
    floor_percent: float
    seconds_percent: float
    num_graphs: int


def load_removed() -> list[Removed]:
    """Return the stages that went."""
    return [Removed(**each) for each in json.loads(PATH.read_text(encoding="utf-8"))["removed"]]


@dataclass(frozen=True)
class Together:
    """What a graph lost when all of these had gone; as in :class:`Row`, with the CPU seconds of the whole planner."""

    graph: str
    lost_points: tuple[float, ...]
    worst_points: float
    floor_percent: float
    seconds_before: float
    seconds_after: float


def load_together() -> list[Together]:
    """Return what all stages that went brought together."""
    rows = json.loads(PATH.read_text(encoding="utf-8"))["removed_together"]
    return [Together(**row | {"lost_points": tuple(row["lost_points"])}) for row in rows]


def load_rows() -> list[Row]:
    """Return the committed rows."""
    rows = json.loads(PATH.read_text(encoding="utf-8"))["rows"]
    return [Row(**row | {"lost_points": tuple(row["lost_points"])}) for row in rows]


def summary(rows: list[Row]) -> list[Summary]:
    """Return for each stage the most it brings anywhere, and what it takes."""
    return [
        _summary(stage, [row for row in rows if row.stage == stage]) for stage in dict.fromkeys(r.stage for r in rows)
    ]


def _summary(stage: str, rows: list[Row]) -> Summary:
    most, graph = max((max(row.lost_points), row.graph) for row in rows)
    return Summary(
        stage=stage,
        most_points=most,
        most_on=graph,
        worst_points=max(row.worst_points for row in rows),
        mean_points_at_floor=sum(row.lost_points[0] for row in rows) / len(rows),
        least_points=min(min(row.lost_points) for row in rows),
        floor_percent=max(row.floor_percent for row in rows),
        seconds_percent=100 * sum(row.stage_seconds for row in rows) / sum(row.all_seconds for row in rows),
        pays=any(row.pays for row in rows),
    )


def text() -> str:
    """Return the committed summary as a table in Markdown, and what it says."""
    rows = load_rows()
    gone = [
        f"{each.stage} ({each.most_points:.2f} points for {each.seconds_percent:.0f} % of the time)"
        for each in load_removed()
    ]
    lines = [
        "| stage of the default planner | brings at most, points of a step | at any budget | of the floor | of planning |",
        "|---|---|---|---|---|",
    ]
    for each in summary(rows):
        most = f"{each.most_points:.2f} ({each.most_on})"
        last = f"{each.floor_percent:.1f} % | {each.seconds_percent:.0f} %"
        lines.append(f"| {each.stage} | {most} | {each.worst_points:.2f} | {last} |")
    return "\n".join(
        (
            *lines,
            "",
            f"Each stage is left out of planning for {len({row.graph for row in rows})} graphs with roofline times: the "
            "most by which step time rises at the floor and 25, 50, 75 % of the way from there to keeping all (and at "
            "any budget of the frontier), and by which the floor rises (`python -m benchmarks.ablation`). It stays if that "
            f"is {LEAST_POINTS} points at those four or {LEAST_FLOOR_PERCENT:.0f} % of the floor somewhere; chen stays so "
            "that the default is never worse than a planner asked for by name. Gone by this measure: "
            f"{', '.join(gone)}. {_together_text()}",
        )
    )


def _together_text() -> str:
    rows = load_together()
    worst = sorted(((max(row.lost_points), row.graph) for row in rows), reverse=True)
    before, after = sum(row.seconds_before for row in rows), sum(row.seconds_after for row in rows)
    told = ", ".join(f"{points:.2f} on {graph}" for points, graph in worst[:2])
    return (
        f"All of these together brought, of {len(rows)} graphs, at most {told}, {max(r.worst_points for r in rows):.1f} at "
        f"any budget and {max(row.floor_percent for row in rows):.1f} % of a floor; planning takes {after:.0f} s without "
        f"them, {before:.0f} s with."
    )


def _cells(row: Row) -> dict[str, object]:
    lost = {f"at {share:.0%}" if share else "at floor": p for share, p in zip(SHARES, row.lost_points, strict=True)}
    return {
        "graph": row.graph,
        "recipes": row.num_recipes,
        "without": row.stage,
        **lost,
        "worst": row.worst_points,
        "floor %": row.floor_percent,
        "seconds": row.stage_seconds,
        "of": row.all_seconds,
    }


if __name__ == "__main__":
    raise SystemExit(main())
