"""Planners: from a profile to a frontier of plans, each judged by the simulator. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable

from fxmem.planners import auto, chen, intervals, mincut
from fxmem.planners.frontier import cheapest_within, pareto
from fxmem.types import FrontierPoint

PLANNERS: dict[str, Callable[..., tuple[FrontierPoint, ...]]] = {
    "auto": auto.frontier,
    "chen": chen.frontier,
    "intervals": intervals.frontier,
    "mincut": mincut.frontier,
}
"""By name: functions of ``(profile, *, seconds)`` that return a Pareto set, peaks falling and seconds rising."""

__all__ = ["PLANNERS", "cheapest_within", "pareto"]
