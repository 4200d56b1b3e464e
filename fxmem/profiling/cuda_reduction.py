"""Scratch of PyTorch's reductions on CUDA: partial results of blocks that share an output, and a counter for each group.

Source: ``setReduceConfig`` and ``ReduceConfig`` of aten/src/ATen/native/cuda/Reduce.cuh, on dimensions ordered and merged
as ``TensorIteratorBase`` does it (aten/src/ATen/TensorIterator.cpp), as of torch 2.14. Exact for inputs below 2 GiB;
larger ones are reduced in pieces that each fit 32-bit offsets, where the whole is an upper bound.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fxmem.devices import DeviceModel

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4, "int64": 8,
    "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip

MAX_THREADS = 512
WARP = 32
MIN_VALUES, MAX_VALUES = 16, 256
"""Inputs that one thread takes at least and at most, where blocks share an output."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor as plain data; ``strides`` and ``offset`` (into its storage) count elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, each counted once."""
        return self.numel * ITEM_BYTES[self.dtype]


def contiguous(shape: Collection[int], dtype: str) -> TensorRecord:
    """Return the record of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(list(shape)):
        strides.append(step)
        step *= size
    return TensorRecord(tuple(shape), tuple(reversed(strides)), dtype)


def reduction_blocks(
    x: TensorRecord, dims: Collection[int], device: DeviceModel, partial_bytes: int, vector: int = 4
) -> tuple[int, ...]:
    """Return the scratch of reducing ``x`` over ``dims`` (all, if empty): partial results and counters, if there is any.

    ``partial_bytes``: one partial result: 4 for sums, means and norms of floats of any width, 16 for Welford's (var,
    std) and for a value with its index (max along a dimension). ``vector``: values loaded at once along a reduced row.
    """
    if not x.numel:
        return ()
    merged = _merged(x, dims)
    reduced, kept = [d for d in merged if d.reduced], [d for d in merged if not d.reduced]
    num_outputs, num_inputs = _product(kept), _product(reduced)
    along_rows = not kept or (bool(reduced) and reduced[0].stride < kept[0].stride)
    fastest = (reduced if along_rows else kept)[0].stride
    width, height = (num_inputs, num_outputs) if along_rows else (num_outputs, num_inputs)
    outputs_at_once = 1
    if fastest == 1 and along_rows and width >= 128 and len(reduced) == 1:
        width //= vector
    elif fastest == 1 and not along_rows:
        outputs_at_once = _outputs_at_once(x, kept, reduced)
        width //= outputs_at_once
    block_width, block_height = _block(width, height, MAX_THREADS // outputs_at_once)
    step_in, step_out = (block_width, 1) if along_rows else (1, block_width)
    if -(-num_inputs // step_in) < min(block_height * 16, MAX_VALUES):
        return ()  # every row of threads has an output of its own
    step_in *= block_height
    values = -(-num_inputs // step_in)
    groups = -(-(num_outputs // outputs_at_once) // step_out)
    target = device.num_sms * (device.threads_per_sm // (block_width * block_height))
    if values < MAX_VALUES or groups > target:
        return ()
    least, most = -(-values // MAX_VALUES), -(-values // MIN_VALUES)
    blocks_per_output = min(max(-(-target // groups), least), most)
    if blocks_per_output <= 1:
        return ()
    partials = num_outputs * blocks_per_output * (1 if along_rows else block_width * outputs_at_once)
    return partial_bytes * partials, 4 * groups


@dataclass(slots=True)
class _Dim:
    size: int
    stride: int
    reduced: bool
    out_stride: int


def _merged(x: TensorRecord, dims: Collection[int]) -> list[_Dim]:
    """Dimensions as the iterator orders them: reduced ones first, then by stride; neighbours that continue each other
    are one."""
    over = {d % len(x.shape) for d in dims} if dims else set(range(len(x.shape)))
    out_strides, step = [0] * len(x.shape), 1
    for d in reversed(range(len(x.shape))):
        if d not in over:
            out_strides[d], step = step, step * x.shape[d]
    every = [_Dim(x.shape[d], x.strides[d], d in over, out_strides[d]) for d in reversed(range(len(x.shape)))]
    for i in range(1, len(every)):
        at = i
        for before in reversed(range(i)):
            order = _compare(every[before], every[at])
            if order > 0:
                every[before], every[at] = every[at], every[before]
                at = before
            elif order < 0:
                break
    merged: list[_Dim] = []
    for dim in every:
        last = merged[-1] if merged else None
        if last is not None and (last.size == 1 or dim.size == 1 or _continues(last, dim)):
            if last.size == 1:
                last.stride, last.reduced, last.out_stride = dim.stride, dim.reduced, dim.out_stride
            last.size *= dim.size
        else:
            merged.append(dim)
    return merged or [_Dim(1, 1, True, 0)]


def _continues(inner: _Dim, outer: _Dim) -> bool:
    return inner.size * inner.stride == outer.stride and inner.size * inner.out_stride == outer.out_stride


def _compare(inner: _Dim, outer: _Dim) -> int:
    """Positive if the two are to change places, negative if they stay, 0 if it is open."""
    if inner.reduced != outer.reduced:
        return 1 if outer.reduced else -1
    for a, b in ((inner.out_stride, outer.out_stride), (inner.stride, outer.stride)):
        if a and b and a != b:
            return 1 if a > b else -1
        if a and b and inner.size > outer.size:
            return 1
    return 0


def _outputs_at_once(x: TensorRecord, kept: list[_Dim], reduced: list[_Dim]) -> int:
    """How many neighbouring outputs one thread takes: 4, or as few as address, size and strides are multiples of."""
    count = 4
    for multiple in (x.offset, kept[0].size, *(d.stride for d in (*reduced, *kept[1:]))):
        while multiple % count:
            count //= 2
    return count


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    wide, high = (min(1 << max(0, n.bit_length() - 1), most) for n in (max(1, width), height))
    block_height = min(high, most // min(wide, WARP))
    return min(wide, most // block_height), block_height


def _product(dims: list[_Dim]) -> int:
    count = 1
    for dim in dims:
        count *= dim.size
    return count
