"""Arguments and outputs of a model: which classes are looked into for tensors, and which are refused.

Tuples, lists, dicts and what is registered with ``torch.utils._pytree`` (transformers does so for its outputs) are looked
into by torch. A dataclass is registered there when one is first seen, and so is, among outputs, any other object written in
Python that has tensors in its attributes (the caches of transformers), whatever its ``__init__`` does: it is taken apart
into its attributes and put together from them, without a call of its own code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any

import torch

from fxmem.errors import CaptureError, InputError
from fxmem.torch_private import (
    GetAttrKey,
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
)

_CONSTANT = (type, torch.dtype, torch.device)
"""Classes of attributes that are part of the structure."""
MOST_DEPTH = 4
"""Of objects in each other."""
REMEDY = (
    "use a tuple, list, dict or dataclass, or register the class by torch.utils._pytree.register_pytree_node before "
    "fxmem.optimize"
)


def flattened(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of ``tree`` and its structure. Errors: ``InputError`` for a leaf that holds tensors itself."""
    leaves, spec = tree_flatten(tree)
    others = [leaf for leaf in leaves if type(leaf) not in _PLAIN]
    if _register(others):
        return flattened(tree)
    for leaf in others:
        if holds_tensors(leaf):
            raise InputError(
                f"an argument holds tensors in a {type(leaf).__name__}, which is not looked into; {REMEDY}"
            )
    return leaves, spec


def flattened_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of ``(args, kwargs)`` and their structure, which is known where each argument is a leaf itself.
    Errors: those of :func:`flattened`."""
    leaves = [*args, *kwargs.values()]
    if _PLAIN.issuperset(map(type, leaves)):
        return leaves, _spec_of_leaves(len(args), tuple(kwargs))
    return flattened((args, kwargs))


@lru_cache
def _spec_of_leaves(num_args: int, names: tuple[str, ...]) -> TreeSpec:
    return tree_flatten(((None,) * num_args, dict.fromkeys(names)))[1]


def holds_tensors(leaf: Any, kind: type[torch.Tensor] = torch.Tensor) -> bool:
    """True if ``leaf`` is an object that has tensors of class ``kind`` in its attributes; modules do not count."""
    if isinstance(leaf, torch.Tensor | torch.nn.Module | type):
        return False
    return any(isinstance(value, kind) for value in tree_leaves(list(_attributes(leaf).values())))


def looked_into(output: Any) -> list[Any]:
    """Return the leaves of what a model returns; classes in it that hold tensors are registered."""
    leaves = tree_leaves(output)
    while _register(leaves) or _register_objects(leaves):
        leaves = tree_leaves(output)
    return leaves


@contextmanager
def outputs_looked_into(model: torch.nn.Module) -> Iterator[None]:
    """While the body runs, what ``model`` returns is registered or, with ``CaptureError``, refused."""

    def look(_: torch.nn.Module, args: Any, output: Any) -> None:
        other = next((leaf for leaf in looked_into(output) if not isinstance(leaf, _RETURNED)), None)
        if other is not None:
            returned = f"{type(model).__name__} returns a {type(other).__name__}"
            raise CaptureError(f"{returned}, which is not looked into; {REMEDY}")

    hook = model.register_forward_hook(look)
    try:
        yield
    finally:
        hook.remove()


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, bool, int, float, str, type(None)})
_RETURNED = (torch.Tensor, int, float, str, type(None), torch.SymInt, torch.SymFloat, torch.SymBool)
"""What torch.export lets a model return, beside structures of these."""


def _register(leaves: Iterable[Any]) -> bool:
    """Register the dataclasses that are not; True if there are any."""
    kinds = {type(leaf) for leaf in leaves if is_dataclass(leaf) and not isinstance(leaf, torch.nn.Module | type)}
    kinds = {kind for kind in kinds if kind.__new__ is object.__new__}
    for kind in kinds:
        _register_kind(kind)
    return bool(kinds)


def _register_objects(leaves: Iterable[Any]) -> bool:
    """Register the classes of objects that hold tensors, in other objects perhaps; True if there are any."""
    kinds = {type(leaf) for leaf in leaves if _is_object(leaf) and _reaches_tensors(leaf)}
    for kind in kinds:
        _register_kind(kind)
    return bool(kinds)


def _is_object(leaf: Any) -> bool:
    """True for an object that has attributes of its own and no state but these."""
    kind: Any = type(leaf)
    plain = kind.__new__ is object.__new__ and not isinstance(leaf, torch.nn.Module | type) and not callable(leaf)
    return plain and hasattr(leaf, "__dict__")


def _reaches_tensors(leaf: Any, depth: int = MOST_DEPTH) -> bool:
    parts = tree_leaves(list(_attributes(leaf).values()))
    return any(
        isinstance(part, torch.Tensor) or (depth > 0 and _is_object(part) and _reaches_tensors(part, depth - 1))
        for part in parts
    )


def _register_kind(kind: type) -> None:
    def with_keys(value: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        attributes = _attributes(value)
        constants = {name: part for name, part in attributes.items() if isinstance(part, _CONSTANT)}
        parts = [(GetAttrKey(name), part) for name, part in attributes.items() if name not in constants]
        return parts, (tuple([key.name for key, _ in parts]), tuple(constants.items()))

    def take_apart(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        parts, context = with_keys(value)
        return [part for _, part in parts], context

    def put_together(parts: Iterable[Any], context: tuple[Any, ...]) -> Any:
        value: Any = object.__new__(kind)
        names, constants = context
        for name, part in (*zip(names, parts, strict=True), *constants):
            object.__setattr__(value, name, part)  # a frozen dataclass refuses setattr
        return value

    register_pytree_node(kind, take_apart, put_together, flatten_with_keys_fn=with_keys)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots included."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    found = {name: getattr(value, name) for name in slots if name not in _NO_STATE and hasattr(value, name)}
    return found | getattr(value, "__dict__", {})


_NO_STATE = frozenset({"__dict__", "__weakref__"})
