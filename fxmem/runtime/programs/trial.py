"""Steps by a program that are tried before one trains: their bits beside the tape's, their time, quicker forms of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fxmem.errors import first_lines
from fxmem.runtime.programs.fused_calls import Chain, FusedCall, fused
from fxmem.runtime.programs.instructions import Recording
from fxmem.runtime.programs.joined_calls import joined
from fxmem.runtime.programs.program import Program, programs_of
from fxmem.runtime.programs.written_step import Seen, bits_by
from fxmem.runtime.recompute import random_states_kept

NUM_TURNS = 7
"""Pairs of steps, of which all but one have to gain: times vary."""
NO_ROOM = "none: there is no room for what chains as one kernel each hold at once"
LEAST_GAIN = 0.02
"""Of a step's time: what chains as one kernel each have to gain."""


class Fuse(Protocol):
    """Makes kernels for chains of a step."""

    told: str
    """What came of it last."""

    def __call__(self, chains: Sequence[Chain], most_bytes: int) -> dict[Chain, FusedCall]:
        """Return what runs ``chains``, those for which that is quicker. ``most_bytes``: what may be taken to try them."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a step is tried on, and what it is to be."""

    bits: list[int | None] | None
    """Of the step on the tape; None: they are not compared."""
    arguments: tuple[torch.Tensor, ...]
    seen: Seen
    written: dict[str, torch.Tensor]
    """Buffers that the step writes."""
    devices: tuple[torch.device, ...]
    at_once: bool
    """Gradients go at once."""

    def passes(self, program: Program) -> bool:
        """Whether a step by ``program`` has these bits."""
        return any(self._bits(program, in_place=in_place) == self.bits for in_place in (True, False))

    def _bits(self, program: Program, *, in_place: bool) -> list[int | None]:
        with random_states_kept(self.devices):
            return bits_by(program, self.arguments, self.seen, self.written, in_place=in_place)

    def _seconds(self, program: Program) -> float:
        """Return what a step by ``program`` takes: by the thread's own clock where it is the only one that works."""
        is_alone = torch.get_num_threads() == 1 and all(device.type == "cpu" for device in self.devices)
        clock = time.thread_time if is_alone else time.perf_counter
        start = clock()
        self._bits(program, in_place=True)  # numbers of its bits are on the host: it is over
        return clock() - start

    def _gain(self, quicker: Program, program: Program) -> float:
        """Return the share of a step by ``program`` that ``quicker`` spares, in all turns but the worst."""
        found = []
        for turn in range(NUM_TURNS):
            both = (program, quicker) if turn % 2 else (quicker, program)
            seconds = {id(each): self._seconds(each) for each in both}
            found.append(1 - seconds[id(quicker)] / seconds[id(program)])
        return sorted(found)[1]

    def with_chains_fused(self, recording: Recording, fuse: Fuse) -> tuple[Recording, ...]:
        """Return a quicker form of ``recording``, in which chains are one call each; nothing where that is none, has other
        bits, or fails."""
        try:
            return self._with_chains_fused(recording, fuse)
        except Exception as error:  # of a compiler, or of a device that has no room: the step runs without
            fuse.told = f"none: trying chains as one kernel each fails ({first_lines(error)})"
            return ()

    def _with_chains_fused(self, recording: Recording, fuse: Fuse) -> tuple[Recording, ...]:
        by_calls = joined(recording)
        calls = (*recording.forward, *recording.backward)
        most_bytes = max((call.live_bytes + call.inside_bytes for call in calls), default=0)
        with random_states_kept(self.devices):
            form = fused(by_calls, lambda chains: fuse(chains, most_bytes))
        if form is by_calls:
            return ()
        programs = (next(programs_of(recording, at_once=self.at_once, quicker=forms)) for forms in ([form], []))
        quicker, usual = programs
        if quicker.excess_bytes > 0:
            fuse.told = NO_ROOM
            return ()
        if self.bits is not None and not self.passes(quicker):
            fuse.told = "none: chains as one kernel each have other bits on this batch"
            return ()
        made, gain = fuse.told, self._gain(quicker, usual)
        fuse.told = f"{made}: at least {gain:.1%} of a step's time less"
        if gain < LEAST_GAIN:
            fuse.told = f"none ({made} do not gain {LEAST_GAIN:.0%} of a step's time)"
            return ()
        return (form,)
