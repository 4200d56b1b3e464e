"""A plan at another size than it was made for: a size's first forward notes how its tensors lie, later ones go by that.

In: the :class:`TapeTable` of the size planned for, and one forward call of another size. Out: the table of that size. The
graph's own sizes are symbolic, so what is planned for one size only is the geometry of what the tape holds and runs again.

NOTE [One plan, many sizes]

1. A plan says of storages which are dropped, and how recipes make them again. Both hold for whatever size the graph is
   for, as long as the same nodes make, view and save the same storages. Each node on the tape is checked for that.
2. No storage may have more bytes than planned: then a step takes no more than planned at any moment. What is larger
   anywhere gets a plan of its own, unless there is no budget.
3. A call that turns out otherwise is given up before its output is used: :class:`OtherStructureError`. Whoever called puts
   back what it has written, and plans anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxmem.errors import PlanMismatchError
from fxmem.runtime.layout import View
from fxmem.runtime.recompute import NodeRecompute, Recompute
from fxmem.runtime.slots import Fresh
from fxmem.runtime.tape import Tape
from fxmem.runtime.tape_table import NodeTape, TapeTable
from fxmem.torch_private import FakeTensor, leaves_of, storage_key

MOST_SIZES = 256
"""Whose tables are kept; what comes back after so many others is noted anew."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a graph's inputs that may vary."""

    dims: tuple[tuple[int, int], ...]
    """(input, dimension)."""
    planned: tuple[int, ...]
    """The sizes planned for, in the same order."""
    bounded: bool
    """Whether storages may be no larger than planned: there is a budget."""

    def of(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Return those of a call; ``tensors``: the inputs that :attr:`dims` names, each once, in their order."""
        of_input = dict(zip(dict.fromkeys(i for i, _ in self.dims), tensors, strict=True))
        return tuple([of_input[i].shape[d] for i, d in self.dims])


class OtherStructureError(Exception):
    """At this size the graph does not do what it was planned to: the plan cannot serve it."""


class NotingTape(Tape):
    """The first forward call of a size (NOTE [One plan, many sizes])."""

    def __init__(
        self,
        table: TapeTable,
        statics: dict[int, torch.Tensor],
        counters: dict[int, torch.Tensor],
        done: Callable[[TapeTable], None],
        bounded: bool,
    ) -> None:
        """``done`` is given the table of this size. ``bounded``: whether storages may be no larger than planned."""
        super().__init__(table, statics, counters)
        self._done, self._bounded = done, bounded
        self._noted: dict[int, NodeTape] = {}
        self._leaves: dict[int, tuple[Any, ...]] = {}
        self._keys: dict[int, int] = {}
        """By storage, its identity in this call."""

    def run(self, index: int, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        planned = self.table.nodes[index]
        leaves = leaves_of((args, kwargs))
        arguments = tuple([(p, self._noted_view(planned, view, leaves, p)) for p, view in planned.arguments])
        for place, view in arguments:
            key = storage_key(leaves[place])
            if self._keys.setdefault(view.storage, key) != key:
                raise OtherStructureError(f"{planned.name} reads other memory than planned")
        given = {view.storage: self._keys[view.storage] for _, view in arguments}
        loose = {place for place, _ in planned.loose}
        node = replace(planned, arguments=arguments, loose=tuple([a for a in arguments if a[0] in loose]))
        self._leaves[index] = tuple([None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
        del leaves
        if node.draws_on:
            self._stash(node)
        output = self._run_hooked(node, target, args, kwargs) if node.hooked else target(*args, **kwargs)
        made = [output] if isinstance(output, torch.Tensor) else leaves_of(output)
        outputs = tuple([(p, self._noted_view(planned, view, made, p)) for p, view in planned.outputs])
        for place, view in outputs:
            self._check_made(planned, view.storage, made[place], given)
        self._noted[index] = replace(node, outputs=outputs)
        self._settle_slots(node, made, (args, kwargs))
        return output

    def _noted_view(self, node: NodeTape, view: View, leaves: list[Any], place: int) -> View:
        tensor = leaves[place] if place < len(leaves) else None
        like = (view.dtype, view.conj, view.neg, len(view.size), view.requires_grad)
        if not isinstance(tensor, torch.Tensor) or _kind_of(tensor) != like:
            raise OtherStructureError(f"{node.name} works on another kind of tensor than planned")
        size, offset = tuple(tensor.size()), int(tensor.storage_offset())
        return view._replace(size=size, stride=tensor.stride(), offset=offset)

    def _check_made(self, node: NodeTape, storage: int, tensor: torch.Tensor, given: dict[int, int]) -> None:
        key = storage_key(tensor)
        if storage in given:
            if key != given[storage]:
                raise OtherStructureError(f"{node.name} was planned to return a view, and made a copy")
            return
        if key in given.values():
            raise OtherStructureError(f"{node.name} was planned to make a copy, and returned a view")
        self._keys[storage] = key
        self._check_bytes(node, storage, tensor)

    def _check_bytes(self, node: NodeTape, storage: int, tensor: torch.Tensor) -> None:
        nbytes = tensor.untyped_storage().nbytes()
        if self._bounded and nbytes > self.table.nbytes[storage]:
            raise OtherStructureError(f"{node.name} makes {nbytes} bytes, {self.table.nbytes[storage]} were planned")

    def _settle(self, node: NodeTape, fresh: list[Fresh], output: Any) -> None:
        made = [output] if isinstance(output, torch.Tensor) else leaves_of(output)
        keys = {storage_key(leaf) for leaf in made if isinstance(leaf, torch.Tensor)}
        internals = {saved.key: saved for saved in fresh if saved.key not in keys}
        if len(internals) != len(node.internals):
            raise OtherStructureError(
                f"{node.name} saves {len(internals)} internal tensors, {len(node.internals)} were planned"
            )
        for storage, saved in zip(node.internals, internals.values(), strict=True):
            if storage >= 0:
                self._check_bytes(node, storage, saved.held_tensor())
        super()._settle(node, fresh, output)

    def close(self) -> None:
        super().close()
        nodes = self.table.nodes | self._noted
        recomputes = [r and _at_this_size(r, self._noted, self._leaves) for r in self.table.recomputes]
        self.table = replace(self.table, nodes=nodes, recomputes=tuple(recomputes))
        self._noted, self._leaves, self._keys = {}, {}, {}
        self._done(self.table)


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what no other size may change."""
    return (tensor.dtype, tensor.is_conj(), tensor.is_neg(), tensor.dim(), tensor.requires_grad)


def _at_this_size(recompute: Recompute, noted: dict[int, NodeTape], leaves: dict[int, tuple[Any, ...]]) -> Recompute:
    nodes = [_node_at_this_size(node, noted[node.index], leaves[node.index]) for node in recompute.nodes]
    return replace(recompute, nodes=tuple(nodes))


def _node_at_this_size(node: NodeRecompute, noted: NodeTape, actual: Sequence[Any]) -> NodeRecompute:
    if len(node.leaves) != len(actual):
        raise OtherStructureError(f"{node.name} takes another number of arguments than planned")
    arguments, outputs = dict(noted.arguments), dict(noted.outputs)
    return replace(
        node,
        leaves=tuple([_number(planned, leaf) for planned, leaf in zip(node.leaves, actual, strict=True)]),
        refs=tuple([(place, arguments[place]) for place, _ in node.refs]),
        outputs=tuple([(place, outputs[place]) for place, _ in node.outputs]),
        scratch=tuple([(place, arguments[place]) for place, _ in node.scratch]),
    )


def _number(planned: Any, actual: Any) -> Any:
    """Return the argument of this size: numbers may differ, whatever else there is, is the plan's."""
    return actual if type(planned) in (int, float) else planned


class TapeOpener(torch.nn.Module):
    """The emitted graph's ``fxmem_tape`` submodule: opens a tape for one call."""

    def __init__(
        self,
        table: TapeTable,
        statics: tuple[int, ...],
        counters: dict[int, torch.Tensor],
        sizes: Sizes | None = None,
    ) -> None:
        """``counters``: of statics whose version does not tell when they are written, tensors whose version does."""
        super().__init__()
        self.table = table
        self._statics, self.counters, self._sizes = statics, counters, sizes
        self._of_other_sizes: dict[tuple[int, ...], TapeTable] = {}

    def forward(self, *tensors: torch.Tensor) -> Tape:
        """Return a fresh tape. ``tensors``: the parameters, buffers and inputs that recipes read, in planned order; then
        the inputs whose sizes may vary."""
        count = len(self._statics)
        if len(tensors) < count:
            raise PlanMismatchError(f"{count} static tensors were planned, {len(tensors)} were given")
        statics = dict(zip(self._statics, tensors[:count], strict=True))
        sizes = self._sizes
        if sizes is None or (key := sizes.of(tensors[count:])) == sizes.planned:
            return Tape(self.table, statics, self.counters)
        table = self._of_other_sizes.get(key)
        if table is not None:
            return Tape(table, statics, self.counters)
        of_fakes = any(isinstance(tensor, FakeTensor) for tensor in tensors)

        def done(noted: TapeTable) -> None:
            if of_fakes:  # kernels may lay out otherwise
                return
            if len(self._of_other_sizes) >= MOST_SIZES:
                self._of_other_sizes.pop(next(iter(self._of_other_sizes)), None)
            self._of_other_sizes[key] = noted

        return NotingTape(self.table, statics, self.counters, done, sizes.bounded)
