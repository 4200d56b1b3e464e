"""Budgets as users write them, in bytes; with none, what a CUDA device has free."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from fxmem.capture.graph import device_of
from fxmem.devices import DeviceModel
from fxmem.errors import BudgetError
from fxmem.profiling.storage_tracker import tensors_of
from fxmem.torch_private import storage_key

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{infix}b": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}


MARGIN_BYTES = 256 << 20
MARGIN_RATIO = 0.03
"""What ``budget="auto"`` leaves of a device, the larger of the two: for the allocator's fragments, and for what other
libraries allocate while training."""
LEAST_BARE_BYTES = 1000
"""A budget that is a bare number of fewer bytes is taken for a slip."""
CONTEXT_BYTES = 3 << 28
"""What CUDA's context and kernels take of a device that is not here, beside PyTorch's allocator: on an H200 it was 802 MB
after a step with cuDNN and cuBLAS (torch 2.11, CUDA 13)."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What bounds the peak of a step; neither: nothing does."""

    nbytes: int | None = None
    share: float | None = None
    """Of the peak of the model as it is."""


def _parse_share(budget: float | str | None) -> float | None:
    """Return the share of eager's peak that a text such as "50%" asks for; None where ``budget`` is no such text.

    Errors: ``BudgetError``.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", budget) if isinstance(budget, str) else None
    if match is None:
        return None
    share = float(match[1]) / 100
    if share <= 0:
        raise BudgetError(f"budget must be above 0 % of eager's peak, not {budget!r}; leave it out for no bound")
    return share


def parse_budget(
    budget_gb: float | None,
    budget: float | str | None,
    model: torch.nn.Module,
    *others: Any,
    budget_mb: float | None = None,
    gpu: DeviceModel | None = None,
) -> Budget:
    """Return the budget; ``others``: what else a step counts that may be there already.

    ``gpu``: the GPU that is planned for, if it is not the model's device. Errors: ``BudgetError``.
    """
    if sum(given is not None for given in (budget_gb, budget_mb, budget)) > 1:
        raise BudgetError("pass one of budget_gb, budget_mb and budget, not several")
    if budget_gb is not None:
        return Budget(_parse_units("budget_gb", "GB", 10**9, budget_gb))
    if budget_mb is not None:
        return Budget(_parse_units("budget_mb", "MB", 10**6, budget_mb))
    if (share := _parse_share(budget)) is not None:
        return Budget(share=share)
    if budget is not None and budget != "auto":
        return Budget(parse_bytes(budget))
    if gpu is not None:
        return Budget(gpu.memory_bytes - CONTEXT_BYTES - margin_bytes(gpu.memory_bytes))
    device = device_of(model)
    if device.type == "cuda" and torch.cuda.is_available():
        return Budget(free_bytes(device, (model, *others)))
    if budget == "auto":
        raise BudgetError(
            f'budget="auto" is what a CUDA device has free, and the model is on {device}; move it there first, name a GPU '
            'with plan_for=, or write a size such as "24GiB"'
        )
    return Budget()


def free_bytes(device: torch.device, holders: Any) -> int:
    """Return what a step with the tensors of ``holders`` may take on a CUDA device: all that is free there or held by
    PyTorch's allocator, of this process's share of it, but for other tensors and a margin.

    Inside a MIG instance the runtime tells of the instance's memory, not the device's.
    """
    own = {storage_key(t): t.untyped_storage().nbytes() for t in tensors_of(holders) if t.device == device}
    foreign_bytes = max(0, torch.cuda.memory_allocated(device) - sum(own.values()))
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    held_bytes = free_bytes + torch.cuda.memory_reserved(device)
    share_bytes = int(total_bytes * torch.cuda.get_per_process_memory_fraction(device))
    return min(held_bytes, share_bytes) - foreign_bytes - margin_bytes(total_bytes)


def margin_bytes(total_bytes: int) -> int:
    """Return what is left free of a device of so many bytes."""
    return max(MARGIN_BYTES, int(MARGIN_RATIO * total_bytes))


def _parse_units(name: str, unit: str, scale: int, given: float) -> int:
    """Return what the argument ``name`` gives, in units of ``scale`` bytes, in bytes. Errors: ``BudgetError``."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise BudgetError(f"{name} must be a number of {unit} ({scale:,} bytes), not {given!r}")
    if not math.isfinite(given) or given <= 0:
        raise BudgetError(f"{name} must be above 0 and finite, not {given!r}; leave it out for no bound")
    return int(given * scale)


def parse_bytes(budget: float | str) -> int:
    """Return ``budget``, a whole number of bytes or a text such as "24GiB" or "800 MB", in bytes.

    Errors: ``BudgetError``, also for a bare number that no model fits: gigabytes are meant.
    """
    if isinstance(budget, int | float) and not isinstance(budget, bool) and 0 < budget < LEAST_BARE_BYTES:
        raise BudgetError(
            f'budget={budget} is {budget} bytes; did you mean budget_gb={budget}? (As a text: "{budget}GB".)'
        )
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?b?)\s*", budget.lower())
        if _parse_share(budget) is not None:
            raise BudgetError(
                f"budget {budget!r} is a share of eager's peak, which only fxmem.optimize takes; write a size"
            )
        if match is None or match[2] not in _UNITS:
            raise BudgetError(f'budget {budget!r} is not a size; write bytes or, say, "24GiB" or "800MB"')
        nbytes = int(float(match[1]) * _UNITS[match[2]])
    elif isinstance(budget, bool) or not isinstance(budget, Real) or budget != budget // 1:
        raise BudgetError(f'budget must be a whole number of bytes or a text like "24GiB", not {budget!r}')
    else:
        nbytes = int(budget)
    if nbytes <= 0:
        raise BudgetError(f"budget must be above 0 bytes, not {budget!r}; leave it out for no bound")
    return nbytes
