"""Where the user's code is on the stack: what warnings point at and name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from itertools import islice
from linecache import getline
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

_MACHINERY = tuple(f"{Path(module.__file__ or '').parent}/" for module in (torch, sys.modules["fxmem"]))

_MODULES = f"{Path(torch.nn.__file__ or '').parent}/"

_MODULE_CALL: Any = torch.nn.Module.__call__


def level_of_user() -> int:
    """Return the ``stacklevel`` at which the caller's ``warnings.warn`` points at the user's line."""
    for level, frame in enumerate(_frames(inspect.currentframe()), start=0):
        if not _is_machinery(frame):
            return level
    return 1


def method_running(module: torch.nn.Module) -> str | None:
    """Return the name of the outermost of the user's functions on the stack that is a method call of ``module``."""
    names = [
        frame.f_code.co_name
        for frame in _frames(inspect.currentframe())
        if not _is_machinery(frame) and _first_argument(frame) is module
    ]
    return names[-1] if names else None


def modules_called() -> Iterator[torch.nn.Module]:
    """Yield the modules whose calls are on the stack, the innermost first."""
    for frame in _frames(inspect.currentframe()):
        if frame.f_code is _MODULE_CALL.__code__:
            yield frame.f_locals["self"]


def place_of_user() -> tuple[CodeType, object] | None:
    """Return where the user's code is: the innermost function of it on the stack, and the piece of its text that runs."""
    frame = next(frames_of_user(inspect.currentframe()), None)
    if frame is None:
        return None
    return frame.f_code, next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)


def lines_of_forwards() -> str:
    """Return the lines that the forwards on the stack are at, torch.nn's too, the innermost last, as a traceback prints
    them."""
    lines = [
        f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in forward\n'
        f"    {getline(frame.f_code.co_filename, frame.f_lineno).strip()}"
        for frame in _frames(inspect.currentframe())
        if frame.f_code.co_name == "forward"
        and (frame.f_code.co_filename.startswith(_MODULES) or not _is_machinery(frame))
    ]
    return "\n".join(reversed(lines)).strip()


def frames_of_user(innermost: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames from ``innermost`` outwards that run the user's code."""
    return (frame for frame in _frames(innermost) if not _is_machinery(frame))


def _first_argument(frame: FrameType) -> object:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_machinery(frame: FrameType) -> bool:
    """True for the frames of torch and fxmem, and of torch's decorators, between a model and who calls it."""
    return frame.f_code.co_filename.startswith(_MACHINERY)
