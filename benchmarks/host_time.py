"""What the host must do for a training step, whatever the device does: CPU time of a step over eager's.

On the emulated device kernels take no time, so a step's CPU time there is what launching costs:

    python -m tests.cuda_stub.launch h100-80gb -m benchmarks.host_time [MODEL ...]

In: names of :mod:`benchmarks.models`, at the size ``cpu``. Out: one row each: eager's forward, loss and backward in
milliseconds of CPU time (all threads), and over it fxmem at budgets of 50 % and 10 % of the span from the floor to eager's
peak, as programs and on the tape under the same plans, ``torch.utils.checkpoint`` of each block, and
``torch.compile(backend="aot_eager")``. All ways of a model take turns in one process; figures are medians of all turns. It
is told which models stay on the tape. ``--profile MODEL`` prints which functions take the time (``FXMEM_RUNTIME`` says how
steps run). ``--save`` writes the rows into ``benchmarks/results/host_time.json``, where rows of other models stay. It runs
without the emulated device too, where kernels count.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import json
import os
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxmem
from benchmarks import models, ways
from benchmarks.results_file import RESULTS, machine
from fxmem.runtime.programs.joint import JointSteps

MODELS = ("gpt2", "resnet50", "unet", "vit")
SHARES = (0.5, 0.1)
"""Budgets, as shares of the way from the floor to eager's peak."""
PATH = RESULTS / "host_time.json"

ALLOWED = (1.15, 1.35)
"""By share: what a step may take at most, times eager's, if the host is not to be what slows it down."""

Step = Callable[[], float]
"""Runs one step; returns its CPU seconds."""


@dataclass(frozen=True)
class Row:
    """One model; all but the first figure are ratios to eager's step."""

    model: str
    eager_ms: float
    half: float
    tenth: float
    half_on_tape: float
    tenth_on_tape: float
    checkpoint: float
    aot_eager: float | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=[], help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, which compiles for minutes")
    parser.add_argument("--profile", metavar="MODEL", help="print where the time of one model's step goes")
    parser.add_argument("--share", type=float, default=SHARES[1], help="the budget of --profile")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.profile:
        _profile(options.profile, options.share)
        return 0
    os.environ["FXMEM_RUNTIME"] = "program"
    rows = [_measured(name, options) for name in options.models or MODELS]
    print(tabulate([asdict(row) for row in rows], headers="keys", floatfmt=".2f"))
    if options.save:
        known = json.loads(PATH.read_text())["rows"] if PATH.exists() else []
        by_model = {row["model"]: row for row in (*known, *map(asdict, rows))}
        PATH.write_text(json.dumps({"machine": machine(), "rows": list(by_model.values())}, indent=1) + "\n")
    return 0


def told() -> str:
    """Return the committed results in words and as a table."""
    results = json.loads(PATH.read_text(encoding="utf-8"))
    rows = sorted((Row(**row) for row in results["rows"]), key=lambda row: MODELS.index(row.model))
    ratios = [ratio for row in rows for ratio in zip((row.half, row.tenth), ALLOWED, strict=True)]
    met = sum(ratio <= allowed for ratio, allowed in ratios)
    heads = ["model", "eager, ms", "programs: 50 %", "programs: 10 %", "tape: 50 %", "tape: 10 %"]
    heads += ["checkpoint per block", "torch.compile, aot_eager"]
    cells = [
        [row.model, f"{row.eager_ms:.1f}", *(_cell(ratio) for ratio in list(asdict(row).values())[2:])] for row in rows
    ]
    machine = results["machine"]
    table = tabulate(cells, heads, tablefmt="github", disable_numparse=True)
    return (
        f"{machine['gpu']}, torch {machine['torch']}, {machine['date']}. Of {len(ratios)} figures of programs {met} are "
        f"within the aim, {ALLOWED[0]} times eager at 50 % and {ALLOWED[1]} at 10 %.\n\n{table}"
    )


def _cell(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _measured(name: str, options: argparse.Namespace) -> Row:
    steps = _ways(name, compiled=not options.no_compile)
    seconds: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(options.turns):
        for way, step in steps.items():
            seconds[way].append(step())
    median = {way: statistics.median(times) for way, times in seconds.items()}
    ratios = {way: value / median["eager"] for way, value in median.items() if way != "eager"}
    return Row(name, 1e3 * median["eager"], **{"aot_eager": None, **ratios})


def _ways(name: str, *, compiled: bool) -> dict[str, Step]:
    """Return one step of each way, warm."""
    bench = models.get(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = bench.build("cpu").to(device)
    batch = _on(device, bench.batch("cpu"))
    free = _optimized(copy.deepcopy(model), batch, bench.loss, None)
    low, high = free.report.floor_bytes, free.report.eager_peak_bytes
    made: dict[str, Callable[..., Any]] = {"eager": copy.deepcopy(model)}
    for way, share in zip(("half", "tenth"), SHARES, strict=True):
        made[way] = _optimized(copy.deepcopy(model), batch, bench.loss, int(low + share * (high - low)))
    checkpointed = ways.Way("checkpoint per block", "checkpoint")
    made["checkpoint"] = ways.apply(checkpointed, copy.deepcopy(model), bench, batch, None).forward
    if compiled:
        made["aot_eager"] = torch.compile(copy.deepcopy(model), backend="aot_eager")
    steps = {way: _step(forward, batch, bench.loss) for way, forward in made.items()}
    for step in steps.values():
        for _ in range(3):
            step()
    for way in ("half", "tenth"):
        joint = made[way].fxmem.plans.latest.joint  # type: ignore[attr-defined]
        if joint.program is None:
            print(f"{name}, {way}: stays on the tape, as {joint.refusal}")
        steps[f"{way}_on_tape"] = _on_tape(joint, steps[way])
    return steps


def _on_tape(joint: JointSteps, step: Step) -> Step:
    """Return ``step`` as it is where a program cannot run it."""

    def run() -> float:
        before, joint.refusal = joint.refusal, "the tape is to be measured"
        try:
            return step()
        finally:
            joint.refusal = before

    return run


def _optimized(model: nn.Module, batch: Any, loss: Callable[[Any], Tensor], budget: int | None) -> Any:
    return fxmem.optimize(model, *batch, budget=budget, optimizer=None, loss_fn=loss, cost="h100", plan_seconds=5)


def _on(device: str, tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), tree)


def _step(forward: Callable[..., Any], batch: Any, loss: Callable[[Any], Tensor]) -> Step:
    args, kwargs = batch
    parameters = list(getattr(forward, "parameters", lambda: ())())

    def step() -> float:
        for parameter in parameters:
            parameter.grad = None
        start = time.process_time()
        loss(forward(*args, **kwargs)).backward()
        return time.process_time() - start

    return step


def _profile(name: str, share: float) -> None:
    """Print the functions that take the most time of their own in fxmem's step."""
    bench = models.get(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, batch = bench.build("cpu").to(device), _on(device, bench.batch("cpu"))
    report = _optimized(copy.deepcopy(model), batch, bench.loss, None).report
    low, high = report.floor_bytes, report.eager_peak_bytes
    optimized = _optimized(model, batch, bench.loss, int(low + share * (high - low)))
    step = _step(optimized, batch, bench.loss)
    for _ in range(3):
        step()
    profile = cProfile.Profile(time.process_time)
    with profile, torch.autograd.set_multithreading_enabled(False):  # the backward in the thread that is looked at
        for _ in range(10):
            step()
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    raise SystemExit(main())
