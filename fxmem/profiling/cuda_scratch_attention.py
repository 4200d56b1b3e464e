"""Bytes that attention takes inside on CUDA: rules of :mod:`fxmem.profiling.cuda_scratch`."""

from __future__ import annotations

import math

from fxmem.devices import DeviceModel
from fxmem.profiling.cuda_reduction import ITEM_BYTES, TensorRecord, contiguous
from fxmem.profiling.cuda_scratch import Arguments, Scratch, rule, takes


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
    return takes(4 * splits * batch * heads * rows * (_flash_width(width) + 1) if splits > 1 else 0)


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
    before = (query.nbytes, sums, sums) if query.dtype == "float32" else ()
    blocks = max((sums, batch * heads * per_head), before, key=sum)
    return takes(copied, *blocks, exact=width <= 128)


@rule("_scaled_dot_product_cudnn_attention_backward")
def cudnn_attention_backward(args: Arguments, device: DeviceModel) -> Scratch:
    """Two of the query's size and fp32 row sums. Not exact: cuDNN's workspace comes on top. Source: cudnn/MHA.cpp,
    ``run_cudnn_SDP_bprop``."""
    query = args["query"]
    batch, heads, rows, _ = query.shape
    return takes(query.nbytes, query.nbytes, 4 * batch * heads * rows, exact=False)
