"""Rows of the measurements on a GPU, and what they read off the device."""

from __future__ import annotations

import fcntl
import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fxmem.devices import DEVICES, DeviceModel
from fxmem.fake.stand_in import cuda_model

Row = dict[str, Any]
DATA = Path(__file__).resolve().parents[1] / "tests/data"


def row(what: str, predicted: Any = None, stub: Any = None, real: Any = None, note: str = "") -> Row:
    """Return one row; what is None is not known."""
    found = {"what": what, "predicted": predicted, "stub": stub, "real": real, "note": note}
    return {key: value for key, value in found.items() if value is not None and value != ""}


@cache
def the_device() -> DeviceModel:
    """Return the model of this machine's GPU."""
    return cuda_model(torch.device("cuda"))


def known_name() -> str:
    """Return the name under which :mod:`fxmem.devices` knows this machine's GPU, or the one most like it."""
    here = the_device()
    peers = [d for d in DEVICES.values() if d.capability == here.capability] or list(DEVICES.values())
    return min(peers, key=lambda d: (abs(d.num_sms - here.num_sms), abs(d.memory_bytes - here.memory_bytes))).name


def stat(kind: str, when: str) -> int:
    """Return ``requested``, ``allocated`` or ``reserved`` bytes, ``current`` or ``peak``."""
    return int(torch.cuda.memory_stats()[f"{kind}_bytes.all.{when}"])


def on_empty_device() -> None:
    """Give back all that nothing refers to, libraries' workspaces too."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@contextmanager
def alone() -> Iterator[None]:
    """Hold the lock under which one process at a time takes times on the device."""
    with (Path(tempfile.gettempdir()) / "fxmem_gpu_times.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
