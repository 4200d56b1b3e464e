"""What CUDA's caching allocator of this process holds now, the state that a step to come starts from, and its peaks.

In: the tensors of a step that are there already. Out: an :class:`AllocatorState`, from ``torch.cuda.memory_snapshot``. A
large block is split only where more than 1 MiB is left over, so what a step counts as allocated depends on the free
blocks that it finds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from fxmem.fake.attention import torch_release

MOST_UNSPLIT_BYTES = 1 << 20
"""As much is left in a large block rather than split off."""
CHUNK_BYTES = 32 << 20
"""Of addresses: the driver gives out chunks from above, and of the rest of the last one what fits into it, from below. It
did on an H200 (tests/data/cuda_allocations_h200.json.gz)."""
ORDERS = (True,) if torch_release() >= (2, 12) else (False, True)
"""Of segments, as the allocator searches: by their age; before torch 2.12 by address, False as :data:`CHUNK_BYTES` says."""


@dataclass(frozen=True, slots=True)
class AllocatorPeaks:
    """Largest sums over a stream of allocations, in bytes, ``workspace_bytes`` included."""

    allocated_bytes: int
    reserved_bytes: int
    workspace_bytes: int = 0
    """Of cuBLAS and cuBLASLt."""
    most_allocated_bytes: int = 0
    """With the workspaces of cuDNN's convolutions at their upper bound (:mod:`fxmem.profiling.cudnn_workspace`)."""
    most_reserved_bytes: int = 0
    """The same of ``reserved_bytes``."""

    def with_allocated(self, nbytes: int) -> AllocatorPeaks:
        """Return these with other allocated bytes; workspaces come on top of them as before."""
        beside_bytes = self.most_allocated_bytes - self.allocated_bytes
        return replace(self, allocated_bytes=nbytes, most_allocated_bytes=nbytes + beside_bytes)


@dataclass(frozen=True, slots=True)
class AllocatorState:
    """Segments of one device and the stream that is current, in the order of :data:`ORDERS`: that of age is told by their
    addresses, which no two drivers need to give alike."""

    segments: tuple[Segment, ...]
    own_bytes: int
    """Of the blocks that hold the tensors of the step."""
    has_state: bool
    """Whether the optimizer's state is among these."""
    other_blocks: tuple[int, ...] = ()
    """Bytes of the blocks that are taken by others, libraries among them."""
    gradients: tuple[int, ...] = ()
    """Places among all blocks of those that hold gradients, which do not count as own."""

    def lacking(self, libraries: Sequence[tuple[int, int]]) -> tuple[tuple[tuple[int, int], ...], int]:
        """Return those of ``libraries``, (place, bytes) of their workspaces, that none of the other blocks can be: they are
        still to be made. And the bytes of the blocks of the rest, up to 1 MiB each above what was asked for."""
        others, result, there_bytes = sorted(self.other_blocks), [], 0
        for place, nbytes in libraries:
            found = bisect_left(others, nbytes)
            if found < len(others) and others[found] <= nbytes + MOST_UNSPLIT_BYTES:
                there_bytes += others.pop(found)
            else:
                result.append((place, nbytes))
        return tuple(result), there_bytes


@dataclass(frozen=True, slots=True)
class Segment:
    """``blocks``: pairs (bytes, free) from its start to its end."""

    small: bool
    blocks: tuple[tuple[int, bool], ...]


def allocator_state(
    present: Iterable[torch.Tensor], *, has_state: bool, gradients: Iterable[torch.Tensor] = ()
) -> AllocatorState | None:
    """Return what the allocator holds now; None where no step will run on a CUDA device that is here, and where segments
    are expandable, which are split wherever something is left.

    ``present``: parameters, buffers, batch, what there is of the state of optimizer and scaler. ``gradients``: those that
    are there.
    """
    tensors = [t for t in present if t.device.type == "cuda"]
    if not tensors or any(type(t) is not torch.Tensor for t in tensors):
        return None
    device = tensors[0].device
    stream = torch.cuda.current_stream(device).cuda_stream
    snapshot = torch.cuda.memory_snapshot()
    found = [s for s in snapshot if s["device"] == device.index and s["stream"] == stream]
    if any(s.get("is_expandable") for s in found):
        return None
    starts: list[int] = []
    sizes: list[int] = []
    segments = []
    for segment in sorted(found, key=lambda s: _place_of(int(s["address"]))):
        at, blocks = int(segment["address"]), []
        for block in segment["blocks"]:
            starts.append(at)
            sizes.append(block["size"])
            blocks.append((block["size"], block["state"] == "inactive"))
            at += block["size"]
        segments.append(Segment(segment["segment_type"] == "small", tuple(blocks)))

    by_address = sorted(range(len(starts)), key=starts.__getitem__)

    def blocks_of(tensors: Iterable[torch.Tensor]) -> list[int]:
        pointers = [t.untyped_storage().data_ptr() for t in tensors if t.untyped_storage().nbytes()]
        ranks = [bisect_right(by_address, pointer, key=starts.__getitem__) - 1 for pointer in pointers]
        return [by_address[rank] for rank in dict.fromkeys(ranks) if rank >= 0]

    held = blocks_of(gradient for gradient in gradients if gradient.device == device)
    own = set(blocks_of(tensors)).difference(held)
    taken = {place for place, (_, free) in enumerate(block for s in segments for block in s.blocks) if not free}
    own_bytes = sum(sizes[place] for place in own)
    others = tuple(sizes[place] for place in sorted(taken.difference(own, held)))
    return AllocatorState(tuple(segments), own_bytes, has_state, others, tuple(held))


def _place_of(address: int) -> tuple[int, int]:
    return (-(address // CHUNK_BYTES), address) if ORDERS == (True,) else (0, address)
