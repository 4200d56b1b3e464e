"""Which cases of a sweep run when: marks for lists of parameters.

``make test`` leaves out what is marked `exhaustive`, ``make quick`` what is marked `slow` besides, ``make test-all``
nothing. What a sweep shows of each kind stays in ``make test``: these functions say which cases stand for the others.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def representatives(values: Iterable[Any], *kept: Any, quick: Sequence[Any] = ()) -> list[Any]:
    """All of ``values``: ``quick`` unmarked, ``kept`` marked `slow` where some are quick, the others `exhaustive`."""
    values = list(values)
    unknown = [value for value in (*kept, *quick) if value not in values]
    assert not unknown, f"{unknown} are not among the values"

    def marks(value: Any) -> Any:
        if value in quick:
            return ()
        return (pytest.mark.slow if quick else ()) if value in kept else pytest.mark.exhaustive

    return [pytest.param(value, marks=marks(value)) for value in values]


def first_of_each(values: Iterable[Any], key: Any, *kept: Any, quick: int = 0) -> list[Any]:
    """All of ``values``: the first of each ``key`` and ``kept`` stand for the rest, which are marked `exhaustive`.

    The first ``quick`` of those that stand for others are unmarked, the next ones `slow`; all unmarked if it is 0.
    """
    values = list(values)
    firsts = {key(value): value for value in reversed(values)}.values()
    chosen = [value for value in values if value in firsts or value in kept]
    return representatives(values, *chosen, quick=chosen[:quick])


def diagonal(*axes: Iterable[Any]) -> list[Any]:
    """Every combination of the axes' values: a diagonal where each value occurs unmarked, the others `exhaustive`."""
    lists = [list(axis) for axis in axes]
    kept = {tuple(n % len(values) for values in lists) for n in range(max(map(len, lists)))}
    return [
        pytest.param(
            *(values[i] for values, i in zip(lists, place, strict=True)),
            marks=() if place in kept else pytest.mark.exhaustive,
        )
        for place in itertools.product(*(range(len(values)) for values in lists))
    ]
