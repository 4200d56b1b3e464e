"""``fxmem.watch``: what is allocated while a training loop runs, live on a terminal and step by step to a function."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from fxmem.api.budget import parse_bytes
from fxmem.api.planned_class import PlannedModule
from fxmem.api.track import all_tensors
from fxmem.errors import InputError, in_units
from fxmem.profiling.storage_tracker import tensors_of
from fxmem.user_frames import level_of_user
from fxmem.watching.gauges import CpuGauge, CudaGauge, Gauge, Reading
from fxmem.watching.live_line import LiveLine, line_of
from fxmem.watching.steps import StepEnds

WARN_AT = 0.9
"""The share of a budget at which it is warned of."""

Callback = Callable[[dict[str, float]], object]
"""Is given a flat dict of numbers at the end of each step."""


class MemoryWatch:
    """What :func:`watch` returns; on in the body of a ``with``."""

    def __init__(
        self,
        holders: Sequence[Any],
        budget_bytes: int | None,
        callback: Callback | None,
        devices: Sequence[torch.device],
        live: bool,
    ) -> None:
        self.num_steps = 0
        """That have ended."""
        self._callback, self._start = callback, time.perf_counter()
        self._models = [each for each in holders if isinstance(each, PlannedModule)]
        self._gauges: list[Gauge] = []
        for device in devices:
            if device.type == "cuda":
                self._gauges.append(CudaGauge(device))
            else:
                present = tensors_of(holders) if holders else all_tensors()
                self._gauges.append(CpuGauge([t for t in present if t.device.type == "cpu"], self._look_at_cpu))
        given = {gauge.device: budget_bytes or gauge.total_bytes for gauge in self._gauges}
        self.budgets = {device: nbytes for device, nbytes in given.items() if nbytes is not None}
        """By device, in bytes: the one given, else on CUDA what the process may take of the device."""
        self._warned: set[str] = set()
        self._on = ExitStack()
        self._live = LiveLine(lambda: line_of(self.num_steps, self.readings(), self.budgets)) if live else None

    def __enter__(self) -> MemoryWatch:
        self._start = time.perf_counter()
        for gauge in self._gauges:
            gauge.start()
            self._on.callback(gauge.stop)
        self._on.callback(StepEnds(self._end_step).handle.remove)
        if self._live is not None:
            self._live.start()
            self._on.callback(self._live.stop)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            readings = "; ".join(line_of(self.num_steps, [each], self.budgets) for each in self.readings())
            error.add_note(f"watched when it was raised: {readings}")
            for model in self._models:
                model.fxmem.explain(error)
        self._on.close()
        self._look()

    def readings(self) -> tuple[Reading, ...]:
        """Return what each device holds now; after the end, what it held then."""
        return tuple(gauge.read() for gauge in self._gauges)

    def record(self) -> dict[str, float]:
        """Return what a callback is given: ``step``, ``seconds``, and by device ``cpu/allocated_bytes``,
        ``cuda:0/reserved_bytes``, ``cuda:0/peak_bytes``, ``cuda:0/budget_bytes``."""
        found: dict[str, float] = {"step": self.num_steps, "seconds": time.perf_counter() - self._start}
        for reading in self.readings():
            for name in ("allocated_bytes", "reserved_bytes", "peak_bytes"):
                found[f"{reading.device}/{name}"] = getattr(reading, name)
            if reading.device in self.budgets:
                found[f"{reading.device}/budget_bytes"] = self.budgets[reading.device]
        return found

    def _end_step(self) -> None:
        self.num_steps += 1
        self._look()
        if self._callback is not None:
            self._callback(self.record())

    # -- the budget --------------------------------------------------------------------------------------------------------

    def _look_at_cpu(self, live_bytes: int) -> None:
        self._check("cpu", live_bytes)

    def _look(self) -> None:
        for reading in self.readings():
            self._check(reading.device, reading.peak_bytes)

    def _check(self, device: str, nbytes: int) -> None:
        """Warn, once for each device, where its budget is near."""
        budget = self.budgets.get(device)
        if budget is None or nbytes < WARN_AT * budget or device in self._warned:
            return
        self._warned.add(device)
        over = "is over" if nbytes > budget else f"is {nbytes / budget:.0%} of"
        warnings.warn(
            f"in step {self.num_steps + 1} {in_units(nbytes)} ({nbytes} bytes) were allocated on {device}, which {over} "
            f"the budget of {in_units(budget)}: fxmem.optimize(model, budget={budget}) plans a step that keeps it, "
            "fxmem.advise tells what smaller changes bring.",
            stacklevel=level_of_user(),
        )


def watch(
    *holders: Any,
    budget: float | str | None = None,
    callback: Callback | None = None,
    devices: Sequence[torch.device | str] | None = None,
    live: bool | None = None,
) -> MemoryWatch:
    """Return a context manager that follows what is allocated, reserved, and was allocated at most, while its body trains.

    ``holders``: modules, optimizers, batches that count as present at the start, as of :func:`fxmem.track`; with none,
    every tensor of the process. ``budget``: bytes, or text such as "8GB", for each device; by default that of an optimized
    model among ``holders``, else on CUDA what the process may take of the device. At 90 % of it there is one warning.
    ``callback``: called at the end of each step with a flat dict of numbers (:meth:`MemoryWatch.record`), such as
    ``wandb.log``. ``devices``: by default the CUDA devices of ``holders``, all there are where these hold nothing, else the
    CPU. ``live``: whether a line on the terminal follows; by default where stderr is one. Errors: ``BudgetError``,
    ``InputError``.

    On the CPU each op takes some 20 microseconds longer; on CUDA nothing is slower. CUDA's peaks are set back at the start.

    >>> with fxmem.watch(model, optimizer, budget="8GB", callback=wandb.log):
    ...     train()
    """
    budget_bytes = parse_bytes(budget) if budget is not None else _planned_budget(holders)
    chosen = [torch.device(each) for each in devices] if devices is not None else _devices_of(holders)
    if not chosen or any(each.type not in ("cpu", "cuda") for each in chosen):
        raise InputError(f"devices are cpu, cuda:0, ..., not {devices!r}")
    return MemoryWatch(holders, budget_bytes, callback, chosen, sys.stderr.isatty() if live is None else live)


def _planned_budget(holders: Sequence[Any]) -> int | None:
    budgets = [each.fxmem.settings.budget_bytes for each in holders if isinstance(each, PlannedModule)]
    return max((each for each in budgets if each is not None), default=None)


def _devices_of(holders: Sequence[Any]) -> list[torch.device]:
    """Return the CUDA devices of ``holders``, of the machine where these hold nothing, else the CPU."""
    present = list(tensors_of(holders))
    found = {tensor.device for tensor in present if tensor.is_cuda}
    if not present and torch.cuda.is_available():
        found = {torch.device("cuda", index) for index in range(torch.cuda.device_count())}
    return sorted(found, key=str) or [torch.device("cpu")]
