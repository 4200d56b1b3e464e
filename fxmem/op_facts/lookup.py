"""The table by the op itself: what consumers look ops up in, one dict for each kind of fact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from fxmem.op_facts import FACTS
from fxmem.op_facts.kinds import Device, OpFact, Role, TagsRandom
from fxmem.torch_private import OpOverloadPacket

K = TypeVar("K")
F = TypeVar("F", bound=Callable[..., Any])

_own: dict[str, Callable[..., Any]] = {}
"""Functions of fxmem by the name that rows give them."""
_by_op: dict[tuple[type, str], dict[Any, Any]] = {}
"""By kind and device, what :func:`by_op` has returned."""


def by_op(kind: type[K], device: Device | str = "any") -> Mapping[Any, K]:
    """Return the facts of this kind by op, or by function; always the same dict.

    ``device``: leave out what does not hold on devices of this type. Functions of fxmem are there once their module is
    imported. Errors: ``AttributeError`` if torch has no such op.
    """
    table = _by_op.get((kind, device))
    if table is None:
        table = _by_op[kind, device] = {}
        for fact in _facts(kind, device):
            for name in fact.ops:
                _enter(table, name, fact)
    return table


def with_role(kind: type[Role], *names: str) -> frozenset[Any]:
    """Return the ops that have one of these roles."""
    return frozenset(op for op, role in by_op(kind).items() if role.name in names)


def by_namespace(kind: type[K]) -> dict[str, K]:
    """Return the facts of this kind that hold for all ops of a namespace."""
    names = ((name, fact.value) for fact in _facts(kind, "any") for name in fact.ops)
    return {name.removesuffix(".*"): value for name, value in names if name.endswith(".*")}


def may_draw(op: Any) -> bool:
    """Return whether an op may draw random numbers: it is tagged so, or a custom one."""
    return torch.Tag.nondeterministic_seeded in op.tags or op.namespace not in _TAGS_RANDOM


def own_op(function: F) -> F:
    """Enter ``function``, which stands in graphs as an op, under the name ``fxmem.<its name>`` that rows give it.

    Errors: ``KeyError`` if no row does.
    """
    name = f"fxmem.{function.__name__}"
    if not any(name in fact.ops for fact in FACTS):
        raise KeyError(f"no row of fxmem.op_facts names {name}")
    _own[name] = function
    for (kind, device), table in _by_op.items():
        for fact in _facts(kind, device):
            if name in fact.ops:
                _enter(table, name, fact)
    return function


def resolved(name: str) -> Any:
    """Return the op, all overloads of an op, or the function of torch of this name."""
    first, *rest = name.split(".")
    value: Any = torch if first == "torch" else getattr(torch.ops, first)
    for part in rest:
        value = getattr(value, part)
    return value


def _facts(kind: type, device: str) -> Iterator[OpFact]:
    for fact in FACTS:
        if isinstance(fact.value, kind) and (device == "any" or fact.device in ("any", device)):
            yield fact


def _enter(table: dict[Any, Any], name: str, fact: OpFact) -> None:
    for op in _ops(name):
        if table.setdefault(op, fact.value) is not fact.value:
            raise ValueError(f"two rows of fxmem.op_facts say the same kind of thing of {name}")


def _ops(name: str) -> tuple[Any, ...]:
    """Return what a row's name means: an op, all overloads of one, a function."""
    if name.endswith(".*"):
        return ()
    if name.startswith("fxmem."):
        return (_own[name],) if name in _own else ()
    value = resolved(name)
    if isinstance(value, OpOverloadPacket):
        return tuple(getattr(value, overload) for overload in value.overloads())
    return (value,)


_TAGS_RANDOM = by_namespace(TagsRandom)
