"""Predicted and measured memory of training steps on CUDA, eager and under budgets.

Three commands, each writing one JSON file:

- ``python -m benchmarks.cuda_memory predict DEVICE FILE``: what :func:`fxmem.estimate` says of each case for a GPU by name.
  It needs no CUDA.
- ``... measure DEVICE FILE``: what PyTorch's allocator says of the eager step. It runs on a CUDA device, or on the emulated
  one: ``python -m tests.cuda_stub.launch DEVICE -m benchmarks.cuda_memory measure DEVICE FILE``.
- ``... budgets DEVICE FILE``: trains each case under budgets at the floor and at 35 % and 75 % of the way from there to the
  peak of the step as it is, with AdamW and SGD, and compares the peak with the budget. ``planned`` and ``measured`` are of
  the first two steps, in which a program may be written down, ``told`` and ``steady`` of the four after them.

``... table PREDICTED MEASURED`` prints the two side by side. Options: ``--budget-of``, ``--runtime``, ``--backend``;
``--cases a,b``,
names that contain one of these, in this order; ``--jobs``, so many at a time.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxmem
from benchmarks.cuda_cases import CASES, Case
from benchmarks.results_file import RESULTS, machine
from benchmarks.ways import least_compiled_bytes
from fxmem.compiled.report import CompiledReport

SHARES = (0.0, 0.35, 0.75)
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss that every case is trained with."""
    if isinstance(output, torch.Tensor):
        return output.float().sum() if output.dim() else output
    loss = getattr(output, "loss", None)
    return output[0].float().sum() if loss is None else loss  # type: ignore[no-any-return]


def step_of(case: Case, optimizer: Any, scaler: Any) -> fxmem.TrainingStep:
    """Return the case's training step."""
    return fxmem.TrainingStep(loss_fn=loss_of, optimizer=optimizer, autocast=case.autocast, scaler=scaler)


def train(case: Case, model: nn.Module, batch: Any, optimizer: Any, scaler: Any, num_steps: int) -> None:
    """Run some steps."""
    args, kwargs = batch
    for _ in range(num_steps):
        with torch.autocast("cuda", case.autocast or torch.float16, enabled=case.autocast is not None):
            output = model(*args, **kwargs)
            loss = loss_of(output)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        del output, loss


def predicted(case: Case, device: str) -> dict[str, Any]:
    """Return what the estimate says."""
    model = case.build()
    args, kwargs = case.inputs()
    scaler = torch.amp.GradScaler("cuda") if case.scaled else None
    estimate = fxmem.estimate(
        model, args, kwargs, device=f"cuda:{device}", step=step_of(case, "adamw", scaler), cost="h100", plan_seconds=1
    )
    assert estimate.cuda is not None
    return {"allocated": estimate.cuda.allocated_bytes, "reserved": estimate.cuda.reserved_bytes}


def measured(case: Case) -> dict[str, Any]:
    """Return what the allocator says of a step of the eager model in its steady state."""
    model, batch, scaler = on_cuda(case)
    optimizer = torch.optim.AdamW(model.parameters())
    return measured_step(case, model, batch, optimizer, scaler)


def on_cuda(case: Case) -> tuple[nn.Module, Any, Any]:
    """Return model, batch and scaler on the device, with nothing else there."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    model = case.build().cuda()
    args, kwargs = case.inputs()
    batch = tuple(a.cuda() for a in args), {name: t.cuda() for name, t in kwargs.items()}
    # a larger scale leaves out first steps: then the optimizer has no state
    return model, batch, torch.amp.GradScaler("cuda", init_scale=1.0) if case.scaled else None


def measured_step(
    case: Case, model: nn.Module, batch: Any, optimizer: Any, scaler: Any, num_steps: int = 4
) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    train(case, model, batch, optimizer, scaler, num_steps)
    stats = torch.cuda.memory_stats()
    return {
        "requested": stats["requested_bytes.all.peak"],
        "allocated": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
    }


def under_budgets(case: Case, asked_for: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield, for each optimizer and budget, what was planned and what was measured, each as in a new process."""
    for name in OPTIMIZERS:
        least, whole = _range_of(case, name, asked_for)
        for share in SHARES:
            budget = int(least + share * (whole - least))
            yield {"optimizer": name, "share": share, "budget": budget} | _kept(case, name, budget, asked_for)


def _trained(case: Case, optimizer: str, asked_for: dict[str, Any]) -> tuple[Any, ...]:
    """Return model, batch, scaler and optimizer, on a device with nothing else there, and how a step is planned."""
    model, batch, scaler = on_cuda(case)
    made = OPTIMIZERS[optimizer](model.parameters(), lr=1e-3)
    options = {
        "step": step_of(case, made, scaler),
        "cost": "h100",
        "plan_seconds": 1.0,
        "backend": "eager",
        **asked_for,
    }
    return model, batch, scaler, made, options


def _range_of(case: Case, optimizer: str, asked_for: dict[str, Any]) -> tuple[int, int]:
    """Return the least budget that can be kept, and what the step takes as it is, where that is more: CUDA's allocator may
    leave more unused in a planned step, which asks in another order."""
    model, batch, _, _, options = _trained(case, optimizer, asked_for)
    estimate: Any = fxmem.estimate(model, *batch, **options)
    if options["backend"] == "inductor":
        return least_compiled_bytes(model, batch, options), estimate.peak_bytes
    return estimate.floor_bytes, max(estimate.floor_bytes, estimate.bound_bytes)


def _kept(case: Case, optimizer: str, budget: int, asked_for: dict[str, Any]) -> dict[str, Any]:
    torch.compiler.reset()
    model, batch, scaler, made, options = _trained(case, optimizer, asked_for)
    try:
        optimized = fxmem.optimize(model, *batch, budget=budget, **options)
    except fxmem.InfeasibleBudgetError as error:
        return {"refused": str(error).splitlines()[0]}
    planned = _told(optimized)
    peaks = measured_step(case, optimized, batch, made, scaler, 2)
    later = measured_step(case, optimized, batch, made, scaler, 4)
    of = options["budget_of"]
    return {
        "planned": planned,
        "measured": peaks,
        "told": _told(optimized),
        "steady": later,
        "runtime": getattr(optimized.fxmem, "runtime", options["backend"]),
        "exceeded": max(peaks[of], later[of]) > budget,
    }


def _told(optimized: Any) -> dict[str, int]:
    report = optimized.fxmem.report
    if isinstance(report, CompiledReport):
        return {"allocated": report.predicted_peak_bytes}
    cuda = report.cuda
    return {"allocated": cuda.allocated_bytes, "reserved": cuda.reserved_bytes}


def _each(of: Callable[[str], Any], names: list[str], target: Path, jobs: int) -> None:
    """Write what ``of`` says of each case, after each, so that a run that is cut short leaves what it had."""
    results: dict[str, Any] = json.loads(target.read_text())["cases"] if target.exists() else {}
    timed = partial(_timed, of)
    names = [name for name in names if name not in results]
    with ExitStack() as stack:
        found = map(timed, names)
        if jobs > 1:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(jobs, torch.set_num_threads, (1,), 1))
            found = pool.imap_unordered(timed, names)
        for name, seconds, result in found:
            results[name] = result
            print(f"{name:40} {seconds:6.1f} s  {json.dumps(result)[:300]}", flush=True)
            target.write_text(json.dumps({"machine": machine(), "cases": results}, indent=1) + "\n")


def _timed(of: Callable[[str], Any], name: str) -> tuple[str, float, Any]:
    start = time.perf_counter()
    try:
        result = of(name)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"[:300]}
    return name, time.perf_counter() - start, result


def _result(command: str, device: str, asked_for: dict[str, Any], name: str) -> Any:
    """Return what ``command`` finds of the case ``name``."""
    if command == "predict":
        return predicted(CASES[name], device)
    return measured(CASES[name]) if command == "measure" else list(under_budgets(CASES[name], asked_for))


def table(before: Path, after: Path) -> None:
    """Print predicted and measured bytes side by side."""
    predictions, measurements = (json.loads(path.read_text())["cases"] for path in (before, after))
    for name in predictions:
        one, other = predictions[name], measurements.get(name, {"error": "not measured"})
        if "error" in one or "error" in other:
            print(f"{name:40} {one.get('error', '')[:60]} | {other.get('error', '')[:60]}")
            continue
        shares = (100 * (one[key] / other[key] - 1) for key in ("allocated", "reserved"))
        print(f"{name:40} {one['allocated']:>14,} {other['allocated']:>14,}" + "".join(f" {s:+8.3f} %" for s in shares))


BUDGETS = {
    "h100-80gb": "cuda_budgets_h100-80gb.json",
    "a100-80gb": "cuda_budgets_a100-80gb.json",
    'a100-80gb with `budget_of="reserved"`': "cuda_budgets_reserved_a100-80gb.json",
    "h100-80gb with programs, the default": "cuda_budgets_programs_h100-80gb.json",
    "a100-80gb with programs": "cuda_budgets_programs_a100-80gb.json",
    "h100-80gb with programs, every call in cuDNN taking 25 MB": "cuda_budgets_workspaces_h100-80gb.json",
}
"""By GPU and kind of budget, the committed results."""


def told() -> str:
    """Return a sentence on the budgets of the committed results."""
    files = {what: json.loads((RESULTS / name).read_text()) for what, name in BUDGETS.items()}
    parts = [_told_of(what, found["cases"]) for what, found in files.items()]
    facts = next(iter(files.values()))["machine"]
    return (
        "On devices that run PyTorch's own CUDA host code and compute nothing (`tests/cuda_stub`), AdamW and SGD, three "
        f"budgets each from the floor up: {'; '.join(parts)}. All but the last three are of the tape. "
        "Each step ran as in a new process; cuDNN takes workspaces there where `FXMEM_STUB_CUDNN_WORKSPACE` says so "
        "(`python -m tests.cuda_stub.launch h100-80gb -m benchmarks.cuda_memory budgets h100-80gb FILE --runtime tape`, "
        f"torch {facts['torch']}, {facts['date']})."
    )


def _told_of(device: str, cases: dict[str, Any]) -> str:
    rows = [row for found in cases.values() if isinstance(found, list) for row in found]
    ran = [row for row in rows if "measured" in row]
    differ = sum(told != taken for told, taken in map(_told_and_taken, ran))
    refused = f", {len(rows) - len(ran)} refused" if len(ran) < len(rows) else ""
    return (
        f"{device}, {len(cases)} models, {len(ran)} steps: **{sum(row['exceeded'] for row in ran)} over the budget**, "
        f"{differ} whose allocated bytes are not the predicted ones to the byte{refused}"
    )


def _told_and_taken(row: dict[str, Any]) -> tuple[int, int]:
    """Return allocated bytes, told and measured: of a program those of its own steps, of the tape those of all."""
    if row.get("runtime") == "program":
        return row["told"]["allocated"], row["steady"]["allocated"]
    return row["planned"]["allocated"], max(row[what]["allocated"] for what in ("measured", "steady") if what in row)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("predict", "measure", "budgets", "table"))
    parser.add_argument("device", help="a GPU by name; of table: the predicted file")
    parser.add_argument("file", type=Path)
    parser.add_argument("--cases", default="")
    parser.add_argument("--budget-of", choices=("allocated", "reserved"), default="allocated")
    parser.add_argument("--jobs", type=int, default=1, help="cases beside one another, each in a process of its own")
    parser.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--runtime", choices=("auto", "tape", "program"), default="auto")
    given = parser.parse_args(arguments)
    parts = given.cases.split(",")
    names = list(dict.fromkeys(name for part in parts for name in CASES if part in name))
    if given.command == "table":
        table(Path(given.device), given.file)
        return
    asked_for = {"budget_of": given.budget_of, "runtime": given.runtime, "backend": given.backend}
    _each(partial(_result, given.command, given.device, asked_for), names, given.file, given.jobs)


if __name__ == "__main__":
    main(sys.argv[1:])
