"""Other batch sizes of one captured graph: which dimensions vary, inputs of another size, the largest that fits.

A graph captured with symbolic dimensions serves every size; each size gets a profile and a plan of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fxmem.capture import Dims, Inputs
from fxmem.errors import InputError
from fxmem.fake import FakeWorld


def batch_dims(inputs: Inputs) -> Dims:
    """Return the batch dimension: dimension 0 of each tensor that is as long there as the first one.

    Errors: ``InputError`` if there is none, or its size is 1 (which torch.export cannot keep symbolic).
    """
    tensors = [(i, leaf) for i, leaf in enumerate(inputs.leaves) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not tensors:
        raise InputError("the example holds no tensor with a batch dimension")
    size = tensors[0][1].shape[0]
    if size < 2:
        raise InputError("the example's batch size is 1; use an example of 2 or more to ask for other sizes")
    return frozenset((i, 0) for i, leaf in tensors if leaf.shape[0] == size)


def varying_dims(one: Inputs, other: Inputs) -> Dims:
    """Return the (leaf, dimension) pairs in which two calls of the same ranks differ."""
    return frozenset(
        (i, d)
        for i, (a, b) in enumerate(zip(one.leaves, other.leaves, strict=True))
        if isinstance(a, torch.Tensor)
        for d in range(a.dim())
        if a.shape[d] != b.shape[d]
    )


def resized(inputs: Inputs, dims: Dims, size: int) -> Inputs:
    """Return ``inputs`` with ``size`` entries in the dimensions ``dims``: integers and bools repeated, for a model may look
    at their values, all else as fakes."""
    world = FakeWorld(inputs.leaves)
    leaves = list(inputs.leaves)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        if isinstance(leaf, FakeTensor) or leaf.is_meta or leaf.is_floating_point() or leaf.is_complex():
            shape = [size if (i, d) in dims else n for d, n in enumerate(leaf.shape)]
            with world.mode:
                leaves[i] = torch.empty(shape, dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad)
        else:
            for d, n in enumerate(leaf.shape):
                if (i, d) in dims:
                    leaves[i] = leaves[i].index_select(d, torch.arange(size, device=leaf.device) % n)
    return Inputs(tuple(leaves), inputs.spec)


def largest_batch(fits: Callable[[int], bool], fits_at: int = 0, limit: int = 1 << 24) -> int:
    """Return the largest size for which ``fits``, given that it is monotone: doubling, then bisection.

    ``fits_at``: a size known to fit (0: none is known; 0 or 1 is returned if not even 2 fit).
    """
    low, high = fits_at, max(2, 2 * fits_at)
    while high <= limit and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
