"""Runs that start from another: the same figures as runs from the start, for fewer ticks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fxmem.ir import KEEP, GraphProfile
from fxmem.planners.incremental import Base, Bases, IncrementalRun
from fxmem.planners.registry import PLANNERS
from fxmem.planners.simulate import Run, Tables, tables_of
from tests.synthetic import hourglass, random_dag, random_limits, residual_blocks

Limits = tuple[int, ...]


def whole_run(tables: Tables, limits: Limits) -> Run:
    run = Run(tables, limits)
    run.advance(tables.ticks)
    return run


def resumed_run(base: Base, limits: Limits) -> tuple[IncrementalRun, int]:
    """Return the finished run and the number of stretches it lived through."""
    steps, lived = IncrementalRun(base, limits), 0
    while steps.advance():
        lived += 1
    return steps, lived


def figures(run: Run) -> tuple[int, int, float, int]:
    return run.peak_bytes, run.peak_tick, run.recompute_seconds, run.num_recomputed


def changed(limits: Limits, others: Limits, rng: random.Random, count: int) -> Limits:
    """Return ``limits`` with up to ``count`` of them as in ``others``."""
    chosen = set(rng.sample(range(len(limits)), min(count, len(limits))))
    return tuple(others[s] if s in chosen else limit for s, limit in enumerate(limits))


@pytest.mark.parametrize("seed", range(60))
def test_a_resumed_run_has_the_figures_of_a_whole_one(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_dag(seed, rng.randint(3, 90), reach=rng.randint(1, 8))
    tables = tables_of(profile)
    for _ in range(4):
        base = Base(tables, random_limits(profile, rng))
        for count in (0, 1, 1, 1, 1, 2, 2, 5, len(base.limits)):
            limits = changed(base.limits, random_limits(profile, rng), rng, count)
            steps, _ = resumed_run(base, limits)
            assert figures(steps.run) == figures(whole_run(tables, limits))


def test_seconds_are_the_same_in_whatever_order_they_are_added() -> None:
    profile = residual_blocks(30)
    recipes = tuple(replace(r, seconds=0.1 / (3 + r.index)) for r in profile.recipes)
    tables = tables_of(replace(profile, recipes=recipes))
    assert sum(tables.seconds) == sum(reversed(tables.seconds)) == sum(sorted(tables.seconds))
    assert sum(tables.seconds) == pytest.approx(sum(r.seconds for r in recipes), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("profile", [residual_blocks(40, grad_bytes=1), hourglass(12)], ids=["blocks", "hourglass"])
def test_neighbours_of_a_plan_live_through_few_ticks(profile: GraphProfile) -> None:
    points = PLANNERS["intervals"](profile, seconds=60.0)
    tables, rng = tables_of(profile), random.Random(0)
    lived = whole = 0
    for point in points[:: max(1, len(points) // 8)]:
        base = Base(tables, point.plan.limits)
        for s in rng.sample([s for s, p in enumerate(tables.position) if p >= 0], 10):
            limit = KEEP if base.limits[s] != KEEP else len(tables.inputs) - 1
            limits = (*base.limits[:s], limit, *base.limits[s + 1 :])
            steps, stretches = resumed_run(base, limits)
            assert figures(steps.run) == figures(whole_run(tables, limits))
            lived, whole = lived + stretches, whole + len(base.marks) - 1
    assert lived < 0.35 * whole


def test_a_base_is_lent_to_plans_that_are_near_and_the_oldest_is_let_go() -> None:
    profile = residual_blocks(12)
    tables = tables_of(profile)
    bases = Bases(tables, most=2)
    keep = (KEEP,) * len(tables.position)
    droppable = [s for s, p in enumerate(tables.position) if p >= 0]
    near = tuple(tables.position[s] if s in droppable[:2] else limit for s, limit in enumerate(keep))
    far = tuple(tables.position[s] if s in droppable[:9] else limit for s, limit in enumerate(keep))
    base = bases.of(keep)
    bases.lend(near, base, peak_tick=base.run.peak_tick + 1)
    assert bases.of(near) is base
    assert bases.peak_tick(near) == base.run.peak_tick + 1  # a plan's own, not its base's
    assert bases.peak_tick(keep) == base.run.peak_tick
    bases.lend(far, base, peak_tick=base.run.peak_tick)
    assert bases.of(far) is not base
    assert bases.of(far).limits == far
    assert bases.of(keep) is not base
