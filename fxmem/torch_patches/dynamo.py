"""A patch of what imports torch.compile's tracer where nothing is traced."""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import _compile
from torch._subclasses import fake_tensor
from torch.optim import optimizer

from fxmem.torch_patches.replacing import patch, replaced

TRACER = "torch._dynamo"
_ASKING = (vars(_compile), vars(fake_tensor), vars(optimizer))
"""Modules whose functions import the tracer without need."""
_ASKED_LATER = {(f"{TRACER}.utils", "is_compile_supported")}
"""Module of the tracer and function that libraries take from it when they are imported, and call much later."""


class _Absent:
    """Stands for the tracer, which is imported where more is asked of it. ``config``: its default values for a fake mode,
    but for a memory of ops, which :mod:`fxmem.fake.op_memo` has."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.config = SimpleNamespace(
            fake_tensor_cache_enabled=False, fake_tensor_cache_crosscheck_enabled=False, _custom_ops_profile=None
        )

    def disable(self, function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        self.asked.append(function)
        return function

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Nothing is traced, so nothing breaks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(TRACER), name)


def _called_later(module: str, _: Any = None, names: Any = (), level: int = 0) -> Any:
    """Return what ``from module import names`` takes its names from, where all are functions that are called later."""
    if level or not names or not all((module, name) in _ASKED_LATER for name in names):
        return None

    def of(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: getattr(importlib.import_module(module), name)(*args, **kwargs)

    return SimpleNamespace(**{name: of(name) for name in names})


@patch
@contextmanager
def without_dynamo() -> Iterator[None]:
    """Let functions that torch.compile is not to look into, and fake modes, do in the body without importing it.

    Each of the former (an optimizer's methods, fake kernels written in Python) imports torch._dynamo in its first call, to
    switch off what is not on before; the latter read two of its settings. That takes a third of the time of an estimate.
    torchvision takes a function from it (:data:`_ASKED_LATER`), which imports it when it is called.
    After the body they ask again. Where torch._dynamo is there already, nothing changes. torch 2.11 to 2.15.
    """
    if sys.modules.get(TRACER) is not None or isinstance(vars(torch).get("_dynamo"), _Absent):
        yield
        return
    absent, original = _Absent(), builtins.__import__

    def importing(name: str, scope: Any = None, *args: Any, **kwargs: Any) -> Any:
        if sys.modules.get(TRACER) is None:
            if name in (TRACER, f"{TRACER}.config") and any(scope is asking for asking in _ASKING):
                return torch
            if (later := _called_later(name, *args, **kwargs)) is not None:
                return later
        return original(name, scope, *args, **kwargs)

    try:
        with replaced(builtins, "__import__", importing), replaced(torch, "_dynamo", absent):
            yield
            there = vars(torch)["_dynamo"]
        if there is not absent:  # the body has imported it
            vars(torch)["_dynamo"] = there
    finally:
        for function in absent.asked:
            if vars(function).get("__dynamo_disable") is function:
                del vars(function)["__dynamo_disable"]
