"""The options of one part: which retain limits are worth considering, and what each brings.

In: a :class:`Part`. Out: its Pareto set of :class:`Option`: every choice of the part's minimum-cut menu, refilled on the
way, late, or with nested segments, judged by the simulator on the part alone, and then improved one storage at a time.
Not modelled: whatever parts do to each other except through their kept bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxmem.ir import KEEP
from fxmem.planners.mincut import Choice, menu
from fxmem.planners.segments import Part
from fxmem.planners.simulate import NO_RECIPE, Mark, Run

Limits = tuple[int, ...]
MOST_RERUNS = 3
"""An option that reruns the part's recipes more often than this, on average, is given up."""
ROWS_AT_ONCE = 16
MAX_CHOICES = 24
"""Prices tried for one part."""


@dataclass(frozen=True, slots=True)
class Option:
    """Retain limits of one part's storages, as local positions, and what they bring."""

    limits: Limits
    forward_bytes: int
    """Peak of the part's forward, above its forward base."""
    backward_bytes: int
    """Peak of the part's backward (its working set), above its backward base."""
    kept_bytes: int
    """What it keeps inside from its forward to its backward."""
    seconds: float


def part_peak_bytes(part: Part, forward_bytes: int, backward_bytes: int) -> int:
    """Return the peak of a part's own forward and backward, above what earlier parts keep."""
    return max(part.forward_base_bytes + forward_bytes, part.backward_base_bytes + backward_bytes)


class _Judge:
    """Judges limits of all local storages of one part, each once."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.judged: set[Limits] = set()
        self._found: list[tuple[float, int, int, Option]] = []
        """Options with their seconds, kept bytes and peak; not those that another one beats in all, nor those that rerun
        recipes again and again."""
        self._forwards: dict[bytes, tuple[int, Mark]] = {}
        """The forward's peak and the state after it, by which storages are kept; when others are refilled is for later."""

    def judge(self, limits: Limits) -> None:
        """Run the part with ``limits``, as far as it is worth it."""
        if limits in self.judged:
            return
        self.judged.add(limits)
        part, (forward_bytes, after_forward) = self.part, self._forward(limits)
        run, kept_bytes = Run(part.tables, limits, start=after_forward.copy()), after_forward.managed_bytes
        most_reruns = MOST_RERUNS * len(part.tables.inputs) + 20
        peak_bytes = part_peak_bytes(part, forward_bytes, run.peak_bytes)
        for first in range(0, len(part.backward), ROWS_AT_ONCE):
            run.advance(part.backward[first : first + ROWS_AT_ONCE])
            seconds, peak_bytes = run.recompute_seconds, part_peak_bytes(part, forward_bytes, run.peak_bytes)
            beaten = any(s < seconds and k <= kept_bytes and p <= peak_bytes for s, k, p, _ in self._found)
            if beaten or run.num_recomputed > most_reruns:
                return
        option = Option(limits, forward_bytes, run.peak_bytes, kept_bytes, run.recompute_seconds)
        self._found.append((option.seconds, kept_bytes, peak_bytes, option))

    def _forward(self, limits: Limits) -> tuple[int, Mark]:
        kept = bytes([limit == KEEP for limit in limits])
        if kept not in self._forwards:
            run = Run(self.part.tables, limits)
            run.advance_prefix()
            self._forwards[kept] = run.peak_bytes, run.mark()
        return self._forwards[kept]

    def front(self) -> list[Option]:
        """Return the options that no other beats in peak, kept bytes and seconds at once."""
        front: list[tuple[int, Option]] = []
        for _, kept_bytes, peak_bytes, option in sorted(self._found, key=lambda found: (*found[:3], found[3].limits)):
            if not any(p <= peak_bytes and o.kept_bytes <= kept_bytes for p, o in front):
                front.append((peak_bytes, option))
        return [option for _, option in front]


def options_in_haste(part: Part) -> list[Option]:
    """Return the two options that need no thought: keep everything, drop everything."""
    judge, last = _Judge(part), part.end - part.start - 1
    judge.judge((KEEP,) * len(part.tables.position))
    judge.judge(tuple(KEEP if p == NO_RECIPE else last for p in part.tables.position))
    return judge.front()


def options_of(part: Part, *, num_trials: int) -> list[Option]:
    """Return the part's Pareto set over (peak, kept bytes, seconds), after at most ``num_trials`` judgements."""
    judge = _Judge(part)
    for limits in _seeds(part):
        judge.judge(limits)
    front = judge.front()
    tried: set[Limits] = set()
    while len(judge.judged) < num_trials:
        fresh = [o for o in front if o.limits not in tried]
        if not fresh:
            break
        for option in fresh:
            tried.add(option.limits)
            for limits in _neighbours(part, option.limits):
                judge.judge(limits)
            if len(judge.judged) >= num_trials:
                break
        front = judge.front()
    return front


def _seeds(part: Part) -> Iterator[Limits]:
    """The menu with every refill."""
    num_positions = part.end - part.start
    fences = [list(range(num_positions)), [num_positions - 1] * num_positions]
    for num_inner in (2, 3, 4):
        if num_positions >= 2 * num_inner:
            fences.append([_inner_end(p, num_positions, num_inner) for p in range(num_positions)])
    for choice in menu(part.tables, weights=part.weights, max_choices=MAX_CHOICES):
        for fence in fences:
            yield _limits(part, choice, fence)


def _inner_end(position: int, num_positions: int, num_inner: int) -> int:
    return (position * num_inner // num_positions + 1) * num_positions // num_inner - 1


def _limits(part: Part, choice: Choice, fence: list[int]) -> Limits:
    return tuple(KEEP if p == NO_RECIPE or not choice.reruns[p] else max(p, fence[p]) for p in part.tables.position)


def _neighbours(part: Part, limits: Limits) -> Iterator[Limits]:
    """One storage kept, refilled on the way, or refilled late."""
    last = part.end - part.start - 1
    for s, position in enumerate(part.tables.position):
        if position == NO_RECIPE:
            continue
        for limit in (KEEP, last, position):
            if limit != limits[s]:
                yield (*limits[:s], limit, *limits[s + 1 :])
