"""Other batch sizes of one captured graph: which dimensions vary, inputs of another size, the largest that fits.

A graph captured with symbolic dimensions serves every size; each size gets a profile and a plan of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from fxmem.capture.graph import Dims, Inputs, order_of_dims
from fxmem.errors import InputError
from fxmem.fake.fake_tensors import FakeWorld
from fxmem.torch_private import FakeTensor


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


Shapes = tuple[torch.Size | None, ...]
"""Of a call's leaves; None for what is no tensor."""


def shapes_of(inputs: Inputs) -> Shapes:
    """Return the shapes of a call's tensors."""
    return tuple([leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in inputs.leaves])


def differing_dims(one: Shapes, other: Shapes) -> Dims:
    """Return the (leaf, dimension) pairs in which shapes of the same ranks differ."""
    pairs = ((i, a, b) for i, (a, b) in enumerate(zip(one, other, strict=True)) if a is not None and b is not None)
    return frozenset((i, d) for i, a, b in pairs for d, (m, n) in enumerate(zip(a, b, strict=True)) if m != n)


def is_within(one: Shapes, other: Shapes) -> bool:
    """True if no dimension of ``one`` is longer than that of ``other``, of the same ranks."""
    pairs = ((a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None)
    return all(m <= n for a, b in pairs for m, n in zip(a, b, strict=True))


def largest_of(shapes: Iterable[Shapes]) -> Shapes:
    """Return in each dimension the longest of several shapes of the same ranks."""
    by_leaf = zip(*shapes, strict=True)
    return tuple([None if leaf[0] is None else torch.Size(map(max, zip(*leaf, strict=True))) for leaf in by_leaf])


def resized(inputs: Inputs, dims: Dims, size: int) -> Inputs:
    """Return ``inputs`` with ``size`` entries in the dimensions ``dims``, as :func:`reshaped` does."""
    shapes = [
        shape if shape is None else torch.Size(size if (i, d) in dims else n for d, n in enumerate(shape))
        for i, shape in enumerate(shapes_of(inputs))
    ]
    return reshaped(inputs, tuple(shapes))


def reshaped(inputs: Inputs, shapes: Shapes) -> Inputs:
    """Return ``inputs`` with tensors of ``shapes``: integers and bools cut or repeated, for a model may look at their
    values, all else as fakes."""
    world = FakeWorld(inputs.leaves)
    leaves = list(inputs.leaves)
    for i, (leaf, shape) in enumerate(zip(leaves, shapes, strict=True)):
        if not isinstance(leaf, torch.Tensor) or shape is None:
            continue
        if isinstance(leaf, FakeTensor) or leaf.is_meta or leaf.is_floating_point() or leaf.is_complex():
            order = order_of_dims(leaf)
            back = sorted(range(leaf.dim()), key=order.__getitem__)
            with world.mode:
                dense = torch.empty([shape[d] for d in order], dtype=leaf.dtype, device=leaf.device).permute(back)
                leaves[i] = dense.detach().requires_grad_(leaf.requires_grad)
        else:
            for d, (size, n) in enumerate(zip(shape, leaf.shape, strict=True)):
                if size != n:
                    leaves[i] = leaves[i].index_select(d, torch.arange(size, device=leaf.device) % n)
    return Inputs(tuple(leaves), inputs.spec)


def without_values(inputs: Inputs) -> Inputs:
    """Return ``inputs`` with fakes for its tensors: all that a captured graph is profiled by."""
    world = FakeWorld(inputs.leaves)
    return Inputs(tuple(world.fake_all(leaf) for leaf in inputs.leaves), inputs.spec)


def largest_batch(peak_bytes: Callable[[int], int], budget_bytes: int, limit: int = 1 << 24) -> int:
    """Return the largest size up to ``limit`` whose peak is within ``budget_bytes``, given that peaks grow with sizes.

    0 or 1 is returned if not even 2 fit. Peaks are nearly affine in the size, so the next size asked about is where a line
    through known ones meets the budget; every third time it is the middle, should they be anything but.
    """
    known: dict[int, int] = {}
    low, high, size = 0, limit + 1, 2
    while high - low > 1:
        known[size] = peak_bytes(size)
        low, high = (size, high) if known[size] <= budget_bytes else (low, size)
        halve = high <= limit and len(known) % 3 == 0
        size = (low + high) // 2 if halve else min(max(_met_at(known, budget_bytes), low + 1), high - 1)
    return low


def _met_at(known: dict[int, int], budget_bytes: int) -> int:
    """Return the size at which the line through the two known peaks nearest to the budget meets it; twice the largest
    where there is no rising line."""
    nearest = sorted(known, key=lambda size: abs(known[size] - budget_bytes))[:2]
    one, other = min(nearest), max(nearest)
    rise = known[other] - known[one]
    if rise <= 0:
        return 2 * max(known)
    return one + (budget_bytes - known[one]) * (other - one) // rise
