"""Ops inside a ``with torch.autocast(...)``, ``torch.no_grad()`` or ``sdpa_kernel(...)`` of the model.

In the graph of an emitted module each such op becomes a :class:`Scoped` call that enters its region for itself, so a plan
may keep or drop each value, and an exception leaves nothing switched.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from fxmem.runtime.backend_flags import BackendFlags, under

AutocastArguments = tuple[str, torch.dtype | None, bool, bool | None]
"""Of ``torch.autocast``: device type, dtype, enabled, cache enabled."""


@dataclass(frozen=True, slots=True)
class Region:
    """What a stack of nested regions switches; None: as outside."""

    grad_enabled: bool | None = None
    autocasts: tuple[AutocastArguments, ...] = ()
    """From the outermost in."""
    switches: BackendFlags | None = None

    def enter(self) -> ExitStack:
        stack = ExitStack()
        if self.grad_enabled is not None:
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
        for device_type, dtype, enabled, cache_enabled in self.autocasts:
            stack.enter_context(torch.autocast(device_type, dtype, enabled, cache_enabled))
        if self.switches is not None:
            stack.enter_context(under(self.switches))
        return stack


class Scoped:
    """A callable that runs ``op`` inside ``region``; a target of call_function nodes."""

    def __init__(self, op: Callable[..., Any], region: Region) -> None:
        self.op, self.region = op, region
        self.__name__ = self.__qualname__ = "scoped_" + str(getattr(op, "__name__", op)).replace(".", "_")
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.region.enter():
            return self.op(*args, **kwargs)

    def __str__(self) -> str:
        return str(self.op)


def forget_casts() -> None:
    """Do what leaving an outermost autocast region does: a leaf's cast serves one region.

    To be called in the region that keeps casts alive from one op to the next (``CaptureGraph.scope``) and does not count.
    """
    torch.autocast_increment_nesting()
    if torch.autocast_decrement_nesting() == 1:
        torch.clear_autocast_cache()


def op_of(target: Any) -> Any:
    """Return the op a node calls, whatever region it is in."""
    return target.op if isinstance(target, Scoped) else target


def region_of(target: Any) -> Region:
    """Return the region a node's call enters for itself."""
    return target.region if isinstance(target, Scoped) else Region()


def op_text(target: Any) -> str:
    """Return the name of the op a node calls: ``aten.relu.default``; of a function, its own."""
    op = op_of(target)
    return op.__name__ if isinstance(op, FunctionType) else str(op)
