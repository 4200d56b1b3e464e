"""The saved-tensor tape: what an emitted graph calls while it runs.

In: a :class:`TapeTable` (the plan, compiled). Nodes that save something the plan drops run inside
``saved_tensors_hooks``; every other node runs untouched.

NOTE [Who owns what on the tape]

1. Autograd owns *handles* (what ``pack`` returns), a handle owns a *slot* (one per storage), so memory dies exactly
   when autograd lets go. The tape owns a slot only in the forward, until the last node that can give it an owner.
2. A kept slot holds a tensor. A dropped slot is empty after the forward and holds the slots of its recipe's inputs;
   once refilled it holds the tensor and lets go of those slots.
3. Unpacking an empty slot runs the recipes of the empty slots it needs, in position order, and refills each slot the
   plan's retain limit allows. The order in which autograd asks is not assumed: retained graphs, partial backwards and
   several forwards work alike. Retained graphs: NOTE [Retained graphs] in :mod:`fxmem.runtime.retained`.
4. Hooks switch autograd's version check off, so a slot remembers the version of what it holds and raises what
   autograd would have raised.
5. A kernel may lay its output out otherwise than its fake does. From there on the geometries of all nodes on the tape are
   noted in the forward, and a re-run goes by what was noted; but a view that turns out a copy, or a copy a view, cannot
   be followed. So whatever makes a storage that a re-run reads is on the tape, also where others write it later.
6. An offloaded slot is a dropped one whose recipe is a fetch: it holds a copy in host memory instead of its recipe's
   inputs (:mod:`fxmem.runtime.host_memory`). The copy is made once the storage is final, and waited for at the forward's
   last use; unpacking another storage may start the fetch ahead.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fxmem.errors import SavedTensorModifiedError
from fxmem.runtime.autocast import autocast_as_in_forward
from fxmem.runtime.backend_flags import present, under
from fxmem.runtime.host_memory import HostCopy
from fxmem.runtime.layout import View, Views, layout_error, layout_message, memory_error
from fxmem.runtime.out_of_memory import explainer
from fxmem.runtime.programs.recording import at_work
from fxmem.runtime.recompute import SavedInRerun, replayed, stash_random_states, without_graph
from fxmem.runtime.retained import FOR_GOOD, Holding, RetainedGraph
from fxmem.runtime.slots import Fresh, Handle, Held, Slot, unpack
from fxmem.runtime.tape_table import NodeTape, TapeTable
from fxmem.torch_patches import outside_of_batch
from fxmem.torch_private import leaves_of, storage_key, version_of


class Tape:
    """One forward call of an emitted graph."""

    def __init__(
        self, table: TapeTable, statics: dict[int, torch.Tensor], counters: dict[int, torch.Tensor] | None = None
    ) -> None:
        """``statics``, ``counters``: see :class:`fxmem.runtime.other_sizes.TapeOpener`."""
        self.table = table
        self.random_states: dict[int, replayed] = {}
        self._recorder = at_work()
        self._views: dict[int, Views] = {}
        self._relaid: dict[int, int] = {}
        """Storages that hold what lies otherwise than planned, each with its identity in this call."""
        self._switches = present()
        self._statics = statics
        self._static_versions: dict[int, int] = {}
        self._counters = counters or {}
        self._counter_versions: dict[int, int] = {}
        self._open: dict[int, Slot] | None = {}
        self._slots: dict[int, weakref.ref[Slot]] = {}
        self._handles: list[weakref.ref[Handle]] = []
        self._retained = RetainedGraph(self._slots, self._handles)
        self._lock = threading.RLock()
        self._explain = explainer()

    # -- forward ------------------------------------------------------------------------------------------------------

    def run(self, index: int, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one node of the graph and return its output."""
        node = self.table.nodes[index]
        if node.draws_on:
            self._stash(node)
        if node.loose or self._relaid:
            self._note_views(node, leaves_of((args, kwargs)))
        if node.hooked:
            output = self._run_hooked(node, target, args, kwargs)
        else:
            output = target(*args, **kwargs)
        leaves = [output] if isinstance(output, torch.Tensor) else leaves_of(output)
        for place, view in node.outputs:
            if self._relaid or not view.same_layout(leaves[place]):
                self._relay(node, leaves, leaves_of((args, kwargs)))
                break
        self._settle_slots(node, leaves, (args, kwargs))
        return output

    def _settle_slots(self, node: NodeTape, leaves: list[Any], arguments: Any) -> None:
        """Do with what is final after ``node`` as planned. ``leaves``: of its output."""
        for from_outputs, place, storage in node.holds:
            self._slot(storage).fill((leaves if from_outputs else leaves_of(arguments))[place].detach())
        for from_outputs, place, storage in node.sends:
            self._slot(storage).host = HostCopy((leaves if from_outputs else leaves_of(arguments))[place])
        for storage in node.leaves:
            if (slot := self._slots[storage]()) is not None and slot.host is not None:
                slot.host.left()
        if node.connects or node.frees:
            self._connect(node)

    def _stash(self, node: NodeTape) -> None:
        states = stash_random_states(node.draws_on)
        self.random_states[node.index] = replayed(states) if self._recorder is None else self._recorder.stash(states)

    def _note_views(self, node: NodeTape, argument_leaves: list[Any]) -> None:
        for place, view in node.arguments if self._relaid else node.loose:
            tensor = argument_leaves[place]
            if not view.lies_as(tensor):
                self._note_view(node, place, view, tensor)
            if view.storage in self._relaid and self._relaid[view.storage] != storage_key(tensor):
                raise memory_error(node.name)

    def _note_view(self, node: NodeTape, key: int, view: View, tensor: torch.Tensor) -> None:
        actual = view._replace(stride=tensor.stride(), offset=int(tensor.storage_offset()))
        self._views.setdefault(node.index, {})[key] = actual

    def _relay(self, node: NodeTape, leaves: list[Any], argument_leaves: list[Any]) -> None:
        """Note outputs that lie otherwise than planned, and go on (NOTE [Who owns what on the tape], rule 5)."""
        given = {view.storage: storage_key(argument_leaves[place]) for place, view in node.arguments}
        for place, view in node.outputs:
            output = leaves[place]
            if not view.is_alike(output):
                raise layout_error(node.name, view, output)
            key, is_view = storage_key(output), view.storage in given
            if (is_view and key != given[view.storage]) or (not is_view and key in given.values()):
                raise memory_error(node.name)
            if not (is_view or view.fills_as(output)):
                raise layout_error(node.name, view, output)
            if not view.same_layout(output):
                self._note_output(node, place, view, output)

    def _note_output(self, node: NodeTape, place: int, view: View, output: torch.Tensor) -> None:
        if not self._relaid:
            warnings.warn(
                f"{layout_message(node.name, view, output)}: re-runs follow it, the peak may be above the budget",
                stacklevel=2,
            )
        self._relaid[view.storage] = storage_key(output)
        self._note_view(node, ~place, view, output)

    def _run_hooked(
        self, node: NodeTape, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        argument_leaves = leaves_of((args, kwargs))
        # By identity: autograd saves most arguments as they are.
        arguments = {id(argument_leaves[place]): view for place, view in node.arguments}
        by_storage: dict[int, int] = {}  # filled if something else is saved
        fresh: list[Fresh] = []

        def pack(tensor: torch.Tensor) -> Held | Handle | Fresh:
            view = arguments.get(id(tensor))
            if view is not None:
                return self._handle(tensor, view)
            if not by_storage:
                by_storage.update((storage_key(argument_leaves[place]), view.storage) for place, view in node.arguments)
            key = storage_key(tensor)
            storage = by_storage.get(key)
            if storage is not None:
                return self._handle(tensor, View.of(tensor, storage))
            if not node.drops_fresh:
                return Held(tensor.detach())
            fresh.append(Fresh(key, tensor))
            return fresh[-1]

        try:
            with saved_tensors_hooks(pack, unpack):
                output = target(*args, **kwargs)
            if node.drops_fresh:
                self._settle(node, fresh, output)
        finally:  # autograd keeps the pack hook, and all it refers to, as long as any tensor saved here
            arguments.clear()
            argument_leaves.clear()
            fresh.clear()
        return output

    def _handle(self, tensor: torch.Tensor, view: View) -> Held | Handle:
        """Return what autograd is to hold in place of an argument planned to lie as ``view``."""
        if view.storage not in self.table.dropped:
            return Held(tensor)
        return self._handle_on(view.storage, view if view.lies_as(tensor) else View.of(tensor, view.storage))

    def _handle_on(self, storage: int, view: View) -> Handle:
        handle = Handle(self._slot(storage), view)
        self._handles.append(weakref.ref(handle))
        return handle

    def _settle(self, node: NodeTape, fresh: list[Fresh], output: Any) -> None:
        """Say of each fresh saved tensor whether it is an output or an internal, and drop it if the plan says so."""
        leaves = [output] if isinstance(output, torch.Tensor) else leaves_of(output)
        keys = [storage_key(leaf) if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]
        planned = {keys[place]: view for place, view in node.outputs}
        internals = dict.fromkeys([saved.key for saved in fresh if saved.key not in keys], -1)
        if len(internals) == len(node.internals):
            internals = dict(zip(internals, node.internals, strict=True))
        else:
            warnings.warn(
                f"{node.name} saves {len(internals)} internal tensors, {len(node.internals)} were planned; they "
                "are kept: gradients are right, the peak may be above the budget",
                stacklevel=2,
            )
        for saved in fresh:
            view = planned.get(saved.key)
            storage = view.storage if view is not None else internals.get(saved.key, -1)
            if storage in self.table.dropped:
                tensor = saved.held_tensor()
                if view is None or not view.is_of(tensor):
                    view = View.of(tensor, storage)
                if storage in self.table.internal and self.table.recipe_of[storage] in self.table.fetched:
                    slot = self._slot(storage)
                    slot.host = slot.host or HostCopy(tensor)
                saved.settled = self._handle_on(storage, view)

    def _slot(self, storage: int) -> Slot:
        assert self._open is not None, "the forward is over"
        slot = self._open.get(storage)
        if slot is None:
            slot = self._open[storage] = Slot(self, storage)
            self._slots[storage] = weakref.ref(slot)
        return slot

    def _connect(self, node: NodeTape) -> None:
        """Let empty slots hold what they are recomputed from, and let go of slots that others own by now."""
        table = self.table
        assert self._open is not None, "the forward is over"
        for recipe, storages in node.connects:
            inputs = tuple([self._slot(i) for i in table.recipe_inputs[recipe]])
            for storage in storages:
                self._slot(storage).inputs = inputs
        for storage in node.frees:
            self._open.pop(storage, None)

    def close(self) -> None:
        """End the forward."""
        self._open = None
        self._static_versions = {j: version_of(tensor) for j, tensor in self._statics.items()}
        self._counter_versions = {j: version_of(tensor) for j, tensor in self._counters.items()}

    # -- backward -----------------------------------------------------------------------------------------------------

    def refill(self, target: Slot) -> None:
        """Recompute the empty ``target`` and whatever empty slots it needs."""
        with self._lock:
            if target.held is None:
                self._recompute(target, FOR_GOOD)

    def fetch_ahead(self, storages: tuple[int, ...]) -> None:
        """Start to fetch what is empty of ``storages`` and can still be asked for."""
        for storage in storages:
            if (slot := self._empty_slot(storage)) is not None:
                self.refill(slot)

    def unpack_retained(self, handle: Handle) -> torch.Tensor:
        """Return the tensor of ``handle``, in a backward that retains its graph or outside of any."""
        with self._lock:
            holding = self._retained.holding(handle.slot)
            if handle.slot.held is None:
                self._recompute(handle.slot, holding)
            tensor = handle.view.on(handle.slot.get())
            holding.use(handle)
            return tensor

    def _recompute(self, target: Slot, holding: Holding) -> None:
        position = self.table.recipe_of[target.storage]
        assert position is not None
        positions, readers = self._needed(target)
        passing: dict[int, torch.Tensor] = {}
        saved, table = SavedInRerun(), self.table
        region = autocast_as_in_forward(table.autocast, table.devices, regions_inside=table.regions_inside)
        graph = without_graph() if table.elementwise.issuperset(positions) else saved
        with outside_of_batch(), graph, region, under(self._switches):
            try:
                for p in positions:
                    self._run_recipe(p, (target, position, holding), readers, passing, saved)
            except torch.OutOfMemoryError as error:
                self._explain(error)
                raise

    def _needed(self, target: Slot) -> tuple[list[int], dict[int, int]]:
        """Return the recipes to run, in order, and for each storage they refill, how many of them read it.

        A function of its own, so that no local variable owns a slot while the recipes run.
        """
        recipe_of, recipe_inputs = self.table.recipe_of, self.table.recipe_inputs
        if all(slot.held is not None for slot in target.inputs):
            position = recipe_of[target.storage]
            assert position is not None
            return [position], {}
        needed, stack = {target.storage}, [target]
        while stack:
            for slot in stack.pop().inputs:
                if slot.held is None and slot.storage not in needed:
                    needed.add(slot.storage)
                    stack.append(slot)
        positions = sorted({p for s in needed if (p := recipe_of[s]) is not None})
        readers = dict.fromkeys(needed, 0)
        for p in positions:
            for storage in recipe_inputs[p]:
                if storage in readers:
                    readers[storage] += 1
        return positions, readers

    def _run_recipe(
        self,
        p: int,
        asked: tuple[Slot, int, Holding],
        readers: dict[int, int],
        passing: dict[int, torch.Tensor],
        saved: SavedInRerun,
    ) -> None:
        """``asked``: the slot that all is done for, its recipe, and which slots stay refilled."""
        table, (target, position, holding) = self.table, asked
        refilled = []
        for storage in table.products(p):
            slot = self._empty_slot(storage)
            if slot is not None and (slot is target or (position <= table.limits[storage] and holding.wants(slot))):
                refilled.append(slot)
        read = [storage for storage in table.products(p) if readers.get(storage, 0) > 0]
        made = self._made(p, {slot.storage for slot in refilled}.union(read), passing, saved)
        for storage in read:
            passing[storage] = made[storage].get()
        for slot in refilled:
            slot.hold(made[slot.storage], for_good=holding is FOR_GOOD)
            holding.refilled(slot)
        for storage in table.recipe_inputs[p]:
            if storage in readers:
                readers[storage] -= 1
                if readers[storage] == 0:
                    passing.pop(storage, None)

    def _made(self, p: int, wanted: set[int], passing: dict[int, torch.Tensor], saved: SavedInRerun) -> dict[int, Held]:
        """Return those products of recipe ``p`` that are ``wanted``, computed once more or fetched from host memory."""
        table = self.table
        if p in table.fetched:
            return {s: slot.fetched() for s in table.fetched[p] if s in wanted and (slot := self._empty_slot(s))}
        recompute = table.recomputes[p]
        assert recompute is not None
        saved.capture = not wanted.isdisjoint(table.internal)
        bases = self._bases(p, passing)
        recompute.run(bases, self.random_states, saved, self._views)
        return {s: Held(bases[s], table.names[s]) for s in wanted}

    def _empty_slot(self, storage: int) -> Slot | None:
        """Return the slot of ``storage`` if it is empty and somebody owns it."""
        reference = self._slots.get(storage)
        slot = reference() if reference is not None and storage in self.table.dropped else None
        return slot if slot is not None and slot.held is None else None

    def _bases(self, p: int, passing: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        bases = {}
        for storage in self.table.recipe_inputs[p]:
            if storage in passing:
                bases[storage] = passing[storage]
            else:
                slot = self._slots[storage]()
                assert slot is not None
                bases[storage] = slot.get()
        for j in self.table.recipe_statics[p]:
            bases[j] = self._static(j)
        return bases

    def _static(self, j: int) -> torch.Tensor:
        tensor = self._statics[j]
        if version_of(tensor) != self._static_versions[j]:
            raise SavedTensorModifiedError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter, buffer or input ({tensor.dtype}, {tuple(tensor.shape)}) is at version {version_of(tensor)}; "
                f"expected version {self._static_versions[j]} instead. Call optimizer.step() after the last backward."
            )
        if j in self._counters and version_of(self._counters[j]) != self._counter_versions[j]:
            raise SavedTensorModifiedError(
                f"running statistics ({tensor.dtype}, {tuple(tensor.shape)}) that a batch norm in eval mode read were "
                "updated by a call in training mode since; what was made of them cannot be recomputed. Call backward "
                'before the next forward, or pass policy=[("batch_norm", "save"), ("frozen_batch_norm", "save")].'
            )
        return tensor


class TapedCall:
    """A target of the emitted graph: runs one node on the tape and returns its output."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self.target = target
        self.__name__ = self.__qualname__ = f"taped_{getattr(target, '__name__', 'call')}"
        self.__module__ = __name__

    def __call__(self, tape: Tape, index: int, *args: Any, **kwargs: Any) -> Any:
        return tape.run(index, self.target, args, kwargs)


def close_tape(tape: Tape) -> None:
    """End the forward of ``tape``."""
    tape.close()
