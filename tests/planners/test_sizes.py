"""Plans taken over from one size of a graph for another: as good, never over the budget, and no batch stays in memory."""

from __future__ import annotations

import dataclasses
import functools
import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.api.estimate import Question
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.ir import GraphProfile
from fxmem.planners.pareto import cheapest_within
from fxmem.planners.plan_transfer import MOST_WORSE, Planned, counterparts, of_same_graph, taken_over
from fxmem.planners.registry import PLANNERS
from fxmem.planners.simulate import simulate
from fxmem.profiling.op_benchmark import with_times_like
from fxmem.profiling.profile import profile
from fxmem.profiling.roofline import PRESETS
from tests.exactness import differences, run
from tests.synthetic import chain, hourglass, residual_blocks
from tests.tiers import representatives

WIDTH = 16


def planned(graph_profile: GraphProfile) -> Planned:
    return Planned(graph_profile, PLANNERS["intervals"](graph_profile, seconds=10.0))


@pytest.mark.slow
@pytest.mark.parametrize("make", [residual_blocks, hourglass], ids=lambda make: make.__name__)
@pytest.mark.parametrize("width", [48, 60, 70, 96])
def test_what_is_taken_over_fits_and_is_about_as_good_as_planned_anew(make: Any, width: int) -> None:
    earlier, other = planned(make(5, width=64)), make(5, width=width)
    anew = planned(other).points
    low, high = anew[-1].peak_bytes, anew[0].peak_bytes
    taken = 0
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        budget_bytes = round(low + share * (high - low))
        point = cheapest_within(taken_over(other, [earlier], (), budget_bytes), budget_bytes)
        if point is None:
            continue
        taken += 1
        timeline = simulate(other, point.plan)
        assert (timeline.peak_bytes, timeline.recompute_seconds) == (point.peak_bytes, point.recompute_seconds)
        best = cheapest_within(anew, budget_bytes)
        assert best is not None
        assert point.recompute_seconds <= best.recompute_seconds + 3 * MOST_WORSE * other.step_seconds
    assert taken >= 3


def test_nothing_is_taken_over_where_no_earlier_plan_fits() -> None:
    earlier, other = planned(residual_blocks(3, width=8)), residual_blocks(3, width=80)
    assert taken_over(other, [earlier], (), earlier.points[0].peak_bytes) == ()


@pytest.mark.slow
def test_a_dear_plan_is_not_taken_over() -> None:
    best, other = planned(residual_blocks(4, width=64)), residual_blocks(4, width=63)
    dear = dataclasses.replace(best, points=best.points[-1:])  # that of the least peak
    budget_bytes = (best.points[0].peak_bytes + best.points[-1].peak_bytes) // 2
    assert taken_over(other, [best], (), budget_bytes)
    assert not taken_over(other, [dear], (), budget_bytes)


def test_sizes_of_another_graph_do_not_serve_and_the_nearest_comes_first() -> None:
    sizes = [planned(residual_blocks(2, width=width)) for width in (8, 30, 64)]
    others = [planned(residual_blocks(3, width=30)), planned(chain(12, nbytes=30))]
    order = of_same_graph(residual_blocks(2, width=40), [*others, *sizes])
    assert [one.profile for one in order] == [sizes[k].profile for k in (1, 2, 0)]


# -- through the pipeline --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(2)))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def texts(length: int) -> Tensor:
    return torch.randint(32, (4, length))


class Plannings:
    """Counts how often the planner is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        planner = PLANNERS["mincut"]

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return planner(*args, **kwargs)

        monkeypatch.setitem(PLANNERS, "mincut", counted)


@functools.cache
def budget_for(length: int, share: float) -> int:
    report = fxmem.optimize(Texts(), texts(length), planner="chen", optimizer=None).report
    return round(report.floor_bytes + share * (report.eager_peak_bytes - report.floor_bytes))


@pytest.mark.exhaustive
def test_texts_of_many_lengths_are_planned_for_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = budget_for(64, 0.4)
    plannings = Plannings(monkeypatch)
    eager = Texts()
    optimized = fxmem.optimize(Texts(), budget=budget, planner="mincut", optimizer=None, loss_fn=torch.sum)
    optimized.load_state_dict(eager.state_dict())
    rng = random.Random(0)
    names = []
    for length in (64, *(rng.randint(48, 68) for _ in range(4)), 70, 72):
        inputs = Inputs.of((texts(length),), {})
        assert not differences(run(eager, eager, inputs), run(optimized, optimized, inputs))
        assert optimized.report.predicted_peak_bytes <= budget
        names.append(optimized.report.planner)
    assert plannings.count <= 2
    assert sum(name.startswith("earlier size") for name in names) >= 3  # what is larger is planned for
    assert sum(name.endswith("of a larger size") for name in names) >= 3


@pytest.mark.slow
def test_the_largest_batch_is_looked_for_with_plans_made_for_smaller_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    plannings = Plannings(monkeypatch)
    estimate = fxmem.estimate(Texts(), texts(64), planner="mincut", optimizer=None)
    sizes: list[int] = []
    peak_at_batch = Question.peak_at_batch

    def watched(question: Question, size: int, budget_bytes: int | None) -> int:
        sizes.append(size)
        return peak_at_batch(question, size, budget_bytes)

    monkeypatch.setattr(Question, "peak_at_batch", watched)
    largest = estimate.max_batch_size(4 * estimate.floor_bytes, recompute=True)
    assert largest > 8
    assert plannings.count < len(sizes)  # those that an earlier plan fits are not planned for; the example was


@pytest.mark.slow
def test_sizes_in_an_autocast_region_with_dropout() -> None:
    def network() -> nn.Sequential:
        torch.manual_seed(0)
        dropping = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))
        return nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), dropping, nn.Linear(64, 16))

    def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
        module.zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(x).float().square().sum()
        loss.backward()
        return [p.grad for p in module.parameters() if p.grad is not None]

    eager = network()
    optimized = fxmem.optimize(network(), budget=134_000, planner="mincut", optimizer=None, loss_fn=torch.sum)
    planners = []
    for rows in (128, 124, 126):
        x = torch.randn(rows, 16)
        assert all(map(torch.equal, gradients(eager, x), gradients(optimized, x)))
        planners.append(optimized.report.planner)
    assert planners[1:] == ["earlier size, of a larger size"] * 2


@pytest.mark.slow
def test_a_report_of_a_plan_taken_over_plans_when_its_floor_is_asked_for_only(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = budget_for(64, 0.4)
    plannings = Plannings(monkeypatch)
    optimized = fxmem.optimize(Texts(), budget=budget, planner="mincut", optimizer=None)
    for length in (64, 63, 62):
        optimized(texts(length))
    report, count = optimized.report, plannings.count
    assert report.planner == "earlier size, of a larger size"
    assert "least reachable" not in str(report)
    assert plannings.count == count
    assert report.floor_bytes <= report.predicted_peak_bytes
    assert plannings.count == count + 1


@pytest.mark.slow
@pytest.mark.parametrize("action", representatives(["save", "recompute"], "save", quick=["recompute"]))
def test_a_policy_holds_for_plans_taken_over(action: Any) -> None:
    budget = budget_for(64, 0.7)
    optimized = fxmem.optimize(
        Texts(), budget=budget, planner="mincut", optimizer=None, policy=[("layer_norm", action)]
    )
    for length in (64, 63, 62):
        optimized(texts(length))
    report = optimized.report
    assert report.planner == "earlier size, of a larger size"
    decisions = {row.decision for row in report.rows if row.name.startswith("layer_norm")}
    assert decisions == {"keep" if action == "save" else "drop"}


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.4, 2.0])
def test_no_batch_is_held_once_its_step_is_over(share: float) -> None:
    optimized = fxmem.optimize(Texts(), budget=budget_for(64, share), planner="mincut", optimizer=None)
    for length in (64, 64, 60, 60, 64):  # planned for, and known
        tokens = texts(length)
        held = weakref.ref(tokens)
        gc.disable()
        optimized(tokens).sum().backward()
        del tokens
        gc.enable()
        assert held() is None


@pytest.mark.slow
def test_what_a_user_froze_stays_so() -> None:
    optimized = fxmem.optimize(Texts(), planner="mincut", optimizer=None)
    gc.freeze()
    try:
        num_frozen = gc.get_freeze_count()
        optimized(texts(8))
        assert 0 < gc.get_freeze_count() <= num_frozen
    finally:
        gc.unfreeze()


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(enabled: bool) -> None:
    optimized = fxmem.optimize(Texts(), planner="mincut", optimizer=None)
    before, num_frozen = gc.isenabled(), gc.get_freeze_count()
    (gc.enable if enabled else gc.disable)()
    try:
        optimized(texts(8))
        with pytest.raises(fxmem.InputError):
            optimized(torch.zeros(2))
        assert gc.isenabled() == enabled
        assert bool(gc.get_freeze_count()) == bool(num_frozen)
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.slow
def test_times_of_another_size_are_scaled_as_measured_ones_were() -> None:
    model, timer = Texts().train(), PRESETS["cpu"].seconds
    small, large = (Inputs.of((texts(length),), {}) for length in (16, 32))
    captured = capture(model, small)
    one = profile(captured, small, timer)
    nodes = tuple(dataclasses.replace(node, seconds=3 * node.seconds) for node in one.profile.nodes)
    recipes = tuple(dataclasses.replace(r, seconds=3 * r.seconds + 1.0) for r in one.profile.recipes)
    slower = dataclasses.replace(one.profile, nodes=nodes, recipes=recipes, backward_seconds=0.5)
    usual = profile(capture(model, large), large, timer)
    scaled = with_times_like(usual, slower, counterparts(usual.profile, slower), timer).profile
    assert [n.seconds for n in scaled.nodes] == pytest.approx([3 * n.seconds for n in usual.profile.nodes])
    assert [r.seconds for r in scaled.recipes] == pytest.approx([3 * r.seconds + 1 for r in usual.profile.recipes])
    ratio = usual.profile.backward_seconds / one.profile.backward_seconds
    assert scaled.backward_seconds == pytest.approx(0.5 * ratio)
