"""What a forward leaves in Python beside what it returns, and how a graph leaves it too.

A mixture of experts keeps its balancing loss in ``self.aux_loss``, a hook the features of a layer in a dict, and a sentence
encoder puts its embeddings into the dict that it was called with. In: attributes and items of dicts that a forward can
reach, and containers among the arguments, in which each forward leaves other tensors. While the model is captured they are
returned beside its output; when its graph has run, they are put where the model would have put them.

A forward that reads what the one before left, as neurons read their potential, has a graph that reads it too: an attribute
of the graph, which is set anew for each call (:meth:`SideEffects.read_by`). In between it is a fake, so that no graph keeps
what is old. Which graph serves follows from shapes, dtypes and whether there is a gradient, not from values.

NOTE [State between calls]

1. A buffer that forward exchanges for a tensor with a gradient is left as an attribute is; any other one is written by a
   copy, which torch.export puts into the graph.
2. While the model is captured, such a buffer is a plain attribute: torch.export would write it in place.
3. What a call reads stays to the next one, as planning counts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fxmem.errors import CaptureError
from fxmem.fake.fake_tensors import FakeWorld
from fxmem.fake.python_state import Place
from fxmem.torch_private import FakeTensor, TreeSpec, storage_key, tree_leaves, tree_map_only, tree_unflatten

_LEFT = (torch.Tensor, bool, int, float, str, type(None))
"""Classes of what is left, alone or in tuples, lists and dicts."""


@dataclass(frozen=True, slots=True, eq=False)
class SideEffects:
    """Where a forward leaves tensors."""

    attributes: tuple[Place, ...] = ()
    """Attributes, and items of other dicts."""
    arguments: tuple[int | str, ...] = ()
    """Places or names of arguments that are dicts or lists."""
    guarded: tuple[Place, ...] = ()
    """Of the attributes: those that the graph is for as they lie, since a later call goes by that."""
    reads: tuple[tuple[str, int], ...] = ()
    """What the graph reads of them: the target of its node, and which leaf of what they hold."""
    kept: list[Any] = field(default_factory=list)
    """What the latest call of the model's graphs read."""

    def __bool__(self) -> bool:
        return bool(self.attributes or self.arguments)

    @contextmanager
    def returned(self, model: torch.nn.Module) -> Iterator[None]:
        """While the body runs, calls of ``model`` return ``(output, attributes, arguments)``, the latter two as lists."""

        owners = _owners_of_buffers(model)

        def left(holder: dict[Any, Any], key: Any) -> Any:  # a buffer may be a plain attribute now
            owner = owners.get(id(holder))
            return holder.get(key) if owner is None or key in holder else vars(owner).get(key)

        def both(_: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            given = [args[each] if isinstance(each, int) else kwargs[each] for each in self.arguments]
            return output, [left(*item) for item in self._items()], given

        hook = model.register_forward_hook(both, with_kwargs=True) if self else None
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()

    def held(self) -> list[Any]:
        """Return what the attributes hold now."""
        return [holder.get(key) for holder, key in self._items()]

    def read_by(self, graph_module: torch.nn.Module) -> AbstractContextManager[None]:
        """While the body runs, ``graph_module`` reads what an earlier call left; what it does not read is let go of, as the
        model would while it runs (NOTE [State between calls], rule 3)."""
        return self._read_by(graph_module) if self else nullcontext()

    @contextmanager
    def _read_by(self, graph_module: torch.nn.Module) -> Iterator[None]:
        self.kept[:] = self._read()
        for place in self.attributes:
            if place.held_by is not None and place.key in place.held_by and place not in self.guarded:
                place.held_by[place.key] = None
        pairs = zip(self.reads, self.kept, strict=True)
        stand_ins = [_exchange(graph_module, target, value) for (target, _), value in pairs]
        try:
            yield
        finally:
            for (target, _), stand_in in zip(self.reads, stand_ins, strict=True):
                _exchange(graph_module, target, stand_in)

    def _read(self) -> list[Any]:
        leaves = tree_leaves(self.held()) if self.reads else []
        return [leaves[number] for _, number in self.reads]

    @contextmanager
    def as_plain_attributes(self, model: torch.nn.Module) -> Iterator[None]:
        """While the body runs, the attributes hold tensors without a graph behind them, buffers as plain attributes."""
        owners = _owners_of_buffers(model)
        plain = [(owners.get(id(holder)), holder, key, dict(holder)) for holder, key in self._items() if key in holder]
        for owner, holder, key, before in plain:
            value = tree_map_only(torch.Tensor, torch.Tensor.detach, before[key])
            if owner is None:
                holder[key] = value
            else:
                del holder[key]
                vars(owner)[key] = value
        try:
            yield
        finally:
            for owner, holder, key, before in plain:
                if owner is None:
                    holder[key] = before[key]
                else:
                    vars(owner).pop(key, None)
                    holder.clear()
                    holder.update(before)

    def with_stand_ins(
        self, graph_module: torch.fx.GraphModule, state: tuple[torch.Tensor, ...]
    ) -> tuple[SideEffects, tuple[torch.Tensor, ...]]:
        """Put fakes into ``graph_module`` and ``state`` for what they have of the attributes; return the effects that know
        of it, and ``state``."""
        leaves = tree_leaves(self.held())
        number_of = {_lies(leaf): number for number, leaf in enumerate(leaves) if _is_dense(leaf)}
        buffers = graph_module.named_buffers(remove_duplicate=False)
        held = {target: _lies(tensor) for target, tensor in buffers if _is_dense(tensor)}
        reads = tuple((target, number_of[lies]) for target, lies in held.items() if lies in number_of)
        world = FakeWorld()
        for target, number in reads:
            _exchange(graph_module, target, world.fake(leaves[number]))
        if reads:
            _let_go_of_constants(graph_module)
        read = {id(leaves[number]): world.fake(leaves[number]) for _, number in reads}
        ends = [len(tree_leaves(self.held()[:place])) for place in range(1, len(self.attributes) + 1)]
        places = {next(p for p, end in enumerate(ends) if number < end) for _, number in reads}
        guarded = dict.fromkeys((*self.guarded, *(self.attributes[place] for place in sorted(places))))
        known = replace(self, guarded=tuple(guarded), reads=reads)
        return known, tuple(read.get(id(tensor), tensor) for tensor in state)

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
_KEPT: WeakKeyDictionary[torch.nn.Module, list[Any]] = WeakKeyDictionary()
"""By model, what the latest call of its graphs read."""


def side_effects(
    model: torch.nn.Module,
    left: Mapping[Place, Any],
    again: Mapping[Place, Any],
    arguments: Sequence[int | str],
    moved: Sequence[Place] = (),
) -> SideEffects:
    """Return what a captured call of ``model`` leaves: the attributes that every forward changes, or that have tensors
    with a gradient, and ``arguments``. ``left``, ``again``: what two forwards changed; ``moved``: what lies otherwise after
    the first, if the second goes by it."""
    attributes = [
        place
        for place, value in {**left, **again}.items()
        if place.held_by is not None
        and _can_be_left(value)
        and (place in again or any(leaf.requires_grad for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)))
    ]
    guarded = tuple(place for place in moved if place in attributes)
    return SideEffects(tuple(attributes), tuple(arguments), guarded, kept=_KEPT.setdefault(model, []))


def facts_of(place: Place) -> Any:
    """Return what a graph may depend on of what is held at ``place``, but for values."""
    value = None if place.held_by is None else place.held_by.get(place.key)
    return tuple(
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad) if _is_dense(leaf) else repr(leaf)
        for leaf in tree_leaves(value)
    )


def _exchange(graph_module: torch.nn.Module, target: str, value: Any) -> Any:
    """Set an attribute of a graph, if it has it; return what it was."""
    path, _, name = target.rpartition(".")
    owner: Any = graph_module
    for part in path.split(".") if path else ():
        owner = getattr(owner, part, None)
    if owner is None or name not in owner._buffers:
        return None
    before, owner._buffers[name] = owner._buffers[name], value
    return before


def _let_go_of_constants(graph_module: torch.fx.GraphModule) -> None:
    """Let what torch.export notes of values hold no tensor that the model had while it was captured."""
    for node in graph_module.graph.nodes:
        for fake in tree_leaves(node.meta.get("val")):
            if isinstance(fake, FakeTensor):
                fake.constant = None


def _owners_of_buffers(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    modules = (module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule))
    return {id(module._buffers): module for module in modules}


def _lies(tensor: torch.Tensor) -> tuple[Any, ...]:
    return storage_key(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _can_be_left(value: Any) -> bool:
    """True of tensors, alone or in containers with numbers and texts."""
    leaves = tree_leaves(value)
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves) and all(isinstance(leaf, _LEFT) for leaf in leaves)


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
