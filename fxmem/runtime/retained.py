"""Backwards that retain their graph: which refilled slots are emptied again, and when.

In: a tape's slots and handles. Out: slots without what was recomputed, once the backward that asked for it is past.

NOTE [Retained graphs]

1. A backward that lets go of its graph frees a slot with the last handle on it and the last slot recomputed from it. With
   ``retain_graph=True`` both stay, so :class:`Uses` counts in their stead, for one backward: a handle is done with when it
   is unpacked, a dropped slot when it is refilled or no longer asked for. At zero a slot is emptied again.
2. To be emptied, a slot must be able to be refilled: in such a backward it keeps hold of its recipe's inputs. The first
   backward that lets go of the graph lets go of them too.
3. What a partial backward refills and does not use is emptied when it ends, also by an exception: the engine owns what
   counts.
4. With ``create_graph=True`` the backward is recorded, and its own graph saves what was refilled. Recomputed once more it
   would be there twice, so it stays, once, as in plain PyTorch.
5. One backward at a time counts and empties; others on the same graph meanwhile (threads, a backward inside of one) only
   refill. So no slot is emptied behind the back of one that counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

import torch

from fxmem.runtime.slots import Handle, Slot
from fxmem.torch_private import at_end_of_backward, current_backward


class Holding(Protocol):
    """Which refilled slots stay, and until when."""

    def wants(self, slot: Slot) -> bool:
        """Whether ``slot`` is refilled where a recomputation passes through it."""

    def refilled(self, slot: Slot) -> None:
        """``slot`` was recomputed."""

    def use(self, handle: Handle) -> None:
        """``handle`` was unpacked."""


class ForGood:
    """All that the plan lets stays, and is never emptied: it lets go of its recipe's inputs."""

    def wants(self, slot: Slot) -> bool:
        return True

    def refilled(self, slot: Slot) -> None:
        pass

    def use(self, handle: Handle) -> None:
        handle.slot.fill_no_more()


class Filling:
    """All that the plan lets stays, until another backward empties it (rule 5)."""

    def wants(self, slot: Slot) -> bool:
        return True

    def refilled(self, slot: Slot) -> None:
        pass

    def use(self, handle: Handle) -> None:
        pass


class Once:
    """Nothing stays: outside of a backward, and where one asks again for what it was done with."""

    def wants(self, slot: Slot) -> bool:
        return False

    def refilled(self, slot: Slot) -> None:
        pass

    def use(self, handle: Handle) -> None:
        handle.slot.empty()


FOR_GOOD, FILLING, ONCE = ForGood(), Filling(), Once()


class Uses:
    """What one backward that retains its graph has still to do with each slot (NOTE [Retained graphs], rule 1).

    The engine owns it for as long as that backward runs. ``empty_all`` empties what may be emptied.
    """

    def __init__(
        self, backward: int, handles: Iterable[Handle], slots: Iterable[Slot], empty_all: Callable[[], None]
    ) -> None:
        """``backward``: the number of the one that runs in this thread."""
        self.backward, self.is_over = backward, False
        self._empty_all = empty_all
        self._left: dict[int, int] = {}
        """By storage: handles not unpacked yet, and slots recomputed from it that are neither refilled nor done with."""
        self._used: set[int] = set()
        self._released: set[int] = set()
        """Storages whose slots have no more need of their recipe's inputs in this backward."""
        left = self._left
        for handle in handles:
            left[handle.slot.storage] = left.get(handle.slot.storage, 0) + 1
        for slot in slots:
            for given in slot.inputs:
                left[given.storage] = left.get(given.storage, 0) + 1
        at_end_of_backward(self.end)

    def is_done_with(self, slot: Slot) -> bool:
        return self._left.get(slot.storage, 0) <= 0

    def wants(self, slot: Slot) -> bool:
        return not self.is_done_with(slot)

    def refilled(self, slot: Slot) -> None:
        self._release_inputs(slot)

    def use(self, handle: Handle) -> None:
        if id(handle) not in self._used:
            self._used.add(id(handle))
            self._leave(handle.slot)

    def _leave(self, slot: Slot) -> None:
        storage = slot.storage
        self._left[storage] = self._left.get(storage, 0) - 1
        if self._left[storage] == 0:
            slot.empty()
            self._release_inputs(slot)

    def _release_inputs(self, slot: Slot) -> None:
        stack = [slot]
        while stack:
            slot = stack.pop()
            if slot.storage in self._released:
                continue
            self._released.add(slot.storage)
            for given in slot.inputs:
                self._left[given.storage] -= 1
                if self._left[given.storage] == 0:
                    given.empty()
                    stack.append(given)

    def end(self) -> None:
        """Empty what is left (rule 3)."""
        if not self.is_over:
            self.is_over = True
            self._empty_all()

    def __del__(self) -> None:
        self.end()


class RetainedGraph:
    """Backwards that retain the graph of one tape. ``slots``, ``handles``: the tape's own, as they come to be."""

    def __init__(self, slots: dict[int, weakref.ref[Slot]], handles: list[weakref.ref[Handle]]) -> None:
        self._slots, self._handles = slots, handles
        self._uses: weakref.ref[Uses] | None = None

    def holding(self, slot: Slot) -> Holding:
        """Say which slots stay refilled where ``slot`` is asked for now, in a backward that retains the graph."""
        backward = current_backward()
        if backward < 0:
            return ONCE
        if torch.is_grad_enabled():
            return FOR_GOOD
        uses = self._uses() if self._uses is not None else None
        if uses is None or uses.is_over:
            self._empty_all()
            uses = Uses(backward, _living(self._handles), _living(self._slots.values()), self._empty_all)
            self._uses = weakref.ref(uses)
        if uses.backward != backward:
            return FILLING
        return ONCE if uses.is_done_with(slot) else uses

    def _empty_all(self) -> None:
        """Empty the slots that were refilled, and can be again."""
        for slot in _living(self._slots.values()):
            slot.empty()


Living = TypeVar("Living", Slot, Handle)


def _living(refs: Iterable[weakref.ref[Living]]) -> Iterator[Living]:
    return (thing for ref in refs if (thing := ref()) is not None)
