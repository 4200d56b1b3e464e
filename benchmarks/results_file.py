"""Results as JSON: the machine, versions, date and commit with the rows, written after every row."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Row

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results"


def machine() -> dict[str, Any]:
    """Return what the figures depend on, without anything that names the host."""
    facts = {
        "cpu": _cpu_model(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
    }
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return facts


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def where_measured(rows: Iterable[Any]) -> str:
    """Return the processors and the days that rows were measured on, as they tell by ``cpu`` and ``date``."""
    noted = [row for row in rows if row.cpu and row.date]
    days = sorted(row.date for row in noted)
    return f"{' and '.join(sorted({row.cpu for row in noted}))}, {' to '.join(dict.fromkeys((days[0], days[-1])))}"


def commit() -> str:
    """Return the short commit, with ``+`` if the package differs from it; ``unknown`` outside a checkout."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--", ":/fxmem") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    ).stdout.strip()


def load_rows(path: Path) -> list[Row]:
    """Return the rows of ``path``; none if there is no such file."""
    if not path.exists():
        return []
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]


def save_rows(path: Path, rows: list[Row], **facts: Any) -> None:
    """Write ``rows`` with the machine's facts; None fields are left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = [{k: _short(v) for k, v in asdict(row).items() if v is not None} for row in rows]
    body = ",\n".join("  " + json.dumps(row) for row in plain)
    head = json.dumps({**machine(), **facts})
    path.write_text(f'{{"machine": {head},\n "rows": [\n{body}\n]}}\n', encoding="utf-8")


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value
