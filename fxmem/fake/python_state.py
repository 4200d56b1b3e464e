"""What a forward does beside computing tensors: it may change Python objects, and do another thing in its next call.

A captured graph does neither. In: a model. Out: :class:`PythonState`, the Python values a forward can reach, for putting
them back after a run on fakes and for saying what a run changed.

NOTE [What a forward can reach]

1. The attributes of its modules; elements of containers; closures, defaults and globals of functions (hooks, the
   forward itself and the methods beside it); attributes of objects of the user's own classes.
2. Not what lies inside torch, the standard library or an installed package's modules (only what the model's own
   classes and hooks name), and no tensor's contents: parameters and buffers are the graph's own business.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fxmem.fake.generators import GeneratorStates, default_generators
from fxmem.torch_private import OpOverload, version_of

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
"""Types of values that are compared as values."""
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
"""Classes whose objects are looked into."""
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value is held: ``owner`` as a person would call it ("Net", "the hook f"), and by what name."""

    owner: str
    name: str
    holder: int = 0
    """The id of the dict that holds it, of attributes perhaps, if one does."""
    key: Any = None
    """Under which it is held there."""
    held_by: dict[Any, Any] | None = field(default=None, compare=False, repr=False)
    """The dict."""

    def __str__(self) -> str:
        return f"{self.name!r} of {self.owner}"


@dataclass(slots=True)
class _Cell:
    """One mutable holder of values, with what it held. ``kind`` says how to read and write it."""

    holder: Any
    place: Place
    values: Any

    @property
    def of_object(self) -> bool:
        """True if the holder is an object, whose attributes the values are."""
        return not isinstance(self.holder, dict) and isinstance(self.values, dict)

    def read(self) -> Any:
        """Return a shallow copy of what the holder holds now; None if it is gone."""
        return _contents(self.holder)


def _contents(holder: Any) -> Any:
    if isinstance(holder, types.CellType):
        try:
            return [holder.cell_contents]
        except ValueError:
            return []
    if isinstance(holder, _Global):
        return [holder.function.__globals__.get(holder.name)]
    if isinstance(holder, dict | set | list | deque):
        return holder.copy()
    return dict(vars(holder))


@dataclass(frozen=True, slots=True)
class _Global:
    """A module-level name that a function reads."""

    function: types.FunctionType
    name: str


class PythonState:
    """The Python values that the forward of ``roots`` can reach (NOTE [What a forward can reach]), as they are now."""

    def __init__(self, *roots: torch.nn.Module) -> None:
        self._cells: dict[Any, _Cell] = {}
        self._registries: list[tuple[torch.nn.Module, str, dict[str, Any]]] = []
        self.tensors: dict[int, tuple[Place, torch.Tensor]] = {}
        """By id: the tensors met that are neither parameters nor buffers."""
        self.hidden: dict[int, torch.nn.Module] = {}
        """By id: modules met that are no submodules."""
        self._generators = _python_generators()
        self._torchs: dict[int, torch.Generator] = {id(g): g for g in default_generators()}
        for root in roots:
            for module in root.modules():
                self._walk_module(module)
        self._torchs_states = GeneratorStates(self._torchs.values())

    # -- walking ------------------------------------------------------------------------------------------------------

    def _walk_module(self, module: torch.nn.Module) -> None:
        owner = type(module).__name__
        if self._add(module, Place(owner, "")):
            for name, value in vars(module).items() if not isinstance(module, torch.jit.ScriptModule) else ():
                if name in _REGISTRIES:
                    self._registries.append((module, name, dict(value)))
                else:
                    self._walk(value, Place(owner, name))
            if isinstance(module, torch.fx.GraphModule):
                for node in module.graph.nodes:
                    self._walk(node.target, Place(owner, node.name))
            for cls in type(module).__mro__:
                for name, value in vars(cls).items() if _of_user(cls) else ():
                    self._walk(value, Place(cls.__name__, name))

    def _walk(self, value: Any, place: Place) -> None:
        if type(value) in PLAIN or isinstance(value, type | types.ModuleType):
            return
        if isinstance(value, torch.nn.Module):
            self.hidden[id(value)] = value
        elif isinstance(value, torch.Tensor):
            self.tensors.setdefault(id(value), (place, value))
        elif isinstance(value, torch.Generator):
            self._torchs[id(value)] = value
        elif isinstance(value, types.FunctionType):
            self._walk_function(value, place)
        elif (elements := elements_of(value)) is not None:
            if not isinstance(value, dict | list | set | deque) or self._add(value, place):
                for element in elements:
                    self._walk(element, place)
        elif _of_user(type(value)) and hasattr(value, "__dict__") and self._add(value, place):
            for name, element in (*vars(value).items(), *vars(type(value)).items()):
                self._walk(element, Place(type(value).__name__, name))

    def _walk_function(self, function: types.FunctionType, place: Place) -> None:
        if not _is_user_module(function.__module__) or not self._add(function, place):
            return
        owner = function.__qualname__.replace(".<locals>", "")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if self._add(cell, Place(owner, name)):
                for content in _contents(cell):
                    self._walk(content, Place(owner, name))
        self._walk(function.__defaults__, place)
        for name in _global_names(function.__code__):
            value = function.__globals__.get(name)
            if type(value) in PLAIN:
                self._add(_Global(function, name), Place(function.__module__, name))
            elif isinstance(value, dict | list | set | deque | types.FunctionType):
                self._walk(value, Place(function.__module__, name))

    def _add(self, holder: Any, place: Place) -> bool:
        """Note ``holder``; True if it was not known."""
        key = (id(holder.function.__globals__), holder.name) if isinstance(holder, _Global) else id(holder)
        if key in self._cells:
            return False
        self._cells[key] = _Cell(holder, place, _contents(holder))
        return True

    # -- using --------------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Put everything back as it was."""
        for cell in self._cells.values():
            holder, values = cell.holder, cell.values
            if isinstance(holder, types.CellType):
                if values:
                    holder.cell_contents = values[0]
            elif isinstance(holder, _Global):
                if holder.name in holder.function.__globals__:
                    holder.function.__globals__[holder.name] = values[0]
            elif isinstance(holder, dict | set):
                _refill(holder, values)
            elif isinstance(holder, list | deque):
                if not _same(holder, values):
                    holder.clear()
                    holder.extend(values)
            else:
                _refill(vars(holder), values)
        for module, name, registered in self._registries:
            _refill(vars(module)[name], registered)
        _set_python_generators(self._generators)
        self._torchs_states.restore()

    def exchanged(self) -> Iterator[Place]:
        """Yield the parameters, submodules and buffers that are gone, new or others; a buffer may be another tensor."""
        for module, registry, before in self._registries:
            now = vars(module)[registry]
            for name in before.keys() | now.keys():
                there = before.get(name), now.get(name)
                same = name in before and name in now and there[0] is there[1]
                if not same and (registry != "_buffers" or None in there):
                    yield Place(type(module).__name__, name)

    def changes(self) -> dict[Place, Any]:
        """Return the places that hold another value than they did, with what they hold now."""
        found: dict[Place, Any] = {}
        for cell in self._cells.values():
            now = cell.read()
            if isinstance(now, dict) and (cell.of_object or now.keys() >= cell.values.keys()):
                held_by = vars(cell.holder) if cell.of_object else cell.holder
                derived = _is_derived(cell.holder)
                for k in now:
                    same = k in cell.values and _is(now[k], cell.values[k])
                    known = (cell.of_object and k in _REGISTRIES) or (derived and isinstance(now[k], torch.Tensor))
                    if not (same or known):
                        name = k if cell.of_object else cell.place.name
                        found[Place(cell.place.owner, name, id(held_by), k, held_by)] = now[k]
            elif not _same(now, cell.values):
                found[cell.place] = now
        for name, before, after in zip(("random", "numpy.random"), self._generators, _python_generators(), strict=True):
            if before != after:
                found[Place("Python", name)] = None
        return found


@contextmanager
def tensors_restored(model: torch.nn.Module) -> Iterator[list[Place]]:
    """Undo what the body writes to the tensors that the forward of ``model`` can reach and that are no parameters or
    buffers, or are those of a module which is no submodule. Yielded is a list of the places of plain tensors, filled at the
    end. Tensors of more than :data:`MOST_COPIED_BYTES`, perhaps whole data sets, are noted only."""
    written: list[Place] = []
    state, own = PythonState(model), {id(t) for t in (*model.parameters(), *model.buffers())}
    hidden = [t for module in state.hidden.values() for t in (*module.parameters(), *module.buffers())]
    reached = [*state.tensors.values(), *((None, t) for t in dict.fromkeys(hidden) if id(t) not in own)]
    plain = [
        (place, tensor)
        for place, tensor in reached
        if tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_inference())
    ]
    copies = [(version_of(tensor), _copy_of_small(tensor)) for _, tensor in plain]
    try:
        yield written
    finally:
        for (place, tensor), (version, copy) in zip(plain, copies, strict=True):
            if version_of(tensor) != version:
                written += [] if place is None else [place]
                if copy is not None:
                    tensor.detach().copy_(copy)


MOST_COPIED_BYTES = 2**28


def _copy_of_small(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.detach().clone() if tensor.numel() * tensor.element_size() <= MOST_COPIED_BYTES else None


def elements_of(value: Any) -> Iterable[Any] | None:
    """Return what a container or a wrapper of a callable holds; None of any other object."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, CONTAINERS):
        return iter(value)  # a length it may not have
    if isinstance(value, staticmethod | classmethod):
        return (value.__func__,)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, types.MethodType):
        return (value.__func__, value.__self__)
    return None


def modules_held(value: Any) -> Iterator[torch.nn.Module]:
    """Yield the modules that the calls of a GraphModule hold beside its own: in arguments and closures of opaque ones."""
    if not isinstance(value, torch.fx.GraphModule):
        return
    stack: list[Any] = [node.target for node in value.graph.nodes if node.op == "call_function"]
    seen: set[int] = set()
    while stack:
        held = stack.pop()
        if type(held) in PLAIN or isinstance(held, torch.Tensor | OpOverload) or id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, torch.nn.Module):
            yield held
        elif (elements := elements_of(held)) is not None:
            stack += elements
        elif isinstance(held, types.FunctionType):
            stack += (held.__defaults__, *(_contents(cell) for cell in held.__closure__ or ()))
            if _is_user_module(held.__module__):
                stack += [held.__globals__.get(name) for name in _global_names(held.__code__)]
        elif isinstance(held, type):
            stack += vars(held).values() if _of_user(held) else ()
        elif not isinstance(held, types.ModuleType):
            slots = [name for kind in type(held).__mro__ for name in getattr(kind, "__slots__", ())]
            stack += [type(held), *getattr(held, "__dict__", {}).values()]
            stack += [getattr(held, name, None) for name in slots if isinstance(name, str)]


def _is_derived(module: Any) -> bool:
    """True if a hook of torch.nn.utils (weight_norm, spectral_norm) leaves the weight it computes on ``module``."""
    hooks = module._forward_pre_hooks.values() if isinstance(module, torch.nn.Module) else ()
    return any(type(hook).__module__.startswith("torch.nn.utils") for hook in hooks)


def _refill(holder: Any, values: Any) -> None:
    if not _same(holder, values):
        holder.clear()
        holder.update(values)


def _is(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in PLAIN and repr(a) == repr(b))


def _same(a: Any, b: Any) -> bool:
    """True if two holders of a kind hold the same objects."""
    if len(a) != len(b):
        return False
    if isinstance(a, set):
        return bool(a == b)
    if isinstance(a, dict):
        return all(k in b and _is(v, b[k]) for k, v in a.items())
    return all(_is(x, y) for x, y in zip(a, b, strict=True))


def _of_user(cls: type) -> bool:
    """True for classes of the user's own, and for the callables that fxmem itself puts into graphs."""
    return cls.__module__ == "fxmem.capture.opaque_calls" or _is_user_module(cls.__module__)


@functools.cache
def _is_user_module(name: str | None) -> bool:
    """True for modules that are neither Python's, nor fxmem's, nor of an installed package."""
    top = (name or "").partition(".")[0]
    if top == "__main__":
        return True
    file = getattr(sys.modules.get(top), "__file__", None) or "".join(getattr(sys.modules.get(top), "__path__", ()))
    return top not in (*sys.stdlib_module_names, "fxmem", "") and not {"site-packages", "dist-packages"} & set(
        file.replace("\\", "/").split("/")
    )


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _python_generators() -> tuple[Any, Any]:
    """Return the states of Python's generator and of numpy's, if numpy is imported."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return random.getstate(), None
    kind, keys, *rest = numpy_random.get_state()
    return random.getstate(), (kind, tuple(keys.tolist()), *rest)


def _set_python_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy.random"].set_state(states[1])
