"""``python -m benchmarks.frameworks``: loops of many frameworks, each with the one line that a user would type first.

Each loop of :mod:`benchmarks.framework_loops` trains on the CPU without fxmem, then with a budget that is a share of the
peak measured there. Printed and kept in ``benchmarks/results/frameworks.json``: whether it runs, whether losses, weights,
buffers and gradients are the same to the bit, the peak that was measured, whether what is saved has the same names, keys
and contents, and what fxmem told the user. Needs the frameworks; a loop whose framework is missing keeps its row.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.results_file import RESULTS, machine

PATH = RESULTS / "frameworks.json"
FILES = ("hugging_face", "vision", "trainers", "science")
"""Of :mod:`benchmarks.framework_loops`, in the order of the table."""
MARK = "ROW "
HERE = ("-m", "benchmarks.frameworks", "--here")


@dataclass(frozen=True, slots=True)
class FrameworkRow:
    """What one loop showed. Bytes are measured ones."""

    framework: str
    loop: str
    versions: str
    result: str
    """``runs``; ``refused``, with an error of fxmem; ``fails``, with another."""
    error: str = ""
    remedy_works: bool | None = None
    """Of what is refused: whether it trains alike when done as the error says; what follows is then of that run."""
    same_bits: bool | None = None
    differs: str = ""
    eager_bytes: int = 0
    budget_bytes: int = 0
    peak_bytes: int = 0
    plan_dropped: bool = False
    """Whether a plan that ran recomputes anything."""
    saved_alike: bool | None = None
    """None if the loop saves nothing."""
    said: tuple[str, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether it does, at once or once the error's remedy is followed."""
        return self.result == "runs" or bool(self.remedy_works)

    @property
    def within(self) -> bool:
        return 0 < self.peak_bytes <= self.budget_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", nargs="+", choices=FILES, default=FILES)
    parser.add_argument("--only", default="", help="loops whose framework and name contain this")
    parser.add_argument("--ranks", action="store_true", help="DDP and FSDP2 on two processes, in place of loops")
    parser.add_argument("--here", action="store_true", help="in this process: print rows, keep nothing")
    given = parser.parse_args()
    if given.here:
        return _here(given.files, given.only)
    if given.ranks:
        _write(_kept() | {"ranks": [*ranks()]})
    else:
        for file in given.files:
            for row in _lines_of([*HERE, "--files", file, "--only", given.only]):
                kept = _kept()
                by_name = {(each["framework"], each["loop"]): each for each in (*kept["rows"], row)}
                _write(kept | {"rows": list(by_name.values())})
    print(page())
    return 0


def _kept() -> dict[str, Any]:
    kept = json.loads(PATH.read_text()) if PATH.exists() else {"rows": [], "ranks": []}
    return {**kept, "machine": machine()}


def _write(kept: dict[str, Any]) -> None:
    tables = (
        f'"{name}": [\n' + ",\n".join("  " + json.dumps(row) for row in kept[name]) + "\n]"
        for name in ("rows", "ranks")
    )
    PATH.write_text(f'{{"machine": {json.dumps(kept["machine"])},\n {", ".join(tables)}}}\n', encoding="utf-8")


def ranks() -> Iterator[dict[str, Any]]:
    """Yield the rows of :mod:`benchmarks.framework_loops.ranks`, run by two processes."""
    return _lines_of(["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "benchmarks.framework_loops.ranks"])


def _lines_of(command: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows that Python prints when it runs ``command`` in a process of its own."""
    env = {**os.environ, "FXMEM_CACHE": "0", "FXMEM_MEASURE": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with subprocess.Popen([sys.executable, *command], env=env, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith(MARK):
                yield json.loads(line.removeprefix(MARK))


# -- one loop --------------------------------------------------------------------------------------------------------------


def _here(files: list[str], only: str) -> int:
    import torch

    from benchmarks.framework_loops.loop import LOOPS
    from benchmarks.libraries import import_torchvision

    torch.set_num_threads(1)
    import_torchvision()
    for file in files:
        importlib.import_module(f"benchmarks.framework_loops.{file}")
    for loop in LOOPS:
        if only in f"{loop.framework} {loop.name}":
            row = tried(loop)
            if row is not None:
                print(MARK + json.dumps(asdict(row)), flush=True)
    return 0


def tried(loop: Any) -> FrameworkRow | None:
    """Return the row of a loop; None if its framework is not installed."""
    from benchmarks.framework_loops.loop import run
    from fxmem.errors import FxMemError

    facts = {"framework": loop.framework, "loop": loop.name, "versions": _versions(loop.framework)}
    with tempfile.TemporaryDirectory() as folder:
        eager, ours = (Path(folder) / name / "out" for name in ("a", "b"))
        for each in (eager, ours):
            each.mkdir(parents=True)
        try:
            expected = run(loop.train, eager, None)
        except ModuleNotFoundError as error:
            print(f"{loop.framework}: {error}", file=sys.stderr)
            return None
        budget_bytes = int(loop.share * expected.peak_bytes)
        bytes_of = {"eager_bytes": expected.peak_bytes, "budget_bytes": budget_bytes}
        try:
            found = run(loop.train, ours, budget_bytes)
        except FxMemError as error:
            row = FrameworkRow(**facts, result="refused", error=f"{type(error).__name__}: {error}", **bytes_of)
            return _as_it_says(loop, row, error)
        except Exception as error:
            traceback.print_exc()
            return FrameworkRow(**facts, result="fails", error=f"{type(error).__name__}: {error}", **bytes_of)
        row = FrameworkRow(**facts, result="runs", **bytes_of)
        return _compared(row, (expected, eager), (found, ours))


MOST_RAISES = 3
"""Of a budget to the least that an error names: the steps that show later may need more."""


def _as_it_says(loop: Any, row: FrameworkRow, error: Any) -> FrameworkRow:
    """Return the row of a refused loop once it is done as the error says: by its remedy, or with the least budget that the
    error names."""
    from benchmarks.framework_loops.loop import run
    from fxmem.errors import FxMemError

    least_bytes = _least_of(error) if loop.remedy is None else None
    if loop.remedy is None and least_bytes is None:
        return row
    for _ in range(MOST_RAISES):
        with tempfile.TemporaryDirectory() as folder:
            eager, ours = (Path(folder) / name / "out" for name in ("a", "b"))
            for each in (eager, ours):
                each.mkdir(parents=True)
            expected = run(loop.remedy or loop.train, eager, None)
            bytes_of = {
                "eager_bytes": expected.peak_bytes,
                "budget_bytes": least_bytes or int(loop.share * expected.peak_bytes),
            }
            try:
                found = run(loop.remedy or loop.train, ours, bytes_of["budget_bytes"])
            except FxMemError as again:
                error, least_bytes = again, _least_of(again)
                if least_bytes is None:
                    break
                continue
            done = _compared(replace(row, **bytes_of), (expected, eager), (found, ours))
            return replace(done, remedy_works=bool(done.same_bits))
    return replace(row, remedy_works=False, said=(f"{type(error).__name__}: {error}",))


def _least_of(error: Exception) -> int | None:
    """Return the least budget that an error names, if it does."""
    from fxmem.errors import InfeasibleBudgetError

    return error.least_bytes if isinstance(error, InfeasibleBudgetError) else None


def _compared(row: FrameworkRow, eager: tuple[Any, Path], ours: tuple[Any, Path]) -> FrameworkRow:
    from benchmarks.framework_loops.loop import differing, unequal_files
    from fxmem.api.planned_class import FxMemModule

    differs = differing(eager[0], ours[0])
    unequal = unequal_files(eager[1], ours[1])
    planned = [m for m in ours[0].model.modules() if isinstance(m, FxMemModule)]
    spaces = [
        space
        for m in planned
        for space in (m.fxmem, *m.fxmem.methods.values(), *m.fxmem.set_forwards.values())
        if space.is_planned
    ]
    return replace(
        row,
        same_bits=not differs,
        differs=", ".join([*differs[:4], *(unequal or [])[:4]]),
        peak_bytes=ours[0].peak_bytes,
        plan_dropped=any(space.report.dropped_bytes > 0 for space in spaces),
        saved_alike=None if unequal is None else not unequal,
        said=tuple(ours[0].said),
    )


PACKAGES = {
    "transformers Trainer": "transformers",
    "TRL": "trl",
    "Lightning": "lightning",
    "MONAI": "monai",
    "PyG": "torch_geometric",
    "torch DDP": "torch",
    "torch FSDP2": "torch",
    "torch.func": "torch",
    "transformers wav2vec2": "transformers",
}


def _versions(framework: str) -> str:
    name = PACKAGES.get(framework, framework)
    try:
        return f"{name} {version(name).partition('+')[0]}"
    except PackageNotFoundError:
        return name


# -- the page --------------------------------------------------------------------------------------------------------------

HEADERS = (
    "framework",
    "loop",
    "trains",
    "same bits",
    "eager MB",
    "budget MB",
    "peak MB",
    "saved",
    "what the user sees",
)


def page() -> str:
    """Return docs/frameworks.md: the loops of frameworks, and ranks of distributed ones."""
    kept = json.loads(PATH.read_text())
    rows = [FrameworkRow(**row) for row in kept["rows"]]
    facts = kept["machine"]
    used = sorted({row.versions for row in rows})
    trained, refused = ([row for row in rows if row.result == result] for result in ("runs", "refused"))
    over = [row for row in trained if not row.within]
    followed = [row for row in refused if row.remedy_works]
    lines = [
        "# fxmem in the loops of frameworks",
        "",
        f"From `benchmarks/results/frameworks.json` ({facts['date']}), made by `python -m benchmarks.frameworks`; this "
        f"page by `python -m benchmarks.readme`. Versions: {', '.join(used)}; torch {facts['torch']}.",
        "",
        "Each loop trains a small model on the CPU, without fxmem and with the one line that a user would type first; the "
        "code is in `benchmarks/framework_loops`. *Same bits*: losses, weights, buffers and gradients. *eager MB*: the "
        "peak of storages without fxmem, from the second step of the optimizer on, all that the framework holds included; "
        "the budget is a share of it. *saved*: names, keys and contents of what the loop saves. Plans are those of the "
        "quick planner, `chen`.",
        "",
        f"{len(trained)} of {len(rows)} loops train, {sum(bool(row.same_bits) for row in trained)} of them with the same "
        f"bits, {len(trained) - len(over)} within the budget. Of {len(refused)} that are refused the remedy that the error "
        f"names was followed: {len(followed)} train then, {sum(row.within for row in followed)} of them within the budget; "
        "the figures are of that run.",
        "",
        tabulate([_cells(row) for row in rows], headers=HEADERS, tablefmt="github", disable_numparse=True),
        "",
    ]
    return "\n".join(lines + (_ranks(kept["ranks"]) if kept["ranks"] else []))


def _cells(row: FrameworkRow) -> list[str]:
    if row.result != "runs":
        remedy = {None: "", True: "; the remedy works", False: "; the remedy fails"}[row.remedy_works]
        if not row.remedy_works:
            said = _on_one_line(" / ".join((row.error, *row.said)))
            return [row.framework, row.loop, row.result + remedy, "", *_megabytes(row), "", said]
        result, said = row.result + remedy, (row.error, *row.said)
    else:
        result, said = "yes", row.said
    saved = {None: "", True: "alike", False: f"not alike: {row.differs}"}[row.saved_alike]
    bits = "yes" if row.same_bits else f"no: {row.differs}"
    return [row.framework, row.loop, result, bits, *_megabytes(row), saved, _on_one_line(" / ".join(said))]


def _ranks(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of :mod:`benchmarks.framework_loops.ranks`."""
    cells = [
        [
            row["case"],
            *(", ".join(map(str, row[name])) for name in ("eager_bytes", "predicted_bytes", "peak_bytes")),
        ]
        + ["yes" if row["same_bits"] else "no"]
        for row in rows
    ]
    headers = ("two processes (gloo)", "eager bytes", "predicted bytes", "measured bytes", "same bits")
    text = (
        "Peaks of each rank in the fourth step, from before the wrapper is made. Predicted is, for DDP, the plan's peak "
        "and what the wrapper holds beside it; for FSDP2 what one process takes alone, in PyTorch's fake process group "
        "(`benchmarks/framework_loops/ranks.py`)."
    )
    return ["## Data parallelism", "", text, "", tabulate(cells, headers=headers, tablefmt="github"), ""]


def _on_one_line(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _megabytes(row: FrameworkRow) -> list[str]:
    peak = f"{row.peak_bytes / 1e6:.3f}" if row.peak_bytes else ""
    return [f"{row.eager_bytes / 1e6:.3f}", f"{row.budget_bytes / 1e6:.3f}", peak]


if __name__ == "__main__":
    raise SystemExit(main())
