"""What is in memory beside a compiled step and is not always there, and how much of it its plan leaves room for."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from fxmem.compiled.surroundings import Surroundings
from fxmem.profiling.training_step import TrainingStep


class Beside(NamedTuple):
    """What is there as a step begins, and is not always."""

    step: TrainingStep
    """The step asked for, with what becomes of gradients that are there."""
    outputs_bytes: int = 0
    """Of outputs of steps before that go before the backward, where there is no room for them."""
    kept_bytes: int = 0
    """Of those that stay."""

    def around(self, around: Surroundings) -> Surroundings:
        """Return ``around``, which is of :attr:`step`, with these outputs."""
        outputs, kept = ((nbytes,) if nbytes else () for nbytes in (self.outputs_bytes, self.kept_bytes))
        return replace(around, in_forwards=(*around.in_forwards, *outputs), present=(*around.present, *kept))


class Room(NamedTuple):
    """What may be there beside a step, in bytes, and its plan keeps the budget."""

    in_forwards: int
    """Until the backward begins."""
    throughout: int

    def least(self, other: Room) -> Room:
        return Room(min(self.in_forwards, other.in_forwards), min(self.throughout, other.throughout))
