"""The captured graph as a picture: module by module in order of execution, sized by bytes, coloured by the plan.

In: a profile and a plan, or the :class:`GraphNode` list a report keeps of them. Out: a networkx graph and a matplotlib
figure of it. Nodes of one module that run one after another are drawn as one, at the greatest depth of module paths that
keeps the picture readable. An arrow is data that one group makes and another reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from fxmem.ir import KEEP, GraphProfile, Plan
from fxmem.report.plots import _done, pyplot

if TYPE_CHECKING:
    import networkx

KEPT_COLOUR, DROPPED_COLOUR, INPLACE_COLOUR, EMPTY_COLOUR = "#1d6fb8", "#f28e2b", "#2a9d6f", "#dfe3e8"
MOST_GROUPS = 45
"""More groups than this are collapsed one level of the module path further."""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node of the captured graph with what the plan does to the saved tensors it creates."""

    name: str
    op: str
    module_path: str
    reads: tuple[int, ...]
    """Nodes whose results it reads, by their place in the list."""
    kept_bytes: int
    """Of what it creates and autograd saves."""
    dropped_bytes: int
    nbytes: int
    """All that it creates."""
    seconds: float
    """Estimated time of one run."""
    source_line: str
    """The user's ``file:line``; empty when unknown."""


def graph_nodes(profile: GraphProfile, plan: Plan) -> tuple[GraphNode, ...]:
    """Return one :class:`GraphNode` for each node of ``profile`` that makes or changes a tensor."""
    last_writer: dict[int, int] = {}
    nodes: list[GraphNode] = []
    place: dict[int, int] = {}
    for node in profile.nodes:
        if not node.creates and not node.writes:
            continue  # a view: its readers read what it is a view of
        reads = tuple(dict.fromkeys(place[last_writer[s]] for s in node.reads if s in last_writer))
        last_writer.update(dict.fromkeys((*node.creates, *node.writes), node.index))
        place[node.index] = len(nodes)
        saved = [profile.storages[s] for s in node.creates if profile.storages[s].num_saves]
        kept = sum(s.nbytes for s in saved if plan.limits[s.index] == KEEP)
        nodes.append(
            GraphNode(
                name=node.name,
                op=node.op,
                module_path=node.source.module_path,
                reads=reads,
                kept_bytes=kept,
                dropped_bytes=sum(s.nbytes for s in saved) - kept,
                nbytes=sum(profile.storages[s].nbytes for s in node.creates),
                seconds=node.seconds,
                source_line=node.source.line,
            )
        )
    return tuple(nodes)


def collapsed(nodes: tuple[GraphNode, ...], depth: int | None = None) -> networkx.DiGraph:
    """Return the graph of groups, numbered in order of execution, with ``label``, ``kept_bytes`` and ``dropped_bytes``.

    ``depth``: how many parts of a module path to tell apart; default: as many as give at most ``MOST_GROUPS`` groups.
    """
    import networkx

    if depth is None:
        depth = max((node.module_path.count(".") + 1 for node in nodes), default=1)
        while depth > 1 and len(_groups(nodes, depth)) > MOST_GROUPS:
            depth -= 1
    graph = networkx.DiGraph()
    group_of: dict[int, int] = {}
    for g, (label, members) in enumerate(_groups(nodes, depth)):
        group_of.update(dict.fromkeys(members, g))
        graph.add_node(
            g,
            label=label,
            num_ops=len(members),
            kept_bytes=sum(nodes[i].kept_bytes for i in members),
            dropped_bytes=sum(nodes[i].dropped_bytes for i in members),
        )
    for i, node in enumerate(nodes):
        graph.add_edges_from((group_of[j], group_of[i]) for j in node.reads if group_of[j] != group_of[i])
    return graph


def _groups(nodes: tuple[GraphNode, ...], depth: int) -> list[tuple[str, list[int]]]:
    """Return (label, node indices) of runs of nodes whose module paths agree up to ``depth`` parts."""

    def path_of(i: int) -> str:
        return ".".join(nodes[i].module_path.split(".")[:depth])

    runs = [(path, list(run)) for path, run in groupby(range(len(nodes)), key=path_of)]
    return [(path or _ops_of([nodes[i] for i in run]), run) for path, run in runs]


def _ops_of(nodes: list[GraphNode]) -> str:
    """Name a run of ops of the outermost module by the first of them."""
    names = [node.op.removeprefix("aten.").split(".")[0] for node in nodes]
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def draw_graph(nodes: tuple[GraphNode, ...], depth: int | None = None) -> Any:
    """Return a figure of the collapsed graph: one row a group, disks sized by saved bytes, orange where dropped."""
    import networkx

    plt = pyplot()
    graph = collapsed(nodes, depth)
    num_rows = graph.number_of_nodes()
    figure, axes = plt.subplots(figsize=(7.5, max(2.5, 0.29 * num_rows + 0.9)), layout="constrained")
    positions = _positions(graph)
    largest = max((_saved(data) for _, data in graph.nodes(data=True)), default=0) or 1
    sizes = [12 + 420 * _saved(graph.nodes[g]) / largest for g in graph]
    for edge in graph.edges:
        networkx.draw_networkx_edges(
            graph, positions, [edge], ax=axes, node_size=sizes, edge_color="#9aa5b1", width=1.0, arrowsize=7,
            connectionstyle=f"arc3,rad={_bend(positions, edge)}",
        )  # fmt: skip
    for g, size in zip(graph, sizes, strict=True):
        _draw_disk(axes, positions[g], size, graph.nodes[g])
    label_width = 0.17 * max((len(data["label"]) for _, data in graph.nodes(data=True)), default=0)
    bytes_at = 1.6 + max(4.2, min(label_width, 8.0))
    for g, data in graph.nodes(data=True):
        axes.text(1.2, positions[g][1], data["label"], va="center", size=8.5)
        axes.text(bytes_at, positions[g][1], _bytes_text(data), va="center", size=8.5, color="#333")
    axes.text(1.2, 0.9, "module, in order of execution", va="center", size=8.5, color="#777")
    axes.text(bytes_at, 0.9, "saved for backward", va="center", size=8.5, color="#777")
    axes.set_xlim(-2.6, bytes_at + 4.4)
    axes.set_ylim(-num_rows, 1.4)
    for colour, text in (
        (KEPT_COLOUR, "kept"),
        (DROPPED_COLOUR, "dropped and recomputed"),
        (EMPTY_COLOUR, "nothing saved"),
    ):
        axes.scatter([], [], color=colour, edgecolors="#444", linewidths=0.6, label=text)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=8.5, title_fontsize=8.5)
    axes.axis("off")
    return _done(figure)


def _positions(graph: networkx.DiGraph) -> dict[int, tuple[float, float]]:
    """Place groups one below the other; those that could run side by side lie side by side."""
    import networkx

    positions = {}
    for generation in networkx.topological_generations(graph):
        for lane, g in enumerate(sorted(generation)):
            positions[g] = (0.45 * min(lane, 2), -float(g))
    return positions


def _bend(positions: dict[int, tuple[float, float]], edge: tuple[int, int]) -> float:
    """Neighbours are joined by a straight line; a skip bows to the left, the longer the less, for it is long already."""
    rows = positions[edge[0]][1] - positions[edge[1]][1]
    return 0.0 if rows <= 1 else -min(0.5, 0.03 + 2.2 / rows)


def _saved(data: Any) -> int:
    return int(data["kept_bytes"] + data["dropped_bytes"])


def _draw_disk(axes: Any, at: tuple[float, float], size: float, data: Any) -> None:
    """Draw a disk with a slice for what is dropped; ``size``: its area in square points."""
    saved = _saved(data)
    share = data["dropped_bytes"] / saved if saved else 0.0
    axes.scatter(*at, s=size, color=KEPT_COLOUR if saved else EMPTY_COLOUR, edgecolors="#444", linewidths=0.6, zorder=3)
    if share:
        angles = [math.pi / 2 - 2 * math.pi * share * i / 40 for i in range(41)]
        slice_ = [(0.0, 0.0)] * (share < 1) + [(math.cos(a), math.sin(a)) for a in angles]
        reach = max(max(abs(x), abs(y)) for x, y in slice_)
        axes.scatter(*at, marker=slice_, s=size * reach**2, color=DROPPED_COLOUR, linewidths=0, zorder=4)


def _bytes_text(data: Any) -> str:
    """Say how many bytes are kept and dropped; parts too small to see in the disk are left out."""
    parts = [(data[f"{what}_bytes"], what) for what in ("kept", "dropped")]
    return ", ".join(f"{nbytes / 1e6:.3g} MB {what}" for nbytes, what in parts if nbytes > 0.004 * _saved(data))
