"""The bound on many models: predicted against measured peak, budget by budget.

``python -m benchmarks.sweep`` runs every model of the zoo x {SGD, AdamW} x {fp32, bf16 autocast} x budgets (the floor
and 25, 35, 50, 75 % of the way from it to eager's peak) on the CPU. Each point runs the emitted module's real training
step and measures its peak. Results go to a JSON file, one entry a configuration; a second run goes on where the first
stopped. The last lines count violations (measured above budget) and differences (measured is not predicted).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from fxmem.capture.export import capture
from fxmem.capture.graph import CaptureGraph, Inputs
from fxmem.emitted import emit_within_budget
from fxmem.frontiers import frontier_of
from fxmem.passes.context import CompileContext, Settings
from fxmem.pipeline import profile_for_short_memory
from fxmem.profiling.storage_tracker import StorageTracker, tensors_of
from fxmem.profiling.training_step import TrainingStep, run_step
from fxmem.profiling.verify import eager_step
from fxmem.runtime.autocast import Autocast
from tests import zoo

SHARES = (0.0, 0.25, 0.35, 0.5, 0.75)
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
RESULTS = Path(__file__).parent / "results" / "sweep_cpu.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="names of the zoo; all by default")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--plan-seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    done = json.loads(arguments.results.read_text())["points"] if arguments.results.exists() else {}
    todo = [key for key in configurations(arguments.models or _by_turns()) if f"{'/'.join(key)}/adamw" not in done]
    start = time.monotonic()
    for i, key in enumerate(todo):
        for optimizer, records in run_configuration(*key, arguments.plan_seconds).items():
            done[f"{'/'.join(key)}/{optimizer}"] = records
        _write(arguments.results, done)
        left = (time.monotonic() - start) / (i + 1) * (len(todo) - i - 1)
        print(f"[{i + 1}/{len(todo)}] {'/'.join(key):<44} {left / 60:5.1f} min left", flush=True)
    print_table(done)


def configurations(models: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (model, precision)."""
    for model in models:
        for precision in ("fp32", "bf16"):
            yield model, precision


def _by_turns() -> list[str]:
    """Names of the zoo, one of each family in turn, so that a part of the sweep is a fair sample."""
    families: dict[str, list[str]] = {}
    for name in zoo.names():
        families.setdefault(zoo.get(name).family, []).append(name)
    longest = max(map(len, families.values()))
    return [names[i] for i in range(longest) for names in families.values() if i < len(names)]


def run_configuration(name: str, precision: str, plan_seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Return, for each optimizer, one record a budget: bytes of budget, prediction and measurement."""
    entry = zoo.get(name)
    torch.manual_seed(0)
    model = entry.build().train()
    inputs = Inputs.of(*entry.batch(entry.default_batch))
    region = Autocast("cpu", torch.bfloat16) if precision == "bf16" else None
    captured = capture(model, inputs, region)
    return {o: _run_budgets(entry, model, captured, inputs, region, o, plan_seconds) for o in OPTIMIZERS}


def _run_budgets(
    entry: zoo.ZooModel,
    model: torch.nn.Module,
    captured: CaptureGraph,
    inputs: Inputs,
    region: Autocast | None,
    optimizer: str,
    plan_seconds: float,
) -> list[dict[str, Any]]:
    step = TrainingStep(loss_fn=entry.loss, optimizer=optimizer)
    settings = Settings(None, step, "auto", plan_seconds, None)
    context = CompileContext(model, inputs, settings, region)
    profiled = profile_for_short_memory(captured, context)
    points = frontier_of(profiled.profile, context)
    eager_bytes = eager_step(model, captured, inputs, step).peak_bytes
    floor_bytes = points[-1].peak_bytes
    real = OPTIMIZERS[optimizer](model.parameters(), lr=1e-4)
    args, kwargs = inputs.call()
    run_step(lambda: model(*args, **kwargs), entry.loss, real, region)  # the optimizer's state is there from now on
    records = [
        {
            "share": "eager",
            "budget_bytes": eager_bytes,
            "predicted_bytes": eager_bytes,
            "measured_bytes": _measured(lambda: model(*args, **kwargs), model, model, inputs, entry, real, region),
            "overhead_ratio": 0.0,
        }
    ]
    for share in SHARES:
        budget_bytes = floor_bytes + int(share * max(0, eager_bytes - floor_bytes))
        emitted = emit_within_budget(profiled, context.with_settings(budget_bytes=budget_bytes), points)
        measured_bytes = _measured(
            lambda module=emitted.graph_module: captured.call(module, inputs.leaves),
            emitted.graph_module,
            model,
            inputs,
            entry,
            real,
            region,
        )
        records.append(
            {
                "share": share,
                "budget_bytes": budget_bytes,
                "planned_bytes": emitted.timeline.peak_bytes,
                "predicted_bytes": emitted.verification.verified_bytes,
                "measured_bytes": measured_bytes,
                "overhead_ratio": emitted.point.recompute_seconds / profiled.profile.step_seconds,
            }
        )
    return records


def _measured(
    forward: Any,
    module: torch.nn.Module,
    model: torch.nn.Module,
    inputs: Inputs,
    entry: zoo.ZooModel,
    optimizer: Any,
    region: Autocast | None,
) -> int:
    tracker = StorageTracker()
    tracker.hold(tensors_of((module, model, optimizer, inputs.leaves)))  # an emitted module may hold constants
    with tracker:
        run_step(forward, entry.loss, optimizer, region)
    return tracker.peak_bytes


def _write(path: Path, points: dict[str, Any]) -> None:
    versions = {"torch": torch.__version__, "date": date.today().isoformat(), "device": "cpu"}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**versions, "points": points}, indent=0) + "\n")


def print_table(points: dict[str, Any]) -> None:
    """Print a line a configuration and the counts."""
    rows = []
    total = violations = differences = unplanned = 0
    for key, records in points.items():
        above = sum(r["measured_bytes"] > r["budget_bytes"] for r in records)
        differ = sum(r["measured_bytes"] != r["predicted_bytes"] for r in records)
        unplanned += sum(r.get("planned_bytes", r["predicted_bytes"]) != r["predicted_bytes"] for r in records)
        total, violations, differences = total + len(records), violations + above, differences + differ
        peaks = [f"{r['measured_bytes'] / 1e6:.2f}" for r in records]
        rows.append((key, *peaks, f"{records[1]['overhead_ratio']:.1%}", above, differ))
    headers = ("model", "eager MB", *(f"{s:.0%}" for s in SHARES), "floor overhead", "violations", "differences")
    print(tabulate(rows, headers=headers, disable_numparse=True))
    models = len({key.partition("/")[0] for key in points})
    print(
        f"{models} models, {total} measured steps: {violations} above budget, {differences} where measured is not "
        f"predicted, {unplanned} where the plan's figure is not the verified one"
    )


if __name__ == "__main__":
    main()
