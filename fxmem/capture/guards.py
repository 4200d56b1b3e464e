"""What a plan depends on of a call: its arguments.

In: a call's inputs. Out: hashable values, equal where one plan serves both calls.
"""

from __future__ import annotations

from typing import Any

import torch

from fxmem.capture.graph import Inputs, order_of_dims
from fxmem.torch_private import FakeTensor, is_traceable_wrapper, storage_key

NUMBERS = (int, float, str)
"""Classes of arguments, these very ones, whose values may make no difference."""


def arguments_of(inputs: Inputs, *, with_sizes: bool = True, with_numbers: bool = True) -> tuple[Any, ...]:
    """Return what a plan depends on of a call's arguments; without ``with_sizes``, what a graph with symbolic dimensions
    does; without ``with_numbers``, what the model's own code does not see to itself."""
    leaves = tuple(
        [
            _leaf_signature(leaf, with_sizes) if with_numbers or type(leaf) not in NUMBERS else type(leaf)
            for leaf in inputs.leaves
        ]
    )
    return (inputs.spec, leaves, _sharing(inputs.tensors, with_sizes))


def _leaf_signature(leaf: Any, with_sizes: bool) -> Any:
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided:
            return (leaf.layout, leaf.shape)
        layout = (leaf.shape, leaf.stride()) if with_sizes else _layout_of_any_size(leaf)
        return (layout, leaf.dtype, leaf.device, leaf.requires_grad, leaf.is_conj(), leaf.is_neg())
    try:
        hash(leaf)
    except TypeError:
        return repr(leaf)
    return (type(leaf), constant(leaf))


def _layout_of_any_size(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return in which order the dimensions of a dense tensor lie, which all its sizes may share; else how it lies."""
    order = order_of_dims(tensor)
    contiguous = tensor.is_contiguous()
    if contiguous or tensor.permute(order).is_contiguous():
        return (tensor.dim(), None if contiguous else tuple(order))
    return (tensor.shape, tensor.stride())


def constants_of(inputs: Inputs) -> tuple[Any, ...]:
    """Return what a plan depends on of those arguments that are no tensors."""
    return tuple([_leaf_signature(leaf, True) for leaf in inputs.leaves if not isinstance(leaf, torch.Tensor)])


def _sharing(tensors: list[torch.Tensor], with_sizes: bool) -> tuple[Any, ...]:
    """Return which of a call's tensors are the same one, or lie on one storage, and how many bytes apart there."""
    if len(tensors) < 2:
        return ()
    first: dict[int, int] = {}
    on: dict[int, tuple[int, int]] = {}
    found = []
    for number, tensor in enumerate(tensors):
        if has_memory(tensor):
            same = first.setdefault(id(tensor), number)
            offset_bytes = int(tensor.storage_offset()) * tensor.itemsize
            other, start_bytes = on.setdefault(memory_of(tensor), (number, offset_bytes))
            if other != number:
                found.append((number, same, other, offset_bytes - start_bytes if with_sizes else 0))
    return tuple(found)


def has_memory(tensor: torch.Tensor) -> bool:
    """True if ``tensor`` lies on one storage: a sparse one, and a wrapper of others, have several."""
    return tensor.layout is torch.strided and not is_traceable_wrapper(tensor)


def has_address(tensor: torch.Tensor) -> bool:
    """True if where ``tensor`` lies is told by its address, which means nothing of a fake."""
    return has_memory(tensor) and not isinstance(tensor, FakeTensor)


def memory_of(tensor: torch.Tensor) -> int:
    """Return where the storage of a tensor that has memory begins; something of its own where that is empty."""
    if not has_address(tensor):
        return storage_key(tensor)
    return tensor.untyped_storage().data_ptr() or storage_key(tensor)


def constant(value: Any) -> Any:
    """Return what tells a number from an equal one of another type or sign: True, 1 and 1.0, or 0.0 and -0.0."""
    return (type(value), repr(value)) if type(value) in (bool, int, float) else value
