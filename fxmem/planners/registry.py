"""The planners, by name."""

from __future__ import annotations

from collections.abc import Callable

from fxmem.ir import FrontierPoint
from fxmem.planners import chen, mincut, portfolio, segment_dp

PLANNERS: dict[str, Callable[..., tuple[FrontierPoint, ...]]] = {
    "auto": portfolio.frontier,
    "chen": chen.frontier,
    "intervals": segment_dp.frontier,
    "mincut": mincut.frontier,
}
"""Functions of ``(profile, *, seconds)`` that return a Pareto set, peaks falling and seconds rising."""

AT_BUDGET: dict[str, Callable[..., tuple[FrontierPoint, ...]]] = {"auto": portfolio.at_budget}
"""Of planners that search for one budget, once the frontier is there: ``(profile, points, budget_bytes, *, seconds)``."""

AT_ONCE: dict[str, Callable[..., tuple[FrontierPoint, ...]]] = {"auto": mincut.frontier}
"""Of planners that start from what another one finds in a small part of their time: that one."""
