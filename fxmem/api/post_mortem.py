"""What is said after an error of memory: what was planned, what is there, who else holds memory, what to do.

In: a ``torch.OutOfMemoryError`` on its way to the user. It stays the same error, of the same class; the text is a note.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from fxmem.api.budget import free_bytes
from fxmem.api.track import all_tensors
from fxmem.errors import in_units
from fxmem.profiling.storage_tracker import parts_of, tensors_of
from fxmem.torch_private import storage_key

MOST_NAMED = 5
"""Tensors outside of the model."""
HEAD = "fxmem: "


class Planned(NamedTuple):
    """What was planned for the step that failed, in bytes."""

    peak_bytes: int
    budget_bytes: int | None
    unplanned: str
    """What the step takes without a plan."""
    least_bytes: int | None
    """The least reachable peak, where it is known already: this is no time to plan."""
    least_by: str
    """What tells it."""
    options: str = ""
    """What ``optimize`` is to be given too."""


def add_post_mortem(error: BaseException, model: torch.nn.Module, planned: Planned | None) -> None:
    """Add the note to an error, once. ``planned``: the plan that ran; None: nothing is planned yet."""
    if any(note.startswith(HEAD) for note in getattr(error, "__notes__", ())):
        return
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    error.add_note("\n".join(_lines(model, planned, device)))


def _lines(model: torch.nn.Module, planned: Planned | None, device: torch.device) -> Iterator[str]:
    name = type(model).__name__
    if planned is None:
        yield f"{HEAD}no step of {name} had been planned yet."
    else:
        budget = "no budget" if planned.budget_bytes is None else f"a budget of {in_units(planned.budget_bytes)}"
        yield (
            f"{HEAD}a step of {name} was planned to take {in_units(planned.peak_bytes)} ({planned.peak_bytes} bytes) with "
            f"{budget}; {planned.unplanned}."
        )
    if device.type == "cuda":
        yield from _measured(device)
    outside = _outside(model, device)
    if outside:
        total = sum(nbytes for nbytes, _ in outside)
        yield f"  tensors on {device} that are no parameters, buffers or gradients of it: {in_units(total)}, the largest:"
        yield from (f"    {in_units(nbytes)} {what}" for nbytes, what in outside[:MOST_NAMED])
    yield from _remedies(model, planned, device)


def _measured(device: torch.device) -> Iterator[str]:
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    yield (
        f"  measured on {device}: allocated {in_units(allocated)}, reserved {in_units(reserved)}, peak "
        f"{in_units(torch.cuda.max_memory_allocated(device))}; the device has {in_units(total)}, {in_units(free)} free."
    )
    yield f"  outside of PyTorch's allocator: {in_units(total - free - reserved)}: other processes, and CUDA's own context."


def _outside(model: torch.nn.Module, device: torch.device) -> list[tuple[int, str]]:
    """Return bytes and kind of the storages on a device that are not of the model, the largest first."""
    own = {storage_key(part) for tensor in tensors_of(model) for part in parts_of(tensor)}
    found: dict[int, tuple[int, str]] = {}
    for tensor in all_tensors():
        for part in parts_of(tensor) if tensor.device == device else ():
            if storage_key(part) not in own:
                kind = f"{part.dtype} {tuple(part.shape)}".removeprefix("torch.")
                found[storage_key(part)] = part.untyped_storage().nbytes(), kind
    return sorted((each for each in found.values() if each[0]), reverse=True)


def _remedies(model: torch.nn.Module, planned: Planned | None, device: torch.device) -> Iterator[str]:
    if device.type == "cuda":
        available = free_bytes(device, model)
        if available <= 0:
            yield "  what to do: other tensors and processes take all of the device; let go of them, or use another one."
        elif planned is None or planned.peak_bytes > available:
            options = planned.options if planned else ""
            yield (
                f"  what to do: {available} bytes are there for a step: fxmem.optimize(model, budget={available}{options})"
                f", or a smaller batch: fxmem.estimate(model, x).max_batch_size({available})."
            )
        else:
            yield (
                f"  what to do: {available} bytes are there for a step, enough for the plan, but not in one piece or not "
                "all the time: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or keep fewer tensors outside."
            )
    elif planned is not None:
        least, options = planned.least_bytes, planned.options
        lower = f"fxmem.optimize(model, budget={least}{options}), which is the least" if least else "a lower budget"
        known = "" if least else f"; {planned.least_by} tells how low it can be"
        yield f"  what to do: {lower}{known}, or a smaller batch."
