"""What a plan depends on: a call's arguments and the state its model is in.

In: a model and a call's inputs. Out: hashable values, equal where one plan serves both calls. Tensors of the model count by
identity: a replaced parameter is another model. So do the modules' numbers, flags and texts (``training``, a dropout's
``p``), alone or in containers, their hooks and the tensors that are plain attributes: the graph has them as constants.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from fxmem.captured import Inputs

CONSTANTS = frozenset({bool, int, float, str, type(None)})
CONTAINERS = frozenset({dict, OrderedDict, list, tuple})
"""Types whose elements count too."""
REGISTRIES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})


def arguments_of(inputs: Inputs, *, with_sizes: bool = True) -> tuple[Any, ...]:
    """Return what a plan depends on of a call's arguments; without ``with_sizes``, what a graph with symbolic dimensions
    does."""
    return (inputs.spec, tuple([_leaf_signature(leaf, with_sizes) for leaf in inputs.leaves]))


def _leaf_signature(leaf: Any, with_sizes: bool) -> Any:
    if isinstance(leaf, torch.Tensor):
        layout = (leaf.shape, leaf.stride()) if with_sizes else (leaf.dim(), leaf.is_contiguous())
        return (layout, leaf.dtype, leaf.device, leaf.requires_grad)
    try:
        hash(leaf)
    except TypeError:
        return repr(leaf)
    return (type(leaf), _constant(leaf))


def _constant(value: Any) -> Any:
    """Return what tells a number from an equal one of another type or sign: True, 1 and 1.0, or 0.0 and -0.0."""
    return (type(value), repr(value)) if type(value) in (bool, int, float) else value


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

    def number(self) -> int:
        """Return the number of the state that the model is in."""
        if self._look is None or self._look.differs():
            state = _state_of(self._model)
            if state not in self._known:
                self._known[state] = (len(self._known), not _keeps_tensors(self._model))
            self._number, may_look = self._known[state]
            self._look = _Look(self._model) if may_look else None
        return self._number


class _Look:
    """All that a model's state is made of, by identity, to tell whether anything was replaced since."""

    def __init__(self, model: torch.nn.Module) -> None:
        modules = list(model.modules())
        holders = [h for m in modules for h in (m.__dict__, m._parameters, m._buffers, m._modules, *_containers_of(m))]
        self._empty = [h for h in holders if not h]
        self._holders = [dict.values(h) if isinstance(h, dict) else h for h in holders if h]
        self._values = list(chain.from_iterable(self._holders))
        self._tensors = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        self._facts = list(map(_FACTS, self._tensors))

    def differs(self) -> bool:
        """True if some value, or what is known of some tensor, is no longer the same."""
        values = list(chain.from_iterable(self._holders))
        return (
            any(self._empty)
            or len(values) != len(self._values)
            or not all(map(is_, values, self._values))
            or list(map(_FACTS, self._tensors)) != self._facts
        )


_FACTS = attrgetter("requires_grad", "dtype", "device", "shape")


def _keeps_tensors(model: torch.nn.Module) -> bool:
    """True if other tensors are plain attributes: they may be written in place, and nobody else should keep them."""
    holders = (h for m in model.modules() for h in (m.__dict__, *_containers_of(m)))
    values = chain.from_iterable(h.values() if isinstance(h, dict) else h for h in holders)
    own = _own_tensors(model)
    return any(isinstance(value, torch.Tensor) and id(value) not in own for value in values)


def _own_tensors(model: torch.nn.Module) -> frozenset[int]:
    """Return the ids of parameters and buffers, which every step writes; an RNN has them in a list too."""
    return frozenset(map(id, (*model.parameters(), *model.buffers())))


def _containers_of(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the containers among a module's attributes, and those in them."""
    stack = [value for name, value in module.__dict__.items() if type(value) in CONTAINERS and name not in REGISTRIES]
    seen = set()
    while stack:
        container = stack.pop()
        if id(container) not in seen:
            seen.add(id(container))
            yield container
            values = container.values() if isinstance(container, dict) else container
            stack += [value for value in values if type(value) in CONTAINERS]


def _state_of(model: torch.nn.Module) -> tuple[Any, ...]:
    state: list[Any] = []
    own = _own_tensors(model)
    for module in model.modules():
        state.append(id(module))
        for t in (*module._parameters.values(), *module._buffers.values()):
            if t is not None:
                state += (id(t), t.requires_grad, t.dtype, t.device, t.shape)
        others = []
        for name, value in module.__dict__.items():
            kind = type(value)
            if kind in CONSTANTS:
                state.append(_constant(value))
            elif (kind not in CONTAINERS or value) and name not in REGISTRIES:
                others.append(value)
        state += [_value_signature(value, own) for value in others]
    return tuple(state)


def _value_signature(value: Any, own: frozenset[int], depth: int = 4) -> Any:
    """Return what a graph has as a constant of an attribute: numbers by value, tensors and functions by identity.

    ``own``: ids of the model's own tensors, which the graph reads anew in every step, not as constants.
    """
    kind = type(value)
    if kind in CONSTANTS:
        return _constant(value)
    if kind in CONTAINERS and depth:
        items = value if kind in (list, tuple) else value.items()
        return tuple([_value_signature(item, own, depth - 1) for item in items])
    if id(value) in own:
        return id(value)
    if isinstance(value, torch.Tensor):
        return (id(value), 0 if value.is_inference() else value._version, value.shape, value.dtype)
    return id(value) if callable(value) else None
