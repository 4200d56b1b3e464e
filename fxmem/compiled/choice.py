"""Which plan of a frontier a compiled step takes: the cheapest whose lowered step keeps the budget.

In: a frontier, a function that lowers a plan and runs it on fakes. Out: a plan with its :class:`StepRun`.

NOTE [Monotone budgets]

1. Candidates are a fixed, small part of the frontier, whatever the budget: the first keeps all, the last is the deepest.
2. A candidate fits a budget where neither its lowered step takes more, nor its plan as the planner sees it, less what the
   planner sees too much where all is kept. The second is known without lowering, and is of no budget's doing either.
   Of the deepest one only what is lowered counts, so that nothing is refused that fits.
3. Keeping all is tried first. Where it takes no more than the end of the step, which no plan changes, nothing takes less,
   and a budget below that fits nothing. Else the candidates are bisected for the cheapest that fits.
4. Of two budgets, what fits the lower fits the higher; up to the first candidate that tells them apart they are bisected
   alike, and from there on the higher one goes to cheaper candidates, the lower to dearer ones. So more bytes never cost
   more time, though peaks of lowered plans need not fall as the planner's do.
5. Therefore bisecting may miss what fits a low budget. Where it finds nothing, the least budget is looked for that it finds
   something for, whatever the budget asked for; what it finds then is the cheapest candidate that lower budgets take. It
   and the dearer ones are tried in turn. Again a higher budget gets no dearer one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fxmem.compiled.fakerun import StepRun
from fxmem.ir import FrontierPoint
from fxmem.planners.pareto import cheapest_within

NUM_CANDIDATES = 32
"""So that a budget takes one lowering if all fits, else at most six, or more where bisecting finds none."""

NEAR = 1.002
"""Times the end of the step: where keeping all takes no more, no deeper plan is lowered to find a lesser budget to name."""

Run = Callable[[FrontierPoint], StepRun]
"""Lowers a plan and runs it on fakes."""


@dataclass(slots=True)
class Candidates:
    """Candidates of one graph, and what was seen of them."""

    points: tuple[FrontierPoint, ...]
    """Peaks falling, seconds rising."""
    runs: dict[int, StepRun] = field(default_factory=dict)
    """By place in ``points``."""

    @staticmethod
    def of(frontier: Sequence[FrontierPoint]) -> Candidates:
        """Return points with peaks at even distances."""
        most, least = frontier[0].peak_bytes, frontier[-1].peak_bytes
        found: dict[FrontierPoint, None] = {frontier[0]: None}
        for i in range(1, NUM_CANDIDATES):
            point = cheapest_within(frontier, most - (most - least) * i // (NUM_CANDIDATES - 1))
            assert point is not None
            found[point] = None
        return Candidates(tuple(found))

    def cheapest_within(self, budget_bytes: float, run: Run) -> int | None:
        """Return the place of the candidate to take (NOTE [Monotone budgets]); None if none fits."""
        if self.needed_bytes(0, run) > budget_bytes and self.runs[0].floor_bytes > budget_bytes:
            return None
        place = self._bisected(budget_bytes, run)
        if place is not None:
            return place
        deeper = range(self._first_deeper(run), len(self.points))
        return next((i for i in deeper if self._fits(i, budget_bytes, run)), None)

    def least_bytes(self, run: Run) -> int:
        """Return the least budget that :meth:`cheapest_within` finds a candidate for, or one at most :data:`NEAR` it."""
        if (needed_bytes := self.needed_bytes(0, run)) <= NEAR * self.runs[0].floor_bytes:
            return needed_bytes
        deeper = range(self._first_deeper(run), len(self.points))
        return self._least_needed(reversed(deeper), run)

    def _bisected(self, budget_bytes: float, run: Run) -> int | None:
        if self.needed_bytes(0, run) <= budget_bytes:
            return 0
        best, low, high = None, 1, len(self.points)
        while low < high:
            middle = (low + high) // 2
            if self._fits(middle, budget_bytes, run):
                best = high = middle
            else:
                low = middle + 1
        return best

    def _first_deeper(self, run: Run) -> int:
        """Return what bisecting finds for the least budget that it finds something for."""
        tried, low = [0], 1
        while low < len(self.points):
            tried.append((low + len(self.points)) // 2)
            low = tried[-1] + 1
        found = self._bisected(self._least_needed(reversed(tried), run), run)
        assert found is not None
        return found

    def _least_needed(self, places: Iterable[int], run: Run) -> int:
        """Return the least that one of ``places`` needs; what is known to need more is not lowered."""
        self.needed_bytes(0, run)
        least: float = math.inf
        for place in places:
            if self._known_bytes(place) < least:
                least = min(least, self.needed_bytes(place, run))
        return int(least)

    def _fits(self, place: int, budget_bytes: float, run: Run) -> bool:
        return self._known_bytes(place) <= budget_bytes and self.needed_bytes(place, run) <= budget_bytes

    def needed_bytes(self, place: int, run: Run) -> int:
        """Return the least budget that a candidate fits."""
        if place not in self.runs:
            self.runs[place] = run(self.points[place])
        run_of = self.runs[place]
        return max(run_of.peak_bytes, run_of.most_bytes, self._known_bytes(place))

    def _known_bytes(self, place: int) -> int:
        """Return what a candidate needs at least, as is known without lowering it once the first one is lowered."""
        if place in (0, len(self.points) - 1):
            return 0
        return self.points[place].peak_bytes - max(0, self.points[0].peak_bytes - self.runs[0].peak_bytes)
