"""Example targets of a loss: their shapes, and what these are for a batch of another size.

In: what a user passes as ``targets=``. Out: leaves of the shapes that a call of the model needs. Values are not kept. A
dimension of a target follows the inputs if, in the example, it is as long as one of theirs that now has another size; a
first dimension also where it is a multiple of such a one, as that of flattened labels is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxmem.torch_private import TreeSpec, tree_flatten


@dataclass(frozen=True, slots=True)
class Beside:
    """What the step has already: a parameter, by its index, or a leaf of the inputs, by its index from their end."""

    index: int


@dataclass(frozen=True, slots=True)
class Like:
    """A tensor's shape and type."""

    size: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    def blank(self, device: torch.device) -> torch.Tensor:
        """Return a tensor like it, with anything in it."""
        return torch.empty(self.size, dtype=self.dtype, device=device, requires_grad=self.requires_grad)

    def resized(self, changes: dict[int, int]) -> Like:
        """Return what it is like where dimensions of the inputs have changed."""
        size = tuple(changes.get(n, n) if i else resized(n, changes) for i, n in enumerate(self.size))
        return replace(self, size=size)


Sizes = tuple[tuple[int, ...] | None, ...]
"""Of the leaves of a call's inputs; None for those that are no tensors."""


def sizes_of(leaves: Sequence[Any]) -> Sizes:
    """Return the sizes of leaves."""
    return tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)


@dataclass(frozen=True, slots=True)
class Targets:
    """The arguments of a loss beside the output, flattened: :class:`Like` or :class:`Beside` for tensors."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    inputs: Sizes | None = None
    """Sizes of the inputs' leaves that they are an example for; None: those of the first call."""

    @staticmethod
    def of(targets: Any) -> Targets:
        """Return what is kept of ``targets=``: a tensor or another single argument, or a tuple or list of arguments."""
        if isinstance(targets, Targets):
            return targets
        args = () if targets is None else tuple(targets) if isinstance(targets, tuple | list) else (targets,)
        leaves, spec = tree_flatten(args)
        kept = (Like(tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else t for t in leaves)
        return Targets(tuple(kept), spec)

    def seen_with(self, inputs: Sequence[Any]) -> Targets:
        """Return them as an example for these leaves of a call, if it is not known yet for which."""
        if self.inputs is not None or not self.leaves:
            return self
        return replace(self, inputs=sizes_of(inputs))

    def for_inputs(self, inputs: Sequence[Any]) -> Targets:
        """Return them for a call with these leaves."""
        now = self.seen_with(inputs)
        changes = changed_sizes(zip(now.inputs or (), sizes_of(inputs), strict=False))
        sizes = (t.resized(changes) if isinstance(t, Like) else t for t in now.leaves)
        return replace(now, leaves=tuple(sizes), inputs=None).seen_with(inputs)

    def blank(self, beside: Sequence[Any]) -> list[Any]:
        """Return leaves of these shapes, on the device of the first tensor of ``beside``: the step's parameters, then the
        leaves of its inputs. Under a mode of fakes they are fakes."""
        device = next((t.device for t in beside if isinstance(t, torch.Tensor)), torch.device("cpu"))

        def made(leaf: Any) -> Any:
            if isinstance(leaf, Like):
                return leaf.blank(device)
            return beside[leaf.index] if isinstance(leaf, Beside) else leaf

        return [made(leaf) for leaf in self.leaves]


def changed_sizes(pairs: Iterable[tuple[tuple[int, ...] | None, tuple[int, ...] | None]]) -> dict[int, int]:
    """Return what lengths have become what others, from tensors' sizes before and now; the first that tells counts."""
    changes: dict[int, int] = {}
    for before, now in pairs:
        if before is not None and now is not None and len(before) == len(now):
            for one, other in zip(before, now, strict=True):
                if one != other:
                    changes.setdefault(one, int(other))
    return changes


def resized(length: int, changes: dict[int, int]) -> int:
    """Return what a length, or a multiple of one, is after ``changes``."""
    if length in changes:
        return changes[length]
    for one, other in changes.items():
        if one > 1 and length % one == 0:
            return length // one * other
    return length
