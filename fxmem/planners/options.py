"""The options of one part: which retain limits are worth considering, and what each brings.

In: a :class:`Part`. Out: its Pareto set of :class:`Option`: every choice of the part's minimum-cut menu, refilled on the
way, late, or with nested segments, judged by the simulator on the part alone, and then improved one storage at a time.
Not modelled: whatever parts do to each other except through their kept bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxmem.planners.mincut import Choice, menu
from fxmem.planners.parts import Part
from fxmem.simulate import NO_RECIPE, Run
from fxmem.types import KEEP

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


def judge_option(part: Part, limits: Limits) -> Option | None:
    """Return what ``limits`` (of all local storages) brings; None if it reruns recipes again and again."""
    run = Run(part.tables, limits)
    run.advance_prefix()
    forward_bytes, kept_bytes = run.peak_bytes, run.managed_bytes
    run.peak_bytes = -1
    most_reruns = MOST_RERUNS * len(part.tables.inputs) + 20
    for first in range(0, len(part.backward), ROWS_AT_ONCE):
        run.advance(part.backward[first : first + ROWS_AT_ONCE])
        if run.num_recomputed > most_reruns:
            return None
    return Option(limits, forward_bytes, run.peak_bytes, kept_bytes, run.recompute_seconds)


def options_in_haste(part: Part) -> list[Option]:
    """Return the two options that need no thought: keep everything, drop everything."""
    last = part.end - part.start - 1
    keep = (KEEP,) * len(part.tables.position)
    drop = tuple(KEEP if p == NO_RECIPE else last for p in part.tables.position)
    return _pareto(part, {limits: judge_option(part, limits) for limits in (keep, drop)})


def options_of(part: Part, *, num_trials: int) -> list[Option]:
    """Return the part's Pareto set over (peak, kept bytes, seconds), after at most ``num_trials`` judgements."""
    options: dict[Limits, Option | None] = {}
    for limits in _seeds(part):
        if limits not in options:
            options[limits] = judge_option(part, limits)
    front = _pareto(part, options)
    tried: set[Limits] = set()
    while len(options) < num_trials:
        fresh = [o for o in front if o.limits not in tried]
        if not fresh:
            break
        for option in fresh:
            tried.add(option.limits)
            for limits in _neighbours(part, option.limits):
                if limits not in options:
                    options[limits] = judge_option(part, limits)
            if len(options) >= num_trials:
                break
        front = _pareto(part, options)
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


def _pareto(part: Part, options: dict[Limits, Option | None]) -> list[Option]:
    """Options that no other beats in peak, kept bytes and seconds at once."""

    def peak(option: Option) -> int:
        return max(part.forward_base_bytes + option.forward_bytes, part.backward_base_bytes + option.backward_bytes)

    front: list[tuple[int, Option]] = []
    ordered = sorted(filter(None, options.values()), key=lambda o: (o.seconds, o.kept_bytes, peak(o), o.limits))
    for option in ordered:
        own_peak = peak(option)
        if not any(p <= own_peak and o.kept_bytes <= option.kept_bytes for p, o in front):
            front.append((own_peak, option))
    return [option for _, option in front]
