"""Ops written over their first argument, with the bits of those that are not: the forms that
:mod:`fxmem.passes.inplace` puts in.

Two of autograd's own in-place ops would not do:

1. On a *view* (the result of a linear layer on sequences is one on the CPU) autograd lays the gradient out as the view's
   base is, for the other operand too, and copies it twice; a sum over it then adds in another order. Here the op writes
   over an alias that autograd does not take for a view, so gradients pass as they come.
2. ``hardtanh_`` and ``relu6_`` copy their input before they overwrite it, to know in the backward where that lay between
   the bounds. There, and only there, does the result: input <= bound means result <= bound, and a NaN stays one. The same
   backward kernel given the result makes the same bits, and no copy. That holds for bounds that are numbers of the
   tensor's dtype: 0.7 in bfloat16 is clipped to 0.699, which the backward, comparing in fp32, takes to lie inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from fxmem.op_facts.lookup import own_op
from fxmem.torch_private import is_view

aten = torch.ops.aten


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def no_view(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a tensor on its memory, with its gradient, that is no view to autograd."""
    return cast(torch.Tensor, _Alias.apply(x)) if is_view(x) else x  # type: ignore[no-untyped-call]


@own_op
def add_(x: torch.Tensor, other: Any, *, alpha: Any = 1) -> torch.Tensor:
    """Return ``x + alpha * other`` in the memory of ``x``."""
    return no_view(x).add_(other, alpha=alpha)


@own_op
def sub_(x: torch.Tensor, other: Any, *, alpha: Any = 1) -> torch.Tensor:
    """Return ``x - alpha * other`` in the memory of ``x``."""
    return no_view(x).sub_(other, alpha=alpha)


@own_op
def relu_(x: torch.Tensor) -> torch.Tensor:
    """Return ``relu(x)`` in the memory of ``x``."""
    return no_view(x).relu_()


@own_op
def leaky_relu_(x: torch.Tensor, negative_slope: float = 0.01) -> torch.Tensor:
    """Return ``leaky_relu(x)`` in the memory of ``x``."""
    return cast(torch.Tensor, aten.leaky_relu_.default(no_view(x), negative_slope))


@own_op
def sigmoid_(x: torch.Tensor) -> torch.Tensor:
    """Return ``sigmoid(x)`` in the memory of ``x``."""
    return no_view(x).sigmoid_()


@own_op
def tanh_(x: torch.Tensor) -> torch.Tensor:
    """Return ``tanh(x)`` in the memory of ``x``."""
    return no_view(x).tanh_()


class _Hardtanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, low: float, high: float) -> torch.Tensor:
        ctx.mark_dirty(x)
        result = cast(torch.Tensor, aten.hardtanh_.default(x, low, high))
        ctx.save_for_backward(result)
        ctx.bounds = low, high
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (result,) = ctx.saved_tensors
        return aten.hardtanh_backward.default(grad, result, *ctx.bounds), None, None


@own_op
def hardtanh_in_place(x: torch.Tensor, min_val: float = -1.0, max_val: float = 1.0) -> torch.Tensor:
    """Return ``x``, clipped to the bounds, as ``aten.hardtanh_`` does where a model calls it, on a part of a tensor too."""
    return cast(torch.Tensor, _Hardtanh.apply(x, min_val, max_val))  # type: ignore[no-untyped-call]


@own_op
def relu6_in_place(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, clipped to 0 and 6, as ``aten.relu6_`` does where a model calls it."""
    return hardtanh_in_place(x, 0.0, 6.0)


@own_op
def hardtanh_(x: torch.Tensor, min_val: float = -1.0, max_val: float = 1.0) -> torch.Tensor:
    """Return ``hardtanh(x)`` in the memory of ``x``."""
    return hardtanh_in_place(no_view(x), min_val, max_val)


@own_op
def relu6_(x: torch.Tensor) -> torch.Tensor:
    """Return ``relu6(x)`` in the memory of ``x``."""
    return hardtanh_(x, 0.0, 6.0)


FORMS: dict[str, Callable[..., torch.Tensor]] = {
    form.__name__: form
    for form in (
        add_,
        sub_,
        relu_,
        leaky_relu_,
        sigmoid_,
        tanh_,
        hardtanh_,
        hardtanh_in_place,
        relu6_,
        relu6_in_place,
    )
}
"""By the name that :mod:`fxmem.op_facts` gives them."""
