"""What the CUDA caching allocator makes of a step's allocations: rounded and reserved bytes.

In: a stream of (key, nbytes) allocations and frees, such as a step on fakes yields. Out: peaks of *allocated* bytes, each
request rounded to 512, and of *reserved* bytes, what the process takes from the device. The rules are those of
PyTorch's native allocator with default settings (c10/cuda/CUDACachingAllocator.cpp): two pools, segments of 2 MiB for
requests up to 1 MiB, of 20 MiB up to 10 MiB, above that of the request rounded to 2 MiB; best fit; splitting; merging of
free neighbours. With ``expandable_segments:True`` each pool is one segment that grows at its end by pages of 2 or 20 MiB.
Of free blocks of one size that of the oldest segment serves. Before torch 2.12 it was the one at the lowest address, and
what is left unsplit depends on the driver, which promises nothing: then the larger peaks of two orders count (``ORDERS``).
Not modelled: unmapping when memory runs out, several streams, graphs' private pools. What kernels and libraries allocate
for themselves is in the stream (:mod:`fxmem.profiling.device_memory`).
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fxmem.devices import MIN_BLOCK_BYTES, rounded
from fxmem.profiling.allocator_state import (
    CHUNK_BYTES,
    MOST_UNSPLIT_BYTES,
    ORDERS,
    AllocatorPeaks,
    AllocatorState,
)

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
    address: int
    """Of the segment."""
    offset: int
    nbytes: int
    free: bool = True


@dataclass(slots=True)
class _Pool:
    """Free blocks of one pool, sorted by (size, address): the allocator's order of search."""

    blocks: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(size, address, segment, offset)"""

    def add(self, block: _Block) -> None:
        insort(self.blocks, (block.nbytes, block.address + block.offset, block.segment, block.offset))

    def remove(self, block: _Block) -> None:
        del self.blocks[bisect_left(self.blocks, (block.nbytes, block.address + block.offset))]

    def best_fit(self, nbytes: int, spared: _Block | None = None) -> tuple[int, int] | None:
        """Return segment and offset of the smallest block that serves; ``spared`` only if no other does."""
        place = bisect_left(self.blocks, (nbytes,))
        found = [entry[2:] for entry in self.blocks[place : place + 2]]
        if len(found) == 2 and spared is not None and found[0] == (spared.segment, spared.offset):
            return found[1]
        return found[0] if found else None


class CachingAllocator:
    """A simulation of one device's caching allocator on one stream. ``rising``: as of
    :data:`~fxmem.profiling.allocator_state.ORDERS`."""

    def __init__(self, *, expandable: bool = False, rising: bool = True) -> None:
        self._expandable, self._rising = expandable, rising
        self._lowest = self._next_address = self._left_of_chunk = 0
        self.allocated_bytes = self.reserved_bytes = 0
        self._segments: list[dict[int, _Block]] = []
        """By segment: its blocks by offset."""
        self._pools = {True: _Pool(), False: _Pool()}
        self._small: list[bool] = []
        self._owned: dict[int, _Block] = {}
        self._last: dict[bool, _Block] = {}
        """By pool, if segments are expandable: the block at the end of its one segment."""

    @staticmethod
    def holding(state: AllocatorState, keys: Mapping[int, int], *, rising: bool = True) -> CachingAllocator:
        """Return an allocator in ``state``. ``keys``: by place among all blocks, of those that may be freed; the others
        that are not free stay so."""
        allocator, place = CachingAllocator(rising=rising), 0
        for segment in state.segments:
            blocks: dict[int, _Block] = {}
            address, offset = allocator._next_address, 0
            for nbytes, free in segment.blocks:
                blocks[offset] = block = _Block(len(allocator._segments), address, offset, nbytes, free)
                offset += nbytes
                allocator.allocated_bytes += 0 if free else nbytes
                if free:
                    allocator._pools[segment.small].add(block)
                elif place in keys:
                    allocator._owned[keys[place]] = block
                place += 1
            allocator._segments.append(blocks)
            allocator._small.append(segment.small)
            allocator._next_address += offset
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
            block = self._segments[found[0]][found[1]]
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
    def owned_bytes(self) -> int:
        """Of the blocks that have keys."""
        return sum(block.nbytes for block in self._owned.values())

    @property
    def free_blocks(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
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
        block = _Block(len(self._segments), self._address(nbytes), 0, nbytes)
        self._segments.append({0: block})
        self._small.append(small)
        self._pools[small].add(block)
        self.reserved_bytes += block.nbytes
        if self._expandable:
            self._last[small] = block
        return block

    def _address(self, nbytes: int) -> int:
        """Return where a segment of ``nbytes`` lies."""
        if not self._rising:
            if nbytes > self._left_of_chunk:
                self._left_of_chunk = -(-nbytes // CHUNK_BYTES) * CHUNK_BYTES
                self._lowest -= self._left_of_chunk
                self._next_address = self._lowest
            self._left_of_chunk -= nbytes
        self._next_address += nbytes
        return self._next_address - nbytes

    def _expand(self, size: int, small: bool) -> _Block:
        """Map as many pages behind the pool's last block as ``size`` lacks; they join it if it is free."""
        last, page = self._last[small], SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        if last.free:
            self._pools[small].remove(last)
            block = last
        else:
            block = _Block(last.segment, last.address, last.offset + last.nbytes, 0)
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
            remainder = _Block(block.segment, block.address, block.offset + size, rest)
            self._segments[block.segment][remainder.offset] = remainder
            self._pools[small].add(remainder)
            self._moved_end(block, remainder)
            block.nbytes = size


def allocator_peaks(stream: Iterable[Allocation], *, expandable: bool | None = None) -> AllocatorPeaks:
    """Return the peaks of ``stream``, the larger of those in all orders of segments.

    ``expandable``: whether segments are; None: as the environment has it.
    """
    expandable = expandable_segments() if expandable is None else expandable
    events = stream if len(ORDERS) == 1 else tuple(stream)  # which may go on long after it repeats
    found = [peaks_of(events, CachingAllocator(expandable=expandable, rising=rising)) for rising in ORDERS]
    return AllocatorPeaks(max(p.allocated_bytes for p in found), max(p.reserved_bytes for p in found))


def peaks_of(stream: Iterable[Allocation], allocator: CachingAllocator) -> AllocatorPeaks:
    """Return the peaks of ``stream``, from what ``allocator`` holds on.

    It stops after a step that left the allocator as the one before had: so does each that follows.
    """
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


def expandable_segments() -> bool:
    """True if the environment asks PyTorch's allocator for expandable segments."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    settings = next((os.environ[name] for name in names if name in os.environ), "")
    return "expandable_segments:true" in settings.replace(" ", "").lower()
