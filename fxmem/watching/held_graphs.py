"""Which tensors in Python keep graphs that were marked earlier, and the bytes of these graphs.

Nothing is unpacked: of a saved tensor that hooks have packed, what they made of it is looked at.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from functools import cache, reduce
from operator import or_
from typing import Any

import torch

from fxmem.profiling.storage_tracker import parts_of
from fxmem.runtime.programs.program_call import ProgramCall
from fxmem.runtime.slots import Fresh, Handle, Held
from fxmem.torch_private import FakeTensor, graph_nodes, storage_key, tree_leaves


def tensors_with_graph() -> list[torch.Tensor]:
    """Return all tensors of the process that have a graph."""
    return [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), torch.Tensor)
        and not isinstance(candidate, FakeTensor)
        and candidate.grad_fn is not None
    ]


def nodes_of(tensors: Iterable[torch.Tensor]) -> set[Any]:
    """Return the autograd nodes that tensors keep."""
    return set(graph_nodes(tensors))


def reached_from(tensors: Iterable[torch.Tensor], mark_of: Callable[[Any], int]) -> list[int]:
    """Return of each tensor the union of the marks, sets of bits, of all nodes that it keeps."""
    reached: dict[Any, int] = {}
    for tensor in tensors:
        stack = [tensor.grad_fn]
        while stack:
            node = stack[-1]
            left = [] if node in reached else [each for each in _inputs_of(node) if each not in reached]
            if left:
                stack += left
                continue
            stack.pop()
            if node not in reached:
                reached[node] = reduce(or_, (reached[each] for each in _inputs_of(node)), mark_of(node))
    return [reached[tensor.grad_fn] for tensor in tensors]


def _inputs_of(node: Any) -> list[Any]:
    return [each for each, _ in node.next_functions if each is not None]


def storages_of(nodes: set[Any]) -> dict[int, int]:
    """Return, by key, the bytes of the storages that nodes save, those of leaves aside: these have other owners."""
    leaves = {storage_key(part) for node in nodes for part in parts_of(getattr(node, "variable", None))}
    saved = {
        storage_key(part): part.untyped_storage().nbytes()
        for node in nodes
        for tensor in _saved_by(node)
        for part in parts_of(tensor)
    }
    return {key: nbytes for key, nbytes in saved.items() if key not in leaves}


def _saved_by(node: Any) -> Iterator[Any]:
    for name in _names_of_saved(node.__class__):
        try:
            found = getattr(node, name)
        except RuntimeError:  # a backward has let go of it
            continue
        for saved in found if isinstance(found, tuple | list) else (found,):
            if saved is not None:
                yield from _behind(saved.data)
    if hasattr(node, "__dict__"):
        for leaf in tree_leaves(vars(node)):
            yield from leaf.saved if isinstance(leaf, ProgramCall) else (leaf,)


@cache
def _names_of_saved(kind: type[Any]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _behind(packed: Any) -> Iterator[Any]:
    """Yield the tensors that a packed tensor keeps."""
    if isinstance(packed, Fresh):
        packed = packed.settled
    if isinstance(packed, Handle):
        packed = packed.slot.held
    if isinstance(packed, Held):
        packed = packed.tensor
    yield from tree_leaves(packed)
