"""One call of a model, run in pieces of its batch: forward without a graph, each piece's graph made anew in the backward.

NOTE [Micro-batches]

1. The forward runs the pieces one after the other without autograd, and puts their outputs together. What lives until the
   backward is the batch, its outputs, and the generators' states before each piece.
2. The backward runs each piece once more, from these states, with autograd, and passes it its part of the outputs'
   gradients. A backward within the backward adds each parameter's gradient to what is there, as micro-batches do: equal to
   the whole batch's up to the order of sums. So ``torch.autograd.grad`` of parameters is refused, and hooks on parameters
   run once for each piece.
3. Autocast and gradient mode in the backward are those of the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from fxmem.errors import InputError, SavedTensorModifiedError
from fxmem.runtime.autocast import Autocast
from fxmem.runtime.recompute import RandomStates, replayed, stash_random_states
from fxmem.torch_private import grad_reaches_all, version_of

Run = Callable[[Sequence[Any]], Sequence[torch.Tensor]]
"""From the leaves of one piece's inputs to those of its outputs, all with the batch first."""


class InPieces:
    """Runs calls of a model in ``k`` pieces; ``batched``: places of the inputs' leaves that are cut, along dimension 0.

    ``forward`` runs a piece without autograd, ``again`` with it.
    """

    def __init__(
        self,
        k: int,
        batched: frozenset[int],
        forward: Run,
        again: Run,
        devices: tuple[torch.device, ...],
        autocast: Autocast | None,
        parameters: tuple[torch.Tensor, ...],
    ) -> None:
        self.parameters = parameters
        self.k, self.batched, self.forward, self.again = k, batched, forward, again
        self.devices, self.autocast = devices, autocast

    def __call__(self, leaves: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Return the leaves of the whole batch's outputs."""
        anchor = torch.empty(0, requires_grad=True, device=self.devices[0])
        result: tuple[torch.Tensor, ...] = _Pieces.apply(self, anchor, *leaves)  # type: ignore[no-untyped-call]
        return result

    def versions(self) -> list[int]:
        """Return the parameters' versions."""
        return [version_of(parameter) for parameter in self.parameters]

    def piece(self, leaves: Sequence[Any], number: int) -> list[Any]:
        """Return the leaves of piece ``number``."""
        return [self.part(leaf, number) if place in self.batched else leaf for place, leaf in enumerate(leaves)]

    def part(self, whole: torch.Tensor, number: int) -> torch.Tensor:
        """Return the samples of piece ``number``."""
        length = len(whole) // self.k
        return whole.narrow(0, number * length, length)


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: InPieces, anchor: torch.Tensor, *leaves: Any) -> tuple[torch.Tensor, ...]:
        ctx.op, ctx.leaves = op, [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        ctx.save_for_backward(*(leaf if isinstance(leaf, torch.Tensor) else None for leaf in leaves))
        states: list[RandomStates] = []
        results: list[torch.Tensor] = []
        for number in range(op.k):
            states.append(stash_random_states(op.devices))
            pieces = op.forward(op.piece(leaves, number))
            if not results:
                results = [p.new_empty(op.k * len(p), *p.shape[1:]) for p in pieces]
            for whole, piece in zip(results, pieces, strict=True):
                op.part(whole, number).copy_(piece)
            del pieces, piece
        ctx.states, ctx.versions = states, op.versions()
        ctx.mark_non_differentiable(*(whole for whole in results if not whole.is_floating_point()))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        op: InPieces = ctx.op
        if not grad_reaches_all():
            raise InputError(
                "micro-batches add to the .grad of parameters, which torch.autograd.grad and backward(inputs=) do not ask "
                'for: call loss.backward(), or take "microbatch" out of allow='
            )
        if ctx.versions != op.versions():
            raise SavedTensorModifiedError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                "parameter was written to between forward and backward. Call optimizer.step() after the last backward."
            )
        saved = [t if plain is None else plain for t, plain in zip(ctx.saved_tensors, ctx.leaves, strict=True)]
        leaves = [
            t.detach().requires_grad_(n) if isinstance(t, torch.Tensor) else t
            for t, n in zip(saved, ctx.needs_input_grad[2:], strict=True)
        ]
        for number, states in enumerate(ctx.states):
            with torch.enable_grad(), replayed(states), op.autocast.enter() if op.autocast else nullcontext():
                pieces = op.again(op.piece(leaves, number))
            wanted = [
                (p, op.part(g, number)) for p, g in zip(pieces, grads, strict=True) if g is not None and p.requires_grad
            ]
            del pieces
            torch.autograd.backward([p for p, _ in wanted], [g for _, g in wanted])
            del wanted
        return (
            None,
            None,
            *(leaf.grad if isinstance(leaf, torch.Tensor) and leaf.requires_grad else None for leaf in leaves),
        )
