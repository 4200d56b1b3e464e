"""Chains of ops that run in pieces of rows, forward and backward: what :mod:`fxmem.passes.chunk` puts into graphs.

NOTE [Pieces]

1. A *row* is what one token, one image or one pixel has: one place in all of a tensor's dimensions but the last; for
   convolutions, one in the first. Each op of a chain makes a row of its result from one row of its input and from weights,
   so k pieces of rows may pass one after the other. No more is alive of the chain than one piece's values.
2. :class:`ChunkedLoss` ends in a cross-entropy. One pass over the pieces makes loss and gradients, since the gradient of a
   loss is known but for a factor; the backward multiplies by it. Nothing runs twice. (Chunked and fused heads: Liger
   Kernel, Hsu et al. 2024; Cut Your Losses, Wijmans et al. 2024.)
3. :class:`ChunkedRows` returns rows. It saves its inputs; the backward runs each piece again, with autograd, and adds the
   piece's gradients of the weights to those of the pieces before. (ALST's tiled MLP, Bekman et al. 2025.)
4. Under autocast a piece's matmuls run in its dtype, in the backward too; gradients of weights add up in the weights' own.
5. Sums over rows (gradients of weights, the loss) are added piece by piece: equal to eager's up to rounding, and for the
   same k the same bits each time. Weights of a short dtype are rounded to it after each piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from fxmem.torch_private import keeps_graph

Tensor = torch.Tensor
RowOps = Callable[..., Tensor]
"""A function of a piece of rows, and of weights."""


def pieces_of(num_rows: int, k: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of at most ``k`` pieces, all but the last as long as the first."""
    length = max(1, -(-num_rows // k))
    for start in range(0, num_rows, length):
        yield start, min(length, num_rows - start)


def _recording() -> Any:
    """Let autograd save for itself: hooks that are on outside are not for what a piece saves."""
    return saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)


def _lower_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast gives matmuls of ``x`` here; None where it leaves them as they are."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else None


def _autocast(x: Tensor, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Let the body's ops run in ``dtype`` where autocast would have them so; None: as they are. No cast is kept."""
    if dtype is None and _lower_dtype(x) is None:
        return nullcontext()
    return torch.autocast(x.device.type, dtype, enabled=dtype is not None, cache_enabled=False)


class _Op:
    """A target of call_function nodes."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.__name__ = self.__qualname__ = type(self).__name__.lower()
        self.__module__ = __name__


# -- linear, then cross-entropy ----------------------------------------------------------------------------------------


class ChunkedLoss(_Op):
    """The cross-entropy of a linear layer's rows (NOTE [Pieces], 2).

    ``between``: what is done to the scores row by row before the loss, such as a cast. The others are arguments of
    ``F.cross_entropy``; ``reduction`` is "mean" or "sum".
    """

    effect = "makes its gradients together with its result"

    def __init__(self, k: int, between: RowOps, reduction: str, ignore_index: int, label_smoothing: float) -> None:
        super().__init__(k)
        self.between, self.reduction = between, reduction
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None
    ) -> Tensor:
        """Return the loss of ``x``, (..., features), for ``target``, one class for each row of it."""
        loss: Tensor = _Loss.apply(self, x, weight, bias, target, class_weight)  # type: ignore[no-untyped-call]
        return loss

    def loss_of(self, scores: Tensor, target: Tensor, class_weight: Tensor | None) -> Tensor:
        """Return the sum of the losses of some rows."""
        return F.cross_entropy(
            self.between(scores),
            target,
            class_weight,
            reduction="sum",
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )

    def factor(self, target: Tensor, class_weight: Tensor | None, like: Tensor) -> Tensor:
        """Return what the sum over all rows is multiplied by: for a mean, one over the weights of the classes of the rows
        that count."""
        if self.reduction == "sum":
            return torch.ones((), dtype=like.dtype, device=like.device)
        counts = target != self.ignore_index
        if class_weight is None:
            return counts.sum().to(like.dtype).reciprocal()
        weights = class_weight.gather(0, target.masked_fill(~counts, 0))
        return weights.masked_fill(~counts, 0).sum().to(like.dtype).reciprocal()


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        op: ChunkedLoss,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
    ) -> Tensor:
        rows, dtype = x.reshape(-1, x.shape[-1]), _lower_dtype(x)
        factors = [weight, bias] if dtype is None else [None if t is None else t.to(dtype) for t in (weight, bias)]
        of_x, of_weight, of_bias = ctx.needs_input_grad[1:4]
        grad_x = x.new_empty(x.shape) if of_x else None
        grad_weight = torch.zeros_like(weight) if of_weight else None
        grad_bias = torch.zeros_like(bias) if of_bias and bias is not None else None
        total: Tensor | None = None
        factor: Tensor | None = None
        for start, length in pieces_of(rows.shape[0], op.k):
            piece = rows.narrow(0, start, length)
            piece = piece if dtype is None else piece.to(dtype)
            with _autocast(x, None):
                scores = F.linear(piece, *factors).requires_grad_()  # type: ignore[arg-type]
            with torch.enable_grad(), _recording():
                loss = op.loss_of(scores, target.narrow(0, start, length), class_weight)
            if factor is None:
                factor = op.factor(target, class_weight, loss)
            if of_x or of_weight or of_bias:
                (grad,) = torch.autograd.grad(loss, scores, factor)
                with _autocast(x, None):
                    _add_gradients(grad, piece, factors[0], start, _rows_of(grad_x), grad_weight, grad_bias)
                del grad
            total = loss.detach() if total is None else total + loss.detach()
            del loss, scores, piece
        if total is None or factor is None:
            raise ValueError("a cross-entropy of no rows has no pieces")
        ctx.gradients = (grad_x, grad_weight, grad_bias)
        return total * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        gradients = ctx.gradients
        if gradients is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: pass retain_graph=True to the first"
            )
        if keeps_graph():
            scaled = [None if g is None else g * grad.to(g.dtype) for g in gradients]
        else:
            ctx.gradients = None
            scaled = [None if g is None else g.mul_(grad.to(g.dtype)) for g in gradients]
        return None, *scaled, None, None


def _rows_of(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.view(-1, x.shape[-1])


def _add_gradients(
    grad: Tensor,
    piece: Tensor,
    weight: Tensor | None,
    start: int,
    grad_x: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> None:
    """Add what the gradient of a piece's scores says of a linear layer, whose sums may be of a longer dtype."""
    assert weight is not None
    if grad_x is not None:
        rows = grad_x.narrow(0, start, len(grad))
        if rows.dtype == grad.dtype:
            torch.mm(grad, weight, out=rows)
        else:
            rows.copy_(grad @ weight)
    if grad_weight is not None:
        if grad_weight.dtype == grad.dtype:
            grad_weight.addmm_(grad.t(), piece)
        else:
            grad_weight.add_(grad.t() @ piece)
    if grad_bias is not None:
        grad_bias.add_(grad.sum(0))


# -- linear layers with pointwise ops between --------------------------------------------------------------------------


class ChunkedRows(_Op):
    """A function of rows that returns rows (NOTE [Pieces], 3).

    ``ops``: what is done to a piece of rows (rows, features) with the weights. ``flat``: the result has two dimensions, not
    those of ``x``. ``images``: rows are images, what a convolution takes one by one: pieces are pieces of the batch.
    """

    def __init__(self, k: int, ops: RowOps, flat: bool, images: bool = False) -> None:
        super().__init__(k)
        self.ops, self.flat, self.images = ops, flat, images

    def rows_of(self, x: Tensor) -> Tensor:
        """Return ``x``, or a result, with its rows first."""
        return x if self.images else x.reshape(-1, x.shape[-1])

    def __call__(self, x: Tensor, *weights: Tensor) -> Tensor:
        """Return the chain's result for ``x``, (..., features)."""
        result: Tensor = _Rows.apply(self, x, *weights)  # type: ignore[no-untyped-call]
        return result


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: ChunkedRows, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.op, ctx.dtype = op, _lower_dtype(x)
        ctx.save_for_backward(x, *weights)
        rows = op.rows_of(x)
        result: Tensor | None = None
        for start, length in pieces_of(rows.shape[0], op.k):
            with _autocast(x, ctx.dtype):
                piece = op.ops(rows.narrow(0, start, length), *weights)
            if result is None:  # not a view of rows: an op that follows may write over it
                before = x.shape[:1] if op.images else (rows if op.flat else x).shape[:-1]
                result = piece.new_empty(*before, *piece.shape[1:])
            op.rows_of(result).narrow(0, start, length).copy_(piece)
            del piece
        assert result is not None, "a chain of no rows is not put in pieces"
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        op, needs = ctx.op, ctx.needs_input_grad[1:]
        rows, grad_rows = op.rows_of(x), op.rows_of(grad)
        grad_x = x.new_empty(x.shape) if needs[0] else None
        totals: list[Tensor | None] = [None] * len(weights)
        for start, length in pieces_of(rows.shape[0], op.k):
            piece = rows.narrow(0, start, length).detach().requires_grad_(needs[0])
            leaves = [w.detach().requires_grad_(need) for w, need in zip(weights, needs[1:], strict=True)]
            with torch.enable_grad(), _recording(), _autocast(x, ctx.dtype):
                result = op.ops(piece, *leaves)
            wanted = [leaf for leaf in (piece, *leaves) if leaf.requires_grad]
            found = iter(torch.autograd.grad(result, wanted, grad_rows.narrow(0, start, length)))
            del result, wanted
            if grad_x is not None:
                op.rows_of(grad_x).narrow(0, start, length).copy_(next(found))
            for place, leaf in enumerate(leaves):
                if leaf.requires_grad:
                    total, one = totals[place], next(found)
                    totals[place] = one if total is None else total.add_(one)
                    del total, one
            del found, piece, leaves
        return None, grad_x, *totals
