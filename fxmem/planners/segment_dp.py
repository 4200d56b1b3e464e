"""Stretches between well chosen cuts, each with a menu of options, combined for every budget at once.

In: a profile. Out: a frontier. Possible cuts lie at local minima of crossing bytes, thinned to about 24 (twice sqrt(n)
on long graphs). Every run of up to so many cells between them is a part (:mod:`fxmem.planners.segments`) with a Pareto
set of options (:mod:`fxmem.planners.segment_options`); whatever crosses a chosen cut is kept, so parts do not recompute
into each other. A dynamic program chooses cuts and options together, from the last position to the first, over Pareto
lists of (H, seconds), where H is the peak from the forward of position i to its backward, above what earlier parts
keep:

    H_i = min over cuts j and options of part (i, j):  max(peak of the part, kept bytes of the part + H_j)

which gives every budget in one pass without a discretisation of memory (cf. Beaumont et al. 2019, arXiv:1911.13214, for
chains). Not modelled by H, but by the simulator, which judges every result: parts whose backwards interleave.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxmem.ir import KEEP, FrontierPoint, GraphProfile
from fxmem.planners.cuts import Spans, local_minima, spans_of
from fxmem.planners.pareto import Clock, judge_all
from fxmem.planners.segment_options import Option, options_in_haste, options_of, part_peak_bytes
from fxmem.planners.segments import Part, Parter
from fxmem.planners.simulate import keep_all

LIST_CAP = 400
"""Longest Pareto list of the dynamic program."""
NUM_JUDGED = 96
"""Combinations of one set of cuts that are judged on the whole step."""
NUM_TRIALS = 40
"""Judgements spent on one part's options."""


def frontier(profile: GraphProfile, *, seconds: float) -> tuple[FrontierPoint, ...]:
    """Return the Pareto set over all thinnings of the cuts, within ``seconds`` of CPU time."""
    clock = Clock(seconds)
    return judge_all(profile, "intervals", _candidates(profile, clock), clock)


def _candidates(profile: GraphProfile, clock: Clock) -> Iterator[tuple[int, ...]]:
    yield keep_all(profile).limits
    spans = spans_of(profile)
    known: dict[Any, list[Option]] = {}
    for cuts, reach in thinnings(spans):
        if clock.over:
            return
        program = Program(Parter(profile, spans, cuts), reach, known, clock)
        for index in program.spread(NUM_JUDGED):
            yield limits_of(profile, program.options(index))


def thinnings(spans: Spans) -> Iterator[tuple[list[int], int]]:
    """Yield sets of possible cuts, each with the largest number of cells in a part; fewer on longer graphs."""
    num_positions = spans.num_positions
    allowed = local_minima(spans)
    sizes = [(max(24, round(2 * num_positions**0.5)), 4 if num_positions <= 400 else 3)]
    if num_positions <= 250:
        sizes.append((14, 4))
    if num_positions <= 150:
        sizes += [(8, 3), (4, 4)]
    known = set()
    for num_cells, reach in sizes:
        cuts = thin(spans, allowed, num_cells)
        if tuple(cuts) not in known:
            known.add(tuple(cuts))
            yield cuts, reach


def thin(spans: Spans, allowed: list[int], num_cells: int) -> list[int]:
    """Return at most ``num_cells - 1`` of the allowed cuts, the least crossed one in each equal stretch."""
    if len(allowed) < num_cells:
        return allowed
    width = spans.num_positions / num_cells
    best: dict[int, tuple[int, float, int]] = {}
    for cut in allowed:
        stretch = int((cut - width / 2) // width)
        rank = (spans.crossing_bytes[cut], abs(cut - (stretch + 1) * width), cut)
        best[stretch] = min(best.get(stretch, rank), rank)
    return sorted(cut for stretch, (_, _, cut) in best.items() if 0 <= stretch < num_cells - 1)


def limits_of(profile: GraphProfile, chosen: list[tuple[Part, Option]]) -> tuple[int, ...]:
    """Return the whole graph's limits from the options of parts that cover it; boundaries are kept."""
    limits = [KEEP] * len(profile.storages)
    for part, option in chosen:
        for s, limit in zip(part.storages, option.limits, strict=False):
            if limit != KEEP:
                limits[s] = part.start + limit
    return tuple(limits)


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """The Pareto list from one cut on: H falling, seconds rising; and where each entry comes from."""

    high_bytes: NDArray[np.int64]
    seconds: NDArray[np.float64]
    choice: NDArray[np.int64]
    """Index into the level's menu."""
    rest: NDArray[np.int64]
    """Index into the list of the cut that the choice leads to."""
    menu: list[tuple[int, Part, Option]]
    """The next cut, the part up to it, and an option for it."""


class Program:
    """The dynamic program over cuts, from the last to the first."""

    def __init__(self, parter: Parter, reach: int, known: dict[Any, list[Option]], clock: Clock) -> None:
        self.levels: dict[int, Level] = {}
        zero = np.zeros(1, dtype=np.int64)
        end = parter.num_cells
        self.levels[end] = Level(np.array([parter.outside_bytes]), np.zeros(1), zero, zero, [])
        for first in reversed(range(end)):
            menu = []
            for end_cell in range(first + 1, min(first + (1 if clock.over else reach), end) + 1):
                part = parter.part(first, end_cell)
                options = known.get(part.signature)
                if options is None and clock.over:
                    options = options_in_haste(part)
                elif options is None:
                    options = known[part.signature] = options_of(part, num_trials=NUM_TRIALS)
                menu += [(end_cell, part, option) for option in options]
            self.levels[first] = self._level(menu)

    def _level(self, menu: list[tuple[int, Part, Option]]) -> Level:
        high, seconds, choice, rest = [], [], [], []
        for number, (next_cut, part, option) in enumerate(menu):
            after = self.levels[next_cut]
            peak_bytes = part_peak_bytes(part, option.forward_bytes, option.backward_bytes)
            high.append(np.maximum(peak_bytes, option.kept_bytes + after.high_bytes))
            seconds.append(option.seconds + after.seconds)
            choice.append(np.full(len(after.seconds), number))
            rest.append(np.arange(len(after.seconds)))
        all_high, all_seconds = np.concatenate(high), np.concatenate(seconds)
        order = np.lexsort((all_high, all_seconds))
        best_before = np.concatenate([[np.iinfo(np.int64).max], np.minimum.accumulate(all_high[order])[:-1]])
        order = order[all_high[order] < best_before]
        order = order[thin_list(all_high[order], LIST_CAP)]
        return Level(
            all_high[order], all_seconds[order], np.concatenate(choice)[order], np.concatenate(rest)[order], menu
        )

    def spread(self, count: int) -> list[int]:
        """Return indices of at most ``count`` entries for the whole graph, evenly over their peaks."""
        indices: list[int] = thin_list(self.levels[0].high_bytes, count).tolist()
        return indices

    def options(self, index: int) -> list[tuple[Part, Option]]:
        """Return the parts and options of an entry for the whole graph."""
        chosen, cut = [], 0
        while self.levels[cut].menu:
            level = self.levels[cut]
            next_cut, part, option = level.menu[int(level.choice[index])]
            chosen.append((part, option))
            cut, index = next_cut, int(level.rest[index])
        return chosen


def thin_list(high_bytes: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return indices of at most ``count`` entries of a falling list, both ends among them, evenly by value."""
    if len(high_bytes) <= count:
        return np.arange(len(high_bytes))
    wanted = np.linspace(float(high_bytes[0]), float(high_bytes[-1]), count)
    places = np.searchsorted(-high_bytes.astype(np.float64), -wanted, side="left")
    return np.unique(places.clip(0, len(high_bytes) - 1))
