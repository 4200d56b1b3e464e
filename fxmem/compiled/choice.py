"""Which plan of a frontier a compiled step takes: the cheapest whose lowered step keeps the budget.

In: a frontier, a function that lowers a plan and runs it on fakes. Out: a plan with its :class:`StepRun`.

NOTE [Monotone budgets]

1. Candidates are a fixed, small part of the frontier, whatever the budget: the first keeps all, the last is the deepest.
   Between two of them are a few finer ones.
2. A candidate fits a budget where neither its lowered step takes more, nor its plan as the planner sees it, plus what the
   first one takes, lowered, above that (but for what ops take inside, which a tight backward may spare). The second is
   known without lowering and is of no budget's doing either. It is nearly right, and low rather than high: plans that
   recompute more are lowered to what takes more than planned, mostly little (2 % of what plans spare, in GPT-2), in some
   networks of convolutions a third of it. So for budgets in the lower half of what plans spare, and for all budgets where
   ops take much inside, the deepest one is lowered too, and where it is off by more than :data:`OFF` the one in the middle;
   others are taken to be off by no less than the better of both, less :data:`OFF`. Of the deepest one only what is lowered
   counts: what it fits is not refused.
3. A budget takes the first that fits, or of the finer ones just before it the first that fits and gains :data:`GAIN`. What
   fits a lower budget fits a higher one, so more bytes never cost more time, though peaks of lowered plans need not fall as
   the planner's do. Two to five are lowered for most budgets, more where none of many takes as little as planned.
4. Where keeping all takes no more than the end of the step, which no plan changes, nothing takes less.

NOTE [Layouts]

Inductor copies the weights of convolutions to channels last, many of them as soon as the forward begins. On the CPU a
convolution lays out what it is given by itself, so the copies may be spared. In GoogLeNet that costs time, in ResNet-18
it saves a quarter of a step (``benchmarks/results/compare_cpu.json``): so convolutions and copies from one layout to
another are timed, of both codes that keep all. A gain below :data:`LAYOUT_SHARE` of a step is none: the numbers would be
others for nothing. A budget takes the cheaper of what fits with layouts as Inductor has them and of what fits with
layouts as they are. The latter are looked for first: the planner guesses better what they take, and of the others those
that cost more need not be lowered. Less memory never costs less time in either, nor in the cheaper of both. On CUDA the
layout decides which kernels run: there it is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

from fxmem.compiled.levers import Levers
from fxmem.compiled.step_run import StepRun
from fxmem.ir import FrontierPoint
from fxmem.planners.pareto import cheapest_within

NUM_CANDIDATES = 32

FINER = 4
"""A candidate and the finer ones before it."""

GAIN = 0.0025
"""Of a step: what a finer one must take less time, as its code takes seconds to make."""

NEAR = 1.002
"""Times the end of the step: where keeping all takes no more, no deeper plan is lowered to find a lesser budget to name."""

OFF = 0.05
"""Of what the deepest candidate spares: so much less may others take than is guessed from those that are lowered."""

MUCH = 0.05
"""Of what plans may spare: code that takes so much more than guessed is made otherwise too, to take what is less."""

LAYOUT_SHARE = 0.05
"""Of a step: what convolutions in the model's own layout cost, where they are not timed, and what they have to gain to be
taken without need."""


class Point(Protocol):
    """A plan of one graph, or of several calls."""

    @property
    def peak_bytes(self) -> int:
        """As the planner sees it: lower for each candidate than for the one before."""

    @property
    def recompute_seconds(self) -> float: ...


P = TypeVar("P", bound=Point)
Run = Callable[[P, float], StepRun]
"""Lowers a plan and runs it on fakes. The bytes are enough: where code takes more, it is tried whether other takes less."""


@dataclass(slots=True)
class Candidates(Generic[P]):
    """Candidates of one graph, and what was seen of them."""

    points: tuple[P, ...]
    """Peaks falling, seconds rising."""
    runs: dict[int, StepRun] = field(default_factory=dict)
    """By place in ``points``."""

    @staticmethod
    def of(frontier: Sequence[FrontierPoint]) -> Candidates[FrontierPoint]:
        """Return points with peaks at even distances."""
        most, least = frontier[0].peak_bytes, frontier[-1].peak_bytes
        found: dict[FrontierPoint, None] = {frontier[0]: None}
        num_steps = FINER * (NUM_CANDIDATES - 1)
        for i in range(1, num_steps + 1):
            point = cheapest_within(frontier, most - (most - least) * i // num_steps)
            assert point is not None
            found[point] = None
        return Candidates(tuple(found))

    @property
    def places(self) -> list[int]:
        """Where in ``points`` those are that are no finer ones."""
        return sorted({*range(0, len(self.points), FINER), len(self.points) - 1})

    def cheapest_within(self, budget_bytes: float, run: Run[P], most_seconds: float = math.inf) -> int | None:
        """Return the place of the candidate to take (NOTE [Monotone budgets]); None if none fits. Those that cost more than
        ``most_seconds``, and the finer ones before them too, need not be found."""
        if self.needed_bytes(0, run) > budget_bytes and self.runs[0].floor_bytes > budget_bytes:
            return None
        for place in self.places:
            cheapest = self.points[self._first_finer(place)]
            if cheapest.recompute_seconds - self.points[0].recompute_seconds > most_seconds:
                return None
            if self._fits(place, budget_bytes, run):
                return next((i for i in self._finer(place) if self._fits(i, budget_bytes, run)), place)
        return None

    def _first_finer(self, place: int) -> int:
        """Return the place of the first finer candidate before that at ``place``; itself where there is none."""
        return max((i for i in self.places if i < place), default=-1) + 1

    def _finer(self, place: int) -> Iterator[int]:
        """Yield the places of finer candidates before that at ``place``, as far as they gain."""
        most_seconds = self.points[place].recompute_seconds - GAIN * self.runs[0].seconds
        finer = range(self._first_finer(place), place)
        return (i for i in finer if self.points[i].recompute_seconds <= most_seconds)

    def least_bytes(self, run: Run[P], other_bytes: int | None = None) -> int:
        """Return the least budget that a candidate fits, or one at most :data:`NEAR` it; ``other_bytes``, which something
        else fits, where no candidate fits less."""
        first = self.needed_bytes(0, run)
        least = first if other_bytes is None else min(first, other_bytes)
        if first <= NEAR * self.runs[0].floor_bytes:
            return least
        for place in reversed(self.places[1:]):
            if self._known_bytes(place) < least and self._least_budget(place, 0, run) < least:
                least = min(least, self.needed_bytes(place, run))
        return least

    def needed_bytes(self, place: int, run: Run[P]) -> int:
        """Return the least budget that a candidate fits."""
        return self._least_budget(place, self._lowered(place, run).needed_bytes, run)

    def _lowered(self, place: int, run: Run[P]) -> StepRun:
        if place not in self.runs:
            self.runs[place] = run(self.points[place], self._enough_bytes(place))
        return self.runs[place]

    def _fits(self, place: int, budget_bytes: float, run: Run[P]) -> bool:
        known_bytes = self._known_bytes(place)
        if known_bytes <= budget_bytes < self._low_bytes:
            known_bytes = self._likely_bytes(place, run)
        return known_bytes <= budget_bytes and self._lowered(place, run).needed_bytes <= budget_bytes

    def _least_budget(self, place: int, lowered_bytes: int, run: Run[P]) -> int:
        """Return the least budget that a candidate fits if its lowered step takes ``lowered_bytes``."""
        if place == 0:
            return lowered_bytes
        least = max(lowered_bytes, self._known_bytes(place), self.runs[0].floor_bytes)
        if least >= self._low_bytes:
            return least
        return int(min(self._low_bytes, max(least, self._likely_bytes(place, run))))

    @property
    def _low_bytes(self) -> float:
        """Return below which budgets are low: those in the lower half of what plans spare, as guessed; all, where what ops
        take inside makes guesses rough."""
        first = self.runs[0]
        if first.inside_bytes > MUCH * (first.outside_peak_bytes - first.floor_bytes):
            return math.inf
        return (first.outside_peak_bytes + self._guessed_bytes(len(self.points) - 1)) // 2

    def _known_bytes(self, place: int) -> int:
        """Return what a candidate needs at least, as is known without lowering it once the first one is lowered."""
        return 0 if place in (0, len(self.points) - 1) else self._guessed_bytes(place)

    def _likely_bytes(self, place: int, run: Run[P]) -> int:
        """Return the same as is to be expected once two others are lowered too (NOTE [Monotone budgets], 2)."""
        known_bytes, last, middle = self._known_bytes(place), len(self.points) - 1, self.places[len(self.places) // 2]
        if place in (0, last):
            return known_bytes
        off = self._off_bytes(last, run)
        slack = OFF * (self.runs[0].needed_bytes - self.runs[last].needed_bytes)
        if off > slack and middle not in (0, last):
            off = min(off, self._off_bytes(middle, run))
        return known_bytes + max(0, int(off - slack))

    def _off_bytes(self, place: int, run: Run[P]) -> int:
        """Return how much more a lowered candidate takes than guessed, but for the end of the step."""
        lowered = self._lowered(place, run)
        most_bytes = max(lowered.forward_peak_bytes, lowered.backward_peak_bytes)
        return most_bytes - self._guessed_bytes(place)

    def _guessed_bytes(self, place: int) -> int:
        """What ops take inside is not planned for, and a tight backward may spare it."""
        return self.points[place].peak_bytes + self.runs[0].outside_peak_bytes - self.points[0].peak_bytes

    def _enough_bytes(self, place: int) -> float:
        if place == 0:
            return math.inf
        if place == len(self.points) - 1:
            return 0.0
        first = self.runs[0]
        beside_bytes = first.needed_bytes - first.peak_bytes
        return self._guessed_bytes(place) + beside_bytes + MUCH * (first.outside_peak_bytes - first.floor_bytes)


class Taken(NamedTuple, Generic[P]):
    """What a budget takes."""

    place: int
    layouts_left: bool
    """NOTE [Layouts]."""
    point: P
    run: StepRun

    @property
    def levers(self) -> Levers:
        return Levers(self.layouts_left or self.run.layouts_left, self.run.tightness)


@dataclass(frozen=True, slots=True)
class Choices(Generic[P]):
    """Candidates with layouts as Inductor has them and as they are, of which the cheaper that fits is taken."""

    candidates: Candidates[P]
    as_laid_out: Candidates[P] | None
    """The same, lowered with convolutions laid out as they are (NOTE [Layouts]); None where that changes nothing."""
    run: Callable[[P, bool, float], StepRun]
    """As :data:`Run`, with layouts left as they are or not."""

    def cheapest_within(self, budget_bytes: float) -> Taken[P] | None:
        """Return what to take; None if nothing fits."""
        if self.as_laid_out is None:
            return self._found_in(self.candidates, budget_bytes)
        usual = self._found_in(self.candidates, budget_bytes, self.layout_seconds)
        if usual is not None and self.overhead_seconds(usual) <= self.layout_seconds:
            return usual
        left = self._found_in(self.as_laid_out, budget_bytes)
        most_seconds = math.inf if left is None else self.overhead_seconds(left)
        usual = self._found_in(self.candidates, budget_bytes, most_seconds)
        return min((each for each in (usual, left) if each is not None), key=self.overhead_ratio, default=None)

    def least_bytes(self) -> int:
        """Return the least budget that something fits, or one at most :data:`NEAR` it."""
        usual = self.candidates
        left = None if self.as_laid_out is None else self.as_laid_out.least_bytes(self._run_of(self.as_laid_out))
        return usual.least_bytes(self._run_of(usual), left)

    def costs(self) -> tuple[tuple[int, Taken[P]], ...]:
        """Return the budgets at which another candidate is taken, falling, each with what is: it, or a finer one. All
        candidates are lowered."""
        budgets = {each.needed_bytes(i, self._run_of(each)) for each in self._each() for i in each.places}
        least: dict[tuple[bool, int], tuple[int, Taken[P]]] = {}
        for budget in sorted(budgets, reverse=True):
            taken = self.cheapest_within(budget)
            if taken is not None:
                least[taken.layouts_left, taken.place] = budget, taken
        return tuple(least.values())

    @property
    def keep_all(self) -> StepRun:
        """The first candidate's step, with layouts as Inductor has them."""
        self.candidates.needed_bytes(0, self._run_of(self.candidates))
        return self.candidates.runs[0]

    @property
    def num_lowered(self) -> int:
        return sum(len(each.runs) for each in self._each())

    def overhead_seconds(self, taken: Taken[P]) -> float:
        """Return the seconds of what is recomputed and of other layouts."""
        more = taken.point.recompute_seconds - self.candidates.points[0].recompute_seconds
        return more + (self.layout_seconds if taken.layouts_left else 0.0)

    @property
    def layout_seconds(self) -> float:
        """What layouts as they are cost a step, less than nothing where it is quicker so (NOTE [Layouts])."""
        usual, least_gain = self.keep_all, LAYOUT_SHARE * self.keep_all.seconds
        if self.as_laid_out is None or not usual.measured_seconds:
            return least_gain
        self.as_laid_out.needed_bytes(0, self._run_of(self.as_laid_out))
        left, scale = self.as_laid_out.runs[0], usual.laid_out_seconds / usual.measured_seconds
        rest = [run.seconds - run.laid_out_seconds for run in (left, usual)]
        more = rest[0] - rest[1] + scale * (left.measured_seconds - usual.measured_seconds)
        return 0.0 if -least_gain < more < 0 else more

    def overhead_ratio(self, taken: Taken[P]) -> float:
        """Return their share of the step that keeps all."""
        return self.overhead_seconds(taken) / self.keep_all.seconds if self.keep_all.seconds else 0.0

    def _found_in(
        self, candidates: Candidates[P], budget_bytes: float, most_seconds: float = math.inf
    ) -> Taken[P] | None:
        place = candidates.cheapest_within(budget_bytes, self._run_of(candidates), most_seconds)
        if place is None:
            return None
        return Taken(place, candidates is self.as_laid_out, candidates.points[place], candidates.runs[place])

    def _each(self) -> tuple[Candidates[P], ...]:
        return (self.candidates,) if self.as_laid_out is None else (self.candidates, self.as_laid_out)

    def _run_of(self, candidates: Candidates[P]) -> Run[P]:
        def run(point: P, enough_bytes: float) -> StepRun:
            found = self.run(point, candidates is self.as_laid_out, enough_bytes)
            if not found.loses_writes or self.as_laid_out is None or candidates is self.as_laid_out:
                return found
            return replace(self._run_as_laid_out(point), layouts_left=True)

        return run

    def _run_as_laid_out(self, point: P) -> StepRun:
        """Return the run of a candidate with layouts left as they are."""
        left = self.as_laid_out
        assert left is not None
        run, place = self._run_of(left), next(i for i, each in enumerate(left.points) if each is point)
        for needed in (0, place):  # what is enough of others is known by the first
            left.needed_bytes(needed, run)
        return left.runs[place]
