"""What a run computes: the ops of a forward on fakes, for comparing two forwards."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fxmem.fake.meta_fixups import run_above_fixups
from fxmem.fake.modes import ModeOnFakes
from fxmem.fake.python_state import PLAIN
from fxmem.torch_private import leaves_of, schema_of, storage_key, told_once, tree_leaves


class OpLog(ModeOnFakes):
    """Notes the ops of a run, with their scalars, as far as they depend on ``tensors`` or on random numbers.

    Tables that a model computes from nothing but sizes and caches (positions, rotations) are left out, and so are views
    and assertions.
    """

    def __init__(self, tensors: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[tuple[str, tuple[str, ...]]] = []
        self.given: set[int] = set()
        """The storages of all tensors that ops were given."""
        self._depends = {_storage_key(t) for t in tree_leaves(tensors) if isinstance(t, torch.Tensor)}
        self._alive: list[torch.Tensor] = []

    def was_given(self, value: Any) -> bool:
        """True if some op was given a tensor of ``value``."""
        return any(isinstance(leaf, torch.Tensor) and _storage_key(leaf) in self.given for leaf in tree_leaves(value))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = run_above_fixups(func, args, kwargs or {})
        leaves = leaves_of((args, kwargs or {}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.given.update(map(_storage_key, tensors))
        traits = _traits_of(func)
        if traits.left_out:
            return output
        if traits.seeded or any(_storage_key(t) in self._depends for t in tensors):
            self.ops.append((traits.name, tuple(repr(leaf) for leaf in leaves if type(leaf) in PLAIN)))
            made = [t for t in leaves_of(output) if isinstance(t, torch.Tensor)]
            written = tensors[:1] if traits.writes else []
            self._depends.update(_storage_key(t) for t in (*made, *written))
            self._alive += made
        return output


class _Traits(NamedTuple):
    """What is asked of each op."""

    name: str
    left_out: bool
    seeded: bool
    writes: bool


@told_once
def _traits_of(func: Any) -> _Traits:
    writes = schema_of(func).is_mutable
    left_out = func.namespace == "prim" or func.is_view or not (schema_of(func).returns or writes)
    return _Traits(str(func), left_out, torch.Tag.nondeterministic_seeded in func.tags, writes)


def _storage_key(tensor: torch.Tensor) -> int:
    return storage_key(tensor) if tensor.layout == torch.strided else id(tensor)
