"""BatchNorms that are frozen (eval mode, no gradient for weight and bias) in a model that trains.

Such a layer is an affine map, and the gradient of its input does not depend on that input; eager autograd saves it all the
same. In: a captured graph. Out: the same graph with these layers as :func:`frozen_batch_norm`, which calls the same
kernels in forward and backward, hence gives the same bits, and saves nothing of the input's size.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from fxmem.captured import attribute_of
from fxmem.regions import Scoped, op_of

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


def with_frozen_norms(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Let the frozen BatchNorms of ``graph_module``, which is changed and returned, save nothing of their inputs' size."""
    for node in graph_module.graph.nodes:
        if op_of(node.target) is aten.batch_norm.default and _is_frozen(graph_module, node):
            region = node.target.region if isinstance(node.target, Scoped) else None
            node.target = frozen_batch_norm if region is None else Scoped(frozen_batch_norm, region)
    graph_module.recompile()
    return graph_module


def _is_frozen(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    _, weight, bias, mean, var, training = node.args[:6]
    return not (training or mean is None or var is None) and not any(
        _may_learn(graph_module, n) for n in (weight, bias)
    )


def _may_learn(graph_module: fx.GraphModule, argument: Any) -> bool:
    """True unless ``argument`` is None or read from a parameter or buffer that requires no gradient."""
    if not isinstance(argument, fx.Node) or argument.op != "get_attr":
        return argument is not None
    return bool(attribute_of(graph_module, str(argument.target)).requires_grad)
