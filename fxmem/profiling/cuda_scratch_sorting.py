"""Bytes that indexing, sorts and scans take inside on CUDA: rules of :mod:`fxmem.profiling.cuda_scratch`."""

from __future__ import annotations

import math

from fxmem.devices import DeviceModel
from fxmem.profiling.cuda_reduction import ITEM_BYTES
from fxmem.profiling.cuda_scratch import Arguments, Scratch, rule, takes


@rule("embedding_dense_backward", "_embedding_bag_backward", "_embedding_bag_dense_backward")
def embedding_backward(args: Arguments, device: DeviceModel) -> Scratch:
    """Above 3,072 ids: gradients of partial segments of at most 10 ids in fp32, five arrays of 64-bit numbers an id, one
    a partial segment. Exact for rows of 64 values or more, where sorting the ids takes less. Source:
    cuda/EmbeddingBackwardKernel.cu, ``embedding_backward_cuda_kernel``; Embedding.cu."""
    count = args["indices"].numel
    grad = args.get("grad_output") or args["grad"]
    if count <= 3072 and "grad_output" in args:
        return Scratch()
    partial = count // 10 + min(count, args["num_weights"])
    width = grad.shape[-1]
    return takes(
        4 * partial * width + 40 * count + 8 * partial + 16, exact=width >= 64 and count <= args["num_weights"]
    )


@rule("index_put", "index_put_", "_index_put_impl_")
def index_put(args: Arguments, device: DeviceModel) -> Scratch:
    """Accumulating: ids and where they came from, both sorted too, and what sorting them takes. Exact with one tensor of
    indices, else an upper bound. Source: cuda/Indexing.cu, ``index_put_with_sort_kernel``."""
    indices = [i for i in args["indices"] if i is not None]
    if not args.get("accumulate"):
        return Scratch(exact=False)
    count = max((i.numel for i in indices), default=0)
    indexed = zip(args["self"].shape, args["indices"], strict=False)
    most = math.prod(size for size, index in indexed if index is not None)
    sorting = _sorting_pairs(count, most.bit_length(), device)
    return takes(*4 * (8 * count,), sorting, exact=len(indices) == 1 and device.capability >= (8, 0))


def _sorting_pairs(count: int, bits: int, device: DeviceModel) -> int:
    """Bytes of cub's radix sort of 64-bit pairs by so many bits: nothing for one tile; else a second buffer of both where
    there are several passes, counts of each pass and each tile. Source: ``DispatchRadixSort`` and ``InvokeOnesweep``."""
    if count <= 2304:
        return 1
    passes = -(-bits // 8)
    buffers = 2 * _aligned(8 * count) if passes > 1 else 0
    tiles = -(-count // (4608 if device.capability >= (9, 0) else 3840))
    return buffers + 2048 * passes + 1024 * tiles + 511


SMALL_SORT = 4096
"""Values in a row up to which it is sorted by one block."""


@rule("sort")
def sort(args: Arguments, device: DeviceModel) -> Scratch:
    """Up to 4,096 along the dimension: one row of 64-bit positions. More: keys twice and positions thrice for cub's radix
    sort. The first exact, the second an upper bound. Source: cuda/Sort.cpp, ``sort_cuda_kernel``, SortStable.cu."""
    x = args["self"]
    length = x.shape[args.get("dim", -1)] if x.shape else 1
    if length <= SMALL_SORT:
        return takes(8 * length)
    single = x.numel == length
    per_value = 2 * ITEM_BYTES[x.dtype] + (12 if single else 24)
    tiles = x.numel // 2 + 16384 + (5 << 20 if ITEM_BYTES[x.dtype] <= 2 else 0)
    return takes(per_value * x.numel + tiles, exact=False)


@rule("topk")
def topk(args: Arguments, device: DeviceModel) -> Scratch:
    """Few or short rows: nothing. Else a radix select by several blocks a row: histograms of every block and row, counters,
    a scan of these. Exact for up to 4,096 blocks and results. Source: cuda/TensorTopK.cu, ``should_use_multiblock``,
    ``mbtopk::launch``."""
    x = args["self"]
    length = x.shape[args.get("dim", -1)] if x.shape else 1
    rows = x.numel // max(1, length)
    few = args.get("k", 1) <= SMALL_SORT
    if length < next((least for most, least in _SHORTEST_IN_BLOCKS if rows <= most), 400):
        return Scratch(exact=few)
    threads = device.num_sms * 6 * 256  # of 40 registers each
    values = max(4, min(64, -(-x.numel // threads)))
    blocks = rows * -(-length // (256 * values))
    counters = (*4 * (4 * rows,), *2 * (4 * blocks,))
    scan = 1279 + (0 if blocks <= 4096 else blocks // 8)
    taken = (ITEM_BYTES[x.dtype] * rows, *counters, 512 * blocks, 1024 * rows, scan)
    return takes(*taken, exact=few and blocks <= 4096)


_SHORTEST_IN_BLOCKS = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))
"""Up to so many rows, those of so many values or more are each selected from by several blocks; of more rows, of 400."""


@rule("cumsum", "cumprod", "logcumsumexp")
def scans(args: Arguments, device: DeviceModel) -> Scratch:
    """Of one row alone: the state of every tile of cub's scan: value and status in 8 bytes, of half precision apart. Exact
    but for other dtypes. Of several rows: nothing. Source: cuda/ScanUtils.cuh, ``scan_dim``; cub's ``ScanTileState``."""
    x = args["self"]
    if not x.shape or x.numel != x.shape[args["dim"]]:
        return Scratch()
    item = ITEM_BYTES[x.dtype]
    if item == 2:
        tiles = -(-x.numel // 3840) + 32
        return takes(_aligned(4 * tiles) + 2 * _aligned(2 * tiles) + 511)
    tiles = -(-x.numel // 1920) + 32
    return takes(_aligned(2 * max(4, item) * tiles) + 511, exact=x.dtype == "float32")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256
