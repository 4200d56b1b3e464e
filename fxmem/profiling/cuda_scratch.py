"""Bytes that ATen ops take inside on CUDA, beyond their inputs and outputs: what no fake tensor shows.

In: an op's name, its arguments as plain data, a device. Out: :class:`Scratch`. Every rule says where in PyTorch
(aten/src/ATen/native/...) its op is and whether it is exact or an upper bound; all are checked against figures recorded
from PyTorch's own CUDA host code, version 2.14.1 (tests/profiling/test_cuda_scratch.py). Upper bounds hold for all
recorded shapes and are no proofs: those of large sorts are fitted to the record. Not here: cuBLAS's and cuDNN's
workspaces. Rules of attention, layer norms, indices, sorts and scans are in
:mod:`fxmem.profiling.cuda_scratch_libraries`. No torch is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fxmem.devices import DeviceModel
from fxmem.profiling.cuda_reduction import ITEM_BYTES, TensorRecord, contiguous, reduction_blocks

Arguments = Mapping[str, Any]
"""By the names of the op's schema; tensors as :class:`TensorRecord`, everything else as plain Python values."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """``blocks``: bytes of each allocation that lives beside inputs and outputs while the op runs, where most do.
    ``first``: of those before, from before outputs are made. ``whole``: of those that live from before outputs are made
    to the end. ``between``: of those from after outputs are made until ``blocks`` are there. ``phases``: of those that live
    beside ``blocks``, one phase after the other. ``after``: by output, of one that is there once it is made and gone before
    the next. ``late_bytes``: of the last output, where that is made after ``first`` are gone. ``kept_bytes``: what an
    output's storage holds beyond its elements for as long as the output lives. ``exact``: False for an upper bound."""

    blocks: tuple[int, ...] = ()
    kept_bytes: int = 0
    exact: bool = True
    first: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    phases: tuple[tuple[int, ...], ...] = ()
    between: tuple[int, ...] = ()
    late_bytes: int = 0
    after: tuple[int, ...] = ()

    @property
    def transient_bytes(self) -> int:
        """Most that lives beside inputs and outputs while the op runs."""
        beside = max(map(sum, (self.between, *self.phases)))
        return sum(self.whole) + max(
            sum(self.first) + max(self.after, default=0) - self.late_bytes, sum(self.blocks) + beside
        )


Rule = Callable[[Arguments, DeviceModel], Scratch]
RULES: dict[str, Rule] = {}
"""Op name without overload -> its rule. Forward and backward ops are ops alike: each is asked for by its own name."""


CUBLAS = (
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"),
    *("_addmm_activation", "_scaled_mm", "_int_mm"),
)
"""Ops that run in cuBLAS or cuBLASLt."""


def uses_cublas(op: str) -> bool:
    """True if ``op`` takes cuBLAS's handle of its thread, which comes with a workspace; products of groups do on some GPUs,
    one after the other."""
    return _base(op) in (*CUBLAS, "_grouped_mm")


def uses_cublaslt(op: str, args: Arguments) -> bool:
    """True if ``op`` adds a bias to a product in cuBLASLt."""
    return _base(op) in ("addmm", "_addmm_activation") and len(args["self"].shape) == 1


def scratch_of(op: str, args: Arguments, device: DeviceModel) -> Scratch:
    """Return what ``op`` ("aten.sum.dim_IntList") takes inside; nothing for an op without a rule."""
    found = RULES.get(_base(op))
    return Scratch() if found is None else found(args, device)


def has_rule(op: str) -> bool:
    """True if something is known of what ``op`` takes inside."""
    return _base(op) in RULES


def _base(op: str) -> str:
    return op.removeprefix("aten.").split(".")[0]


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter the function that follows as the rule of these ops."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


# -- matrix products ------------------------------------------------------------------------------------------------------


@rule(*CUBLAS)
def matrix_product(args: Arguments, device: DeviceModel) -> Scratch:
    """A copy of each matrix whose rows or columns do not lie one after the other, such as an expanded gradient. Exact.
    Source: cuda/Blas.cpp, ``prepare_matrix_for_cublas``, ``prepare_batch_matrix_for_cublas``."""
    matrices = [t for t in args.values() if isinstance(t, TensorRecord) and len(t.shape) in (2, 3)]
    return takes(*(t.nbytes for t in matrices if not _is_matrix(t)))


def _is_matrix(x: TensorRecord) -> bool:
    (rows, columns), (row_step, step) = x.shape[-2:], x.strides[-2:]
    if 0 in x.shape or (rows == 1 and step == 1) or (columns == 1 and row_step == 1):
        return True
    return (step == 1 and row_step >= max(1, columns)) or (row_step == 1 and step >= max(1, rows))


def takes(
    *blocks: int,
    kept_bytes: int = 0,
    exact: bool = True,
    first: Collection[int] = (),
    whole: Collection[int] = (),
    phases: Collection[tuple[int, ...]] = (),
    between: Collection[int] = (),
    late_bytes: int = 0,
) -> Scratch:
    """Return the scratch of these blocks, but for empty ones."""
    blocks, first, whole, between = (tuple(filter(None, given)) for given in (blocks, first, whole, between))
    return Scratch(blocks, kept_bytes, exact, first, whole, tuple(phases), between, late_bytes)


# -- reductions -----------------------------------------------------------------------------------------------------------


@rule("sum", "mean", "linalg_vector_norm", "nansum")
def sums(args: Arguments, device: DeviceModel) -> Scratch:
    """Partial sums in fp32 (fp64 for fp64). Exact. Source: cuda/ReduceSumProdKernel.cu, ReduceMomentKernel.cu,
    ReduceNormKernel.cu. Bools are summed as a copy in int64. Upper bound above 2 GiB."""
    x = args["self"]
    if x.dtype == "bool":
        copy = TensorRecord(x.shape, x.strides, "int64")
        return takes(copy.nbytes, *_reduced(copy, _dims(args), device, 8), exact=_offsets_fit(copy))
    return takes(*_reduced(x, _dims(args), device, max(4, ITEM_BYTES[x.dtype])), exact=_offsets_fit(x))


@rule("prod")
def products(args: Arguments, device: DeviceModel) -> Scratch:
    """As sums. Exact. Source: cuda/ReduceSumProdKernel.cu."""
    return sums(args, device)


@rule("amax", "amin")
def extremes(args: Arguments, device: DeviceModel) -> Scratch:
    """Partial extremes in the input's own type. Exact. Source: cuda/ReduceMaxValuesKernel.cu."""
    x = args["self"]
    return takes(*_reduced(x, _dims(args), device, ITEM_BYTES[x.dtype]), exact=_offsets_fit(x))


@rule("var", "std", "var_mean", "std_mean")
def moments(args: Arguments, device: DeviceModel) -> Scratch:
    """Partial Welford states of 16 bytes, loaded two values at once. Exact. Source: cuda/ReduceMomentKernel.cu,
    ``WelfordData`` of SharedReduceOps.h."""
    x = args["self"]
    return takes(*_reduced(x, _dims(args), device, 16, vector=2), exact=_offsets_fit(x))


@rule("max", "min", "argmax", "argmin")
def extremes_with_index(args: Arguments, device: DeviceModel) -> Scratch:
    """Partial pairs of value and 64-bit index, 16 bytes; without a dimension, values alone. Exact. Source:
    cuda/ReduceMaxValuesKernel.cu, ReduceArgMaxKernel.cu."""
    x = args["self"]
    with_index = args.get("dim") is not None
    return takes(*_reduced(x, _dims(args), device, 16 if with_index else ITEM_BYTES[x.dtype]), exact=_offsets_fit(x))


@rule("logsumexp")
def logsumexp(args: Arguments, device: DeviceModel) -> Scratch:
    """exp(x - max) as a whole, the maxima, and the sum's partials. Exact. Source: ReduceOps.cpp,
    ``logsumexp_out_impl``."""
    x = args["self"]
    dims = {d % len(x.shape) for d in _dims(args)}
    rows = x.numel
    for d in dims:
        rows //= max(1, x.shape[d])
    return takes(x.nbytes, rows * ITEM_BYTES[x.dtype], *_reduced(x, dims, device, 4), exact=_offsets_fit(x))


@rule("_softmax_backward_data")
def softmax_backward(args: Arguments, device: DeviceModel) -> Scratch:
    """grad * output as a whole. Exact. Source: cuda/SoftMax.cu, ``softmax_backward_cuda_out``."""
    return takes(args["grad_output"].nbytes)


# -- losses ---------------------------------------------------------------------------------------------------------------


def _mean_of(x: TensorRecord, args: Arguments, device: DeviceModel) -> tuple[int, ...]:
    return () if args.get("reduction", 1) == 0 else _reduced(contiguous((x.numel,), x.dtype), (), device, 4)


@rule("mse_loss", "smooth_l1_loss")
def squared_losses(args: Arguments, device: DeviceModel) -> Scratch:
    """The loss of every element twice: once as scratch, once as the storage of the scalar that is returned, sized before
    it is known to be one. Exact. Source: Loss.cpp (``TORCH_META_FUNC``), BinaryOps' borrowed output."""
    x = args["self"]
    if args.get("reduction", 1) == 0:
        return Scratch()
    return takes(x.nbytes, *_mean_of(x, args, device), kept_bytes=x.nbytes - ITEM_BYTES[x.dtype])


@rule("huber_loss")
def huber_loss(args: Arguments, device: DeviceModel) -> Scratch:
    """The loss of every element, and the mean's partials. Exact. Source: Loss.cpp, ``huber_loss``."""
    x = args["self"]
    return Scratch() if args.get("reduction", 1) == 0 else takes(x.nbytes, *_mean_of(x, args, device))


@rule("binary_cross_entropy", "soft_margin_loss")
def losses_that_keep(args: Arguments, device: DeviceModel) -> Scratch:
    """The scalar keeps the storage of the loss of every element; the mean is made beside it. Exact without weights.
    Source: cuda/Loss.cu ``binary_cross_entropy_out_cuda``, Loss.cpp ``soft_margin_loss_out``."""
    x = args["self"]
    if args.get("reduction", 1) == 0:
        return Scratch(exact=args.get("weight") is None)
    item = ITEM_BYTES[x.dtype]
    return takes(*_mean_of(x, args, device), item, kept_bytes=x.nbytes - item, exact=args.get("weight") is None)


@rule("binary_cross_entropy_with_logits")
def bce_with_logits(args: Arguments, device: DeviceModel) -> Scratch:
    """Two of the input's size, and the mean's partials; one more for each weight, as an upper bound. Source: Loss.cpp,
    ``binary_cross_entropy_with_logits``."""
    x = args["self"]
    weights = sum(args.get(name) is not None for name in ("weight", "pos_weight"))
    exact = not weights and args.get("reduction", 1) != 0
    return takes(*(2 + weights) * (x.nbytes,), *_mean_of(x, args, device), exact=exact)


@rule("soft_margin_loss_backward")
def soft_margin_backward(args: Arguments, device: DeviceModel) -> Scratch:
    """Two of the input's size. Exact. Source: Loss.cpp, ``soft_margin_loss_backward_out``."""
    return takes(*2 * (args["self"].nbytes,))


# -- batch norms and convolutions -----------------------------------------------------------------------------------------


@rule("native_batch_norm")
def batch_norm(args: Arguments, device: DeviceModel) -> Scratch:
    """With channels last, partial Welford states of blocks that share a channel, and a counter for each group. Exact.
    Source: cuda/Normalization.cuh, ``batch_norm_stats_channels_last_cuda_template``, ``flexible_launch_configs``."""
    return _of_normed_channels(args["input"], 4) if args["training"] else Scratch()


@rule("native_batch_norm_backward")
def batch_norm_backward(args: Arguments, device: DeviceModel) -> Scratch:
    """With channels last, two sums for every channel; before the gradient is made, their partial sums and counters. Exact.
    Source: cuda/Normalization.cu, ``batch_norm_backward_cuda``; Normalization.cuh,
    ``batch_norm_backward_reduce_cuda_channels_last_template``."""
    x = args["input"]
    if not args["train"] or not channels_vary_fastest(x):
        return Scratch()
    before = _of_normed_channels(x, 2).transient_bytes
    return takes(*2 * (4 * x.shape[1],), max(0, before - x.nbytes))


def channels_vary_fastest(x: TensorRecord) -> bool:
    """True if a norm takes ``x`` as one with channels last. Source: ``batch_norm_use_channels_last_kernels``."""
    return (len(x.shape) == 2 and x.strides[1] == 1) or (len(x.shape) > 3 and _is_dense(x, channels_last=True))


def _of_normed_channels(x: TensorRecord, values: int) -> Scratch:
    if not channels_vary_fastest(x):
        return Scratch()
    channels = x.shape[1]
    rows = x.numel // channels
    wide, high = (1 << (max(1, n).bit_length() - 1) for n in (channels, -(-rows // 16)))
    width = min(wide, 32)
    height = min(high, 512 // width)
    width = min(wide, 512 // height)
    blocks = min(-(-rows // (16 * height)), 128)
    return Scratch() if blocks < 8 else takes(4 * values * channels * blocks, 4 * -(-channels // width))


def _suggests_channels_last(x: TensorRecord) -> bool:
    """True if channels vary fastest, with or without gaps. Source: c10/core/MemoryFormat.h, ``suggest_memory_format``."""
    if len(x.shape) not in (4, 5) or 0 in x.shape or x.strides[1] == 0:
        return False
    least = 0
    for d in (1, *range(len(x.shape) - 1, 1, -1), 0):
        if x.strides[d] < least or (d == 0 and least == x.strides[1]):
            return False
        least = x.strides[d] * max(1, x.shape[d])
    return True


def _is_dense(x: TensorRecord, channels_last: bool) -> bool:
    """True if ``x`` is contiguous in the format."""
    order = [1, *range(2, len(x.shape))] if not channels_last else [*range(2, len(x.shape)), 1]
    step = 1
    for d in reversed([0, *order]):
        if x.shape[d] != 1 and x.strides[d] != step:
            return False
        step *= x.shape[d]
    return True


def _copied(x: TensorRecord, channels_last: bool) -> int:
    return 0 if _is_dense(x, channels_last) else x.nbytes


def _in_channels_last(x: TensorRecord, weight: TensorRecord) -> bool:
    """Whether a convolution runs with channels last. Source: native/ConvUtils.h, ``cudnn_conv_suggest_memory_format``."""
    return _suggests_channels_last(x) or _suggests_channels_last(weight)


def in_depthwise_kernel(args: Arguments) -> bool:
    """True if a convolution runs in PyTorch's own depthwise kernel. Source: native/Convolution.cpp,
    ``use_cudnn_depthwise``, ``check_cudnn_depthwise_workload_with_filter``."""
    x, weight = args["input"], args["weight"]
    if not args["groups"] == x.shape[1] > 1 or args["transposed"] or _in_channels_last(x, weight):
        return False
    stride = args["stride"]
    if not x.dtype == weight.dtype == "float16" or len(x.shape) != 4 or x.shape[1] < 32:
        return True
    if any(d != 1 for d in args["dilation"]) or (stride[0] != stride[-1] and x.shape[2] != 1):
        return True
    return not _cudnn_is_faster(x, weight, stride[-1])


def _cudnn_is_faster(x: TensorRecord, weight: TensorRecord, stride: int) -> bool:
    """Whether a depthwise convolution in fp16 is given to cuDNN."""
    count, channels, height, width = x.shape
    if height == 1 and stride == 1:
        return True
    size = weight.shape[3]
    if weight.shape[2] != size or size not in (1, 3, 5) or width < 7:
        return False
    if stride != 2:
        return stride == 1
    if size == 1:
        return width <= 28 if count == 1 else count <= 16 and channels >= 128 and width <= 7
    return count == 1 or channels >= 512 or (channels >= 256 and width >= 28)


@rule("convolution")
def convolution(args: Arguments, device: DeviceModel) -> Scratch:
    """A copy of input and weight where they are not dense in the format: channels last if either is, gaps or not; that of
    the input before there is a result, that of the weight after. Depthwise kernels go by the input, and copy it if it has
    gaps. Exact but for cuDNN's workspace. Source: Convolution.cpp, ``_convolution``; cudnn/ConvShared.cpp,
    ``cudnn_convolution_forward``; cuda/DepthwiseConv2d.cu."""
    x, weight = args["input"], args["weight"]
    if in_depthwise_kernel(args):
        return takes(first=[_copied(x, _suggests_channels_last(x))])
    last = _in_channels_last(x, weight)
    return takes(_copied(weight, last), whole=[_copied(x, last)])


@rule("convolution_backward")
def convolution_backward(args: Arguments, device: DeviceModel) -> Scratch:
    """Copies of the gradient, such as one of a part of a concatenation, and for the weight's gradient of the input, where
    they are not dense in the format; when these are gone, the bias's gradient is made, with its partial sums. A depthwise
    kernel makes the weight's gradient before the input's. Exact but for cuDNN's workspace, and where the weight is channels
    last and the input is not, or a depthwise input has gaps. Source: Convolution.cpp, ``convolution_backward``;
    cudnn/ConvShared.cpp; cuda/DepthwiseConv2d.cu."""
    grad, x, mask = args["grad_output"], args["input"], args["output_mask"]
    depthwise = in_depthwise_kernel(args)
    last = _suggests_channels_last(x) if depthwise else _in_channels_last(x, args["weight"])
    exact = last == _suggests_channels_last(x) and not (depthwise and _copied(x, last))
    copies = [_copied(grad, last)]
    if mask[1] and not (depthwise and mask[0]):
        copies.append(_copied(x, last))
    if not mask[2]:
        return takes(exact=exact, first=copies)
    partial = _reduced(grad, [d for d in range(len(grad.shape)) if d != 1], device, 4)
    bias_bytes = grad.shape[1] * ITEM_BYTES[grad.dtype]
    exact = exact and (sum(copies) - bias_bytes > sum(partial) or _offsets_fit(grad))
    return takes(*partial, exact=exact, first=copies, late_bytes=bias_bytes)


def _dims(args: Arguments) -> Collection[int]:
    dim = args.get("dim")
    return (dim,) if isinstance(dim, int) else tuple(dim or ())


def _reduced(
    x: TensorRecord, dims: Collection[int], device: DeviceModel, partial_bytes: int, vector: int = 4
) -> tuple[int, ...]:
    return reduction_blocks(x, dims, device, partial_bytes, vector)


def _offsets_fit(x: TensorRecord) -> bool:
    return x.nbytes < 1 << 31
