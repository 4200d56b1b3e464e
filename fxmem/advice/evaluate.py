"""What habits bring: each change made to a copy without bytes, and the step estimated again; then the stacks of changes.

In: a subject, a limit in bytes. Out: :class:`Row` objects and the smallest stack that fits. Nothing is computed by formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import combinations
from types import MappingProxyType
from typing import Any

from fxmem.advice.habits import Disruption, Habit
from fxmem.advice.subject import NotApplicable, Subject
from fxmem.api.estimate import Estimate, estimate
from fxmem.errors import FxMemError, InfeasibleBudgetError, first_lines, in_units
from fxmem.ir import PlainData
from fxmem.profiling.allocator_state import AllocatorPeaks
from fxmem.report.peak import Place

MOST_CHANGES = 4
"""In a stack."""
MOST_PIECES = 16
"""Micro-batches in one call of a plan."""
MOST_TRIES = 4
"""Of stacks of one size and disruption that are estimated."""


@dataclass(frozen=True, slots=True)
class Row(PlainData):
    """What one habit brings."""

    name: str
    label: str
    disruption: str
    """``none`` (the same bits), ``order of sums``, ``numerics`` or ``method``."""
    peak_bytes: int | None
    """What a budget bounds with the change made; None: it cannot be made."""
    saved_bytes: int | None
    """What it takes off; below zero if it adds."""
    fits: bool | None
    """None: there is no limit, or it cannot be made."""
    line: str
    """What to write."""
    note: str
    """Why it cannot be made, why it brings nothing, or what else it does."""


@dataclass(frozen=True, slots=True)
class Stack(PlainData):
    """Changes made together."""

    names: tuple[str, ...]
    peak_bytes: int
    fits: bool
    disruption: str
    """Of the change that reaches farthest."""


@dataclass(slots=True)
class Evaluator:
    """Estimates a subject under changes; each set of changes once."""

    subject: Subject
    """Without bytes."""
    options: dict[str, Any]
    """Of the estimates, the step's aside."""
    limit_bytes: int | None = None
    _known: dict[tuple[str, ...], int] = field(default_factory=dict)

    def estimate(self, habits: Sequence[Habit] = ()) -> Estimate:
        """Return the estimate of the subject with these changes made. Errors: ``NotApplicable``, those of an estimate."""
        changed = reduce(lambda subject, habit: habit.change(subject), habits, self.subject)
        options = {**self.options, **plan_options(habits, self.options)}
        return estimate(
            changed.model, changed.args, changed.kwargs, step=changed.step, device=changed.device, **options
        )

    def peak_bytes(self, habits: Sequence[Habit]) -> int:
        """Return what a budget bounds with these changes made. Errors: as :meth:`estimate`."""
        key = tuple(habit.name for habit in habits)
        if key not in self._known:
            ways = {habit.measured_as for habit in habits}
            if self.limit_bytes is None and any("microbatch" in habit.allow for habit in habits):
                raise NotApplicable("it takes as many pieces as a budget needs, and there is none: pass budget=")
            self._known[key] = self._peak_bytes(self.estimate(habits), ways)
        return self._known[key]

    @property
    def budget_of(self) -> str:
        """What a budget bounds on CUDA."""
        return str(self.options.get("budget_of", "allocated"))

    def _peak_bytes(self, found: Estimate, ways: set[str]) -> int:
        if "plan" in ways:
            if self.limit_bytes is None:
                return found.floor_bytes
            try:
                report = found.report(self.limit_bytes, most_pieces=MOST_PIECES)
            except InfeasibleBudgetError as error:
                return error.least_bytes
            return report.predicted_peak_bytes if report.cuda is None else bounded(report.cuda, self.budget_of)
        return found.graph_peak_bytes if "graph" in ways else found.bound_bytes


def plan_options(habits: Iterable[Habit], given: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the options of the plan that stands for habits: what they allow, and no more; what else was ``given`` goes
    with the plan that recomputes."""
    allow = {choice for habit in habits for choice in habit.allow}
    if "recompute" in allow:
        return {"allow": tuple(sorted(allow | {*given.get("allow", ())}))}
    return {"allow": tuple(sorted(allow)), "policy": (), "inplace": False, "compress_saved": False}


def bounded(peaks: AllocatorPeaks, budget_of: str) -> int:
    """Return what a budget bounds of an allocator's peaks."""
    return peaks.reserved_bytes if budget_of == "reserved" else peaks.allocated_bytes


def row_of(habit: Habit, evaluator: Evaluator, base: Estimate, limit_bytes: int | None) -> Row:
    """Return what one habit brings to a step whose estimate as it is is ``base``."""
    disruption, note = habit.reach(evaluator.subject)
    peak_bytes: int | None = None
    try:
        if habit.measured_as in BESIDE:
            habit.change(evaluator.subject)
            peak_bytes, note = BESIDE[habit.measured_as](base, evaluator.budget_of)
        else:
            peak_bytes = evaluator.peak_bytes((habit,))
    except NotApplicable as reason:
        note = str(reason)
    except FxMemError as error:
        note = f"cannot be made here: {first_lines(error, 160)}"
    saved = None if peak_bytes is None else base.bound_bytes - peak_bytes
    if habit.measured_as == "graph" and saved:
        note = f"held at the peak: {held_in_words(base)}"
    if habit.measured_as == "plan" and limit_bytes is not None and base.bound_bytes <= limit_bytes:
        note = "the step fits as it is, so nothing has to be done"
    elif saved == 0:
        why = f"brings nothing: it frees nothing at the peak, {place_in_words(base.peak_at)}"
        note = f"{why}; {note}" if habit.measured_as in BESIDE and note else why
    elif saved is not None and saved < 0:
        note = f"adds {-saved} bytes at the peak" + (f"; {note}" if note else "")
    fits = None if limit_bytes is None or peak_bytes is None else peak_bytes <= limit_bytes
    return Row(habit.name, habit.label, str(disruption), peak_bytes, saved, fits, habit.line, note)


# -- beside the step -----------------------------------------------------------------------------------------------------


def _evaluation(base: Estimate, budget_of: str) -> tuple[int, str]:
    graph, plain = (in_units(base.evaluation_peak_bytes(no_grad=way)) for way in (False, True))
    return base.bound_bytes, f"evaluation of such a batch peaks at {graph} with gradients on, at {plain} without"


def _cycles(base: Estimate, budget_of: str) -> tuple[int, str]:
    held = base.cyclic_bytes()
    if held:
        return (
            base.bound_bytes,
            f"after each step cycles of references hold {in_units(held)} until Python collects them",
        )
    return base.bound_bytes, "no tensor of the step is in a cycle of references"


def _allocator(base: Estimate, budget_of: str, **setting: bool) -> tuple[int, str]:
    assert base.cuda is not None
    found = base.cuda_with(**setting)
    note = f"of reserved bytes {in_units(base.cuda.reserved_bytes)} become {in_units(found.reserved_bytes)}"
    return bounded(found, budget_of), note


BESIDE: dict[str, Callable[[Estimate, str], tuple[int, str]]] = {
    "evaluation": _evaluation,
    "cycles": _cycles,
    "expandable": partial(_allocator, expandable_segments=True),
    "emptied": partial(_allocator, empty_cache=True),
}
"""Of habits that leave the step as it is: what a budget bounds with them, and what else they bring."""


def held_in_words(found: Estimate, most: int = 3) -> str:
    """Return what the model's own code holds at the peak, the largest first."""
    held = sorted((each for each in found.alive if each.kind == "held_by_code"), key=lambda each: -each.nbytes)
    words = [f"the result of {each.site.name} at {each.site.source}, {each.nbytes} bytes" for each in held[:most]]
    return "; ".join(words) or "nothing that one line holds"


def place_in_words(place: Place) -> str:
    """Return a place in few words."""
    where = place.module_path or place.source_line
    return f"the {place.phase.value}" + (f" of {where}" if where else "")


def smallest_stack(
    habits: Sequence[Habit], rows: Sequence[Row], evaluator: Evaluator, base_bytes: int, limit_bytes: int
) -> Stack | None:
    """Return the smallest stack that fits: of the fewest changes, of those the least disruptive, of those the one that
    saves most; where none of at most :data:`MOST_CHANGES` fits, the one found that comes nearest. None: nothing helps.

    Which stacks are worth an estimate is guessed from what their changes save alone.
    """
    saved = {row.name: row.saved_bytes for row in rows if row.saved_bytes is not None and row.saved_bytes > 0}
    useful = [habit for habit in habits if habit.name in saved and habit.measured_as not in BESIDE]
    reach = {habit.name: habit.reach(evaluator.subject)[0] for habit in useful}
    nearest: Stack | None = None
    for size in range(1, MOST_CHANGES + 1):
        for stack in _promising(useful, reach, saved, size, base_bytes - limit_bytes):
            try:
                peak_bytes = evaluator.peak_bytes(stack)
            except (NotApplicable, FxMemError):
                continue
            names, farthest = tuple(habit.name for habit in stack), max(reach[habit.name] for habit in stack)
            found = Stack(names, peak_bytes, peak_bytes <= limit_bytes, str(farthest))
            if found.fits:
                return found
            if nearest is None or peak_bytes < nearest.peak_bytes:
                nearest = found
    return nearest


def _promising(
    habits: Iterable[Habit], reach: dict[str, Disruption], saved: dict[str, int], size: int, missing_bytes: int
) -> Iterator[tuple[Habit, ...]]:
    """Yield stacks of one size that may fit, the least disruptive first; of each disruption those that save most."""
    # Micro-batches in one call are as many as the budget needs, which alone was asked already.
    alone = [habit for habit in habits if size == 1 or "microbatch" not in habit.allow]
    stacks = [s for s in combinations(alone, size) if len({habit.group for habit in s}) == size]
    for disruption in Disruption:
        these = [s for s in stacks if max(reach[habit.name] for habit in s) is disruption]
        these.sort(key=lambda s: -sum(saved[habit.name] for habit in s))
        # Savings overlap more often than they help one another, which they can by moving the peak.
        hopeful = [s for s in these if 1.5 * sum(saved[habit.name] for habit in s) >= missing_bytes]
        yield from (hopeful or these[:1])[:MOST_TRIES]
