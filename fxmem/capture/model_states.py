"""What a plan depends on of a model: the state that it is in.

In: a model. Out: hashable values, equal where one plan serves both. Tensors of the model count by identity: a replaced
parameter is another model. So do the modules' numbers, flags and texts (``training``, a dropout's ``p``), alone, in
containers or in *records* (objects that hold nothing else but functions and classes, as configs do), in the modules'
classes too, their hooks and the tensors that are plain attributes: the graph has them as constants. So do names. Any other
object counts by identity alone; global variables do not count, and neither does what graphs themselves leave in
attributes (:mod:`fxmem.capture.side_effects`), but for how that lies where a later call reads it.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import chain
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from fxmem.capture.graph import CaptureGraph
from fxmem.capture.guards import constant, has_address, has_memory, memory_of
from fxmem.capture.side_effects import SideEffects, facts_of
from fxmem.fake.python_state import CONTAINERS, Place
from fxmem.torch_private import guard_of, version_of

CONSTANTS = frozenset({bool, int, float, str, type(None)})
VALUES: tuple[type, ...] = (
    *(bool, int, float, str, type(None), complex, bytes, range, slice, Enum),
    *(np.generic, torch.dtype, torch.device, torch.layout),
)
"""Classes whose objects count by value."""
NAMED = (types.FunctionType, types.BuiltinFunctionType, type, torch.Tensor)
"""Classes whose objects a record may hold, too; they count by identity, tensors by version too."""
REGISTRIES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})


class _Same:
    """Equal to what holds the same object, which lives on here, so that no other one comes to lie in its place."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


class ModelStates:
    """The states a model was seen in, numbered.

    A state is computed anew only where something was replaced since the last look; looking costs a fraction of that.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._known: dict[tuple[Any, ...], tuple[int, bool]] = {}
        """By state, its number and whether looks may be kept in it."""
        self._number = 0
        self._look: _Look | None = None
        self._own: dict[int, int] = {}
        """By memory of a parameter or buffer, the number of the first one on it."""
        self._by_name = False
        """Whether the latest look was for a call that finds buffers by name."""
        self._effects: list[SideEffects] = []
        self._changed: Left = defaultdict(set)
        """What the model's own forward changes, each time."""
        self._guarded: dict[Place, None] = {}
        self._constants: list[torch.Tensor] = []
        """What graphs read that is neither parameter, buffer nor input."""

    @property
    def count(self) -> int:
        """How many states the model was seen in."""
        return len(self._known)

    def number(self, *, buffers_by_name: bool = False) -> int:
        """Return the number of the state that the model is in.

        ``buffers_by_name``: for a call in which the model's own code runs, planned in parts that have states of their own:
        another buffer that lies as the one before, such as a running range that each forward assigns anew, is no other
        state, and neither is what that code changes itself (:meth:`noting_changes`). A graph of the whole model has the
        buffers themselves.
        """
        if self._look is None or self._by_name != buffers_by_name or self._look.differs():
            self._by_name = buffers_by_name
            left = self._left
            for holder, names in self._changed.items() if buffers_by_name else ():
                left[holder] |= names
            state = _state_of(self._model, left, buffers_by_id=not buffers_by_name) + self._facts_left()
            if state not in self._known:
                self._known[state] = (len(self._known), not _may_change_unseen(self._model, left))
            self._number, may_look = self._known[state]
            self._own = _first_on_memory(self._model, left)
            may_look = may_look and not self._guarded
            self._look = _Look(self._model, left, with_buffers=not buffers_by_name) if may_look else None
        return self._number

    @contextmanager
    def noting_changes(self) -> Iterator[None]:
        """In the body, a forward of the model's own code runs: attributes that are others after it are of no state of such
        calls, as each of them changes what it finds."""
        before = _attributes_of(self._model)
        yield
        after = _attributes_of(self._model)
        for holder, name in before.keys() | after.keys():
            if before.get((holder, name)) != after.get((holder, name)):
                self._changed[holder].add(name)
        self._look = None

    def note(self, captured: CaptureGraph) -> None:
        """Let what calls of a graph leave in attributes be no other state. Errors: ``CaptureError`` if a graph reads it."""
        read = list(captured.tensors_read())
        for effects in self._effects:
            effects.check_unread((*read, *captured.state))
        captured.effects.check_unread(self._constants)
        self._constants += read
        if captured.effects:
            self._effects.append(captured.effects)
            self._guarded.update(dict.fromkeys(captured.effects.guarded))
            self._look = None

    def _facts_left(self) -> tuple[Any, ...]:
        return tuple(facts_of(place) for place in self._guarded)

    @property
    def _left(self) -> Left:
        left: Left = defaultdict(set)
        for place in chain.from_iterable(effects.attributes for effects in self._effects):
            left[place.holder].add(place.key)
        return left

    def among(self, tensors: list[torch.Tensor]) -> tuple[tuple[int, int], ...]:
        """Return which of ``tensors`` lie on memory of the model's parameters or buffers, as of the last look."""
        own = self._own
        memories = [(number, memory_of(t)) for number, t in enumerate(tensors) if has_memory(t)]
        return tuple([(number, own[memory]) for number, memory in memories if memory in own])


Left = defaultdict[int, set[Any]]
"""By the id of a dict, of attributes perhaps, the keys under which graphs leave something."""
NOTHING_LEFT: Left = defaultdict(set)
_END = object()


def _items(holder: dict[Any, Any], left: Left) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a dict, but for what graphs leave there."""
    keys = left.get(id(holder))
    return holder.items() if not keys else [(k, v) for k, v in holder.items() if k not in keys]


def _values(holder: Any, left: Left) -> Iterable[Any]:
    if isinstance(holder, dict):
        return (value for _, value in _items(holder, left))
    elements: Iterator[Any] = iter(holder)  # a length it may not have
    return elements


class _Without:
    """The values of a dict, but for what graphs leave there, as they are when it is asked."""

    def __init__(self, holder: dict[Any, Any], left: Left) -> None:
        self._holder, self._left = holder, left

    def __iter__(self) -> Iterator[Any]:
        return iter(_values(self._holder, self._left))


def _without(holder: Any, left: Left) -> Any:
    return _Without(holder, left) if id(holder) in left else holder


class _Look:
    """All that a model's state is made of, by identity, to tell whether anything was replaced since.

    ``with_buffers``: False of a model whose buffers may be replaced; those before are not kept alive.
    """

    def __init__(self, model: torch.nn.Module, left: Left, with_buffers: bool) -> None:
        modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]  # of which no graph is made
        buffers: list[dict[str, Any]] = [m._buffers for m in modules] if with_buffers else []
        holders: list[Any] = [h for m in modules for h in (m.__dict__, m._parameters, m._modules)] + buffers
        inside = list(_holders_in(model, left))
        holders = [_without(holder, left) for holder in holders + inside]
        self._empty = [h for h in holders if not isinstance(h, tuple | frozenset) and not h]
        filled = [h for h in holders if isinstance(h, tuple | frozenset) or h]
        self._holders: list[Iterable[Any]] = [dict.values(h) if isinstance(h, dict) else h for h in filled]
        self._holders += [vars(kind).values() for kind in _classes_of(model)]
        self._holders += [h for h in inside if isinstance(h, dict) and h and id(h) not in left]
        self._holders.append((_END,))  # where values became more or fewer, it stands elsewhere
        self._values = list(chain.from_iterable(self._holders))
        registered = [*(m._parameters for m in modules), *buffers]
        self._tensors = [t for tensors in registered for t in tensors.values() if t is not None]
        self._facts = list(map(_facts, self._tensors))
        self._strided = [t for t in self._tensors if t.layout is torch.strided]
        self._offsets = list(map(torch.Tensor.storage_offset, self._strided))
        self._still_known = guard_of(self._strided)
        self._placed = list(filter(has_address, self._tensors))
        self._places = list(map(torch.Tensor.data_ptr, self._placed))
        """By which tensors that come to lie on one storage are noticed."""

    def differs(self) -> bool:
        """True if some value, or what is known of some tensor, is no longer the same. Asked in every step: nothing of
        Python runs for each tensor."""
        return (
            any(self._empty)
            or not all(map(is_, chain.from_iterable(self._holders), self._values))
            or list(map(torch.Tensor.storage_offset, self._strided)) != self._offsets
            or list(map(torch.Tensor.data_ptr, self._placed)) != self._places
            or not self._still_has_facts()
        )

    def _still_has_facts(self) -> bool:
        if len(self._strided) == len(self._tensors) and self._still_known(*self._strided):
            return True
        if self._facts != list(map(_facts, self._tensors)):
            return False
        self._still_known = guard_of(self._strided)  # under autocast, perhaps: no other facts
        return True


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what may change of a parameter or buffer that stays the same object."""
    place = (tensor.stride(), tensor.storage_offset()) if tensor.layout is torch.strided else ()
    return (tensor.requires_grad, tensor.dtype, tensor.device, tensor.layout, tensor.shape, place)


def _first_on_memory(model: torch.nn.Module, left: Left) -> dict[int, int]:
    """Return, by memory, the number of the first of the model's parameters and buffers that lies there."""
    first: dict[int, int] = {}
    kept = (t for m in model.modules() for t in _values(m._buffers, left) if t is not None)
    for number, tensor in enumerate((*model.parameters(), *kept)):
        if has_memory(tensor):
            first.setdefault(memory_of(tensor), number)
    return first


def _may_change_unseen(model: torch.nn.Module, left: Left) -> bool:
    """True if attributes are other tensors or arrays, or records in slots: they may be written to in place."""
    own = _own_tensors(model)
    holders = (*(m.__dict__ for m in model.modules()), *_holders_in(model, left))
    values = chain.from_iterable(_values(holder, left) for holder in holders)
    others = (value for value in values if type(value) not in CONSTANTS and id(value) not in own)
    return any(isinstance(v, torch.Tensor | np.ndarray) or (_slots(v) and _is_record(v)) for v in others)


def _own_tensors(model: torch.nn.Module) -> frozenset[int]:
    """Return the ids of parameters and buffers, which every step writes; an RNN has them in a list too."""
    return frozenset(map(id, (*model.parameters(), *model.buffers())))


def _classes_of(model: torch.nn.Module) -> list[type]:
    """Return the classes of the modules, and those they derive from, that are not torch's own."""
    kinds = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    return [kind for kind in kinds if kind is not object and not kind.__module__.startswith("torch.")]


def _holders_in(model: torch.nn.Module, left: Left) -> Iterator[Any]:
    """Yield the containers among the modules' attributes and the attributes of records, and those in them."""
    stack = [value for m in model.modules() for name, value in _items(m.__dict__, left) if name not in REGISTRIES]
    seen: set[int] = set()
    while stack:
        value = stack.pop()
        if type(value) in CONSTANTS or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, CONTAINERS) or (not _slots(value) and _is_record(value)):
            holder = value if isinstance(value, CONTAINERS) else vars(value)
            yield holder
            stack += _values(holder, left)


def _is_record(value: Any, seen: set[int] | None = None) -> bool:
    """True if ``value`` is an object with attributes that are all values, functions, classes, tensors, or containers or
    records of such.

    ``seen``: ids of those already looked at on the way, which may hold each other.
    """
    if isinstance(value, (*VALUES, *CONTAINERS, type, torch.Tensor, torch.nn.Module)):
        return False
    fields, seen = _fields(value, NOTHING_LEFT), {id(value)} if seen is None else seen
    return bool(fields) and all(_is_plain(part, seen) for part in fields.values())


def _is_plain(value: Any, seen: set[int]) -> bool:
    if isinstance(value, (*VALUES, *NAMED)) or id(value) in seen:
        return True
    seen.add(id(value))
    if isinstance(value, CONTAINERS):
        parts = (*value, *value.values()) if isinstance(value, dict) else value
        return all(_is_plain(part, seen) for part in parts)
    return _is_record(value, seen)


def _fields(value: Any, left: Left) -> dict[str, Any]:
    """Return the attributes of an object, those in slots included, but for what graphs leave there."""
    return _slots(value) | dict(_items(getattr(value, "__dict__", None) or {}, left))


def _slots(value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    return {name: getattr(value, name) for name in _slot_names(kind) if hasattr(value, name)}


_SLOT_NAMES: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()
"""By class. A class may be made for one object, and gone with it."""


def _slot_names(kind: type) -> tuple[str, ...]:
    if kind not in _SLOT_NAMES:
        _SLOT_NAMES[kind] = _found_slot_names(kind)
    return _SLOT_NAMES[kind]


def _found_slot_names(kind: Any) -> tuple[str, ...]:
    slots = [getattr(base, "__slots__", ()) for base in kind.__mro__]
    names = chain.from_iterable((names,) if isinstance(names, str) else names for names in slots)
    return tuple([name for name in names if not name.startswith("__")])


def _state_of(model: torch.nn.Module, left: Left, buffers_by_id: bool) -> tuple[Any, ...]:
    state: list[Any] = []
    known: dict[int, Any] = {}
    own, first = _own_tensors(model), _first_on_memory(model, left)
    for module in model.modules():
        children = [(name, id(child)) for name, child in module._modules.items() if child is not None]
        state += (id(module), type(module), *children)
        for name, t in (*module._parameters.items(), *_items(module._buffers, left)):
            if t is not None:
                itself = id(t) if buffers_by_id or name in module._parameters else None
                state += (name, itself, _facts(t), first.get(memory_of(t)) if has_memory(t) else None)
        others = []
        for name, value in _items(module.__dict__, left):
            if type(value) in CONSTANTS:
                state += (name, constant(value))
            elif name not in REGISTRIES and not (type(value) in CONTAINERS and not value):
                others.append((name, value))
        state += [(name, _value_signature(value, own, known, left)) for name, value in others]
    for kind in _classes_of(model):
        state += [_value_signature(value, own, known, left) for value in vars(kind).values() if _is_plain(value, set())]
    return tuple(state)


def _attributes_of(model: torch.nn.Module) -> dict[tuple[int, str], Any]:
    """Return what counts of the attributes of each module, by the id of the dict that holds them and their name."""
    own, known = _own_tensors(model), dict[int, Any]()
    return {
        (id(module.__dict__), name): _value_signature(value, own, known, NOTHING_LEFT)
        for module in model.modules()
        for name, value in module.__dict__.items()
        if name not in REGISTRIES
    }


def _value_signature(value: Any, own: frozenset[int], known: dict[int, Any], left: Left) -> Any:
    """Return what a graph has as a constant of an attribute: numbers by value, tensors and functions by identity.

    ``own``: ids of the model's own tensors, which the graph reads anew in every step, not as constants. ``known``: what
    was returned for objects looked at before, by id: one config may be an attribute of all modules, or hold itself.
    """
    kind = type(value)
    if kind in CONSTANTS:
        return constant(value)
    if isinstance(value, torch.Tensor):
        facts = (0 if value.is_inference() else version_of(value), value.shape, value.dtype)
        return id(value) if id(value) in own else (_Same(value), *facts)
    if isinstance(value, VALUES):
        return (kind, repr(value))
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype.str, hash(value.tobytes()))
    if id(value) not in known:
        known[id(value)] = id(value)
        known[id(value)] = _contents_signature(value, own, known, left)
    return known[id(value)]


def _contents_signature(value: Any, own: frozenset[int], known: dict[int, Any], left: Left) -> Any:
    if isinstance(value, CONTAINERS):
        items = chain.from_iterable(_items(value, left)) if isinstance(value, dict) else value
        parts = [_value_signature(item, own, known, left) for item in items]
        return (type(value), frozenset(parts) if isinstance(value, set | frozenset) else tuple(parts))
    if _is_record(value):
        # In order of names: an attribute taken away for a while and put back comes last.
        kept = sorted(_fields(value, left).items())
        fields = tuple([(name, _value_signature(part, own, known, left)) for name, part in kept])
        return (type(value), _Same(value) if callable(value) else 0, fields)
    return _Same(value)
