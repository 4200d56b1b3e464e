"""What habits bring: each change made to a copy without bytes, and the step estimated again; then the stacks of changes.

In: a subject, a limit in bytes. Out: :class:`Row` objects and the smallest stack that fits. Nothing is computed by formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import combinations
from typing import Any

from fxmem.advice.habits import Disruption, Habit
from fxmem.advice.subject import NotApplicable, Subject
from fxmem.api.estimate import Estimate, estimate
from fxmem.errors import FxMemError, InfeasibleBudgetError, first_lines
from fxmem.ir import PlainData
from fxmem.report.peak import Place

MOST_CHANGES = 4
"""In a stack."""
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


Measure = Callable[[Subject], Estimate]


@dataclass(slots=True)
class Evaluator:
    """Estimates a subject under changes; each set of changes once."""

    subject: Subject
    """Without bytes."""
    options: dict[str, Any]
    """Of the estimates, the step's aside."""
    limit_bytes: int | None = None
    _known: dict[tuple[str, ...], int] = field(default_factory=dict)

    def estimate(self, subject: Subject) -> Estimate:
        """Return the estimate of a subject."""
        return estimate(subject.model, subject.args, subject.kwargs, step=subject.step, **self.options)

    def peak_bytes(self, habits: Sequence[Habit]) -> int:
        """Return what a budget bounds with these changes made. Errors: ``NotApplicable``, those of an estimate."""
        key = tuple(habit.name for habit in habits)
        if key not in self._known:
            changed = reduce(lambda subject, habit: habit.change(subject), habits, self.subject)
            ways = {habit.measured_as for habit in habits}
            self._known[key] = _peak_bytes(self.estimate(changed), ways, self.limit_bytes)
        return self._known[key]


def _peak_bytes(found: Estimate, ways: set[str], limit_bytes: int | None) -> int:
    if "plan" in ways:
        if limit_bytes is None:
            return found.floor_bytes
        try:
            report = found.report(limit_bytes)
        except InfeasibleBudgetError as error:
            return error.least_bytes
        return report.predicted_peak_bytes if report.cuda is None else report.cuda.allocated_bytes
    return found.graph_peak_bytes if "graph" in ways else found.bound_bytes


def row_of(habit: Habit, evaluator: Evaluator, base: Estimate, limit_bytes: int | None) -> Row:
    """Return what one habit brings to a step whose estimate as it is is ``base``."""
    disruption, note = habit.reach(evaluator.subject)
    peak_bytes: int | None = None
    try:
        peak_bytes = evaluator.peak_bytes((habit,))
    except NotApplicable as reason:
        note = str(reason)
    except FxMemError as error:
        note = f"cannot be made here: {first_lines(error, 160)}"
    saved = None if peak_bytes is None else base.bound_bytes - peak_bytes
    if habit.measured_as == "graph" and saved:
        note = f"held at the peak: {held_in_words(base)}"
    if saved == 0:
        note = f"brings nothing: it frees nothing at the peak, {place_in_words(base.peak_at)}"
    elif saved is not None and saved < 0:
        note = f"adds {-saved} bytes at the peak" + (f"; {note}" if note else "")
    fits = None if limit_bytes is None or peak_bytes is None else peak_bytes <= limit_bytes
    return Row(habit.name, habit.label, str(disruption), peak_bytes, saved, fits, habit.line, note)


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
    useful = [habit for habit in habits if habit.name in saved]
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
    stacks = [s for s in combinations(habits, size) if len({habit.group for habit in s}) == size]
    for disruption in Disruption:
        these = [s for s in stacks if max(reach[habit.name] for habit in s) is disruption]
        these.sort(key=lambda s: -sum(saved[habit.name] for habit in s))
        # Savings overlap more often than they help one another, which they can by moving the peak.
        hopeful = [s for s in these if 1.5 * sum(saved[habit.name] for habit in s) >= missing_bytes]
        yield from (hopeful or these[:1])[:MOST_TRIES]
