"""What the CUDA caching allocator makes of a step's allocations: rounded and reserved bytes.

In: a stream of (key, nbytes) allocations and frees, such as a step on fakes yields. Out: peaks of *allocated* bytes, each
request rounded to 512, and of *reserved* bytes, what the process takes from the device. The rules are those of
PyTorch's native allocator with default settings (c10/cuda/CUDACachingAllocator.cpp): two pools, segments of 2 MiB for
requests up to 1 MiB, of 20 MiB up to 10 MiB, above that of the request rounded to 2 MiB; best fit; splitting; merging of
free neighbours. Not modelled: expandable segments, several streams, graphs' private pools, what kernels and libraries
allocate for themselves (cuBLAS and cuDNN workspaces are given as a constant).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

MIN_BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = 1 << 20
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
MIN_OWN_SEGMENT_BYTES = 10 << 20
SEGMENT_GRAIN_BYTES = 2 << 20

Allocation = tuple[str, int, int]
"""("alloc" | "free", key, nbytes)."""


def rounded(nbytes: int) -> int:
    """Return what a request of ``nbytes`` counts as allocated: the next multiple of 512, at least 512."""
    return max(MIN_BLOCK_BYTES, -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)


def segment_bytes(block_bytes: int) -> int:
    """Return the size of the segment that is taken from the device for a block of ``block_bytes``."""
    if block_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < MIN_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-block_bytes // SEGMENT_GRAIN_BYTES) * SEGMENT_GRAIN_BYTES


@dataclass(frozen=True, slots=True)
class AllocatorPeaks:
    """Largest sums over a stream of allocations, in bytes, ``workspace_bytes`` included."""

    allocated_bytes: int
    reserved_bytes: int
    workspace_bytes: int = 0


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

    def best_fit(self, nbytes: int) -> tuple[int, int, int] | None:
        place = bisect_left(self.blocks, (nbytes, -1, -1))
        return self.blocks[place] if place < len(self.blocks) else None


class CachingAllocator:
    """A simulation of one device's caching allocator on one stream."""

    def __init__(self) -> None:
        self.allocated_bytes = self.reserved_bytes = 0
        self._segments: list[dict[int, _Block]] = []
        """By segment: its blocks by offset."""
        self._pools = {True: _Pool(), False: _Pool()}
        self._small: list[bool] = []
        self._owned: dict[int, _Block] = {}

    def alloc(self, key: int, nbytes: int) -> None:
        """Serve a request; ``key`` names it until it is freed. Requests of 0 bytes take nothing."""
        if nbytes == 0:
            return
        size = rounded(nbytes)
        small = size <= SMALL_REQUEST_BYTES
        found = self._pools[small].best_fit(size)
        block = self._new_segment(size, small) if found is None else self._segments[found[1]][found[2]]
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
        before = next((b for b in blocks.values() if b.offset + b.nbytes == block.offset), None)
        if before is not None and before.free:
            self._pools[small].remove(before)
            del blocks[block.offset]
            before.nbytes += block.nbytes
            block = before
        self._pools[small].add(block)

    def _new_segment(self, size: int, small: bool) -> _Block:
        block = _Block(len(self._segments), 0, segment_bytes(size))
        self._segments.append({0: block})
        self._small.append(small)
        self._pools[small].add(block)
        self.reserved_bytes += block.nbytes
        return block

    def _split(self, block: _Block, size: int, small: bool) -> None:
        """Cut off what is left of ``block`` if it is worth one: 512 bytes in the small pool, over 1 MiB in the large."""
        rest = block.nbytes - size
        if rest >= MIN_BLOCK_BYTES if small else rest > SMALL_REQUEST_BYTES:
            remainder = _Block(block.segment, block.offset + size, rest)
            self._segments[block.segment][remainder.offset] = remainder
            self._pools[small].add(remainder)
            block.nbytes = size


def allocator_peaks(stream: Iterable[Allocation], workspaces: Sequence[int] = ()) -> AllocatorPeaks:
    """Return the peaks of ``stream``, with library workspaces of so many bytes each allocated before it."""
    allocator = CachingAllocator()
    for i, nbytes in enumerate(workspaces):
        allocator.alloc(~i, nbytes)
    allocated, reserved = allocator.allocated_bytes, allocator.reserved_bytes
    for kind, key, nbytes in stream:
        if kind == "alloc":
            allocator.alloc(key, nbytes)
        else:
            allocator.free(key)
        allocated = max(allocated, allocator.allocated_bytes)
        reserved = max(reserved, allocator.reserved_bytes)
    return AllocatorPeaks(allocated, reserved, sum(workspaces))


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Return PyTorch's default cuBLAS workspace of one handle and stream: 32 MiB on Hopper, else 8.125 MiB.

    cuBLASLt shares it. Handles belong to threads, so a training step has two: the caller's and autograd's.
    """
    return 4096 * 8 * 1024 if compute_capability[0] == 9 else 4096 * 1024 * 2 + 16 * 1024 * 8
