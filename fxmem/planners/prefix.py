"""The first ticks of a step, in which a plan changes nothing but what is kept: the simulator lives through them at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

TickRow = tuple[tuple[int, ...], int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A tick as ``(unpacks, start_bytes, peak_bytes, creates, last_used, releases)``."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first ticks of a step, up to the first that unpacks or releases: a plan changes them only by what it keeps."""

    live_bytes: tuple[int, ...] = ()
    """For each tick, its peak if nothing is held but by the forward."""
    gone: dict[int, int] = field(default_factory=dict)
    """Storages the forward lets go of in these ticks, each with the tick."""
    staying: tuple[int, ...] = ()
    """Storages it still holds after them."""
    unpacked_later: tuple[int, ...] = ()
    """Storages that some later tick unpacks, each once."""
    next_event: tuple[int, ...] = ()
    """For each storage the first later tick that names it; the number of ticks if none does."""


def prefix_of(ticks: list[TickRow], nbytes: list[int]) -> Prefix:
    """Return what ``ticks`` do up to the first that unpacks or releases."""
    held: dict[int, None] = {}
    gone: dict[int, int] = {}
    held_bytes, live_bytes = 0, []
    for tick, (unpacks, _, peak_bytes, creates, last_used, releases) in enumerate(ticks):
        if unpacks or releases:
            break
        live_bytes.append(held_bytes + peak_bytes)
        held |= dict.fromkeys(creates)
        gone |= {s: tick for s in last_used if s in held}
        held_bytes += sum(nbytes[s] for s in creates) - sum(nbytes[s] for s in last_used if s in held)
        for s in last_used:
            held.pop(s, None)
    later = dict.fromkeys(s for row in ticks for s in row[0])
    next_event = [len(ticks)] * len(nbytes)
    for tick in range(len(ticks) - 1, len(live_bytes) - 1, -1):
        unpacks, _, _, *others = ticks[tick]
        for s in chain(unpacks, *others):
            next_event[s] = tick
    return Prefix(tuple(live_bytes), gone, tuple(held), tuple(later), tuple(next_event))
