"""The graph as JSON for Google's Model Explorer: a graph collection, and node data to be laid over it.

In: the nodes of a report. Out: two files. The first is a collection of one graph, ``fxmem``: nodes in the namespaces of
their modules, each read an incoming edge, what is known of a node as attributes, its colour what the plan does with it. The
second has, for that graph, the bytes that autograd saves of each node, as a number on a colour scale. Fields are those of
``GraphCollection`` and ``GraphNodeData`` in that project's ``graph_builder.py`` and ``node_data_builder.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from typing import Any

from fxmem.ir import InplaceDecision
from fxmem.report.graph import DROPPED_COLOUR, EMPTY_COLOUR, INPLACE_COLOUR, KEPT_COLOUR, GraphNode

GRAPH_ID = "fxmem"
COLOURS = {"kept": KEPT_COLOUR, "recomputed": DROPPED_COLOUR, "in place": INPLACE_COLOUR, "nothing saved": EMPTY_COLOUR}


def write_model_explorer(
    nodes: Sequence[GraphNode],
    inplace: Sequence[InplaceDecision],
    path: str | PathLike[str],
    data_path: str | PathLike[str] | None = None,
) -> None:
    """Write the graph to ``path`` and, where it is given, the node data to ``data_path``."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(graph_collection(nodes, inplace), file)
    if data_path is not None:
        with open(data_path, "w", encoding="utf-8") as file:
            json.dump(node_data(nodes), file)


def graph_collection(nodes: Sequence[GraphNode], inplace: Sequence[InplaceDecision]) -> dict[str, Any]:
    """Return the graph as a collection of one graph."""
    in_place = {decision.node for decision in inplace if not decision.why_not}
    return {
        "label": GRAPH_ID,
        "graphs": [{"id": GRAPH_ID, "nodes": [_node(nodes, node, node.name in in_place) for node in nodes]}],
    }


def node_data(nodes: Sequence[GraphNode]) -> dict[str, Any]:
    """Return the bytes that autograd saves of each node of which it saves any."""
    saved = {node.name: node.kept_bytes + node.dropped_bytes for node in nodes}
    return {
        GRAPH_ID: {
            "name": "bytes saved for the backward",
            "results": {name: {"value": nbytes} for name, nbytes in saved.items() if nbytes},
            "gradient": [{"stop": 0, "bgColor": "#ffffff"}, {"stop": 1, "bgColor": KEPT_COLOUR}],
        }
    }


def decision_of(node: GraphNode, in_place: bool) -> str:
    """Return what the plan does with a node, a key of :data:`COLOURS`: one that is partly recomputed is recomputed."""
    if node.dropped_bytes:
        return "recomputed"
    if node.kept_bytes:
        return "kept"
    return "in place" if in_place else "nothing saved"


def _node(nodes: Sequence[GraphNode], node: GraphNode, in_place: bool) -> dict[str, Any]:
    decision = decision_of(node, in_place)
    attributes = {
        "op": node.op,
        "plan": decision,
        "in place": "yes" if in_place else "no",
        "bytes created": str(node.nbytes),
        "bytes kept": str(node.kept_bytes),
        "bytes recomputed": str(node.dropped_bytes),
        "seconds": f"{node.seconds:.3g}",
        "source line": node.source_line,
    }
    return {
        "id": node.name,
        "label": node.name,
        "namespace": node.module_path.replace(".", "/"),
        "incomingEdges": [
            {"sourceNodeId": nodes[read].name, "sourceNodeOutputId": "0", "targetNodeInputId": str(i)}
            for i, read in enumerate(node.reads)
        ],
        "attrs": [{"key": key, "value": value} for key, value in attributes.items() if value],
        "style": {"backgroundColor": COLOURS[decision]},
    }
