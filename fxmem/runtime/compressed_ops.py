"""Ops that save or do less than eager's own, with the same bits: the forms that :mod:`fxmem.passes.compress_saved` puts in.

Forward and backward call the kernels that eager calls. What differs is what lies in memory between the two:

1. The mask of a *dropout* has one byte an element, where eager's, on the CPU, has the input's own dtype (Jain et al. 2018,
   Gist, keep the masks of ReLUs so). The generator gives the same numbers for either.
2. Some backwards take the op's input, but only look at its shape, strides and dtype: those of poolings, of paddings that
   reflect or repeat, and of convolutions whose weight is frozen. They get as much memory, with nothing in it.
3. The indices of a *max pooling* are places in a plane: two bytes hold them where eager's take eight.
4. The *safe softmax* of an attention saves what eager's does. That one goes over the scores three times more than a softmax
   does, for rows that are masked out whole. In these a softmax is NaN; so one column of it tells if they need to be sought.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import Any, cast

import torch

from fxmem.op_facts.kinds import CompressedForm
from fxmem.op_facts.lookup import by_op, own_op, resolved
from fxmem.runtime.layout import Geometry
from fxmem.runtime.programs.recording import as_one_call
from fxmem.torch_patches import in_batched_backward
from fxmem.torch_private import (
    FakeTensor,
    OpOverload,
    contiguous_strides,
    schema_of,
    without_modes,
)

aten = torch.ops.aten
Overload = OpOverload

# -- dropout -----------------------------------------------------------------------------------------------------------


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, probability: float) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.probability = probability
        return _product(mask, probability, x, in_place=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        in_place = not (torch.is_grad_enabled() or in_batched_backward())
        return _product(mask, ctx.probability, grad, in_place=in_place), None, None


def _product(mask: torch.Tensor, probability: float, x: torch.Tensor, *, in_place: bool) -> torch.Tensor:
    """Return ``x * (mask / probability)``, in one pass over both where they lie alike."""
    ones = mask.to(x.dtype)
    quotient = _quotient(probability, x.dtype)
    if not (in_place and math.isfinite(quotient) and _laid_out_alike(ones, x)):
        return x * ones.div_(probability)
    return torch.addcmul(x.new_full((), -0.0), ones, x, value=quotient, out=ones)  # -0.0 + y is y, zeros included


@cache
def _quotient(probability: float, dtype: torch.dtype) -> float:
    """Return one over ``probability`` as the kernel divides in this dtype, whatever modes are on."""
    with without_modes():
        return float(torch.ones((), dtype=dtype, device="cpu") / probability)


def _laid_out_alike(dense: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell for certain that the product of both, the first dense, would be laid out as the first is."""
    if dense.stride() == other.stride():
        return 1 not in dense.shape or dense.stride() == contiguous_strides(dense.shape)
    places = sorted(zip(dense.stride(), other.stride(), strict=True), reverse=True)
    strides = [stride for _, stride in places if stride]  # a kernel lets dimensions of stride 0 go by
    falling = all(a > b for a, b in pairwise(strides))
    return falling and 1 not in dense.shape and dense.shape == other.shape


def dropout_mask(x: torch.Tensor, probability: float) -> torch.Tensor:
    """Return one byte for each element of ``x``: 1 with this probability, else 0."""
    return torch.empty_like(x, dtype=torch.int8).bernoulli_(probability)  # the CPU widens int8 faster than bool


@own_op
def masked_dropout(x: torch.Tensor, mask: torch.Tensor, probability: float) -> torch.Tensor:
    """Return ``x`` with each element zero or, where ``mask`` has a 1, divided by ``probability``; the mask is saved."""
    return cast(torch.Tensor, _Dropout.apply(x, mask, probability))  # type: ignore[no-untyped-call]


# -- softmax of scores that a mask may have made -inf -------------------------------------------------------------------


class _SafeSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim, ctx.dtype = dim, scores.dtype
        result = torch.softmax(scores, dim)
        if result.numel():
            as_one_call(_clear_masked_rows, result, scores, dim)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (result,) = ctx.saved_tensors
        return aten._softmax_backward_data(grad, result, ctx.dim, ctx.dtype), None


def _clear_masked_rows(result: torch.Tensor, scores: torch.Tensor, dim: int) -> None:
    """Set rows of ``result`` to zero where all ``scores`` are -inf. As many bytes are allocated if there are none."""
    largest = scores.new_empty(scores.select(dim, 0).unsqueeze(dim).shape)
    masked = torch.empty_like(largest, dtype=torch.bool)
    total = result.select(dim, 0).sum()
    if not isinstance(result, FakeTensor) and math.isnan(total.item()):
        torch.amax(scores, dim, keepdim=True, out=largest)
        torch.eq(largest, -math.inf, out=masked)
        result.masked_fill_(masked, 0.0)


def safe_softmax(scores: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the softmax of ``scores`` over ``dim``, zeros where all are -inf."""
    return cast(torch.Tensor, _SafeSoftmax.apply(scores, dim))  # type: ignore[no-untyped-call]


# -- inputs of which only the geometry is looked at --------------------------------------------------------------------


def with_defaults(op: Overload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` and the defaults of the arguments of ``op`` that come after them."""
    return (*args, *(argument.default_value for argument in schema_of(op).arguments[len(args) :]))


_FORMS = by_op(CompressedForm)
BACKWARDS: dict[Overload, Overload] = {
    op: resolved(fact.backward) for op, fact in _FORMS.items() if fact.form == "input_unread"
}
"""Ops whose backward takes their input after the gradient, then their other arguments, and does not read the input."""


class _Unread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: Overload, args: tuple[Any, ...]) -> torch.Tensor:
        ctx.geometry, ctx.op, ctx.args = Geometry.of(x), op, args
        return cast(torch.Tensor, op(x, *args))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        backward = BACKWARDS[ctx.op]
        num_args = len(schema_of(backward).arguments) - 2  # adaptive poolings see their output's size on its gradient
        return backward(grad, ctx.geometry.blank(), *ctx.args[:num_args]), None, None


def input_unread(op: Overload, x: torch.Tensor, *args: Any) -> torch.Tensor:
    """Return ``op(x, *args)``, for an op of :data:`BACKWARDS`; nothing is saved."""
    _, *rest = with_defaults(op, (x, *args))
    return cast(torch.Tensor, _Unread.apply(x, op, tuple(rest)))  # type: ignore[no-untyped-call]


class _FrozenConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *args: Any) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.geometry, ctx.args = Geometry.of(x), args
        # Which kernel runs may depend on whether autograd is on.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda _: None, _never_unpacked):
            result = aten.convolution.default(x.detach().requires_grad_(), weight, bias, *args)
        return cast(torch.Tensor, result.detach())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        needs = [True, False, False]
        grads = aten.convolution_backward.default(grad, ctx.geometry.blank(), weight, None, *ctx.args, needs)
        return (grads[0], *[None] * (2 + len(ctx.args)))


def _never_unpacked(_: object) -> torch.Tensor:
    raise AssertionError("this convolution does not run backward")


def frozen_convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *args: Any) -> torch.Tensor:
    """Return what ``aten.convolution`` returns, weight and bias frozen; of what is computed nothing is saved."""
    return cast(torch.Tensor, _FrozenConvolution.apply(x, weight, bias, *args))  # type: ignore[no-untyped-call]


# -- max pooling -------------------------------------------------------------------------------------------------------

POOL_BACKWARDS: dict[Overload, Overload] = {
    op: resolved(fact.backward) for op, fact in _FORMS.items() if fact.form == "max_pool_input_unread"
}


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: Overload, narrow: bool, args: tuple[Any, ...]) -> torch.Tensor:
        result, indices = op(x, *args)
        ctx.save_for_backward(narrowed(indices, op, x) if narrow else indices)
        ctx.geometry, ctx.op, ctx.args = Geometry.of(x), op, args
        return cast(torch.Tensor, result)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        return pool_backward(ctx.op, grad, ctx.geometry, ctx.args, indices), None, None, None


def narrowed(indices: torch.Tensor, op: Overload, x: torch.Tensor) -> torch.Tensor:
    """Return the indices of a max pooling of ``x`` in as few bytes as the places in one of its planes need."""
    _, window, *_ = schema_of(op).arguments
    num_places = math.prod(x.shape[-window.N :])
    dtype = torch.int16 if num_places <= 1 << 15 else torch.uint16 if num_places <= 1 << 16 else torch.int32
    return indices.to(dtype) if num_places <= 1 << 31 else indices


def pool_backward(
    op: Overload, grad: torch.Tensor, geometry: Geometry, args: tuple[Any, ...], indices: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the input, of this geometry, of a max pooling; it stands in for the input itself."""
    blank, backward, indices = geometry.blank(), POOL_BACKWARDS[op], indices.to(torch.int64)
    if torch.is_grad_enabled() or in_batched_backward():
        return cast(torch.Tensor, backward(grad, blank, *args, indices))
    return cast(torch.Tensor, backward.overloadpacket.grad_input(grad, blank, *args, indices, grad_input=blank))


def max_pool_input_unread(op: Overload, x: torch.Tensor, *args: Any, narrow: bool = False) -> torch.Tensor:
    """Return the first result of ``op(x, *args)``, a max pooling; of the two, only the indices are saved, ``narrow``: in as
    few bytes as they need."""
    _, *rest = with_defaults(op, (x, *args))
    return cast(torch.Tensor, _MaxPool.apply(x, op, narrow, tuple(rest)))  # type: ignore[no-untyped-call]
