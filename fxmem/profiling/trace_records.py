"""What a traced training step is written down as: per node what it did, and the stream of allocations and frees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from fxmem.ir import Phase, StaticBytes
from fxmem.profiling.optimizer_step import RecordedStep
from fxmem.runtime.layout import View
from fxmem.torch_private import TreeSpec


class Event(NamedTuple):
    """``kind``: alloc, free, unpack, release (``key``: storage serial), begin, end (node index), phase."""

    kind: str
    key: int
    nbytes: int = 0
    phase: Phase | None = None


@dataclass
class NodeTrace:
    """What one call node did. Storages are named by serial; ``version`` counts the writes seen on a storage."""

    index: int
    node: fx.Node
    leaves: tuple[Any, ...]
    spec: TreeSpec
    reads: list[tuple[int, View, int]] = field(default_factory=list)
    """(leaf place, geometry on a serial, version read)."""
    outputs: list[tuple[int, View]] = field(default_factory=list)
    """(output leaf place, geometry on a serial)."""
    creates: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    saves: list[int] = field(default_factory=list)
    last_used: list[int] = field(default_factory=list)
    """Storages no value of the forward lies on any longer after this node."""
    identities: list[tuple[int, bool]] = field(default_factory=list)
    """By read: the first read of the same tensor, and whether autocast keeps a cast of it: it is a leaf, and no view."""
    updates: tuple[int, ...] = ()
    """Leaf places of running statistics that it updates without reading them for what it makes."""
    draws_on: set[torch.device] = field(default_factory=set)
    """Devices from whose generators it draws."""
    effects: str = ""
    flops: int = 0
    moved_bytes: int = 0


@dataclass
class StepTrace:
    """One whole step, as seen. ``statics``: serial -> name of the placeholder or get_attr node that provides it."""

    nodes: list[NodeTrace]
    events: list[Event]
    statics: dict[int, str]
    versions: dict[int, int]
    outputs: frozenset[int]
    """Storages of the graph's outputs."""
    static: StaticBytes
    cached_until: dict[int, int]
    """Under autocast: the node (num_nodes: the loss) at whose end a storage would die if autograd saved nothing."""
    devices: dict[int, torch.device]
    """By storage serial."""
    gradients: frozenset[int]
    """Storages of the gradients that the backward makes and leaves behind."""
    seen: RecordedStep | None
    """What other runs of the step may rely on; None if the gradients that the backward leaves cannot be told one by one, or
    are not all on parameters."""
    backward_flops: int
    backward_moved_bytes: int


def allocations(events: list[Event]) -> list[list[int]]:
    """Return, for each node, the serials of what was allocated while it ran."""
    result: list[list[int]] = []
    inside = False
    for event in events:
        if event.kind == "begin":
            result.append([])
        inside = event.kind == "begin" or (inside and event.kind != "end")
        if inside and event.kind == "alloc" and event.nbytes:
            result[-1].append(event.key)
    return result
