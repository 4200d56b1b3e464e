"""Allocation events as files other tools read: Chrome's trace format (Perfetto) and torch's memory visualizer."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from os import PathLike
from typing import Any, NamedTuple

from fxmem.ir import Phase


class MemoryEvent(NamedTuple):
    """One allocation or free of a storage."""

    kind: str
    """``alloc`` or ``free``."""
    key: int
    """Names the storage."""
    nbytes: int
    live_bytes: int
    """Bytes alive after it."""
    seconds: float
    """Since the start of the block."""
    phase: Phase
    op: str
    """The op that had last run."""


def write_chrome_trace(events: Sequence[MemoryEvent], path: str | PathLike[str]) -> None:
    """Write ``events`` as counters of live bytes and one slice a phase; open the file in Perfetto."""
    records: list[dict[str, Any]] = []
    for event in events:
        time_us = event.seconds * 1e6
        records.append({"ph": "C", "name": "live bytes", "pid": 0, "ts": time_us, "args": {"bytes": event.live_bytes}})
    for phase, begin, end in _phases(events):
        records.append(
            {"ph": "X", "name": phase.value, "pid": 0, "tid": 0, "ts": begin * 1e6, "dur": (end - begin) * 1e6}
        )
    with open(path, "w") as file:
        json.dump({"traceEvents": records, "displayTimeUnit": "ms"}, file)


def _phases(events: Sequence[MemoryEvent]) -> list[tuple[Phase, float, float]]:
    """Return (phase, begin, end) in seconds of each run of events of one phase."""
    runs: list[tuple[Phase, float, float]] = []
    for event in events:
        if runs and runs[-1][0] is event.phase:
            runs[-1] = (event.phase, runs[-1][1], event.seconds)
        else:
            runs.append((event.phase, event.seconds, event.seconds))
    return runs


def write_memory_snapshot(events: Sequence[MemoryEvent], path: str | PathLike[str]) -> None:
    """Write ``events`` in the pickle format of ``torch.cuda.memory._snapshot``, which torch's visualizer opens.

    Addresses are made up: each storage gets a range of its own.
    """
    addresses: dict[int, int] = {}
    top = 0
    trace = []
    for event in events:
        if event.key not in addresses:
            addresses[event.key], top = top, top + max(event.nbytes, 1)
        frame = {"name": f"{event.op} ({event.phase.value})", "filename": event.phase.value, "line": 0}
        action = "alloc" if event.kind == "alloc" else "free_completed"
        trace.append(
            {
                "action": action,
                "addr": addresses[event.key],
                "size": event.nbytes,
                "stream": 0,
                "time_us": int(event.seconds * 1e6),
                "frames": [frame],
            }
        )
    with open(path, "wb") as file:
        pickle.dump({"segments": [], "device_traces": [trace]}, file)
