"""What a run allocates, as the device's own allocator tells.

In: a function. Out: bytes of each allocation and free on the CPU, by the allocator's own events, or how many allocations
there were.

The events are those of torch's first profiler, in a thread of its own: it works beside a ``torch.profiler`` of the user,
which one of its kind would end.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig

_AUTOGRAD: Any = torch.autograd
"""Its stubs lack the profiler."""
_MEMORY = "memory_alloc"
"""The kind of an event of the allocator."""


def allocated_on_cpu(run: Callable[[], object]) -> list[int]:
    """Return the bytes of each allocation of ``run``, in order, and less than 0 those of each free; what it returns is
    still there. It runs in another thread, without gradients."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_allocated, run).result()


@torch.no_grad()
def _allocated(run: Callable[[], object]) -> list[int]:
    cpu, memory_too = _AUTOGRAD.ProfilerState.CPU, (False, True, False, False, False)
    _AUTOGRAD._enable_profiler_legacy(_AUTOGRAD.ProfilerConfig(cpu, *memory_too, _ExperimentalConfig()))
    try:
        result = run()
    finally:
        threads = _AUTOGRAD._disable_profiler_legacy()
    del result
    return [event.cpu_memory_usage() for events in threads for event in events if event.kind() == _MEMORY]


def num_allocations(run: Callable[[], object], device: torch.device) -> int:
    """Return how often ``run`` allocates memory of ``device``."""
    if device.type == "cpu":
        return sum(nbytes > 0 for nbytes in allocated_on_cpu(run))
    before = _num_made(device)
    result = run()
    made = _num_made(device) - before
    del result
    return made


def _num_made(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device)["allocation.all.allocated"])
