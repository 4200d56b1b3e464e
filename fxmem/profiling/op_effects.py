"""What one dispatched op computes, moves and writes; why it may not run again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fxmem.op_facts.kinds import NeverRecompute, UpdatesOnly, WritesUnsaid
from fxmem.op_facts.lookup import by_namespace, by_op
from fxmem.profiling.roofline import flops_of
from fxmem.profiling.storage_tracker import has_storage
from fxmem.torch_private import leaves_of, schema_of, storage_key, told_once

UPDATES = by_op(UpdatesOnly)
"""Ops that update running statistics, and do not read them where these are computed from the batch: without them the op
makes the same (NOTE [Same bits on a re-run], 6)."""

_UNSAID = by_op(WritesUnsaid)
_NEVER_AGAIN = by_namespace(NeverRecompute)


class _Traits(NamedTuple):
    """What an op does wherever it is called."""

    writes: bool
    """By its schema."""
    unsaid: WritesUnsaid | None
    never_again: str
    """Why it may not run again; empty if it may."""


@told_once
def _traits_of(func: Any) -> _Traits:
    never = _NEVER_AGAIN.get(func.namespace)
    return _Traits(schema_of(func).is_mutable, _UNSAID.get(func), "" if never is None else never.effect)


def why_not_again(func: Any, args: Any, kwargs: Any) -> str:
    """Return what one dispatched op does that keeps its node from running again; empty if nothing."""
    if any(isinstance(leaf, torch.Generator) for leaf in (*args, *kwargs.values())):
        return "draws from a generator of its own"
    return _traits_of(func).never_again


def work_of(func: Any, args: Any, kwargs: Any, output: Any) -> tuple[int, int]:
    """Return (FLOPs, bytes moved) of one dispatched op; views do neither."""
    results = [t for t in leaves_of(output) if has_storage(t)]
    operands = [t for t in leaves_of((args, kwargs)) if has_storage(t)]
    flops = flops_of(func, args, kwargs, output)
    if not _traits_of(func).writes and {storage_key(t) for t in results} <= {storage_key(t) for t in operands}:
        return flops, 0
    return flops, sum(map(_read_bytes, (*results, *operands)))


def _read_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of what ``tensor`` shows of its memory: of an expanded one, what there is."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def written_by(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an op writes by its schema, and the running statistics it updates."""
    fact = _traits_of(func).unsaid
    if not (_traits_of(func).writes or fact is not None):
        return
    unsaid = fact.places if fact is not None and (fact.flag is None or args[fact.flag]) else ()
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.is_write or place in unsaid:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (t for t in leaves_of(value) if has_storage(t))
