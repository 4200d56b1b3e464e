"""Bytes that ops take inside on CUDA, most with kernels of other libraries: FlashAttention, CUTLASS, cuDNN; cub.

Rules of :mod:`fxmem.profiling.cuda_scratch`: attention; layer and group norms; rolls, indices, sorts and scans.
"""

from __future__ import annotations

import math

from fxmem.devices import DeviceModel
from fxmem.profiling.cuda_reduction import ITEM_BYTES, TensorRecord, contiguous
from fxmem.profiling.cuda_scratch import Arguments, Scratch, rule, takes

# -- attention -------------------------------------------------------------------------------------------------------------


@rule("_scaled_dot_product_flash_attention")
def flash_attention(args: Arguments, device: DeviceModel) -> Scratch:
    """With dropout, seed and offset. Without, where blocks of queries do not fill the device, results and row sums in fp32
    of every split of the keys. Exact for rows that are equal in number. Source: transformers/cuda/flash_attn/flash_api.cpp,
    ``mha_fwd``, ``set_params_splitkv``."""
    batch, heads, rows, width = args["query"].shape
    if args.get("dropout_p"):
        return takes(16)
    key_block = 256 if width <= 64 else 128 if width <= 128 else 64
    blocks = batch * heads * -(-rows // 64)
    splits = _key_splits(blocks, 2 * device.num_sms, -(-args["key"].shape[2] // key_block))
    sums = 4 * splits * batch * heads * rows if splits > 1 else 0
    return takes(sums, sums * _flash_width(width))


def _flash_width(width: int) -> int:
    """A head's width as the kernels pad it."""
    return -(-width // 32) * 32 if width <= 128 else 192 if width <= 192 else 256


def _key_splits(blocks: int, most_blocks: int, key_blocks: int) -> int:
    """Source: ``num_splits_heuristic``: the fewest splits that fill the device to 85 % of the best filling."""
    if blocks >= 0.8 * most_blocks:
        return 1
    filled = {}
    for splits in range(1, min(128, most_blocks, key_blocks) + 1):
        if splits == 1 or -(-key_blocks // splits) != -(-key_blocks // (splits - 1)):
            waves = blocks * splits / most_blocks
            filled[splits] = waves / math.ceil(waves)
    return next(splits for splits, share in filled.items() if share >= 0.85 * max(filled.values()))


@rule("_scaled_dot_product_flash_attention_backward")
def flash_attention_backward(args: Arguments, device: DeviceModel) -> Scratch:
    """dq in fp32 with rows padded to 128 and width to 32, row sums in fp32, a copy of each of ``grad_out`` and ``out``
    that is not contiguous as batch, row, head; with fewer heads of k and v, dk and dv of all heads. Exact, the last an
    upper bound. Source: transformers/cuda/flash_attn/flash_api.cpp, ``mha_bwd``."""
    query, key = args["query"], args["key"]
    batch, heads, rows, width = query.shape
    sums = 4 * batch * heads * -(-rows // 128) * 128
    copies = _copied_by_rows(args["grad_out"]), _copied_by_rows(args["out"])
    grouped = key.shape[1] != heads
    of_all_heads = 2 * (batch * heads * key.shape[2] * width * ITEM_BYTES[key.dtype],) if grouped else ()
    return takes(*copies, sums, sums * _flash_width(width), *of_all_heads, exact=not grouped and width <= 128)


def _copied_by_rows(t: TensorRecord) -> int:
    """Bytes of a copy of ``t`` if it is not contiguous as batch, row, head."""
    shape, strides = (tuple(v[i] for i in (0, 2, 1, 3)) for v in (t.shape, t.strides))
    return 0 if strides == contiguous(shape, t.dtype).strides else t.nbytes


@rule("_scaled_dot_product_efficient_attention_backward")
def efficient_attention_backward(args: Arguments, device: DeviceModel) -> Scratch:
    """Row sums in fp32, and an accumulator of dq by blocks of queries, each with a lock of 16 bytes, 32 in fp32 kernels of
    wide heads; heads wider than 128 accumulate dk and dv as well. In fp32, before that, the product of gradient and output
    that the row sums are made from, and these twice. A copy of the gradient if it is not contiguous as batch, row, head.
    Exact for heads of up to 128. Source: transformers/cuda/mem_eff_attention/kernel_backward.h, ``workspace_elements_gq``,
    ``_gk``, ``_gv``; transformers/cuda/attention_backward.cu, ``kKernelComputesDelta``."""
    query = args["query"]
    batch, heads, rows, width = query.shape
    block = 64 if width <= 64 else 128
    lock = 32 if query.dtype == "float32" and width > 64 else 16
    per_head = -(-rows // block) * -(-width // block) * (lock + 4 * block * block)
    if width > 128:
        per_head += 2 * 4 * 128 * -(-width // 128) * 128
    copied, sums = _copied_by_rows(args["grad_out_"]), 4 * batch * heads * rows
    products = (query.nbytes, sums) if query.dtype == "float32" else ()
    return takes(sums, whole=[copied], between=products, phases=[(batch * heads * per_head,)], exact=width <= 128)


@rule("_scaled_dot_product_cudnn_attention_backward")
def cudnn_attention_backward(args: Arguments, device: DeviceModel) -> Scratch:
    """Two of the query's size and fp32 row sums. Not exact: cuDNN's workspace comes on top. Source: cudnn/MHA.cpp,
    ``run_cudnn_SDP_bprop``."""
    query = args["query"]
    batch, heads, rows, _ = query.shape
    return takes(query.nbytes, query.nbytes, 4 * batch * heads * rows, exact=False)


# -- matrix products of groups ---------------------------------------------------------------------------------------------


@rule("_grouped_mm")
def grouped_product(args: Arguments, device: DeviceModel) -> Scratch:
    """In bf16 on GPUs of capability 9 and 10, three pointers, three strides and a shape of every group, and for each SM
    the tensor maps of its kernel. Elsewhere one product after the other: nothing. Exact. Source: cuda/GroupMM.cu,
    ``bf16bf16_grouped_gemm_impl_sm90_sm100``; CUTLASS's ``get_workspace_size``."""
    per_sm = {9: 512, 10: 5376}.get(device.capability[0])
    if per_sm is None or args["self"].dtype != "bfloat16":
        return Scratch()
    ends = args.get("offs")
    num_groups = args["self"].shape[0] if ends is None else ends.numel
    return takes(60 * num_groups, per_sm * device.num_sms)


# -- layer and group norms -------------------------------------------------------------------------------------------------


@rule("native_group_norm")
def group_norm(args: Arguments, device: DeviceModel) -> Scratch:
    """Scale and shift of every channel of every sample in fp32; in half precision mean and rstd in fp32 too. Exact.
    Source: cuda/group_norm_kernel.cu, ``GroupNormKernelImplInternal``."""
    channels, groups = args["N"] * args["C"], args["N"] * args["group"]
    affine = args.get("weight") is not None or args.get("bias") is not None
    halves = ITEM_BYTES[args["input"].dtype] < 4
    return takes(*2 * (4 * groups if halves else 0,), *2 * (4 * channels if affine else 0,), exact=args["HxW"] > 1)


@rule("native_group_norm_backward")
def group_norm_backward(args: Arguments, device: DeviceModel) -> Scratch:
    """Per channel ds, db and a factor, per group two more, in fp32. Exact with weights. Source:
    cuda/group_norm_kernel.cu, ``GroupNormBackwardKernelImplInternal``."""
    channels, groups = args["N"] * args["C"], args["N"] * args["group"]
    of_each = *2 * (4 * channels,), *2 * (4 * groups,), 4 * channels
    return takes(*of_each, exact=args["HxW"] > 1 and args.get("weight") is not None)


@rule("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward")
def layer_norm(args: Arguments, device: DeviceModel) -> Scratch:
    """A copy of the input where it is not contiguous, and of the gradient, which is made after the results. Exact. Source:
    cuda/layer_norm_kernel.cu, ``layer_norm_cuda``, ``LayerNormBackwardKernelImplInternal``."""
    grad = args.get("grad_out")
    return takes(0 if grad is None else _copied(grad), whole=[_copied(args["input"])])


def _copied(t: TensorRecord) -> int:
    """Bytes of a copy of ``t`` if it is not contiguous."""
    return 0 if t.strides == contiguous(t.shape, t.dtype).strides else t.nbytes


# -- rolls, indices, sorts, scans ------------------------------------------------------------------------------------------


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
    blocks = 4 * partial * width, *5 * (8 * count,), 8 * partial, 16
    return takes(*blocks, exact=width >= 64 and count <= args["num_weights"])


@rule("roll")
def roll(args: Arguments, device: DeviceModel) -> Scratch:
    """Of several dimensions, one is rolled after the other, and what lies between stays to the end; of one, a copy of what
    is not contiguous. Exact. Source: TensorTransformations.h, ``roll_common``; cuda/TensorTransformations.cu."""
    x, num_between = args["self"], len(args["shifts"]) - 1
    return takes(whole=num_between * (x.nbytes,) or (_copied(x),))


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
