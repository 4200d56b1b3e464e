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
class Like:
    """A tensor's shape and type. ``device``: that of the inputs, where None."""

    size: tuple[int, ...]
    dtype: torch.dtype

    def blank(self, device: torch.device) -> torch.Tensor:
        """Return a tensor like it, with anything in it."""
        return torch.empty(self.size, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Targets:
    """The arguments of a loss beside the output, flattened: :class:`Like` for tensors."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    inputs: tuple[tuple[int, ...] | None, ...] | None = None
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
        sizes = (tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in inputs)
        return replace(self, inputs=tuple(sizes))

    def for_inputs(self, inputs: Sequence[Any]) -> Targets:
        """Return them for a call with these leaves."""
        now = self.seen_with(inputs)
        changes: dict[int, int] = {}
        for before, leaf in zip(now.inputs or (), inputs, strict=False):
            if before is not None and isinstance(leaf, torch.Tensor) and len(before) == leaf.dim():
                for one, other in zip(before, leaf.shape, strict=True):
                    if one != other:
                        changes.setdefault(one, int(other))
        sizes = (replace(t, size=_resized(t.size, changes)) if isinstance(t, Like) else t for t in now.leaves)
        return replace(now, leaves=tuple(sizes), inputs=None).seen_with(inputs)

    def blank(self, beside: Iterable[Any]) -> list[Any]:
        """Return leaves of these shapes on the device of the first tensor of ``beside``; under a mode of fakes they are
        fakes."""
        device = next((t.device for t in beside if isinstance(t, torch.Tensor)), torch.device("cpu"))
        return [leaf.blank(device) if isinstance(leaf, Like) else leaf for leaf in self.leaves]


def _resized(size: tuple[int, ...], changes: dict[int, int]) -> tuple[int, ...]:
    """Return ``size`` where dimensions of the inputs have changed: ``changes``, from one length to another."""
    resized = [changes.get(n, n) for n in size]
    if size and resized[0] == size[0]:
        for one, other in changes.items():
            if one and resized[0] % one == 0:
                resized[0] = resized[0] // one * other
    return tuple(resized)
