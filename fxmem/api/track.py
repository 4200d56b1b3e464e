"""``fxmem.track``: which bytes are alive while a block of code runs, measured.

On the CPU a :class:`~fxmem.profiling.storage_tracker.StorageTracker` counts storages; on CUDA the caching allocator's own
counters are read.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxmem.errors import in_units
from fxmem.ir import Phase, Timeline, TimelineStep, as_plain
from fxmem.profiling.storage_tracker import StorageTracker, tensors_of
from fxmem.report.trace_export import MemoryEvent, write_chrome_trace, write_memory_snapshot
from fxmem.torch_private import FakeTensor, current_backward_node


class Measurement:
    """What :func:`track` measured; final once the block has ended."""

    def __init__(self) -> None:
        self.start_bytes = 0
        """Bytes alive at the start of the block."""
        self.peak_bytes = 0
        """Largest sum of live bytes during the block, ``start_bytes`` included."""
        self.events: list[MemoryEvent] = []
        """Every allocation and free (CPU only)."""
        self._phase, self._op = Phase.FORWARD, ""
        self._start = time.perf_counter()

    def __repr__(self) -> str:
        return f"Measurement(peak {in_units(self.peak_bytes)}, {in_units(self.start_bytes)} at the start)"

    def phase(self, phase: Phase) -> None:
        """Say that ``phase`` begins; backward and optimizer are noticed without it, the loss is not."""
        self._phase = phase

    @property
    def timeline(self) -> Timeline:
        """The block as a timeline: one step for each event, with the phase and the op it belongs to."""
        steps = tuple(TimelineStep(e.phase, e.op, e.live_bytes) for e in self.events)
        peak = max(range(len(steps)), key=lambda i: steps[i].live_bytes, default=0)
        return Timeline(self.peak_bytes, peak, 0.0, 0, steps)

    def to_dict(self) -> dict[str, Any]:
        """Return bytes and events, ready for ``json.dumps``."""
        return {"start_bytes": self.start_bytes, "peak_bytes": self.peak_bytes, "events": as_plain(tuple(self.events))}

    def write_chrome_trace(self, path: str | PathLike[str]) -> None:
        """Write the block for Perfetto or chrome://tracing."""
        write_chrome_trace(self.events, path)

    def write_memory_snapshot(self, path: str | PathLike[str]) -> None:
        """Write the block for torch's memory visualizer."""
        write_memory_snapshot(self.events, path)

    def _note_op(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        self._op = str(func)

    def _note_event(self, tracker: StorageTracker, kind: str, serial: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        if current_backward_node() is not None:
            self._phase = Phase.BACKWARD
        seconds = time.perf_counter() - self._start
        self.events.append(MemoryEvent(kind, serial, nbytes, tracker.live_bytes, seconds, self._phase, self._op))


@contextmanager
def track(*holders: Any) -> Iterator[Measurement]:
    """Measure the peak of allocated bytes in the body of a ``with`` statement.

    ``holders``: modules, optimizers, scalers, tensors or nests of them that count as present at the start. With none, every
    tensor alive in the process counts. Where any of these is on CUDA the allocator's statistics are used: they count
    every tensor on the devices in question, whatever ``holders`` says, and of several devices the sum of the peaks.

    >>> with fxmem.track(model, optimizer, batch) as memory:
    ...     step()
    >>> memory.peak_bytes
    """
    measurement = Measurement()
    present = list(tensors_of(holders)) if holders else list(all_tensors())
    devices = sorted({tensor.device for tensor in present if tensor.is_cuda}, key=str)
    if devices:
        del present  # what it holds may die in the body
        for device in devices:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        measurement.start_bytes = sum(map(torch.cuda.memory_allocated, devices))
        try:
            yield measurement
        finally:
            for device in devices:
                torch.cuda.synchronize(device)
            measurement.peak_bytes = sum(map(torch.cuda.max_memory_allocated, devices))
        return
    tracker = StorageTracker(
        lambda kind, serial, nbytes: measurement._note_event(tracker, kind, serial, nbytes), measurement._note_op
    )
    measurement.start_bytes = tracker.hold(present)
    del present
    hook = register_optimizer_step_pre_hook(lambda *_: measurement.phase(Phase.OPTIMIZER))
    try:
        with tracker:
            yield measurement
    finally:
        hook.remove()
        measurement.peak_bytes = tracker.peak_bytes


def all_tensors() -> Iterator[torch.Tensor]:
    """Yield every tensor that is alive in the process."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor) and not isinstance(candidate, FakeTensor):
            yield candidate
