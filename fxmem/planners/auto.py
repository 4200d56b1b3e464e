"""The default planner: the best of all others."""

from __future__ import annotations

from fxmem.planners import chen
from fxmem.types import FrontierPoint, GraphProfile


def frontier(profile: GraphProfile, *, seconds: float) -> tuple[FrontierPoint, ...]:
    """Return the merged Pareto set of the other planners, found within ``seconds``."""
    return chen.frontier(profile, seconds=seconds)
