"""What autograd holds in place of saved tensors (NOTE [Who owns what on the tape] in :mod:`fxmem.runtime.tape`)."""

from __future__ import annotations

from typing import Protocol

import torch

from fxmem.errors import SavedTensorModifiedError
from fxmem.runtime.host_memory import Arriving, HostCopy
from fxmem.runtime.layout import View
from fxmem.runtime.tape_table import TapeTable
from fxmem.torch_private import keeps_graph, version_of


class Refiller(Protocol):
    """What a slot needs of its tape."""

    table: TapeTable

    def refill(self, target: Slot) -> None:
        """Recompute the empty ``target`` and whatever empty slots it needs."""

    def unpack_retained(self, handle: Handle) -> torch.Tensor:
        """Return the tensor of ``handle``, which may be asked for again in a later backward."""

    def fetch_ahead(self, storages: tuple[int, ...]) -> None:
        """Start to fetch what is empty of ``storages``."""


class Held:
    """A tensor that is kept, with the version it had (NOTE [Who owns what on the tape], rule 4)."""

    __slots__ = ("name", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, name: str = "a saved tensor") -> None:
        self.tensor, self.version, self.name = tensor, version_of(tensor), name

    def get(self) -> torch.Tensor:
        """Return the held tensor, after the check autograd would have made."""
        tensor = self.tensor
        if version_of(tensor) != self.version:
            raise SavedTensorModifiedError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.name} ({tensor.dtype}, {tuple(tensor.shape)}) is at version {version_of(tensor)}; expected version "
                f"{self.version} instead. Do the in-place write after the backward, or on a clone."
            )
        return tensor


class Fetched(Held):
    """A tensor that was fetched from host memory, perhaps ahead of its use."""

    __slots__ = ("_arriving",)

    def __init__(self, arriving: Arriving, name: str) -> None:
        super().__init__(arriving.tensor, name)
        self._arriving = arriving

    def get(self) -> torch.Tensor:
        self._arriving.wait()
        return super().get()


class Slot:
    """The one place of a storage for one forward call (NOTE [Who owns what on the tape])."""

    __slots__ = ("__weakref__", "held", "host", "inputs", "storage", "tape")

    def __init__(self, tape: Refiller, storage: int) -> None:
        self.tape, self.storage = tape, storage
        self.inputs: tuple[Slot, ...] = ()
        self.held: Held | None = None
        self.host: HostCopy | None = None

    def fill(self, tensor: torch.Tensor) -> None:
        """Hold ``tensor``, which is cut off from autograd, for good."""
        self.hold(Held(tensor, self.tape.table.names[self.storage]))

    def hold(self, held: Held, *, for_good: bool = True) -> None:
        """Hold what was made anew; not ``for_good``: so that it may be emptied again."""
        self.held = held
        if for_good:
            self.fill_no_more()

    def fetched(self) -> Held:
        """Return the tensor copied back from host memory."""
        assert self.host is not None, "what is fetched was sent"
        return Fetched(self.host.fetch(), self.tape.table.names[self.storage])

    def fill_no_more(self) -> None:
        """Let go of what the tensor can be made of."""
        self.inputs, self.host = (), None

    def empty(self) -> None:
        """Let go of the tensor if it can be made anew."""
        made_of_something = self.inputs or self.host is not None
        if self.held is not None and (made_of_something or self.storage in self.tape.table.from_nothing):
            self.held = None

    def get(self) -> torch.Tensor:
        assert self.held is not None
        return self.held.get()


class Handle:
    """What autograd holds in place of a saved tensor whose storage is dropped: a slot and the geometry on it."""

    __slots__ = ("__weakref__", "slot", "view")

    def __init__(self, slot: Slot, view: View) -> None:
        self.slot, self.view = slot, view


class Fresh:
    """What autograd holds in place of a tensor that a node itself made: kept, or once it is settled, a handle."""

    __slots__ = ("key", "settled")

    def __init__(self, key: int, tensor: torch.Tensor) -> None:
        self.key = key
        self.settled: Held | Handle = Held(tensor.detach())  # its own node would own itself

    def held_tensor(self) -> torch.Tensor:
        """Return the tensor itself, before it is settled."""
        assert type(self.settled) is Held
        return self.settled.tensor


def unpack(saved: Held | Handle | Fresh) -> torch.Tensor:
    """Return the saved tensor, recomputing its storage if the slot is empty."""
    if type(saved) is Fresh:
        saved = saved.settled
    if type(saved) is Handle:
        slot = saved.slot
        if keeps_graph():
            return slot.tape.unpack_retained(saved)
        while (held := slot.held) is None:  # again, should a backward that retains the graph empty it in another thread
            slot.tape.refill(slot)
        if slot.inputs or slot.host is not None:  # refilled in such a backward
            slot.fill_no_more()
        tensor = saved.view.on(held.get())
        if (ahead := slot.tape.table.ahead.get(slot.storage)) is not None:
            slot.tape.fetch_ahead(ahead)
        return tensor
    assert type(saved) is Held
    return saved.get()
