"""Outputs of training steps before that are still referred to: until the next ones take their names, or longer.

In: storages of a step's outputs as it is over, and where backwards begin. Out: bytes that are there beside a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

SMALL_BYTES = 512
"""Not counted up to this size: a loss, of which most loops hold the latest."""

Held = tuple[weakref.ref[Any], int]
"""A storage, and its bytes."""


class OldOutputs:
    """What is still there of the outputs of one training loop's steps."""

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}
        """By the reference, of which there is one for each storage."""
        self.kept_bytes = 0
        """As the latest backward began: of steps before that one's."""

    def add(self, outputs: Iterable[Held]) -> None:
        """A step with these outputs is over."""
        there = {key: held for key, held in self._held.items() if held[0]() is not None}
        self._held = there | {id(storage): (storage, nbytes) for storage, nbytes in outputs if nbytes > SMALL_BYTES}

    @property
    def nbytes(self) -> int:
        """Of those that are there."""
        return sum(nbytes for storage, nbytes in self._held.values() if storage() is not None)

    def leave_out(self, tensors: Callable[[], Iterable[Any]]) -> None:
        """Forget those that are memory of these ``tensors``, which count as something else: a state that each call is given
        and replaces. What is no tensor is passed over."""
        if self.nbytes:
            for tensor in tensors():
                if type(tensor) is torch.Tensor and tensor.layout == torch.strided:
                    self._held.pop(id(weakref.ref(tensor.untyped_storage())), None)

    def note_backward(self) -> None:
        """The first backward of a step begins."""
        self.kept_bytes = self.nbytes
