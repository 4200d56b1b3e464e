"""What re-runs do, seen by running each recipe's replay once more on fakes.

In: replays. Out: each as it can serve for its forward, with the peak of its re-run; or that it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch

from fxmem.capture.graph import CaptureGraph
from fxmem.errors import PlanMismatchError
from fxmem.fake.fake_tensors import FakeWorld
from fxmem.profiling.device_memory import DeviceMemory
from fxmem.profiling.storage_tracker import FakesTracker
from fxmem.runtime.autocast import autocast_as_in_forward
from fxmem.runtime.layout import View
from fxmem.runtime.recompute import Recompute, SavedInRerun, replayed
from fxmem.torch_private import tree_leaves

Memory = Callable[[int], tuple[int, torch.device]]
"""Bytes and device of a storage, a managed index or ``~j`` of a static tensor."""


class RecomputePeaks(NamedTuple):
    """What a re-run was seen to do."""

    peak_bytes: int
    """Above its start."""
    capture_peak_bytes: int
    casts_once: bool
    """It makes the forward's internals only if a leaf is cast once for all its uses in a node."""


def rerun(
    recomputes: list[Recompute],
    known: dict[object, RecomputePeaks | None],
    captured: CaptureGraph,
    world: FakeWorld,
    devices: tuple[torch.device, ...],
    memory: Memory,
) -> list[tuple[Recompute, RecomputePeaks] | None]:
    """Run each replay on fakes; return with it what was seen, None where it cannot serve for its forward.

    ``known``: what was seen of equal ones before; what is seen now is added to it.
    """

    def peak(recompute: Recompute, *, capture: bool) -> int:
        bases = _fake_bases(recompute, memory)
        tracker = FakesTracker(memory=DeviceMemory.of(devices))
        tracker.hold(bases.values())
        start_bytes = tracker.live_bytes
        states = {node.index: replayed(()) for node in recompute.nodes}
        saved = SavedInRerun(capture=capture)
        inside = captured.autocast_device is not None
        region = autocast_as_in_forward(recompute.autocast, devices, regions_inside=inside)
        with saved, region, tracker:
            recompute.run(bases, states, saved, {})
        return tracker.peak_bytes - start_bytes

    def seen(recompute: Recompute) -> RecomputePeaks | None:
        if not any(node.internals for node in recompute.nodes):
            peak_bytes = peak(recompute, capture=False)
            return RecomputePeaks(peak_bytes, peak_bytes, casts_once=False)
        for once, way in ((False, recompute), (True, _casting_once(recompute))):
            with suppress(PlanMismatchError):
                return RecomputePeaks(peak(way, capture=False), peak(way, capture=True), once)
        return None

    found: list[tuple[Recompute, RecomputePeaks] | None] = []
    with world.active(), world.states_held_by(captured.graph_module):
        for recompute in recomputes:
            key = _signature(recompute)
            if key not in known:
                known[key] = seen(recompute)
            one = known[key]
            found.append(None if one is None else (_casting_once(recompute) if one.casts_once else recompute, one))
    return found


def _fake_bases(recompute: Recompute, memory: Memory) -> dict[int, torch.Tensor]:
    """Return fresh fake storages like those that ``recompute`` reads, each as a tensor of bytes behind its first dtype."""
    own = set(recompute.products).union(view.storage for node in recompute.nodes for _, view in node.outputs)
    bases: dict[int, torch.Tensor] = {}
    for _, view in (ref for node in recompute.nodes for ref in node.refs):
        if view.storage not in own and view.storage not in bases:
            nbytes, device = memory(view.storage)
            bases[view.storage] = torch.empty(-(-nbytes // view.dtype.itemsize), dtype=view.dtype, device=device)
    return bases


def _casting_once(recompute: Recompute) -> Recompute:
    return replace(recompute, nodes=tuple(replace(node, casts_once=True) for node in recompute.nodes))


def _signature(recompute: Recompute) -> object:
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
            len(recompute.products),
        )
        for node in recompute.nodes
    )
