"""What a run allocates, as the device's own allocator tells.

In: a function. Out: bytes of each allocation and free on the CPU, by the allocator's own events, or how many allocations
there were.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LOG_LEVEL = "KINETO_LOG_LEVEL"
"""What the profiler's library reads from the environment, of which the first time counts."""


def allocated_on_cpu(run: Callable[[], object]) -> list[int]:
    """Return the bytes of each allocation of ``run``, in order, and less than 0 those of each free; what it returns is
    still there."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _quiet_profiler(), torch.profiler.profile(profile_memory=True, activities=activities) as profiler:
        result = run()
    results: Any = profiler.profiler.kineto_results
    events = sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    del result
    return [event.nbytes() for event in events]


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


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Keep the profiler's own log from standard error: two lines each time, by default, in torch 2.13."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "99"
    try:
        yield
    finally:
        del os.environ[_LOG_LEVEL]
