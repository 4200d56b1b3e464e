"""What canaries of patches are made with (tests/torch_patches/test_canaries.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

Canary = Callable[[bool], object]
"""Called with whether the patch is on; returns what is then seen."""

CANARIES: dict[str, tuple[Canary, object, object]] = {}
"""By patch: its canary, what is seen with the patch, and what without."""


def canary(*, patched: object, plain: object) -> Callable[[Canary], Canary]:
    def put(function: Canary) -> Canary:
        CANARIES[function.__name__] = (function, patched, plain)
        return function

    return put


def ops_of(run: Callable[[], object]) -> set[str]:
    """Return the names of the ops that ``run`` dispatches."""
    names: set[str] = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Names():
        run()
    return names


def exported(module: nn.Module, *args: Any) -> fx.GraphModule:
    return torch.export.export(module, args, strict=False).module(check_guards=False)


def outcome(run: Callable[[], object]) -> object:
    """Return what ``run`` returns, or "raises"."""
    try:
        return run()
    except Exception:
        return "raises"
