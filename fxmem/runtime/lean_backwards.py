"""Ops whose backward holds less at once than eager's, with the same bits: the forms of :mod:`fxmem.passes.lean_backwards`.

1. The backward of a *convolution* is one op for both gradients, so its input, the gradient of its output and that of its
   input are there together. The kernels are two: one for the weight, which reads the input, one for the input, which does
   not. Here they run one after the other, the input let go of between. (FastSA, Chen et al. 2024; MONeT, Shah et al. 2021.)
2. A *ReLU* saves its result, of which its backward reads only where it is zero or below: a bit an element is enough (Gist,
   Jain et al. 2018). A NaN is not below zero, here as in eager's kernel. Eight runs of elements share one run of bytes, so
   packing needs no more memory than the bits take, twice.
3. Before a *max pooling* a ReLU needs nothing: gradients reach it at the maxima alone, and their values are the pooling's
   result. So the gradient of that is set to zero where the result is, before it is spread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from fxmem.runtime.compressed_ops import narrowed, pool_backward, with_defaults
from fxmem.runtime.inplace_ops import no_view
from fxmem.runtime.layout import Geometry
from fxmem.torch_patches import in_batched_backward
from fxmem.torch_private import OpOverload, keeps_graph

aten = torch.ops.aten
Tensor = torch.Tensor

# -- convolutions ------------------------------------------------------------------------------------------------------


class _SplitConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.args, ctx.bias_sizes = args, None if bias is None else list(bias.shape)
        # Which kernel runs may depend on whether autograd is on.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda _: None, _never_unpacked):
            result = aten.convolution.default(x.detach().requires_grad_(), weight, bias, *args)
        return cast(Tensor, result.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        rest = [None] * len(ctx.args)
        if not (of_x and of_weight) or torch.is_grad_enabled() or keeps_graph() or in_batched_backward():
            return (*_gradients(ctx, grad, x, weight, [of_x, of_weight, of_bias]), *rest)
        _, *of_weights = _gradients(ctx, grad, x, weight, [False, True, of_bias])
        like_x = x.new_empty_strided(x.shape, [0] * x.dim())  # its sizes are all that is looked at
        del x
        ctx.maybe_clear_saved_tensors()
        grad_x, *_ = _gradients(ctx, grad, like_x, weight, [True, False, False])
        return (grad_x, *of_weights, *rest)


def _gradients(ctx: Any, grad: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> Any:
    """Return those of the gradients of input, weight and bias that are ``wanted``."""
    return aten.convolution_backward.default(grad, x, weight, ctx.bias_sizes, *ctx.args, wanted)


def _never_unpacked(_: object) -> Tensor:
    raise AssertionError("this convolution does not run backward")


def split_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
    """Return what ``aten.convolution`` returns; the backward lets go of ``x``, which is contiguous, before its gradient is
    made."""
    return cast(Tensor, _SplitConvolution.apply(x, weight, bias, *args))  # type: ignore[no-untyped-call]


# -- ReLUs -------------------------------------------------------------------------------------------------------------

BITS = 8
"""Of a byte."""
PIECE = 1 << 22
"""Bytes of bits that are read at once, so that what that takes is small."""


def zeros_of(x: Tensor) -> Tensor:
    """Return bits that say where ``x``, dense on its memory, is zero or below: the k-th of byte j is for element k * m + j,
    m their number of bytes."""
    flat = _flat(x)
    num_bytes = -(-len(flat) // BITS)
    zeros = torch.zeros(num_bytes, dtype=torch.uint8, device=x.device)
    for k, start in enumerate(range(0, len(flat), num_bytes)):
        run = flat.narrow(0, start, min(num_bytes, len(flat) - start))
        zeros.narrow(0, 0, len(run)).add_(run.le(0).view(torch.uint8), alpha=1 << k)
    return zeros


def zeroed(grad: Tensor, zeros: Tensor) -> Tensor:
    """Return ``grad``, dense on its memory, with zeros where the bits of ``zeros`` are set."""
    result = torch.empty_like(grad)
    flat, flat_result, zero = _flat(grad), _flat(result), torch.zeros((), dtype=grad.dtype, device=grad.device)
    for k, start in enumerate(range(0, len(flat), len(zeros))):
        for first in range(0, min(len(zeros), len(flat) - start), PIECE):
            bits = zeros[first : min(first + PIECE, len(flat) - start)]
            run = slice(start + first, start + first + len(bits))
            torch.where(bits.bitwise_and(1 << k).bool(), zero, flat[run], out=flat_result[run])
    return result


def _flat(x: Tensor) -> Tensor:
    """Return the elements of ``x``, which is dense, in the order in which they lie."""
    return x.as_strided((x.numel(),), (1,))


def _is_zero(zeros: Tensor, like: Geometry) -> Tensor:
    """Return the bits as numbers of the layout of what they are of: 0 where it is zero or below, else 1."""
    runs = [zeros.bitwise_and(1 << k).eq(0) for k in range(BITS)]
    return torch.cat(runs)[: like.size.numel()].to(like.dtype).as_strided(like.size, like.stride)


class _ReluOfBits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, in_place: bool) -> Tensor:
        if in_place:
            ctx.mark_dirty(x)
        result = aten.relu_.default(x) if in_place else aten.relu.default(x)
        ctx.save_for_backward(zeros_of(result))
        ctx.geometry = Geometry.of(result)
        return cast(Tensor, result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (zeros,) = ctx.saved_tensors
        if grad.stride() == ctx.geometry.stride and not (torch.is_grad_enabled() or in_batched_backward()):
            return zeroed(grad, zeros), None
        return aten.threshold_backward.default(grad, _is_zero(zeros, ctx.geometry), 0), None


def relu_of_bits(x: Tensor) -> Tensor:
    """Return ``relu(x)``, dense on its memory, of which a bit an element is saved."""
    return cast(Tensor, _ReluOfBits.apply(x, False))  # type: ignore[no-untyped-call]


def relu_of_bits_in_place(x: Tensor) -> Tensor:
    """Return ``x``, dense on its memory, after ``aten.relu_``; a bit an element is saved."""
    return cast(Tensor, _ReluOfBits.apply(x, True))  # type: ignore[no-untyped-call]


def relu_of_bits_(x: Tensor) -> Tensor:
    """Return ``relu(x)`` in the memory of ``x``, as :func:`fxmem.runtime.inplace_ops.relu_`; a bit an element is saved."""
    return relu_of_bits_in_place(no_view(x))


# -- ReLU, then max pooling --------------------------------------------------------------------------------------------


class _PoolOfRelu(torch.autograd.Function):
    """The pooling of a ReLU, but for what that does to gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pool: OpOverload, in_place: bool, narrow: bool, args: tuple[Any, ...]) -> Tensor:
        rectified = aten.relu_.default(x) if in_place else aten.relu.default(x)
        result, indices = pool(rectified, *args)
        ctx.save_for_backward(narrowed(indices, pool, x) if narrow else indices)
        ctx.pool, ctx.args, ctx.geometry = pool, args, Geometry.of(rectified)
        return cast(Tensor, result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (indices,) = ctx.saved_tensors
        return pool_backward(ctx.pool, grad, ctx.geometry, ctx.args, indices), None, None, None, None


class _Rectified(torch.autograd.Function):
    """What a ReLU does to the gradient of its result. A node of its own, so that the result goes before the pooling's."""

    @staticmethod
    def forward(ctx: Any, result: Tensor) -> Tensor:
        result = result.detach()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return cast(Tensor, aten.threshold_backward.default(grad, result, 0))


def relu_max_pool(pool: OpOverload, in_place: bool, x: Tensor, *args: Any, narrow: bool = False) -> Tensor:
    """Return the first result of ``pool(relu(x), *args)``, a max pooling with indices; ``x`` is contiguous. Saved are both
    results of the pooling, indices, with ``narrow``, in as few bytes as they need. ``in_place``: the ReLU is written over
    ``x``, which nobody reads any more."""
    _, *rest = with_defaults(pool, (x, *args))
    result = _PoolOfRelu.apply(x, pool, in_place, narrow, tuple(rest))  # type: ignore[no-untyped-call]
    return cast(Tensor, _Rectified.apply(result))  # type: ignore[no-untyped-call]


RELUS: dict[str, Callable[[Tensor], Tensor]] = {
    form.__name__: form for form in (relu_of_bits, relu_of_bits_in_place, relu_of_bits_)
}
