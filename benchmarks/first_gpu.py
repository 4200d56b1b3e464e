"""The first run on a GPU: fifteen measurements in eight minutes, ``python -m benchmarks.first_gpu [FILE]``.

Each (:mod:`benchmarks.gpu_measurements`) runs in a process of its own that is ended at its limit; after each, all that is
known so far is written to FILE, or to ``first_gpu.json`` under ``$OUT``. At the end a table: what fxmem predicts, what the
emulated device said (recorded in tests/data, and an earlier run there: ``--stub``), what this device says. On the
emulated device: ``python -m tests.cuda_stub.launch h100-80gb -m benchmarks.first_gpu FILE``. With ``--jobs 12`` those that
neither time anything nor look at the whole device run beside one another.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.results_file import RESULTS, machine

MOST_SECONDS = 480
ROOT = Path(__file__).resolve().parents[1]
STUB = RESULTS / "first_gpu_emulated_h100.json"
"""An earlier run on the emulated device."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One process and its time limit. ``alone``: nothing else may run on the device meanwhile."""

    number: int
    name: str
    limit_seconds: int
    environment: dict[str, str] = field(default_factory=dict)
    alone: bool = False


PLAN = (
    Measurement(1, "tests", 50),
    Measurement(2, "floor_of_mlp", 30),
    Measurement(3, "sums", 20),
    Measurement(4, "ops", 40),
    Measurement(5, "eager_peaks", 60),
    Measurement(6, "workspace", 20),
    Measurement(7, "convolutions", 40),
    Measurement(8, "attention_backward", 20),
    Measurement(9, "attention_kernels", 20),
    Measurement(10, "budgets", 45),
    Measurement(11, "bits", 35),
    Measurement(12, "reserved", 20),
    Measurement(12, "reserved_expandable", 20, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    Measurement(13, "context", 20, alone=True),
    Measurement(14, "compiled", 40),
    Measurement(15, "suite", MOST_SECONDS, alone=True),
)


def run(measurement: Measurement, seconds: float) -> dict[str, Any]:
    """Run one measurement for at most ``seconds``; return its rows and how it ended."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows"
        command = [sys.executable, "-m", "benchmarks.gpu_measurements", measurement.name, str(out)]
        if measurement.name == "suite":
            limits = ["--models", "unet", "--deadline", str(max(1, int(seconds) - 60))]
            command = [sys.executable, "-m", "benchmarks.cuda_suite", *limits, "--results", str(out)]
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **measurement.environment}, stdout=said, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait(seconds)
                ended = "done" if status == 0 else f"failed with {status}"
            except subprocess.TimeoutExpired:
                ended = f"cut short after {seconds:.0f} s"
            finally:
                _end(process)
            said.seek(0)
            tail = said.read()[-1500:]
        rows = _suite_rows(out) if measurement.name == "suite" else _rows(out)
    result = {"ended": ended, "seconds": round(time.monotonic() - start, 1), "rows": rows}
    return result if ended == "done" else {**result, "said": tail}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and those it started, which share its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _rows(out: Path) -> list[dict[str, Any]]:
    """Return the rows written, the later of two of one name."""
    if not out.exists():
        return []
    lines = out.read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return list({row["what"]: row for row in rows}.values())


def _suite_rows(out: Path) -> list[dict[str, Any]]:
    """Return the suite's rows as those of the other measurements."""
    if not out.exists():
        return []
    found = []
    for row in json.loads(out.read_text())["rows"]:
        ratio = f"time {row['time_ratio']:.2f}, gradients {row.get('gradients')}" if "time_ratio" in row else ""
        real = row.get("peak_bytes", row.get("problem"))
        plain = {"what": f"{row['model']}: {row['way']}", "predicted": row.get("predicted_peak_bytes"), "real": real}
        found.append({key: value for key, value in {**plain, "note": ratio}.items() if value is not None})
    return found


def table(results: dict[str, Any], stub: dict[str, Any]) -> str:
    """Return all rows; of large measurements those whose figures differ."""
    lines: list[list[Any]] = []
    for name, result in results["measurements"].items():
        earlier = {row["what"]: row for row in stub.get("measurements", {}).get(name, {}).get("rows", [])}
        rows, equal = result["rows"], 0
        lines.append([f"-- {name}: {result['ended']}, {result['seconds']} s, {len(rows)} rows"])
        for row in rows:
            predicted, real = row.get("predicted"), row.get("real")
            as_predicted = predicted == real or (row.get("note") == "a bound" and real <= predicted)
            if len(rows) > 60 and as_predicted:
                equal += 1
                continue
            said = row.get("stub", earlier.get(row["what"], {}).get("real"))
            lines.append(
                [row["what"], *map(_shown, (predicted, said, real)), _off(predicted, real), row.get("note", "")]
            )
        if equal:
            lines.append([f"({equal} rows as predicted are not shown)"])
        if not rows and "said" in result:
            lines.append([result["said"].strip().rpartition("\n")[2][:110]])
    return tabulate(lines, headers=["", "predicted", "stub", "real", "off", ""], disable_numparse=True)


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _off(predicted: Any, real: Any) -> str:
    """By how much the prediction is too high, in percent of what was measured."""
    if not (isinstance(predicted, int) and isinstance(real, int)) or predicted == real:
        return ""
    return f"{100 * (predicted / real - 1):+.2f} %" if real else f"{predicted:+,}"


def main(arguments: list[str]) -> int:
    """Run what is asked for, writing after each measurement; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, help="where to write; left out: under $OUT")
    parser.add_argument("--only", default="", help="names of measurements, with commas; FILE keeps others")
    parser.add_argument("--stub", type=Path, default=STUB, help="an earlier run on the emulated device")
    parser.add_argument("--patience", type=float, default=1.0, help="times all limits: for a slow machine")
    parser.add_argument("--jobs", type=int, default=1, help="processes beside one another")
    parser.add_argument("--table", action="store_true", help="print the table of FILE, measure nothing")
    given = parser.parse_args(arguments)
    if given.file is None and "OUT" not in os.environ:
        parser.error("say where to write: a file, or a folder in OUT")
    target: Path = given.file or Path(os.environ["OUT"]) / "first_gpu.json"
    stub = json.loads(given.stub.read_text()) if given.stub.exists() else {}
    if given.table:
        print(table(json.loads(target.read_text()), stub))
        return 0
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing is measured")
        return 1
    wanted = [m for m in PLAN if not given.only or m.name in given.only.split(",")]
    deadline = time.monotonic() + MOST_SECONDS * given.patience
    earlier = json.loads(target.read_text())["measurements"] if given.only and target.exists() else {}
    results: dict[str, Any] = {"machine": machine(), "measurements": earlier}
    lock = threading.Lock()

    def take(measurement: Measurement) -> None:
        seconds = min(measurement.limit_seconds * given.patience, deadline - time.monotonic())
        name = f"{measurement.number} {measurement.name}"
        result = run(measurement, seconds) if seconds > 5 else {"ended": "no time left", "seconds": 0, "rows": []}
        with lock:
            results["measurements"][name] = result
            print(f"{name}: {result['ended']}, {result['seconds']} s, {len(result['rows'])} rows", flush=True)
            target.write_text(json.dumps(results, indent=1) + "\n")

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(take, [measurement for measurement in wanted if not measurement.alone]))
    for measurement in wanted:
        if measurement.alone:
            take(measurement)
    print(table(results, stub))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
