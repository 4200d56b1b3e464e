"""Outputs of a compiled model that its loss does not read, such as logits beside a loss.

In: an output, a step. Out: places among the output's leaves. AOTAutograd gives compiled code a gradient of zeros, as large
as the output, for each output without one. Where the step's loss is known not to read an output, the compiled function
returns it without a gradient; whoever asks for one all the same is told so, in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from fxmem.compiled.surroundings import as_leaf
from fxmem.errors import InputError
from fxmem.fake.fake_tensors import FakeWorld, ScalarReads
from fxmem.profiling.training_step import TrainingStep, loss_of
from fxmem.torch_patches import compiler_says_eager
from fxmem.torch_private import tree_flatten, tree_leaves, tree_map_only, tree_unflatten


def unread_places(output: Any, step: TrainingStep) -> tuple[int, ...]:
    """Return the places of tensors among the leaves of ``output``, fakes, that belong to the graph and get no gradient from
    the step's loss; none where none does."""
    leaves = tree_leaves(output)
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    in_graph = {place for place, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.requires_grad}
    if len(in_graph) < 2:
        return ()
    with FakeWorld(tensors).active(), ScalarReads(), compiler_says_eager(), torch.enable_grad():
        output = tree_map_only(torch.Tensor, as_leaf, output)
        loss_fn = step.loss_on(step.targets.blank(tensors))
        learning = {place: t for place, t in enumerate(tree_leaves(output)) if place in in_graph}
        loss = loss_of([output], loss_fn)
        gradients = torch.autograd.grad(loss, list(learning.values()), allow_unused=True)
    unread = tuple(place for place, gradient in zip(learning, gradients, strict=True) if gradient is None)
    return unread if len(unread) < len(learning) else ()


def refusing_gradients(output: Any, places: tuple[int, ...]) -> Any:
    """Return ``output`` whose leaves at ``places`` belong to the graph, and refuse a gradient."""
    if not places:
        return output
    leaves, spec = tree_flatten(output)
    anchor = next((t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad), None)
    if anchor is None:
        return output
    refused = cast(Callable[..., torch.Tensor], _Refusing.apply)
    return tree_unflatten([refused(t, anchor) if i in places else t for i, t in enumerate(leaves)], spec)


class _Refusing(torch.autograd.Function):
    """The identity of its first argument, without a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return tensor.detach()  # no view of a Function, which may not be written to

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None]:
        if gradient is not None:
            raise InputError(
                "an output of the compiled model is given a gradient that its plan has none for: the step's loss does not "
                "read it. Pass the loss that you train with, fxmem.optimize(..., loss_fn=lambda output: ...)"
            )
        return None, None
