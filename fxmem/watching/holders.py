"""Who holds a tensor in Python: by which variable of a running function, or of a module, and through which containers.

In: tensors. Out: a :class:`Holder` for each that one is found for. Found backwards, from a tensor to what refers to it, by
the garbage collector's own tables: nothing has to be noted beforehand. Each level takes a look at every object of the
process, about 0.1 s.
"""

from __future__ import annotations

import gc
import inspect
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

from fxmem.user_frames import frames_of_user

MOST_LEVELS = 5
"""Between a tensor and the name that holds it."""
_SEQUENCES = (list, tuple, set, frozenset, deque)

_Level = dict[int, tuple[Any, list["_Way"]]]
"""By id, objects and how each leads to tensors."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A name through which tensors are held."""

    path: str
    """``losses``, ``self.history['loss']``, ``total``."""
    name: str
    """The last name in the path: what source lines are looked for by."""
    kind: str
    """The class of what holds the tensors itself: ``list``, ``dict``; empty where the name is the tensor's own."""
    filename: str
    lines: tuple[int, int | None]
    """Where the name is valid: first and last line of the function; (0, None): the whole file."""
    where: str
    """``in train`` or ``in the module __main__``."""


@dataclass(frozen=True, slots=True)
class _Way:
    """How an object leads to a tensor."""

    tensor: int
    """Its id."""
    suffix: str
    """``['loss'][...]``: what has to follow the object's name."""
    kind: str


def holders_in_python(tensors: Sequence[Any]) -> dict[int, list[Holder]]:
    """Return, by id of each tensor, who holds it: a variable of its own, and one that leads to it through containers."""
    scopes = list(_scopes())
    own: dict[int, Holder] = {}
    through: dict[int, Holder] = {}
    level: _Level = {id(t): (t, [_Way(id(t), "", "")]) for t in tensors}
    seen = {id(level), id(tensors), id(scopes), *level}
    for depth in range(MOST_LEVELS):
        for holder, way in _named(level, scopes):
            (through if depth else own).setdefault(way.tensor, holder)
        left = {key: pair for key, pair in level.items() if any(way.tensor not in through for way in pair[1])}
        if depth and all(way.tensor in own or way.tensor in through for _, ways in left.values() for way in ways):
            break
        level = _one_level_up(left, seen)
        seen |= level.keys()
    return {id(t): [found[id(t)] for found in (own, through) if id(t) in found] for t in tensors}


# -- names ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Scope:
    names: dict[str, int]
    """The id of what each name refers to: no references, which would hold it."""
    filename: str
    lines: tuple[int, int | None]
    where: str


def _scopes() -> Iterator[_Scope]:
    """Yield the local variables of the user's running functions, the innermost first, then the variables of modules."""
    running = [frame for top in sys._current_frames().values() for frame in frames_of_user(top)]
    for frame in running:
        code = frame.f_code
        if code.co_flags & inspect.CO_OPTIMIZED:
            lines = [line for _, _, line in code.co_lines() if line is not None]
            names = {name: id(value) for name, value in _locals_of(frame).items()}
            yield _Scope(names, code.co_filename, (min(lines), max(lines)), f"in {code.co_name}")
    for frame in running:
        names = {name: id(value) for name, value in frame.f_globals.items()}
        yield _Scope(names, frame.f_code.co_filename, (0, None), f"in the module {frame.f_globals.get('__name__')}")


def _locals_of(frame: FrameType) -> dict[str, Any]:
    """Return a function's local variables. Before Python 3.13 a frame keeps what it was asked for, and with it what the
    variables referred to then: that is emptied."""
    asked = frame.f_locals
    found = dict(asked)
    if isinstance(asked, dict):
        asked.clear()
    return found


def _named(level: _Level, scopes: list[_Scope]) -> Iterator[tuple[Holder, _Way]]:
    for scope in scopes:
        for name, key in scope.names.items():
            if key in level:
                for way in level[key][1]:
                    yield _holder(name, way, scope), way
    for item, ways in level.values():  # a module that runs nothing now
        if isinstance(item, ModuleType):
            for way in ways:
                scope = _Scope({}, getattr(item, "__file__", None) or "", (0, None), f"in the module {item.__name__}")
                yield _holder("", way, scope), way


def _holder(name: str, way: _Way, scope: _Scope) -> Holder:
    path = re.sub(r"(\[\.\.\.\])+$", "", f"{name}{way.suffix}").lstrip(".")
    names = [part for part in path.partition("[")[0].split(".") if part]
    lines = (0, None) if way.suffix.startswith(".") else scope.lines
    return Holder(path, names[-1] if names else "", way.kind, scope.filename, lines, scope.where)


# -- references ----------------------------------------------------------------------------------------------------------


def _one_level_up(level: _Level, seen: set[int]) -> _Level:
    """Return what refers to the objects of ``level``."""
    above: _Level = {}
    for referrer in gc.get_objects():
        if level.keys().isdisjoint(map(id, gc.get_referents(referrer))) or id(referrer) in seen:
            continue
        owner = _owner_of(referrer)
        for key, step in _steps(referrer, is_namespace=owner is not referrer):
            for way in level[key][1] if key in level else ():
                above.setdefault(id(owner), (owner, []))[1].append(_step_up(way, step, type(referrer).__name__))
    return above


def _step_up(way: _Way, step: str, kind: str) -> _Way:
    """Return the way from a container of class ``kind``; which entry of it a tensor is, is not told."""
    if step.startswith("[") and not way.suffix:
        step = "[...]"
    return _Way(way.tensor, step + way.suffix, way.kind or ("" if step.startswith(".") else kind))


def _owner_of(referrer: Any) -> Any:
    """Return the object whose attributes are in the dictionary ``referrer``; else ``referrer`` itself."""
    if type(referrer) is dict:
        for owner in gc.get_referrers(referrer):
            if getattr(owner, "__dict__", None) is referrer:
                return owner
    return referrer


def _steps(referrer: Any, *, is_namespace: bool) -> Iterator[tuple[int, str]]:
    """Yield the ids of what an object refers to, each with how it is written."""
    if isinstance(referrer, dict):
        for name, value in list(referrer.items()):
            yield id(value), f".{name}" if is_namespace else f"[{name!r}]"
    elif isinstance(referrer, _SEQUENCES):
        for value in list(referrer):
            yield id(value), "[...]"
    elif isinstance(referrer, CellType):
        yield id(referrer.cell_contents), ""
    elif isinstance(referrer, FunctionType):
        for name, cell in zip(referrer.__code__.co_freevars, referrer.__closure__ or (), strict=True):
            yield id(cell), f".{name}"
    elif hasattr(referrer, "__dict__"):
        for name, value in list(vars(referrer).items()):
            yield id(value), f".{name}"
