"""What the CUDA caching allocator makes of a step's allocations: rounded and reserved bytes.

In: a stream of (key, nbytes) allocations and frees, such as a step on fakes yields. Out: peaks of *allocated* bytes, each
request rounded to 512, and of *reserved* bytes, what the process takes from the device. The rules are those of
PyTorch's native allocator with default settings (c10/cuda/CUDACachingAllocator.cpp): two pools, segments of 2 MiB for
requests up to 1 MiB, of 20 MiB up to 10 MiB, above that of the request rounded to 2 MiB; best fit; splitting; merging of
free neighbours. With ``expandable_segments:True`` each pool is one segment that grows at its end by pages of 2 or 20 MiB.
Not modelled: unmapping when memory runs out, several streams, graphs' private pools, what kernels and libraries
allocate for themselves (cuBLAS and cuDNN workspaces are given as a constant).
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from fxmem.devices import MIN_BLOCK_BYTES, rounded
from fxmem.ir import Phase
from fxmem.profiling.allocator_state import MOST_UNSPLIT_BYTES, AllocatorPeaks, AllocatorState

SMALL_REQUEST_BYTES = 1 << 20
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
MIN_OWN_SEGMENT_BYTES = 10 << 20
SEGMENT_GRAIN_BYTES = 2 << 20

Allocation = tuple[str, int, int]
"""("alloc" | "free" | "empty" | "end", key, nbytes); "empty" stands for ``torch.cuda.empty_cache()``, "end" for the end of
a step that goes on as the one before."""


def segment_bytes(block_bytes: int) -> int:
    """Return the size of the segment that is taken from the device for a block of ``block_bytes``."""
    if block_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < MIN_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-block_bytes // SEGMENT_GRAIN_BYTES) * SEGMENT_GRAIN_BYTES


@dataclass(slots=True)
class _Block:
    segment: int
    offset: int
    nbytes: int
    free: bool = True


@dataclass(slots=True)
class _Pool:
    """Free blocks of one pool, sorted by (size, segment, offset): the allocator's order of search."""

    blocks: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, block: _Block) -> None:
        insort(self.blocks, (block.nbytes, block.segment, block.offset))

    def remove(self, block: _Block) -> None:
        entry = (block.nbytes, block.segment, block.offset)
        del self.blocks[bisect_left(self.blocks, entry)]

    def best_fit(self, nbytes: int, spared: _Block | None = None) -> tuple[int, int, int] | None:
        """Return the entry of the smallest block that serves; ``spared`` only if no other does."""
        place = bisect_left(self.blocks, (nbytes, -1, -1))
        found = self.blocks[place : place + 2]
        if len(found) == 2 and spared is not None and found[0][1:] == (spared.segment, spared.offset):
            return found[1]
        return found[0] if found else None


class CachingAllocator:
    """A simulation of one device's caching allocator on one stream."""

    def __init__(self, *, expandable: bool = False) -> None:
        self._expandable = expandable
        self.allocated_bytes = self.reserved_bytes = 0
        self._segments: list[dict[int, _Block]] = []
        """By segment: its blocks by offset."""
        self._pools = {True: _Pool(), False: _Pool()}
        self._small: list[bool] = []
        self._owned: dict[int, _Block] = {}
        self._last: dict[bool, _Block] = {}
        """By pool, if segments are expandable: the block at the end of its one segment."""

    @staticmethod
    def holding(state: AllocatorState) -> CachingAllocator:
        """Return an allocator in ``state``; the blocks that are not free stay so."""
        allocator = CachingAllocator()
        for segment in state.segments:
            blocks: dict[int, _Block] = {}
            offset = 0
            for nbytes, free in segment.blocks:
                blocks[offset] = block = _Block(len(allocator._segments), offset, nbytes, free)
                offset += nbytes
                allocator.allocated_bytes += 0 if free else nbytes
                if free:
                    allocator._pools[segment.small].add(block)
            allocator._segments.append(blocks)
            allocator._small.append(segment.small)
            allocator.reserved_bytes += offset
        return allocator

    def alloc(self, key: int, nbytes: int) -> None:
        """Serve a request; ``key`` names it until it is freed. Requests of 0 bytes take nothing."""
        if nbytes == 0:
            return
        size = rounded(nbytes)
        small = size <= SMALL_REQUEST_BYTES
        found = self._pools[small].best_fit(size, self._last.get(small))
        if found is not None:
            block = self._segments[found[1]][found[2]]
        elif small in self._last:
            block = self._expand(size, small)
        else:
            block = self._new_segment(size, small)
        self._pools[small].remove(block)
        self._split(block, size, small)
        block.free = False
        self._owned[key] = block
        self.allocated_bytes += block.nbytes

    def free(self, key: int) -> None:
        """Give the block of ``key`` back to its pool, merged with free neighbours."""
        block = self._owned.pop(key, None)
        if block is None:
            return
        self.allocated_bytes -= block.nbytes
        block.free = True
        small = self._small[block.segment]
        blocks = self._segments[block.segment]
        after = blocks.get(block.offset + block.nbytes)
        if after is not None and after.free:
            self._pools[small].remove(after)
            del blocks[after.offset]
            block.nbytes += after.nbytes
            self._moved_end(after, block)
        before = next((b for b in blocks.values() if b.offset + b.nbytes == block.offset), None)
        if before is not None and before.free:
            self._pools[small].remove(before)
            del blocks[block.offset]
            before.nbytes += block.nbytes
            self._moved_end(block, before)
            block = before
        self._pools[small].add(block)

    @property
    def free_blocks(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """The free blocks of each pool: what becomes of the next requests depends on nothing else."""
        return tuple(tuple(pool.blocks) for pool in self._pools.values())

    def empty_cache(self) -> None:
        """Give segments that are free as a whole back to the device, as ``torch.cuda.empty_cache`` does."""
        for number, blocks in enumerate(self._segments):
            if len(blocks) == 1 and blocks[0].free:
                self._pools[self._small[number]].remove(blocks[0])
                self.reserved_bytes -= blocks[0].nbytes
                blocks.clear()

    def _new_segment(self, size: int, small: bool) -> _Block:
        page = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        nbytes = -(-size // page) * page if self._expandable else segment_bytes(size)
        block = _Block(len(self._segments), 0, nbytes)
        self._segments.append({0: block})
        self._small.append(small)
        self._pools[small].add(block)
        self.reserved_bytes += block.nbytes
        if self._expandable:
            self._last[small] = block
        return block

    def _expand(self, size: int, small: bool) -> _Block:
        """Map as many pages behind the pool's last block as ``size`` lacks; they join it if it is free."""
        last, page = self._last[small], SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        if last.free:
            self._pools[small].remove(last)
            block = last
        else:
            block = _Block(last.segment, last.offset + last.nbytes, 0)
            self._segments[block.segment][block.offset] = block
            self._last[small] = block
        grown = -(-(size - block.nbytes) // page) * page
        block.nbytes += grown
        self.reserved_bytes += grown
        self._pools[small].add(block)
        return block

    def _moved_end(self, before: _Block, now: _Block) -> None:
        """Note that ``now`` ends where ``before`` did."""
        small = self._small[now.segment]
        if self._last.get(small) is before:
            self._last[small] = now

    def _split(self, block: _Block, size: int, small: bool) -> None:
        """Cut off what is left of ``block`` if it is worth one: 512 bytes in the small pool, over 1 MiB in the large."""
        rest = block.nbytes - size
        if rest >= MIN_BLOCK_BYTES if small or self._expandable else rest > MOST_UNSPLIT_BYTES:
            remainder = _Block(block.segment, block.offset + size, rest)
            self._segments[block.segment][remainder.offset] = remainder
            self._pools[small].add(remainder)
            self._moved_end(block, remainder)
            block.nbytes = size


def allocator_peaks(stream: Iterable[Allocation], *, expandable: bool | None = None) -> AllocatorPeaks:
    """Return the peaks of ``stream``. ``expandable``: whether segments are; None: as the environment has it."""
    return _peaks_of(stream, CachingAllocator(expandable=expandable_segments() if expandable is None else expandable))


def _peaks_of(stream: Iterable[Allocation], allocator: CachingAllocator) -> AllocatorPeaks:
    """Stops after a step that left the allocator as the one before had: so does each that follows."""
    allocated, reserved = allocator.allocated_bytes, allocator.reserved_bytes
    left: object = None
    for kind, key, nbytes in stream:
        if kind == "alloc":
            allocator.alloc(key, nbytes)
        elif kind == "free":
            allocator.free(key)
        elif kind == "empty":
            allocator.empty_cache()
        else:
            before, left = left, allocator.free_blocks
            if left == before:
                break
        allocated = max(allocated, allocator.allocated_bytes)
        reserved = max(reserved, allocator.reserved_bytes)
    return AllocatorPeaks(allocated, reserved)


# -- steps one after the other -------------------------------------------------------------------------------------------

MOST_STEPS = 32
"""As many steps are simulated where each leaves other free blocks than the one before; most settle within four: the first
has no optimizer state, the second has it where the first was short of nothing, the third finds what the second left."""


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What one training step allocates, by when it first does."""

    present: tuple[Allocation, ...] = ()
    """Parameters, buffers, batch, gradients of earlier micro-batches."""
    state: tuple[Allocation, ...] = ()
    """Of the optimizer: there when the step starts, but made at the end of the first step."""
    step: tuple[Allocation, ...] = ()
    optimizer_at: int = 0
    """Place in ``step`` where the optimizer's part begins."""
    libraries: tuple[tuple[int, int], ...] = ()
    """(place in ``step``, bytes) of the workspaces that libraries take where they are used first, and keep."""
    workspaces: tuple[tuple[int, int], ...] = ()
    """(place in ``step``, bytes) of the most that cuDNN may take there, and give back at once."""
    scaler: tuple[Allocation, ...] = ()
    """State of a scaler: there when the step starts, but made where the first loss is scaled, at ``scaled_at``."""
    scaled_at: int = 0

    @property
    def library_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.libraries)

    def history(self, num_steps: int = MOST_STEPS, emptied: bool = False) -> Iterator[Allocation]:
        """Yield what a process allocates that puts model and batch on the device and trains some steps. ``emptied``: the
        cache is emptied after each."""
        yield from self.present
        yield from self._steps(num_steps, emptied)

    def _steps(self, num_steps: int, emptied: bool) -> Iterator[Allocation]:
        freed = {key for kind, key, _ in self.step if kind == "free"}
        gradients = [event for event in self.present if event[0] == "alloc" and event[1] in freed]
        own = {key for kind, key, _ in (*gradients, *self.step) if kind == "alloc"}
        span = 1 + self._last_key()
        for number in range(num_steps):
            shift = number * span
            if number:  # earlier micro-batches of each step leave gradients
                yield from ((kind, key + shift, nbytes) for kind, key, nbytes in gradients)
            for place, (kind, key, nbytes) in enumerate(self.step):
                yield from self._new_at(place) if number == 0 else ()
                yield kind, key + shift if key in own else key, nbytes
            yield from self._new_at(len(self.step)) if number == 0 else ()
            yield from (("free", key + shift, 0) for key in sorted(own))
            yield from [("empty", 0, 0)] * emptied
            yield "end", 0, 0

    def _new_at(self, place: int) -> Iterator[Allocation]:
        for index, (at, nbytes) in enumerate(self.libraries):
            if at == place:
                yield "alloc", ~index, nbytes
        if place == self.scaled_at:
            yield from self.scaler
        if place == self.optimizer_at:
            yield from self.state

    def _last_key(self) -> int:
        return max((key for _, key, _ in (*self.present, *self.state, *self.scaler, *self.step)), default=0)

    def peaks(
        self, now: AllocatorState | None = None, *, expandable: bool | None = None, emptied: bool = False
    ) -> AllocatorPeaks:
        """Return what the caching allocator makes of it, in a new process and, where ``now`` is given, in this one: the
        larger. What others hold in this process is left out. The rest: as of :func:`allocator_peaks`, :meth:`history`."""
        peaks = allocator_peaks(self.history(emptied=emptied), expandable=expandable)
        most = peaks
        if self.workspaces:
            most = allocator_peaks(self._with_workspaces().history(emptied=emptied), expandable=expandable)
        allocated = max(peaks.allocated_bytes, 0 if now is None else self._allocated_from(now))
        return AllocatorPeaks(
            allocated,
            peaks.reserved_bytes,
            self.library_bytes,
            max(allocated, most.allocated_bytes),
            max(peaks.reserved_bytes, most.reserved_bytes),
        )

    def _allocated_from(self, now: AllocatorState) -> int:
        """Return the most that is allocated by steps which start from ``now``."""
        freed = {key for kind, key, _ in self.step if kind == "free"}
        gradients = tuple(event for event in self.present if event[1] in freed)
        lacking = now.lacking(self.libraries)
        steps = replace(self, present=gradients, state=() if now.has_state else self.state, libraries=lacking)
        allocator = CachingAllocator.holding(now)
        others = allocator.allocated_bytes - now.own_bytes - self.library_bytes + steps.library_bytes
        return _peaks_of(steps.history(), allocator).allocated_bytes - others

    def _with_workspaces(self) -> StepEvents:
        """Return the step in which each workspace is allocated and freed."""
        key = 1 + self._last_key()
        step: list[Allocation] = []
        start = 0
        for number, (place, nbytes) in enumerate(self.workspaces):
            step += self.step[start:place]
            step += (("alloc", key + number, nbytes), ("free", key + number, 0))
            start = place
        earlier = [place for place, _ in self.workspaces]

        def moved(place: int) -> int:
            return place + 2 * sum(each < place for each in earlier)

        libraries = tuple((moved(place), nbytes) for place, nbytes in self.libraries)
        places = {"optimizer_at": moved(self.optimizer_at), "scaled_at": moved(self.scaled_at)}
        return replace(self, step=(*step, *self.step[start:]), libraries=libraries, workspaces=(), **places)  # type: ignore[arg-type]


class StepLog:
    """Writes down the allocations of a step as :class:`StepEvents`."""

    def __init__(self) -> None:
        self._all: list[Allocation] = []
        self._state_at = self._scaler_at = self._step_at = self._scaled_at = self._optimizer_at = 0
        self._libraries: list[int] = []
        self._workspaces: list[tuple[int, int]] = []

    def note(self, kind: str, key: int, nbytes: int) -> None:
        self._all.append((kind, key, nbytes))

    def state_starts(self) -> None:
        self._state_at = len(self._all)

    def scaler_starts(self) -> None:
        self._scaler_at = len(self._all)

    def step_starts(self) -> None:
        self._step_at = self._scaled_at = self._optimizer_at = len(self._all)

    def phase_starts(self, phase: Phase) -> None:
        if phase is Phase.BACKWARD:
            self._scaled_at = len(self._all)
        elif phase is Phase.OPTIMIZER:
            self._optimizer_at = len(self._all)

    def note_library(self) -> None:
        self._libraries.append(len(self._all) - self._step_at)

    def note_workspace(self, nbytes: int) -> None:
        self._workspaces.append((len(self._all) - self._step_at, nbytes))

    def events(self, libraries_bytes: Sequence[int]) -> StepEvents:
        """Return what was noted; ``libraries_bytes``: of each library's workspace."""
        return StepEvents(
            tuple(self._all[: self._state_at]),
            tuple(self._all[self._state_at : self._scaler_at]),
            tuple(self._all[self._step_at :]),
            self._optimizer_at - self._step_at,
            tuple(zip(self._libraries, libraries_bytes, strict=False)),
            tuple(self._workspaces),
            tuple(self._all[self._scaler_at : self._step_at]),
            self._scaled_at - self._step_at,
        )


def expandable_segments() -> bool:
    """True if the environment asks PyTorch's allocator for expandable segments."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    settings = next((os.environ[name] for name in names if name in os.environ), "")
    return "expandable_segments:true" in settings.replace(" ", "").lower()
