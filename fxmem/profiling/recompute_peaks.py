"""What re-runs do, seen by running each recipe's replay once more on fakes.

In: replays. Out: each as it can serve for its forward, with the peak of its re-run; or that it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch

from fxmem.capture.graph import Captured
from fxmem.errors import PlanMismatchError
from fxmem.fake.fake_tensors import FakeWorld
from fxmem.profiling.storage_tracker import StorageTracker
from fxmem.runtime.autocast import autocast_as_in_forward
from fxmem.runtime.layout import View
from fxmem.runtime.recompute import Replay, SavedInRerun
from fxmem.torch_private import tree_leaves

Memory = Callable[[int], tuple[int, torch.device]]
"""Bytes and device of a storage, a managed index or ``~j`` of a static tensor."""


class Rerun(NamedTuple):
    """What a re-run was seen to do."""

    peak_bytes: int
    """Above its start."""
    capture_peak_bytes: int
    casts_once: bool
    """It makes the forward's internals only if a leaf is cast once for all its uses in a node."""


def rerun(
    replays: list[Replay],
    known: dict[object, Rerun | None],
    captured: Captured,
    world: FakeWorld,
    devices: tuple[torch.device, ...],
    memory: Memory,
) -> list[tuple[Replay, Rerun] | None]:
    """Run each replay on fakes; return with it what was seen, None where it cannot serve for its forward.

    ``known``: what was seen of equal ones before; what is seen now is added to it.
    """

    def peak(replay: Replay, *, capture: bool) -> int:
        bases = _fake_bases(replay, memory)
        tracker = StorageTracker()
        tracker.hold(bases.values())
        start_bytes = tracker.live_bytes
        states = {node.index: () for node in replay.nodes}
        saved = SavedInRerun(capture=capture)
        inside = captured.autocast_device is not None
        region = autocast_as_in_forward(replay.autocast, devices, regions_inside=inside)
        with saved, region, tracker:
            replay.run(bases, states, saved, {})  # type: ignore[arg-type]
        return tracker.peak_bytes - start_bytes

    def seen(replay: Replay) -> Rerun | None:
        if not any(node.internals for node in replay.nodes):
            peak_bytes = peak(replay, capture=False)
            return Rerun(peak_bytes, peak_bytes, casts_once=False)
        for once, way in ((False, replay), (True, _casting_once(replay))):
            with suppress(PlanMismatchError):
                return Rerun(peak(way, capture=False), peak(way, capture=True), once)
        return None

    found: list[tuple[Replay, Rerun] | None] = []
    with world.active(), world.states_held_by(captured.graph_module):
        for replay in replays:
            key = _signature(replay)
            if key not in known:
                known[key] = seen(replay)
            one = known[key]
            found.append(None if one is None else (_casting_once(replay) if one.casts_once else replay, one))
    return found


def _fake_bases(replay: Replay, memory: Memory) -> dict[int, torch.Tensor]:
    """Return fresh fake storages like those that ``replay`` reads, each as a tensor of bytes behind its first dtype."""
    own = set(replay.products).union(view.storage for node in replay.nodes for _, view in node.outputs)
    bases: dict[int, torch.Tensor] = {}
    for _, view in (ref for node in replay.nodes for ref in node.refs):
        if view.storage not in own and view.storage not in bases:
            nbytes, device = memory(view.storage)
            bases[view.storage] = torch.empty(-(-nbytes // view.dtype.itemsize), dtype=view.dtype, device=device)
    return bases


def _casting_once(replay: Replay) -> Replay:
    return replace(replay, nodes=tuple(replace(node, casts_once=True) for node in replay.nodes))


def _signature(replay: Replay) -> object:
    """Equal for replays that differ only in which storages they run on."""
    names: dict[int, int] = {}

    def anonymous(view: View) -> tuple[object, ...]:
        number = names.setdefault(view.storage, len(names))
        return (number, *view[1:])

    return tuple(
        (
            node.target,
            tuple(repr(leaf) for leaf in tree_leaves(node.leaves)),
            tuple((place, anonymous(view)) for place, view in node.refs),
            tuple(names.setdefault(s, len(names)) for s in sorted(node.writes)),
            tuple((place, anonymous(view)) for place, view in node.outputs),
            tuple(i < 0 for i in node.internals),
            node.identities,
            tuple((place, *view[1:]) for place, view in node.scratch),
            len(replay.products),
        )
        for node in replay.nodes
    )
