"""Patches of torch.export: what it says, asks and loses while it traces a model.

Its modules are imported where they are patched: with torch._dynamo they take seconds, and an estimate traces nothing.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import fx

from fxmem.torch_patches.replacing import patch, replaced, replaced_here


@patch
@contextmanager
def regions_left() -> Iterator[None]:
    """Let torch.export leave the nodes that enter and leave regions where they are, each with what the model asked for.

    It would move what is inside ``torch.no_grad()`` or ``torch.autocast`` into a submodule, which is no flat graph; and
    as autocast's cache is off while it traces, each region would note that the model wants it off. torch 2.11 to 2.15.
    """
    from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass

    with (
        replaced(replace_set_grad_with_hop_pass, "replace_set_grad_with_hop_pass", lambda *given: given),
        replaced(replace_autocast_with_hop_pass, "replace_autocast_with_hop_pass", lambda *given: given),
        replaced_here(torch, "is_autocast_cache_enabled", lambda: True),
    ):
        yield


@patch
@contextmanager
def compiler_says_eager() -> Iterator[Callable[[], None]]:
    """Answer no to a model that asks ``torch.compiler`` whether it is being compiled or exported.

    transformers and many others take another way then, with other kernels: the graph would not be what eager runs.
    Yielded is a function to be called once torch.export has begun: it sets the flags that the same functions read where
    a model has imported them by name. torch.export puts those back. torch 2.11 to 2.15.
    """
    compiler: Any = torch.compiler

    def begin() -> None:
        compiler._is_compiling_flag = compiler._is_exporting_flag = False

    with replaced_here(compiler, "is_exporting", lambda: False), replaced_here(compiler, "is_compiling", lambda: False):
        yield begin


@patch
@contextmanager
def tracing_answered_by(tracing: Callable[[object], bool]) -> Iterator[None]:
    """Let ``tracing`` answer where transformers asks whether a tensor is being traced, before it looks at its values.

    Its own answer is yes to every fake, so that a mask of ones stays and another kernel runs than in eager mode. For
    transformers 4.57 and later; where it is not imported, nothing is replaced.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    if getattr(masking, "is_tracing", None) is None:
        yield
        return
    with replaced_here(masking, "is_tracing", lambda tensor=None: tracing(tensor)):
        yield


@patch
@contextmanager
def nodes_shown_to(look: Callable[[fx.Node], None]) -> Iterator[None]:
    """Show ``look`` each fx node right after it is made, while what the model has set around it is still set.

    torch.fx has no hook for that: afterwards nobody can tell which attention backend was chosen around which op. torch
    2.11 to 2.15.
    """
    create_node = fx.Graph.create_node

    def showing(graph: fx.Graph, *args: Any, **kwargs: Any) -> fx.Node:
        node = create_node(graph, *args, **kwargs)
        look(node)
        return node

    with replaced_here(fx.Graph, "create_node", showing):
        yield


@patch
@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's own code from printing, logging and warning: errors and guards say what there is to say.

    torch.export prints the graph it had when it failed, logs sizes that it takes as they are, and warns of what a forward
    assigns to attributes, as every LSTM does; fakes log why an op failed. What the model itself warns of is heard.
    torch 2.11 to 2.15.
    """
    from torch.export import _trace

    known = logging.root.manager.loggerDict.items()
    logs = [log for name, log in known if _is_of_torch(name) and isinstance(log, logging.Logger)]
    before = [log.disabled for log in logs]
    for log in logs:
        log.disabled = True  # a level would clear what every logger has found out of its own
    try:
        with _only_others_warn(), replaced(_trace, "print", lambda *_, **__: None):
            yield
    finally:
        for log, disabled in zip(logs, before, strict=True):
            log.disabled = disabled


def _is_of_torch(name: str) -> bool:
    return name.partition(".")[0] == "torch"


@contextmanager
def _only_others_warn() -> Iterator[None]:
    """Drop what torch's code warns of in the body, also where warnings are errors; give out other warnings afterwards, each
    once. Who warns is the frame that calls: where a warning says it belongs (stacklevel) may be anywhere."""
    heard: dict[tuple[str, type[Warning], str, int], Warning | str] = {}

    def hear(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") == "warnings":
            frame = frame.f_back
        if frame is None or not _is_of_torch(str(frame.f_globals.get("__name__"))):
            heard.setdefault((str(message), category, filename, lineno), message)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = hear
        yield
    for (_, category, filename, lineno), message in heard.items():
        warnings.warn_explicit(message, category, filename, lineno)
