"""The dynamic program's own figures against the simulator's, and the options of parts."""

from __future__ import annotations

import pytest

from fxmem.ir import GraphProfile, Plan
from fxmem.planners import mincut, segment_dp
from fxmem.planners.cuts import spans_of
from fxmem.planners.pareto import Clock
from fxmem.planners.segments import Parter
from fxmem.planners.simulate import simulate, tables_of
from tests.synthetic import chain, random_dag, residual_blocks


@pytest.mark.parametrize("profile", [chain(60, nbytes=4, grad_bytes=1), residual_blocks(6)], ids=["chain", "blocks"])
def test_the_program_predicts_what_the_simulator_says_where_backwards_nest(profile: GraphProfile) -> None:
    spans = spans_of(profile)
    for cuts, reach in segment_dp.thinnings(spans):
        program = segment_dp.Program(Parter(profile, spans, cuts), reach, {}, Clock(60.0))
        for index in program.spread(20):
            limits = segment_dp.limits_of(profile, program.options(index))
            timeline = simulate(profile, Plan("intervals", limits))
            assert timeline.recompute_seconds == pytest.approx(float(program.levels[0].seconds[index]))
            assert timeline.peak_bytes == int(program.levels[0].high_bytes[index])


def test_equal_blocks_share_their_options() -> None:
    profile = residual_blocks(12)
    spans = spans_of(profile)
    cuts, reach = next(iter(segment_dp.thinnings(spans)))
    parter = Parter(profile, spans, cuts)
    known: dict = {}
    segment_dp.Program(parter, reach, known, Clock(60.0))
    num_parts = sum(min(reach, parter.num_cells - first) for first in range(parter.num_cells))
    assert len(known) < num_parts / 2


@pytest.mark.parametrize("seed", range(5))
def test_no_choice_of_recipes_beats_the_menu_at_any_price(seed: int) -> None:
    tables = tables_of(random_dag(seed, 10))
    network = mincut.Network(tables, tables.nbytes)
    menu = mincut.menu(tables)
    subsets = [[bool(mask >> p & 1) for p in range(len(tables.inputs))] for mask in range(1 << len(tables.inputs))]
    every = [network._choice(mincut.np.array(subset)) for subset in subsets]
    for price in (0.01, 0.1, 0.3, 1.0, 3.0, 10.0):
        best = min(c.seconds + price * c.kept_weight for c in every)
        assert min(c.seconds + price * c.kept_weight for c in menu) == pytest.approx(best)
