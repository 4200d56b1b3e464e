"""From the events of an observed step to ticks: what is unpacked, made, let go of and released, in what order.

In: a :class:`StepTrace` and the indices of its managed storages. Out: the :class:`Tick`s of a profile. A tick begins
with unpacks and ends with releases; its bytes are those of everything that no plan changes.
"""

from __future__ import annotations

from dataclasses import replace

from fxmem.errors import ProfileError
from fxmem.ir import Phase, Tick
from fxmem.profiling.trace_records import StepTrace


def managed_storages(seen: StepTrace) -> list[int]:
    """Storages a node creates that live on as an output or a saved tensor, in order of creation."""
    wanted = {view.storage for node in seen.nodes for _, view in node.outputs}
    wanted |= {s for node in seen.nodes for s in node.saves}
    return [s for node in seen.nodes for s in node.creates if s in wanted]


class _TickMaker:
    """Cuts the event stream into ticks: unpacks first, then other events, then releases."""

    def __init__(self, index: dict[int, int], gradients: frozenset[int]) -> None:
        self.index, self.gradients = index, gradients
        self.kind_bytes = {"gradient": 0, "loss": 0}
        self.kinds: dict[int, str] = {}
        self.ticks: list[Tick] = []
        self.unmanaged_bytes = 0
        self.created_bytes = 0
        self.phase = Phase.FORWARD
        self.node: int | None = None
        self._begin()

    def _begin(self) -> None:
        self.unpacks: list[int] = []
        self.creates: list[int] = []
        self.releases: list[int] = []
        self.start_bytes = self.peak_bytes = self.unmanaged_bytes
        self.peak_kinds = dict(self.kind_bytes)
        self.created_bytes = 0
        self.busy = False

    def cut(self) -> None:
        """End the tick under way, if anything happened in it."""
        if self.busy or self.unpacks or self.creates or self.releases:
            self.ticks.append(
                Tick(
                    self.phase,
                    self.node,
                    tuple(self.unpacks),
                    self.start_bytes,
                    self.peak_bytes,
                    tuple(self.creates),
                    (),
                    tuple(self.releases),
                    self.peak_kinds["gradient"],
                    self.peak_kinds["loss"],
                )
            )
        self._begin()

    def change(self, key: int, nbytes: int, created: int | None) -> None:
        """Note ``nbytes`` allocated (freed, if negative) for the storage of serial ``key``."""
        if nbytes > 0 and self.releases:
            self.cut()
        if nbytes > 0 and (key in self.gradients or self.phase is Phase.LOSS):
            self.kinds[key] = "gradient" if key in self.gradients else "loss"
        if key in self.kinds:
            self.kind_bytes[self.kinds[key]] += nbytes
        if created is None:
            self.unmanaged_bytes += nbytes
        else:
            self.creates.append(created)
            self.created_bytes += nbytes
        if self.unmanaged_bytes + self.created_bytes > self.peak_bytes:
            self.peak_bytes = self.unmanaged_bytes + self.created_bytes
            self.peak_kinds = dict(self.kind_bytes)
        self.busy = True

    def unpack(self, storage: int, node: int | None) -> None:
        if self.busy or self.releases:
            self.cut()
        self.unpacks.append(storage)
        self.node = node

    def release(self, storage: int) -> None:
        self.releases.append(storage)


def ticks_of(seen: StepTrace, index: dict[int, int]) -> tuple[tuple[Tick, ...], frozenset[int]]:
    """Return the ticks, and the serials that something other than the forward and autograd held on to."""
    maker = _TickMaker(index, seen.gradients)
    freed_at: dict[int, int] = {}
    unpacker = {s: node.index for node in seen.nodes for s in node.saves}
    forward_tick: dict[int, int] = {}
    for event in seen.events:
        kind, key = event.kind, event.key
        if kind == "phase":
            maker.cut()
            assert event.phase is not None
            maker.phase, maker.node = event.phase, None
        elif kind == "begin":
            maker.cut()
            maker.node, maker.busy = key, True
            forward_tick[key] = len(maker.ticks)
        elif kind == "alloc":
            maker.change(key, event.nbytes, index.get(key))
        elif kind == "free" and key not in index:
            maker.change(key, -event.nbytes, None)
        elif kind == "free":
            freed_at[key] = len(maker.ticks)
        elif kind == "unpack" and key in index:
            maker.unpack(index[key], unpacker.get(key))
        elif kind == "release" and key in index:
            maker.release(index[key])
    maker.cut()
    return _with_ends(seen, maker.ticks, forward_tick, freed_at, index)


def _with_ends(
    seen: StepTrace, ticks: list[Tick], forward_tick: dict[int, int], freed_at: dict[int, int], index: dict[int, int]
) -> tuple[tuple[Tick, ...], frozenset[int]]:
    """Fill in ``last_used``: after which tick nothing but autograd refers to a storage."""
    end = len(ticks) - 1
    last_used = {s: forward_tick[node.index] for node in seen.nodes for s in node.last_used}
    loss_tick = max(
        (t for t, tick in enumerate(ticks) if tick.phase is Phase.LOSS), default=forward_tick[len(seen.nodes) - 1]
    )
    for node in seen.nodes:  # internals: nothing but autograd, and perhaps autocast's cache, ever refers to them
        for s in node.creates:
            last_used.setdefault(s, forward_tick.get(seen.cached_until.get(s, node.index), loss_tick))
    for s in seen.outputs:
        last_used[s] = end
    released = {i: t for t, tick in enumerate(ticks) for i in tick.releases}
    held_elsewhere = set()
    for s, i in index.items():
        expected, actual = max(last_used[s], released.get(i, 0)), min(freed_at.get(s, end), end)
        if actual > expected:
            held_elsewhere.add(s)
            last_used[s] = actual
        elif actual < expected and s not in seen.outputs:
            raise ProfileError(f"storage {i} was freed in tick {actual}, before its last holder let go in {expected}")
    by_tick: dict[int, list[int]] = {}
    for s, i in index.items():
        by_tick.setdefault(last_used[s], []).append(i)
    return (
        tuple(replace(tick, last_used=tuple(by_tick.get(t, ()))) for t, tick in enumerate(ticks)),
        frozenset(held_elsewhere),
    )
