"""Frontiers kept on disk: the same graph is not planned twice.

In: a profile, a planner's name, its seconds. Out: the frontier found before, or None. The key is a digest of all that
planners look at, and of the planners' own source, so that another version of them plans anew.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

from fxmem import disk_cache
from fxmem.ir import FrontierPoint, GraphProfile, Plan
from fxmem.planners.simulate import check_limits

KIND = "frontier"

Points = tuple[FrontierPoint, ...]


def kept(profile: GraphProfile, planner: str, seconds: float, find: Callable[[], Points]) -> Points:
    """Return the frontier stored for this profile; if there is none, what ``find`` returns, which is stored."""
    points = load(profile, planner, seconds)
    if points is None:
        points = find()
        store(profile, planner, seconds, points)
    return points


def load(profile: GraphProfile, planner: str, seconds: float) -> Points | None:
    """Return the frontier stored for this profile, if there is a sound one."""
    text = disk_cache.read(KIND, key(profile, planner, seconds))
    if text is None:
        return None
    try:
        points = tuple(
            FrontierPoint(Plan(str(name), tuple(map(int, limits))), int(peak_bytes), float(recompute_seconds))
            for name, limits, peak_bytes, recompute_seconds in json.loads(text)
        )
        for point in points:
            check_limits(profile, point.plan)
    except (ValueError, TypeError):
        return None
    return points or None


def store(profile: GraphProfile, planner: str, seconds: float, points: Points) -> None:
    """Keep a frontier for the next time."""
    rows = [(p.plan.planner, p.plan.limits, p.peak_bytes, p.recompute_seconds) for p in points]
    disk_cache.write(KIND, key(profile, planner, seconds), json.dumps(rows, separators=(",", ":")))


def key(profile: GraphProfile, planner: str, seconds: float) -> str:
    storages = [(s.nbytes, s.creator, s.internal, s.recipe, s.num_saves) for s in profile.storages]
    nodes = [(n.reads, n.creates, n.saves) for n in profile.nodes]
    recipes = [(r.nodes, r.inputs, r.products, r.seconds, r.peak_bytes, r.capture_peak_bytes) for r in profile.recipes]
    ticks = [
        (t.phase.value, t.node, t.unpacks, t.start_bytes, t.peak_bytes, t.creates, t.last_used, t.releases)
        for t in profile.ticks
    ]
    return disk_cache.digest(_source(), planner, repr(seconds), repr(storages), repr(nodes), repr(recipes), repr(ticks))


@functools.cache
def _source() -> str:
    """Return a digest of the code that decides what a frontier is."""
    return disk_cache.digest_of_source("fxmem.planners")
