"""Chains of ops that may run in pieces, found in a captured graph (:mod:`fxmem.passes.chunk`).

A *head* is a linear layer whose scores go, row by row, into a cross-entropy with classes as targets and nowhere else. An
*MLP* is one linear layer or several on one input, pointwise ops, and a linear layer on their result, wider between than at
its ends; or the same of convolutions, which treat each image by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxmem.capture.graph import source_of
from fxmem.op_facts.kinds import RowRole
from fxmem.op_facts.lookup import with_role
from fxmem.torch_private import OpOverload, schema_of

(LOSS,) = with_role(RowRole, "loss")
LINEARS = with_role(RowRole, "linear")
CONVOLUTIONS = with_role(RowRole, "convolution")
CASTS = with_role(RowRole, "cast")
SIZED_VIEWS = with_role(RowRole, "view to a size")
VIEWS = SIZED_VIEWS | with_role(RowRole, "view")
SAME = with_role(RowRole, "same")
PARTS = with_role(RowRole, "parts")
SLICES = with_role(RowRole, "slice")
CHECKS = with_role(RowRole, "check")
"""Of the last dimension: how gated MLPs take one linear layer's result apart."""


@dataclass(frozen=True, slots=True)
class Head:
    """A linear layer and its loss."""

    linear: fx.Node
    between: tuple[fx.Node, ...]
    """From the linear layer to the loss."""
    loss: fx.Node

    @property
    def inside(self) -> tuple[fx.Node, ...]:
        return (self.linear, *self.between)


@dataclass(frozen=True, slots=True)
class Mlp:
    """Linear layers on ``x``, what is done to their results, and the linear layer on that."""

    x: fx.Node
    inside: tuple[fx.Node, ...]
    """In the graph's order, without the last layer."""
    last: fx.Node
    images: bool = False
    """Whether its layers are convolutions: rows are images."""


def heads_of(graph: fx.Graph) -> tuple[tuple[Head, ...], tuple[str, ...]]:
    """Return the heads, and why others are left whole."""
    heads, left = [], []
    for loss in graph.find_nodes(op="call_function", target=LOSS):
        if not _has_classes(loss):
            continue
        between: list[fx.Node] = []
        node = loss.args[0]
        while isinstance(node, fx.Node) and not _is_linear(node) and _is_unary(node):
            between.insert(0, node)
            node = node.args[0]
        if not isinstance(node, fx.Node) or not _is_linear(node) or _is_half(node):
            continue
        head = Head(node, tuple(between), loss)
        outside = _first_outside((*head.inside, loss), head.inside)
        if not _is_calm(node, loss):
            continue
        if outside is None:
            heads.append(head)
        else:
            where = "an output of the model" if outside.op == "output" else f"read by {outside.name} too"
            left.append(
                f"the head at {source_of(node)} is whole: its scores are {where}. Return the loss alone, as in a module "
                "whose forward is `return model(**batch).loss`"
            )
    return tuple(heads), tuple(left)


def loss_arguments(loss: fx.Node) -> tuple[Any, ...]:
    """Return target, weight of classes, reduction (1: mean, 2: sum), index to ignore, and label smoothing."""
    _, target, *given = loss.args
    return (target, *given, *(None, 1, -100, 0.0)[len(given) :])


def _has_classes(loss: fx.Node) -> bool:
    """True of a loss of rows of scores, one class for each row, that is one number."""
    scores, target = (value_of(node) for node in loss.args[:2])
    return (
        not loss.kwargs
        and scores is not None
        and target is not None
        and scores.dim() == 2
        and target.dim() == 1
        and not target.is_floating_point()
        and loss_arguments(loss)[2] in (1, 2)
    )


def _is_half(node: fx.Node) -> bool:
    """True of scores whose gradient, before it is scaled, may be too small for their dtype."""
    value = value_of(node)
    return value is None or value.dtype == torch.float16


def _is_unary(node: fx.Node) -> bool:
    """True of ops that do something to each row of their one tensor, or choose rows."""
    if node.target in VIEWS:
        return _keeps_rows(node)
    if node.target in SLICES:
        value = value_of(node)
        return value is not None and not _is_last(node.args[1] if len(node.args) > 1 else 0, value)
    return (node.target in CASTS or node.target in SAME or _is_pointwise(node)) and len(node.all_input_nodes) == 1


def _keeps_rows(node: fx.Node) -> bool:
    """True of a view that leaves the last dimension as it is."""
    value, before = value_of(node), value_of(node.args[0])
    return value is not None and before is not None and value.dim() > 0 and value.shape[-1] == before.shape[-1]


def _is_pointwise(node: fx.Node) -> bool:
    op = node.target
    return isinstance(op, OpOverload) and torch.Tag.pointwise in op.tags and not schema_of(op).is_mutable


def mlps_of(graph: fx.Graph) -> tuple[Mlp, ...]:
    """Return the MLPs, none inside of another."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    found: list[Mlp] = []
    taken: set[fx.Node] = set()
    for last in graph.nodes:
        mlp = _mlp(last, order) if last.target in LINEARS else _images(last, order)
        if mlp is not None and not taken & {*mlp.inside, last}:
            found.append(mlp)
            taken |= {*mlp.inside, last}
    return tuple(found)


def _mlp(last: fx.Node, order: dict[fx.Node, int]) -> Mlp | None:
    inside: set[fx.Node] = set()
    first: set[fx.Node] = set()
    waiting = [_rows_of(last)]
    while waiting:
        node = waiting.pop()
        if node in inside:
            continue
        if node.target in LINEARS:
            first.add(node)
        elif _is_row_op(node):
            read = node.all_input_nodes[:1] if node.target in VIEWS else node.all_input_nodes
            waiting += [each for each in read if each.op != "get_attr"]
        else:
            return None
        inside.add(node)
    if len({_rows_of(node) for node in first}) != 1:
        return None
    x = _rows_of(next(iter(first)))
    widths = [value.shape[-1] for node in (x, last) if (value := value_of(node)) is not None]
    between = sum(value.shape[-1] for node in first if (value := value_of(node)) is not None)
    chain = tuple(sorted(inside, key=order.__getitem__))
    if len(widths) != 2 or between <= max(widths) or inside == first or _first_outside((*chain, last), chain):
        return None
    return Mlp(x, chain, last) if _is_calm(chain[0], last) else None


def _images(last: fx.Node, order: dict[fx.Node, int]) -> Mlp | None:
    """Return the chain of convolutions on one input, of what is pointwise, and of ``last``, a convolution on that."""
    if not _is_of_images(last):
        return None
    inside: set[fx.Node] = set()
    first: set[fx.Node] = set()
    waiting: list[Any] = [last.args[0]]
    while waiting:
        node = waiting.pop()
        if node in inside:
            continue
        if _is_of_images(node):
            first.add(node)
        elif _is_pointwise_of_images(node):
            waiting += [each for each in node.all_input_nodes if each.op != "get_attr"]
        else:
            return None
        inside.add(node)
    x = {node.args[0] for node in first}
    if len(x) != 1 or not isinstance(start := x.pop(), fx.Node) or inside == first:
        return None
    before, after = value_of(start), value_of(last)
    between = sum(value.numel() for node in first if (value := value_of(node)) is not None)
    chain = tuple(sorted(inside, key=order.__getitem__))
    if before is None or after is None or between <= max(before.numel(), after.numel()):
        return None
    if _first_outside((*chain, last), chain) or not (before.is_contiguous() and after.is_contiguous()):
        return None
    return Mlp(start, chain, last, images=True) if _is_calm(chain[0], last) else None


def _is_of_images(node: Any) -> bool:
    """True of a convolution of a batch."""
    if not isinstance(node, fx.Node) or node.target not in CONVOLUTIONS:
        return False
    value, weight = value_of(node), value_of(node.args[1])
    return value is not None and weight is not None and value.dim() == weight.dim()


def _is_pointwise_of_images(node: fx.Node) -> bool:
    """True of ops that make an image of one, each by itself; what they read else is the same for all."""
    value = value_of(node)
    if node.target in CASTS or node.target in SAME:
        return True
    if not _is_pointwise(node) or value is None:
        return False
    others = [(each, other) for each in node.all_input_nodes if (other := value_of(each)) is not None]
    return all(
        other.dim() < value.dim() or (other.dim() == value.dim() and other.shape[0] == 1)
        if each.op == "get_attr"
        else other.shape == value.shape
        for each, other in others
    )


def _is_calm(first: fx.Node, last: fx.Node) -> bool:
    """True if nothing is written over between two nodes: what is read at the first may be read at the last."""
    node = first
    while node is not last:
        if isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable:
            return False
        node = node.next
    return True


def _is_linear(node: fx.Node) -> bool:
    """True of a linear layer whose rows come first, not after a bias."""
    return (
        node.target in LINEARS and isinstance(node.target, OpOverload) and schema_of(node.target).name == "aten::linear"
    )


def _rows_of(linear: fx.Node) -> fx.Node:
    node = linear.args[0 if _is_linear(linear) else 1]
    assert isinstance(node, fx.Node)
    return node


def _is_row_op(node: fx.Node) -> bool:
    value = value_of(node)
    if node.target in VIEWS:
        return _keeps_rows(node)
    if node.target in PARTS:
        before = value_of(node.args[0])
        return before is not None and _is_last(node.args[2] if len(node.args) > 2 else 0, before)
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and node.args[0].target in PARTS
    if node.target in CASTS or node.target in SAME:
        return True
    if not _is_pointwise(node) or value is None:
        return False
    others = [other for each in node.all_input_nodes if (other := value_of(each)) is not None]
    return all(
        other.dim() <= 1 if each.op == "get_attr" else other.shape == value.shape
        for each, other in zip(node.all_input_nodes, others, strict=True)
    )


def _is_last(dim: Any, value: torch.Tensor) -> bool:
    return bool(dim % value.dim() == value.dim() - 1)


def _first_outside(chain: Iterable[fx.Node], inside: Iterable[fx.Node]) -> fx.Node | None:
    """Return a node that reads what is inside of a chain and is none of it; checks that return nothing do not count."""
    members = set(chain)
    return next((u for node in inside for u in node.users if u not in members and not is_check(u)), None)


def is_check(node: fx.Node) -> bool:
    return node.target in CHECKS


def value_of(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
