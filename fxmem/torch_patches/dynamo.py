"""A patch of what imports torch.compile's tracer where nothing is traced."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch import _compile

from fxmem.torch_patches.replacing import patch, replaced


@patch
@contextmanager
def without_dynamo() -> Iterator[None]:
    """Let functions that torch.compile is not to look into run in the body without importing it.

    Each of them (an optimizer's methods, fake kernels written in Python) imports torch._dynamo in its first call, to switch
    off what is not on before: half of the time of an estimate. After the body they ask again. Where torch._dynamo is there
    already, nothing changes. torch 2.11 to 2.15.
    """
    asked: list[Any] = []

    def disable(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        asked.append(function)
        return function

    answer = SimpleNamespace(_dynamo=SimpleNamespace(disable=disable))
    original = builtins.__import__

    def importing(name: str, scope: Any = None, *args: Any, **kwargs: Any) -> Any:
        if name == "torch._dynamo" and scope is vars(_compile) and sys.modules.get(name) is None:
            return answer
        return original(name, scope, *args, **kwargs)

    try:
        with replaced(builtins, "__import__", importing):
            yield
    finally:
        for function in asked:
            if vars(function).get("__dynamo_disable") is function:
                del vars(function)["__dynamo_disable"]
