"""When each storage is made, unpacked, released and let go of by the forward, and who may hold it in between."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fxmem.planners.simulate import Tables


@dataclass(frozen=True, slots=True)
class Events:
    """Numbers of ticks."""

    created: list[int]
    gone: list[int]
    """After which the forward holds the storage no longer."""
    unpacked: dict[int, int]
    """The first at which autograd asks for it, if it does."""
    released: dict[int, int]
    """The last after which autograd releases it, if it saved it."""


@lru_cache(maxsize=1)
def events_of(tables: Tables) -> Events:
    """Return the events of all storages."""
    events = Events([0] * len(tables.nbytes), [0] * len(tables.nbytes), {}, {})
    for tick, (unpacks, _, _, creates, last_used, releases) in enumerate(tables.ticks):
        for s in creates:
            events.created[s] = tick
        for s in last_used:
            events.gone[s] = tick
        for s in unpacks:
            events.unpacked.setdefault(s, tick)
        for s in releases:
            events.released[s] = tick
    return events


@lru_cache(maxsize=1)
def holders_of(tables: Tables) -> list[tuple[list[int], list[int], list[int]]]:
    """Return for each tick the storages made before it: those the forward holds then, those that saved tensors may hold,
    and the others."""
    events, found = events_of(tables), []
    for tick in range(len(tables.ticks)):
        made = [s for s, created in enumerate(events.created) if created < tick]
        rest = [s for s in made if events.gone[s] < tick]
        found.append(
            (
                [s for s in made if tick <= events.gone[s]],
                [s for s in rest if tick <= events.released.get(s, -1)],
                [s for s in rest if events.released.get(s, -1) < tick],
            )
        )
    return found
