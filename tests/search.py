"""How planners search in tests: briefly, and once for equal profiles, but where planning itself is tested.

Most tests ask for bits, bytes and errors, and any sound plan shows those. The default planner goes through all its stages
with little work for each; equal profiles get equal plans (tests/planners/test_frontiers.py), so the second time they are
remembered. The fixtures `whole_search` and `planned_anew` of tests/conftest.py bring back what users have.
"""

import functools
from collections.abc import Callable
from typing import Any

from fxmem.ir import FrontierPoint, GraphProfile
from fxmem.planners import frontier_cache, portfolio
from fxmem.planners.registry import PLANNERS

BRIEF = {"MOST_TRIALS": 200, "MOST_WINDOWS": 2}
"""Of the local search and its like, and of the neighbourhoods chosen anew."""
WHOLE = {name: getattr(portfolio, name) for name in BRIEF}
PLANNING_ANEW = dict(PLANNERS)


def search_briefly() -> None:
    """Let this process search briefly from now on."""
    for name, value in BRIEF.items():
        setattr(portfolio, name, value)


def plan_once() -> None:
    """Let this process remember the frontiers of all profiles from now on."""
    PLANNERS.update({name: _remembering(name, planner) for name, planner in PLANNING_ANEW.items()})


def _remembering(name: str, planner: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, tuple[FrontierPoint, ...]] = {}

    @functools.wraps(planner)
    def remembering(profile: GraphProfile, *, seconds: float) -> tuple[FrontierPoint, ...]:
        key = frontier_cache.key(profile, name, seconds), *(getattr(portfolio, limit) for limit in BRIEF)
        if key not in known:
            known[key] = planner(profile, seconds=seconds)
        return known[key]

    return remembering
