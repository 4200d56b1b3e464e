"""Chains of ops that treat each row by itself, run in pieces: heads with their loss, and MLPs (``allow=(..., "chunk")``).

In: a captured graph. Out: the graph in which such chains (:mod:`fxmem.passes.chunk_chains`) are one op of
:mod:`fxmem.runtime.chunked_ops` each.

Which are put in pieces, and in how many: heads first, since that takes no time, then MLPs too, whose forward runs once
more; k = 4, 16, 64, of the one or the other, until the step with all recomputed keeps the budget or its peak falls no
further. Chains with dropout inside are left alone (eager's mask is one draw for all rows). Not found are losses put
together from other ops, scores that are transposed or of float16, and layers in an autocast region of the model's own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxmem.capture.graph import CaptureGraph, with_graph
from fxmem.ir import ChoiceMade
from fxmem.passes.chunk_chains import (
    PARTS,
    SAME,
    SIZED_VIEWS,
    SLICES,
    VIEWS,
    Head,
    Mlp,
    heads_of,
    is_check,
    loss_arguments,
    mlps_of,
    value_of,
)
from fxmem.passes.context import CompileContext, Settings
from fxmem.planners.simulate import drop_all, simulate
from fxmem.runtime.chunked_ops import ChunkedLoss, ChunkedRows

aten = torch.ops.aten

PIECES = (4, 16, 64)
LEAST_GAIN = 0.01
"""More pieces must lower the peak by so much of itself."""

Chains = tuple[Head, ...] | tuple[Mlp, ...]


class Chunk:
    """Chains run in pieces (NOTE [Pieces] in :mod:`fxmem.runtime.chunked_ops`)."""

    name = "chunk"

    def enabled(self, settings: Settings) -> bool:
        return "chunk" in settings.allow

    def apply(self, graph: CaptureGraph, context: CompileContext) -> CaptureGraph:
        heads, left = heads_of(graph.graph_module.graph)
        kinds: list[Chains] = [chains for chains in (heads, mlps_of(graph.graph_module.graph)) if chains]
        whole = best = _Cut(graph, (0,) * len(kinds), _least_bytes(graph, context))
        while (cut := _cut_more(graph, context, kinds, best)) is not None:
            best = cut
            if best.peak_bytes <= (context.settings.plan_bytes or 0):
                break
        notes = [] if best is whole else [_made(kinds, best, whole.peak_bytes - best.peak_bytes)]
        return _with(best.graph, *notes, *(ChoiceMade("chunk", why, 0) for why in left))


@dataclass(frozen=True, slots=True)
class _Cut:
    """A graph with chains in pieces."""

    graph: CaptureGraph
    places: tuple[int, ...]
    """For each kind of chain: 0 if they are whole, else the place of their number in :data:`PIECES`, from 1."""
    peak_bytes: int
    """Of the step with all recomputed."""


def _cut_more(graph: CaptureGraph, context: CompileContext, kinds: Sequence[Chains], best: _Cut) -> _Cut | None:
    """Return the first of these that lowers the peak: more pieces of one kind of chain, or of all; None if none does."""
    more = [tuple(int(k == other) for other in range(len(kinds))) for k in range(len(kinds))]
    for by in dict.fromkeys((*more, (1,) * len(kinds))):
        places = tuple(map(operator.add, best.places, by))
        if max(places, default=len(PIECES) + 1) > len(PIECES):
            continue
        pieces = {
            chain: PIECES[place - 1] for chains, place in zip(kinds, places, strict=True) if place for chain in chains
        }
        made = in_pieces(graph, pieces)
        cut = _Cut(made, places, _least_bytes(made, context))
        if cut.peak_bytes <= (1 - LEAST_GAIN) * best.peak_bytes:
            return cut
    return None


def _with(graph: CaptureGraph, *made: ChoiceMade) -> CaptureGraph:
    return replace(graph, choices=(*graph.choices, *made)) if made else graph


def _least_bytes(graph: CaptureGraph, context: CompileContext) -> int:
    profile = context.profile_of(graph).profile
    return simulate(profile, drop_all(profile)).peak_bytes


def _made(kinds: Sequence[Chains], cut: _Cut, spared_bytes: int) -> ChoiceMade:
    parts = [
        f"{len(chains)} {'heads with a loss' if isinstance(chains[0], Head) else 'MLPs'} run in {PIECES[place - 1]} pieces"
        for chains, place in zip(kinds, cut.places, strict=True)
        if place
    ]
    what = f"{' and '.join(parts)}, which changes the order of sums over rows, of the step with all recomputed"
    return ChoiceMade("chunk", what, spared_bytes)


# -- what is written -----------------------------------------------------------------------------------------------------


def in_pieces(captured: CaptureGraph, pieces: Mapping[Head | Mlp, int]) -> CaptureGraph:
    """Return the captured graph with the chains of ``pieces`` as one op each, which runs them in so many pieces."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    ends = {chain.loss if isinstance(chain, Head) else chain.last: chain for chain in pieces}
    inside = {node for chain in ends.values() for node in chain.inside}
    for node in captured.graph_module.graph.nodes:
        if node in inside or (is_check(node) and inside & set(node.all_input_nodes)):
            continue
        chain = ends.get(node)
        if isinstance(chain, Head):
            env[node] = _write_head(graph, chain, pieces[chain], env)
        elif chain is not None:
            env[node] = _write_mlp(graph, chain, pieces[chain], env)
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
    return with_graph(captured, graph)


def _write_head(graph: fx.Graph, head: Head, k: int, env: dict[fx.Node, fx.Node]) -> fx.Node:
    x, weight, *bias = head.linear.args
    rows, width = env[x], value_of(x).shape[-1]  # type: ignore[index, union-attr]
    for node in head.between:  # views and slices are made of the rows that the linear layer reads
        if node.target in SIZED_VIEWS:
            shape: Any = node.args[1]
            sizes: Any = fx.map_arg(shape[:-1], env.__getitem__)
            rows = graph.call_function(aten.reshape.default, (rows, [*sizes, width]))
        elif node.target in VIEWS and callable(node.target):
            rows = graph.call_function(node.target, (rows, *node.args[1:]))
        elif node.target in SLICES:
            value = value_of(node)
            assert value is not None
            given: tuple[Any, ...] = (*node.args[1:], *(0, None, None)[len(node.args) - 1 :])
            dim, *bounds = fx.map_arg(given, env.__getitem__)
            rows = graph.call_function(aten.slice.Tensor, (rows, dim % value.dim(), *bounds))
        else:
            continue
        rows.meta = {key: value for key, value in node.meta.items() if key != "val"}
    target, class_weight, reduction, ignore_index, smoothing = loss_arguments(head.loss)
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
    before, after = value_of(mlp.x), value_of(mlp.last)
    assert before is not None
    assert after is not None
    op = ChunkedRows(k, _row_ops(nodes, mlp.x, weights), flat=after.dim() != before.dim(), images=mlp.images)
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
