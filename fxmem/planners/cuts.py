"""Where a graph may be cut into runs of recipes, and what must be kept at each cut.

In: a :class:`GraphProfile`. Out: for every storage the *span* of recipe positions in which it is made and needed, for
every position the bytes that cross it, and plans of whole segments. No articulation points are needed: whatever crosses
a cut is kept as a boundary, so a recomputation never leaves its segment.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from fxmem.ir import KEEP, GraphProfile


@dataclass(frozen=True, slots=True)
class Spans:
    """For each storage, the positions between which it is made and needed. A cut at ``c`` parts ``c - 1`` from ``c``."""

    num_positions: int
    first: tuple[int, ...]
    """Position of the recipe that makes it (of the next recipe, if it has none)."""
    last: tuple[int, ...]
    """Last position whose recipe reads it or whose node saves it; at least ``first``."""
    crossing_bytes: tuple[int, ...]
    """For each position ``c``, the bytes a cut there would have to keep; entry 0 is 0."""

    def crosses(self, storage: int, cut: int) -> bool:
        return self.first[storage] < cut <= self.last[storage]


def spans_of(profile: GraphProfile) -> Spans:
    """Return the spans of all storages and the bytes that cross every position."""
    position = node_positions(profile)
    first = [position[s.creator] if s.recipe is None else s.recipe for s in profile.storages]
    last = list(first)
    for recipe in profile.recipes:
        for s in recipe.inputs:
            last[s] = max(last[s], recipe.index)
    for node in profile.nodes:
        for s in node.saves:
            last[s] = max(last[s], position[node.index])
    num_positions = len(profile.recipes)
    change = np.zeros(num_positions + 2, dtype=np.int64)
    for storage in profile.storages:
        start, end = first[storage.index], last[storage.index]
        if storage.recipe is not None and end > start:
            change[start + 1] += storage.nbytes
            change[end + 1] -= storage.nbytes
    crossing = np.cumsum(change)[: num_positions + 1]
    return Spans(num_positions, tuple(first), tuple(last), tuple(int(b) for b in crossing))


def node_positions(profile: GraphProfile) -> list[int]:
    """Return for each node the position of its recipe; of the next recipe that ends, if it belongs to none."""
    ends = [recipe.nodes[-1] for recipe in profile.recipes]
    positions = [bisect_left(ends, node.index) for node in profile.nodes]
    for recipe in profile.recipes:
        for node_index in recipe.nodes:
            positions[node_index] = recipe.index
    return positions


def local_minima(spans: Spans) -> list[int]:
    """Return the positions where no neighbour is crossed by fewer bytes, ends excluded."""
    crossing = spans.crossing_bytes
    inner = range(1, spans.num_positions)
    return [c for c in inner if crossing[c] <= crossing[c - 1] or c == 1 if crossing[c] <= crossing[c + 1]]


def segment_limits(profile: GraphProfile, spans: Spans, cuts: list[int], *, keep_last: bool = False) -> tuple[int, ...]:
    """Return the plan that keeps what crosses ``cuts`` and refills the rest on the way.

    ``keep_last`` keeps the last segment whole: backward needs it at once, so dropping it often saves nothing.
    """
    return nested_limits(profile, spans, [cuts], keep_last=keep_last)


def nested_limits(
    profile: GraphProfile, spans: Spans, levels: list[list[int]], *, keep_last: bool = False
) -> tuple[int, ...]:
    """Return the plan of nested segments: ``levels`` are ever finer cuts, each level containing the one before.

    What crosses a cut of the outermost level is kept. What crosses only inner cuts is held by recomputations for
    targets of its enclosing segment; the rest by those for targets of its innermost one.
    """
    num_positions = spans.num_positions
    last_start = levels[0][-1] if levels[0] else 0
    ends = [[*cuts, num_positions] for cuts in levels]
    limits = []
    for storage in profile.storages:
        first, last = spans.first[storage.index], spans.last[storage.index]
        limit = KEEP
        if storage.recipe is not None and not (keep_last and first >= last_start):
            for level_ends in ends:
                end = level_ends[bisect_right(level_ends, first)]
                if last >= end:
                    break
                limit = end - 1
        limits.append(limit)
    return tuple(limits)
