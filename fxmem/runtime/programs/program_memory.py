"""What a program takes, found from what was written down of the step on the tape, before it is run.

In: the lines of a program as they are written (:class:`Line`). Out: bytes alive at each of them, and those that were alive
there on the tape.

NOTE [A program's peak]

1. A program makes the same calls as the tape in the same order, but it holds values for other times: gradients that wait
   for others (NOTE [Parts] in gradient_parts.py), those that are summed, and what it must not write over.
2. What the tape held is noted at each call, as the step is written down: what of the step's own was alive, by its memory's
   own end, what of that are outputs, and of which arguments the gradient had come.
3. A program takes no more than the tape if nowhere more is alive than at the tape's peak, what kernels take inside
   included; whether outputs live on after the forward or not. Where that is not so, gradients are handed over as early as
   they can be, and if that does not help, steps stay on the tape.
4. A step by the program is run on fakes before the first real one: that is the peak that its report tells. On CUDA the
   allocator may serve the same requests from larger blocks where they come at other moments; what it makes of that step is
   compared with the budget.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fxmem.runtime.programs.gradient_parts import made_by
from fxmem.runtime.programs.instructions import IN_PLACE, Instruction, Recording, device_bytes

WRITING = frozenset(IN_PLACE.values())
START = Instruction(None, (), {}, (), True, False, False)
"""Stands for what is before the first call."""


@dataclass(frozen=True, slots=True)
class Line:
    """A call of a program. ``instruction``: as it is run. ``dying``: values that die after it. ``given``: gradients that
    are handed over then."""

    instruction: Instruction
    dying: tuple[int, ...] = ()
    given: tuple[int, ...] = ()


Moment = tuple[Instruction, int]
"""A call, or :data:`START` for what is after one, and the bytes alive."""


def moments_of(
    recording: Recording, lines: Sequence[Line], before: Iterable[int], staying: set[int], lasting: Iterable[int] = ()
) -> list[Moment]:
    """Return what is alive of values that the step has made or was given, once each line has run. ``before``: values that
    are there at the start. ``staying``: gradients that stay where they are handed over to. ``lasting``: values that do not
    count."""
    alive, moments = _Alive(recording, lasting), list[Moment]()
    for value in before:
        alive.add(value)
    for line in lines:
        made = made_by(line.instruction)
        if line.instruction.target in WRITING and made:
            alive.lies_on(made[0], line.instruction.reads[0])
        for value in made:
            alive.add(value)
        moments.append((line.instruction, alive.nbytes))
        moments.append((START, alive.nbytes + max(map(alive.copied_bytes, line.given), default=0)))
        alive.nbytes += sum(gradient_bytes(recording, value) for value in line.given if value in staying)
        for value in line.dying:
            alive.drop(value)
    return moments


def excess_bytes(ours: Iterable[Moment], recorded: Sequence[Instruction], tape: Callable[[Instruction], int]) -> int:
    """Return by how much more is alive than may be (NOTE [A program's peak], rule 3). ``recorded``: all calls that were
    written down. ``tape``: what was alive at one of them."""
    peak = max((tape(call) + call.inside_bytes for call in recorded), default=0)
    return max((nbytes + call.inside_bytes for call, nbytes in ours), default=0) - peak


class _Alive:
    """The storages that values alive lie on."""

    def __init__(self, recording: Recording, lasting: Iterable[int]) -> None:
        self.nbytes = 0
        self._recording, views = recording, recording.views
        self._lasting = {views[value].storage for value in (*recording.arguments, *recording.constants, *lasting)}
        self._count: Counter[int] = Counter()
        self._memory: dict[int, int] = {}
        """By storage, that which it lies on: what is written over is one."""
        self._owners: dict[int, int] = {}
        """By storage: the value that was made with it."""

    def lies_on(self, value: int, other: int) -> None:
        """``value`` is written over ``other``."""
        views = self._recording.views
        self._memory[views[value].storage] = self._memory[views[other].storage]

    def add(self, value: int) -> None:
        storage = self._recording.views[value].storage
        memory = self._memory.setdefault(storage, storage)
        self._owners.setdefault(storage, value)
        self._count[memory] += 1
        if self._count[memory] == 1 and memory not in self._lasting:
            self.nbytes += self._recording.nbytes[memory]

    def drop(self, value: int) -> None:
        storage = self._recording.views[value].storage
        if storage not in self._lasting:
            memory = self._memory[storage]
            self._count[memory] -= 1
            self.nbytes -= 0 if self._count[memory] else self._recording.nbytes[memory]

    def copied_bytes(self, gradient: int) -> int:
        """Return what autograd takes to keep or add a gradient: it steals none that is a view."""
        is_view = self._owners.get(self._recording.views[gradient].storage) != gradient
        return gradient_bytes(self._recording, gradient) if is_view else 0


def gradient_bytes(recording: Recording, value: int) -> int:
    """Return the bytes of a gradient that is there by itself."""
    view = recording.views[value]
    return device_bytes(math.prod(view.size) * view.dtype.itemsize, recording.devices[value])
