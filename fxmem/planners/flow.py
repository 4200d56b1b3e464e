"""The least cut between two vertices of a small network, from the largest flow between them (Dinic 1970).

In: the edges of a network, then capacities as often as wanted. Out: the value of the least cut and the vertices on the
source's side, as few as possible. In plain Python: the networks of planning have some tens to some hundreds of edges,
for which a sparse matrix costs more to make than the flow to find.
"""

from __future__ import annotations

from collections.abc import Sequence

SOURCE, SINK = 0, 1


class Flow:
    """The edges of a network, each with one back; ``tails[e]`` and ``heads[e]`` are the ends of edge ``e``."""

    def __init__(self, num_vertices: int, tails: Sequence[int], heads: Sequence[int]) -> None:
        self.ends: list[int] = []
        """Vertex that half-edge ``h`` leads to: ``2 e`` goes along edge ``e``, ``2 e + 1`` back."""
        self.leaving: list[list[int]] = [[] for _ in range(num_vertices)]
        """Half-edges by the vertex they start at."""
        for edge, (tail, head) in enumerate(zip(tails, heads, strict=True)):
            self.ends += (head, tail)
            self.leaving[tail].append(2 * edge)
            self.leaving[head].append(2 * edge + 1)
        self.short_ways = [
            (first, second)
            for first in self.leaving[SOURCE]
            for second in self.leaving[self.ends[first]]
            if self.ends[second] == SINK
        ]

    def least_cut(self, capacities: Sequence[int]) -> tuple[int, list[bool]]:
        """Return the value of the least cut and, for each vertex, whether it is on the source's side."""
        residual = [0] * (2 * len(capacities))
        residual[::2] = capacities
        value = sum(_push(way, residual) for way in self.short_ways)
        while True:
            levels = self._levels(residual)
            if not levels[SINK]:
                return value, [level > 0 for level in levels]
            value += self._block(residual, levels)

    def _levels(self, residual: list[int]) -> list[int]:
        """Return for each vertex one more than its distance from the source; 0 if it is no nearer than the sink."""
        ends, levels = self.ends, [0] * len(self.leaving)
        levels[SOURCE] = 1
        queue = [SOURCE]
        for vertex in queue:
            next_level = levels[vertex] + 1
            for half in self.leaving[vertex]:
                if residual[half] and not levels[ends[half]]:
                    levels[ends[half]] = next_level
                    queue.append(ends[half])
            if levels[SINK]:
                break
        return levels

    def _block(self, residual: list[int], levels: list[int]) -> int:
        """Fill every shortest way, one edge of each to its capacity; return the flow this adds."""
        ends, value = self.ends, 0
        untried = list(map(iter, self.leaving))
        way: list[int] = []
        vertex = SOURCE
        while True:
            if vertex == SINK:
                value += _push(way, residual)
                filled = next(place for place, half in enumerate(way) if not residual[half])
                vertex = ends[way[filled] ^ 1]
                del way[filled:]
            for half in untried[vertex]:
                if residual[half] and levels[ends[half]] == levels[vertex] + 1:
                    way.append(half)
                    vertex = ends[half]
                    break
            else:
                if not way:
                    return value
                vertex = ends[way.pop() ^ 1]


def _push(way: Sequence[int], residual: list[int]) -> int:
    """Send as much as fits along half-edges that lead on from each other; return it."""
    amount = min([residual[half] for half in way])
    for half in way:
        residual[half] -= amount
        residual[half ^ 1] += amount
    return amount
