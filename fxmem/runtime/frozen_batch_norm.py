"""A BatchNorm that is frozen (eval mode, no gradient for weight and bias) in a model that trains.

Such a layer is an affine map, and the gradient of its input does not depend on that input; eager autograd saves it all the
same. :func:`frozen_batch_norm` calls the same kernels in forward and backward, hence gives the same bits, and saves nothing
of the input's size.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from fxmem.op_facts.lookup import own_op

aten = torch.ops.aten


class _FrozenBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor,
        running_var: torch.Tensor,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, running_mean, running_var)
        ctx.eps = eps
        return torch.batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps, cudnn_enabled)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        weight, mean, var = ctx.saved_tensors
        # The second argument stands where the input was: of it only the shape is looked at.
        needs = [True, False, False]
        found = aten.native_batch_norm_backward(
            grad, grad.detach(), weight, mean, var, None, None, False, ctx.eps, needs
        )
        return (found[0], *[None] * 7)


@own_op
def frozen_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """Return what ``aten.batch_norm`` returns for these arguments, in eval mode and with frozen weight and bias."""
    y = _FrozenBatchNorm.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, running_mean, running_var, momentum, eps, cudnn_enabled
    )
    return cast(torch.Tensor, y)
