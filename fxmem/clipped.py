"""hardtanh and relu6 in place, with a backward that reads the result.

Autograd's own ``hardtanh_`` copies its input before it overwrites it, to know in the backward where that lay between the
bounds. There, and only there, does the result: input <= bound means result <= bound, and a NaN stays one. The same
backward kernel given the result makes the same bits, and no copy. That holds for bounds that are numbers of the tensor's
dtype: 0.7 in bfloat16 is clipped to 0.699, which the backward, comparing in fp32, takes to lie inside.
"""

from __future__ import annotations

from typing import Any, cast

import torch

aten = torch.ops.aten


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


def hardtanh_(x: torch.Tensor, min_val: float = -1.0, max_val: float = 1.0) -> torch.Tensor:
    """Return ``x``, clipped to the bounds, as ``aten.hardtanh_`` does."""
    return cast(torch.Tensor, _Hardtanh.apply(x, min_val, max_val))  # type: ignore[no-untyped-call]


def relu6_(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, clipped to 0 and 6, as ``aten.relu6_`` does."""
    return hardtanh_(x, 0.0, 6.0)
