"""Segments of equal number or equal bytes, and nested segments: the classic, and every other planner's baseline.

In: a profile. Out: a frontier. Chen et al. 2016 (arXiv:1604.06174): section 4.1 (sqrt(n) segments), Algorithm 3 (segments
that end once they hold so many bytes) searched over its whole parameter, section 4.3 (recursion, O(log n) memory).
Differs from the paper in one point: it needs no candidate split points, since whatever crosses a segment's end is kept
(:mod:`fxmem.planners.cuts`). Not modelled: times; all of a segment is recomputed, be it cheap or dear.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from fxmem.ir import FrontierPoint, GraphProfile
from fxmem.planners.cuts import Spans, local_minima, nested_limits, segment_limits, spans_of
from fxmem.planners.pareto import Clock, judge_all
from fxmem.planners.simulate import keep_all

NUM_BYTE_LIMITS = 24
"""How many values of Algorithm 3's parameter are tried; a third of it on graphs of more than ``LONG`` recipes."""
LONG = 1_000
BRANCHINGS = (2, 3, 4, 6)
"""Into how many parts the recursion splits a segment."""
MAX_DEPTH = 12


def frontier(profile: GraphProfile, *, seconds: float) -> tuple[FrontierPoint, ...]:
    """Return the Pareto set of all segmentations tried, within ``seconds`` of CPU time."""
    return judge_all(profile, "chen", _candidates(profile), Clock(seconds))


def _candidates(profile: GraphProfile) -> Iterator[tuple[int, ...]]:
    yield keep_all(profile).limits
    spans = spans_of(profile)
    allowed = local_minima(spans)
    for cuts in (*_equal_number(spans, allowed), *_equal_bytes(profile, spans, allowed)):
        yield segment_limits(profile, spans, cuts)
        yield segment_limits(profile, spans, cuts, keep_last=True)
    for levels in _recursive(spans, allowed):
        yield nested_limits(profile, spans, levels)


def _equal_number(spans: Spans, allowed: list[int]) -> Iterator[list[int]]:
    """Section 4.1: k segments of equal length, for k around sqrt(n) and at most that of all allowed cuts."""
    root = max(1, round(spans.num_positions**0.5))
    for num_segments in sorted({1, 2, 3, max(1, root // 4), max(1, root // 2), root, 2 * root, 4 * root}):
        yield nearest_cuts(allowed, 0, spans.num_positions, num_segments)


def nearest_cuts(allowed: list[int], start: int, end: int, num_segments: int) -> list[int]:
    """Return the allowed cuts nearest to those that would part ``start``..``end`` equally."""
    inside = [c for c in allowed if start < c < end]
    if len(inside) < num_segments:
        return inside
    wanted = [start + (end - start) * k / num_segments for k in range(1, num_segments)]
    return sorted({min(inside, key=lambda c, w=w: abs(c - w)) for w in wanted})  # type: ignore[misc]


def _equal_bytes(profile: GraphProfile, spans: Spans, allowed: list[int]) -> Iterator[list[int]]:
    """Algorithm 3: a segment ends at the first allowed cut at which its dropped bytes exceed the limit."""
    dropped_bytes = [0] * (spans.num_positions + 1)
    for s in profile.storages:
        if s.recipe is not None and s.num_saves:
            dropped_bytes[s.recipe] += s.nbytes
    total_bytes, least_bytes = sum(dropped_bytes), max(1, max(dropped_bytes))
    ratio = max(1.0, total_bytes / least_bytes)
    num_limits = NUM_BYTE_LIMITS if spans.num_positions <= LONG else NUM_BYTE_LIMITS // 3
    for k in range(num_limits):
        limit_bytes = least_bytes * ratio ** (k / num_limits)
        yield _cuts_by_bytes(dropped_bytes, set(allowed), limit_bytes)


def _cuts_by_bytes(dropped_bytes: list[int], allowed: set[int], limit_bytes: float) -> list[int]:
    cuts, held_bytes = [], 0
    for position, nbytes in enumerate(dropped_bytes):
        if held_bytes > limit_bytes and position in allowed:
            cuts.append(position)
            held_bytes = 0
        held_bytes += nbytes
    return cuts


def _recursive(spans: Spans, allowed: list[int]) -> Iterator[list[list[int]]]:
    """Section 4.3: every segment is split again, to every depth until nothing is left to split."""
    for branching in BRANCHINGS if spans.num_positions <= LONG else BRANCHINGS[::2]:
        levels = [nearest_cuts(allowed, 0, spans.num_positions, branching)]
        for _ in range(MAX_DEPTH):
            finer = _split(levels[-1], spans.num_positions, allowed, branching)
            if finer == levels[-1]:
                break
            levels.append(finer)
            yield list(levels)


def _split(cuts: list[int], num_positions: int, allowed: list[int], branching: int) -> list[int]:
    edges = [0, *cuts, num_positions]
    finer = set(cuts)
    for start, end in pairwise(edges):
        finer.update(nearest_cuts(allowed, start, end, branching))
    return sorted(finer)
