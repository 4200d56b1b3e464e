"""What a forward leaves in Python beside what it returns, and how a graph leaves it too.

A mixture of experts keeps its balancing loss in ``self.aux_loss``, a hook the features of a layer in a dict, and a sentence
encoder puts its embeddings into the dict that it was called with. In: attributes and items of dicts that a forward can
reach, and containers among the arguments, in which each forward leaves other tensors. While the model is captured they are
returned beside its output; when its graph has run, they are put where the model would have put them.

Not left: what a forward reads before it writes it. Then the state is an input, and a graph would have it as a constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fxmem.errors import CaptureError
from fxmem.fake.python_state import Place
from fxmem.torch_private import TreeSpec, storage_key, tree_leaves, tree_unflatten

_LEFT = (torch.Tensor, bool, int, float, str, type(None))
"""Classes of what is left, alone or in tuples, lists and dicts."""


@dataclass(frozen=True, slots=True, eq=False)
class SideEffects:
    """Where a forward leaves tensors."""

    attributes: tuple[Place, ...] = ()
    """Attributes, and items of other dicts."""
    arguments: tuple[int | str, ...] = ()
    """Places or names of arguments that are dicts or lists."""

    def __bool__(self) -> bool:
        return bool(self.attributes or self.arguments)

    @contextmanager
    def returned(self, model: torch.nn.Module) -> Iterator[None]:
        """While the body runs, calls of ``model`` return ``(output, attributes, arguments)``, the latter two as lists."""

        def both(_: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            given = [args[each] if isinstance(each, int) else kwargs[each] for each in self.arguments]
            return output, self.held(), given

        hook = model.register_forward_hook(both, with_kwargs=True) if self else None
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()

    def held(self) -> list[Any]:
        """Return what the attributes hold now."""
        return [holder.get(key) for holder, key in self._items()]

    def forget(self) -> None:
        """Let go of what an earlier call left, as the next one would while it runs."""
        for holder, key in self._items():
            if key in holder:
                holder[key] = None

    def output_of(self, returned: Any) -> Any:
        """Return the model's output of what a captured call returned, and leave what it leaves in attributes."""
        if not self:
            return returned
        output, values, _ = returned
        for (holder, key), value in zip(self._items(), values, strict=True):
            holder[key] = value
        return output

    def _items(self) -> list[tuple[dict[Any, Any], Any]]:
        """Return the dicts that hold the attributes, and under which keys."""
        return [(place.held_by, place.key) for place in self.attributes if place.held_by is not None]

    def num_leaves(self, spec: TreeSpec) -> int:
        """Return how many leaves of what a captured call returns are of the model's output. ``spec``: of all of it."""
        return int(spec.child(0).num_leaves if self else spec.num_leaves)

    def write_arguments(
        self, call: tuple[Sequence[Any], Mapping[str, Any]], leaves: Sequence[Any], spec: TreeSpec
    ) -> None:
        """Put into the containers of a ``call`` what the model would have put there. ``leaves``, ``spec``: of what a
        captured call returned."""
        if not self.arguments:
            return
        args, kwargs = call
        for each, value in zip(self.arguments, tree_unflatten(list(leaves), spec)[2], strict=True):
            given = args[each] if isinstance(each, int) else kwargs[each]
            if isinstance(given, dict):
                given.clear()
                given.update(value)
            else:
                given[:] = value

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Put back what the attributes held before the body ran."""
        before = [(holder, key, key in holder, holder.get(key)) for holder, key in self._items()]
        try:
            yield
        finally:
            for holder, key, was_there, value in before:
                if was_there:
                    holder[key] = value
                else:
                    holder.pop(key, None)

    def check_unread(self, read: Iterable[torch.Tensor]) -> None:
        """Errors: ``CaptureError`` if a graph that reads these tensors reads what an earlier call left in an attribute."""
        if not self.attributes:
            return
        places = set(map(storage_key, filter(_is_dense, read)))
        for place, value in zip(self.attributes, self.held(), strict=True):
            values = filter(_is_dense, tree_leaves(value))
            if not places.isdisjoint(map(storage_key, values)):
                raise CaptureError(
                    f"{place.owner} reads in forward what an earlier call left in its attribute {place.name!r}; a "
                    "captured graph would take it for a constant. Keep it in a tensor, by register_buffer, that each "
                    "forward writes in place (copy_), or do it outside of the model."
                )


NONE = SideEffects()


def side_effects(left: Mapping[Place, Any], again: Mapping[Place, Any], arguments: Sequence[int | str]) -> SideEffects:
    """Return what a captured call leaves: the attributes that every forward changes, or that have tensors
    with a gradient, and ``arguments``. ``left``, ``again``: what two forwards changed."""
    attributes = [
        place
        for place, value in {**left, **again}.items()
        if place.held_by is not None
        and _can_be_left(value)
        and (place in again or any(leaf.requires_grad for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)))
    ]
    return SideEffects(tuple(attributes), tuple(arguments))


def _can_be_left(value: Any) -> bool:
    """True of tensors, alone or in containers with numbers and texts."""
    leaves = tree_leaves(value)
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves) and all(isinstance(leaf, _LEFT) for leaf in leaves)


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
