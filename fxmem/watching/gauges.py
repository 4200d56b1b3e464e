"""What is allocated on a device at present: on the CPU by a tracker of storages, on CUDA by the allocator's statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from fxmem.ir import PlainData
from fxmem.profiling.storage_tracker import StorageTracker


@dataclass(frozen=True, slots=True)
class Reading(PlainData):
    """What a device holds at one moment."""

    device: str
    allocated_bytes: int
    reserved_bytes: int
    """What the allocator keeps of the device; on the CPU, where there is none, what is allocated."""
    peak_bytes: int
    """The most that was allocated since the watch began."""


class Gauge(Protocol):
    """Measures one device, from :meth:`start` to :meth:`stop`."""

    device: str
    total_bytes: int | None
    """What the process may take of the device; None: not known."""

    def start(self) -> None:
        """Begin."""

    def stop(self) -> None:
        """End; readings stay."""

    def read(self) -> Reading:
        """Return what is allocated. From any thread."""


class CpuGauge:
    """Storages on the CPU, of ops of the thread that starts it."""

    device, total_bytes = "cpu", cast(int | None, None)

    def __init__(self, present: Iterable[torch.Tensor], on_growth: Callable[[int], None]) -> None:
        """``present``: what counts from the start. ``on_growth`` is told the bytes alive at each allocation."""
        self._tracker = StorageTracker(
            lambda kind, *_: on_growth(self._tracker.live_bytes) if kind == "alloc" else None
        )
        self._present = present

    def start(self) -> None:
        self._tracker.hold(self._present)
        self._present = ()
        self._tracker.__enter__()

    def stop(self) -> None:
        self._tracker.__exit__(None, None, None)

    def read(self) -> Reading:
        live = self._tracker.live_bytes
        return Reading(self.device, live, live, self._tracker.peak_bytes)


class CudaGauge:
    """All that PyTorch's allocator holds on a CUDA device, of every thread."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.device = device, str(device)
        total = torch.cuda.get_device_properties(device).total_memory
        self.total_bytes: int | None = int(total * torch.cuda.get_per_process_memory_fraction(device))

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> None:
        """Nothing: the allocator goes on counting."""

    def read(self) -> Reading:
        of = self._device
        allocated, reserved = torch.cuda.memory_allocated(of), torch.cuda.memory_reserved(of)
        return Reading(self.device, allocated, reserved, torch.cuda.max_memory_allocated(of))
