"""Chains of ops that treat each row by itself, run in pieces: heads with their loss, and MLPs (``allow=(..., "chunk")``).

In: a captured graph. Out: the graph in which such chains are one op of :mod:`fxmem.runtime.chunked_ops` each. A *head* is
a linear layer whose scores go, row by row, into a cross-entropy with classes as targets and nowhere else. An *MLP* is one
linear layer or several on one input, pointwise ops, and a linear layer on their result, wider between than at its ends.

Which are put in pieces, and in how many: heads first, since that takes no time, then MLPs too, whose forward runs once
more; each with k = 4, 16, 64, until the step with all recomputed keeps the budget or its peak falls no further. Chains with
dropout inside are left alone (eager's mask is one draw for all rows). Not found are losses put together from other ops,
scores that are transposed or of float16, convolutions, and layers in an autocast region of the model's own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxmem.capture.graph import CaptureGraph, source_of, with_unused_state
from fxmem.ir import ChoiceMade
from fxmem.op_facts.kinds import RowRole
from fxmem.op_facts.lookup import with_role
from fxmem.passes.context import CompileContext, Settings
from fxmem.planners.simulate import drop_all, simulate
from fxmem.runtime.chunked_ops import ChunkedLoss, ChunkedRows
from fxmem.torch_private import OpOverload, schema_of

aten = torch.ops.aten

(LOSS,) = with_role(RowRole, "loss")
LINEARS = with_role(RowRole, "linear")
CASTS = with_role(RowRole, "cast")
SIZED_VIEWS = with_role(RowRole, "view to a size")
VIEWS = SIZED_VIEWS | with_role(RowRole, "view")
SAME = with_role(RowRole, "same")
PARTS = with_role(RowRole, "parts")
SLICES = with_role(RowRole, "slice")
CHECKS = with_role(RowRole, "check")
"""Of the last dimension: how gated MLPs take one linear layer's result apart."""

HEAD_PIECES = (4, 16, 64)
MLP_PIECES = (4, 16)
LEAST_GAIN = 0.01
"""More pieces must lower the peak by so much of itself."""


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


class Chunk:
    """Chains run in pieces (NOTE [Pieces] in :mod:`fxmem.runtime.chunked_ops`)."""

    name = "chunk"

    def enabled(self, settings: Settings) -> bool:
        return "chunk" in settings.allow

    def apply(self, graph: CaptureGraph, context: CompileContext) -> CaptureGraph:
        heads, left = heads_of(graph.graph_module.graph)
        mlps = mlps_of(graph.graph_module.graph)
        whole_bytes = best_bytes = _least_bytes(graph, context)
        best, what = graph, ""
        stages: list[tuple[tuple[Head | Mlp, ...], tuple[int, ...]]] = []
        stages += [(heads, HEAD_PIECES)] if heads else []
        stages += [((*heads, *mlps), MLP_PIECES)] if mlps else []
        for chains, pieces in stages:
            for k in pieces:
                if what and best_bytes <= (context.settings.budget_bytes or 0):
                    break
                made = in_pieces(graph, chains, k)
                nbytes = _least_bytes(made, context)
                if nbytes > (1 - LEAST_GAIN) * best_bytes:
                    break
                best, best_bytes, what = made, nbytes, _said(chains, k)
        notes = (
            [ChoiceMade("chunk", f"{what}, of the step with all recomputed", whole_bytes - best_bytes)] if what else []
        )
        return _with(best, *notes, *(ChoiceMade("chunk", why, 0) for why in left))


def _with(graph: CaptureGraph, *made: ChoiceMade) -> CaptureGraph:
    return replace(graph, choices=(*graph.choices, *made)) if made else graph


def _least_bytes(graph: CaptureGraph, context: CompileContext) -> int:
    profile = context.profile_of(graph).profile
    return simulate(profile, drop_all(profile)).peak_bytes


def _said(chains: Sequence[Head | Mlp], k: int) -> str:
    num_heads = sum(isinstance(chain, Head) for chain in chains)
    parts = [f"{n} {name}" for n, name in ((num_heads, "heads with a loss"), (len(chains) - num_heads, "MLPs")) if n]
    return f"{' and '.join(parts)} run in {k} pieces, which changes the order of sums over rows"


# -- what is found -------------------------------------------------------------------------------------------------------


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


def _loss_arguments(loss: fx.Node) -> tuple[Any, ...]:
    """Return target, weight of classes, reduction (1: mean, 2: sum), index to ignore, and label smoothing."""
    _, target, *given = loss.args
    return (target, *given, *(None, 1, -100, 0.0)[len(given) :])


def _has_classes(loss: fx.Node) -> bool:
    """True of a loss of rows of scores, one class for each row, that is one number."""
    scores, target = (_value(node) for node in loss.args[:2])
    return (
        not loss.kwargs
        and scores is not None
        and target is not None
        and scores.dim() == 2
        and target.dim() == 1
        and not target.is_floating_point()
        and _loss_arguments(loss)[2] in (1, 2)
    )


def _is_half(node: fx.Node) -> bool:
    """True of scores whose gradient, before it is scaled, may be too small for their dtype."""
    value = _value(node)
    return value is None or value.dtype == torch.float16


def _is_unary(node: fx.Node) -> bool:
    """True of ops that do something to each row of their one tensor, or choose rows."""
    if node.target in VIEWS:
        return _keeps_rows(node)
    if node.target in SLICES:
        value = _value(node)
        return value is not None and not _is_last(node.args[1] if len(node.args) > 1 else 0, value)
    return (node.target in CASTS or node.target in SAME or _is_pointwise(node)) and len(node.all_input_nodes) == 1


def _keeps_rows(node: fx.Node) -> bool:
    """True of a view that leaves the last dimension as it is."""
    value, before = _value(node), _value(node.args[0])
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
        if last.target in LINEARS and (mlp := _mlp(last, order)) and not taken & {*mlp.inside, last}:
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
    widths = [value.shape[-1] for node in (x, last) if (value := _value(node)) is not None]
    between = sum(value.shape[-1] for node in first if (value := _value(node)) is not None)
    chain = tuple(sorted(inside, key=order.__getitem__))
    if len(widths) != 2 or between <= max(widths) or inside == first or _first_outside((*chain, last), chain):
        return None
    return Mlp(x, chain, last) if _is_calm(chain[0], last) else None


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
    value = _value(node)
    if node.target in VIEWS:
        return _keeps_rows(node)
    if node.target in PARTS:
        before = _value(node.args[0])
        return before is not None and _is_last(node.args[2] if len(node.args) > 2 else 0, before)
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and node.args[0].target in PARTS
    if node.target in CASTS or node.target in SAME:
        return True
    if not _is_pointwise(node) or value is None:
        return False
    others = [other for each in node.all_input_nodes if (other := _value(each)) is not None]
    return all(
        other.dim() <= 1 if each.op == "get_attr" else other.shape == value.shape
        for each, other in zip(node.all_input_nodes, others, strict=True)
    )


def _is_last(dim: Any, value: torch.Tensor) -> bool:
    return bool(dim % value.dim() == value.dim() - 1)


def _first_outside(chain: Iterable[fx.Node], inside: Iterable[fx.Node]) -> fx.Node | None:
    """Return a node that reads what is inside of a chain and is none of it; checks that return nothing do not count."""
    members = set(chain)
    return next((u for node in inside for u in node.users if u not in members and not _is_check(u)), None)


def _is_check(node: fx.Node) -> bool:
    return node.target in CHECKS


def _value(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


# -- what is written -----------------------------------------------------------------------------------------------------


def in_pieces(captured: CaptureGraph, chains: Iterable[Head | Mlp], k: int) -> CaptureGraph:
    """Return the captured graph with ``chains`` as one op each, which runs them in ``k`` pieces."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    ends = {chain.loss if isinstance(chain, Head) else chain.last: chain for chain in chains}
    inside = {node for chain in ends.values() for node in chain.inside}
    for node in captured.graph_module.graph.nodes:
        if node in inside or (_is_check(node) and inside & set(node.all_input_nodes)):
            continue
        chain = ends.get(node)
        if isinstance(chain, Head):
            env[node] = _write_head(graph, chain, k, env)
        elif chain is not None:
            env[node] = _write_mlp(graph, chain, k, env)
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.lint()
    module = fx.GraphModule(captured.graph_module, graph, class_name="CaptureGraph")
    return replace(captured, graph_module=with_unused_state(module, captured.graph_module))


def _write_head(graph: fx.Graph, head: Head, k: int, env: dict[fx.Node, fx.Node]) -> fx.Node:
    x, weight, *bias = head.linear.args
    rows, width = env[x], _value(x).shape[-1]  # type: ignore[index, union-attr]
    for node in head.between:  # views and slices are made of the rows that the linear layer reads
        if node.target in SIZED_VIEWS:
            shape: Any = node.args[1]
            sizes: Any = fx.map_arg(shape[:-1], env.__getitem__)
            rows = graph.call_function(aten.reshape.default, (rows, [*sizes, width]))
        elif node.target in VIEWS and callable(node.target):
            rows = graph.call_function(node.target, (rows, *node.args[1:]))
        elif node.target in SLICES:
            value = _value(node)
            assert value is not None
            given: tuple[Any, ...] = (*node.args[1:], *(0, None, None)[len(node.args) - 1 :])
            dim, *bounds = fx.map_arg(given, env.__getitem__)
            rows = graph.call_function(aten.slice.Tensor, (rows, dim % value.dim(), *bounds))
        else:
            continue
        rows.meta = {key: value for key, value in node.meta.items() if key != "val"}
    target, class_weight, reduction, ignore_index, smoothing = _loss_arguments(head.loss)
    between = _row_ops([node for node in head.between if node.target not in VIEWS], head.linear, {})
    op = ChunkedLoss(k, between, "mean" if reduction == 1 else "sum", ignore_index, smoothing)
    others: Any = fx.map_arg((weight, bias[0] if bias else None, target, class_weight), env.__getitem__)
    made = graph.create_node("call_function", op, (rows, *others), {}, head.loss.name)
    made.meta = dict(head.loss.meta)
    return made


def _write_mlp(graph: fx.Graph, mlp: Mlp, k: int, env: dict[fx.Node, fx.Node]) -> fx.Node:
    nodes = (*mlp.inside, mlp.last)
    known = {*nodes, mlp.x}
    read = (each for node in nodes if node.target not in VIEWS for each in node.all_input_nodes)
    weights = list(dict.fromkeys(each for each in read if each not in known))
    before, after = _value(mlp.x), _value(mlp.last)
    assert before is not None
    assert after is not None
    op = ChunkedRows(k, _row_ops(nodes, mlp.x, weights), flat=after.dim() != before.dim())
    made = graph.create_node("call_function", op, (env[mlp.x], *(env[each] for each in weights)), {}, mlp.last.name)
    made.meta = dict(mlp.last.meta)
    return made


def _row_ops(nodes: Sequence[fx.Node], x: fx.Node, weights: Iterable[fx.Node]) -> fx.GraphModule:
    """Return what ``nodes`` do to rows of ``x``, (rows, features), with ``weights``."""
    graph = fx.Graph()
    env = {x: graph.placeholder("x")} | {each: graph.placeholder(f"w{i}") for i, each in enumerate(weights)}
    result = env[x]
    for node in nodes:
        if node.target in VIEWS or node.target in SAME or node.target in SLICES:
            result = env[node] = env[node.args[0]]  # type: ignore[index]
        else:
            result = env[node] = graph.node_copy(node, env.__getitem__)
            if node.target in PARTS:
                result.args = (*result.args[:2], -1)
    graph.output(result)
    return fx.GraphModule(torch.nn.Module(), graph, class_name="RowOps")
