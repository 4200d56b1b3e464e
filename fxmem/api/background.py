"""Quick plans, while better ones are searched for in the background, and how these take their places.

In: what is compiled under a quick plan. Out: what is compiled under the plan found, wherever the quick one was kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection

from fxmem.api.size_families import Family
from fxmem.errors import FxMemError, first_lines
from fxmem.pipeline import Compiled
from fxmem.planners.background import PlanningFailedError
from fxmem.user_frames import level_of_user


class Searches:
    """What is compiled under quick plans for one model, while others are searched for."""

    def __init__(self, model_name: str, beside: Searches | None = None) -> None:
        """``beside``: those for another step of the same model, one warning for both."""
        self._model_name = model_name
        self._quick: list[Compiled] = []
        self._failures: list[str] = [] if beside is None else beside._failures

    def note(self, compiled: Compiled) -> None:
        """Wait for the better plan of ``compiled``, if one is searched for."""
        if compiled.later is not None:
            self._quick.append(compiled)

    def found(
        self, families: Collection[Family], specializations: Collection[list[Compiled]], *, wait: bool
    ) -> list[tuple[Compiled, Compiled]]:
        """Put what is found by now, or with ``wait`` all, in the places of quick plans; return pairs (quick, found)."""
        pairs, waiting = [], []
        for quick in self._quick:
            if quick.later is None or not (wait or quick.later.planning.is_over):
                waiting.append(quick)
            elif any(plan.compiled is quick for family in families for plan in family.plans):
                found = self._found(quick)
                if found is not None:
                    pairs.append((quick, found))
        self._quick = waiting  # what is in no family any more was for parameters that the model has no longer
        for quick, found in pairs:
            _exchange(quick, found, families, specializations)
        return pairs

    def _found(self, quick: Compiled) -> Compiled | None:
        """Return what was searched for in place of ``quick``; None, with a warning, where nothing was found."""
        assert quick.later is not None
        try:
            return quick.later.compiled()
        except (PlanningFailedError, FxMemError) as error:
            self._failures.append(first_lines(error))
            if len(self._failures) > 1:
                return None
            warnings.warn(
                f"no plan was found in the background for {self._model_name} ({first_lines(error)}); training goes on "
                'under the quick plan, which keeps the budget. fxmem.optimize(..., plan="now") shows the error.',
                stacklevel=level_of_user(),
            )
            return None


def _exchange(
    quick: Compiled, found: Compiled, families: Collection[Family], specializations: Collection[list[Compiled]]
) -> None:
    assert found.planned is not None
    for family in families:
        if any(plan.compiled is quick for plan in family.plans):
            family.exchange(quick, found)
            family.planned.append(found.planned)
    for known in specializations:  # smaller sizes, which ran under the quick one too, are found again
        there = [found if one is quick else one for one in known]
        known[:] = [one for one in there if one.graph_module is not quick.graph_module]
