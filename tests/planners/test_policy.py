"""What the user says must be saved or recomputed, the check of plans, and frontiers as the user sees them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import nn

import fxmem
from fxmem import disk_cache
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.ir import KEEP, GraphProfile, Plan
from fxmem.planners import frontier_cache
from fxmem.planners.plan_check import check_plan
from fxmem.planners.policy import check_policy, constrain, enforce, op_name
from fxmem.planners.registry import PLANNERS
from fxmem.planners.simulate import drop_all, keep_all, simulate
from fxmem.profiling.profile import profile
from fxmem.profiling.roofline import PRESETS
from tests.synthetic import Op, build, chain, random_dag


class Router(nn.Module):
    """Two experts; each token goes to the one its router scores higher."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = torch.topk(self.gate(x).softmax(-1), 1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        picked = outputs.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 8)).squeeze(1)
        return (weight * picked).tanh()


def profile_of(model: nn.Module, *args: torch.Tensor) -> GraphProfile:
    inputs = Inputs.of(args, {})
    return profile(capture(model.train(), inputs), inputs, PRESETS["a100"].seconds).profile


def dropped_somewhere(points: tuple, storage: int) -> bool:
    return any(point.plan.limits[storage] != KEEP for point in points)


def test_routing_decisions_are_saved_by_default() -> None:
    graph = profile_of(Router(), torch.randn(16, 8))
    constrained, _ = constrain(graph, ())
    kept = {s.name for s in constrained.storages if s.why_kept == "a routing decision"}
    assert kept == {"topk.1"}
    indices = next(s.index for s in graph.storages if s.name == "topk.1")
    assert not dropped_somewhere(PLANNERS["auto"](constrained, seconds=20.0), indices)


def test_a_rule_may_say_otherwise() -> None:
    graph = profile_of(Router(), torch.randn(16, 8))
    constrained, recomputed = constrain(graph, (("topk", "recompute"),))
    assert constrained is graph
    assert {graph.storages[s].name for s in recomputed} == {"topk.0", "topk.1"}


@pytest.mark.parametrize("where", ["experts.0", "experts.[0]", lambda node: "experts.0" in node.source.module_path])
def test_what_lies_inside_a_module_is_saved(where) -> None:
    graph = profile_of(Router(), torch.randn(16, 8))
    constrained, _ = constrain(graph, check_policy([(where, "save")]))
    kept = [s for s in constrained.storages if s.why_kept == "the policy says so"]
    assert len(kept) >= 2
    assert all(graph.nodes[s.creator].source.module_path.startswith("experts.0") for s in kept)


def test_the_first_rule_that_matches_decides() -> None:
    graph = profile_of(Router(), torch.randn(16, 8))
    _, recomputed = constrain(graph, (("experts.0", "save"), ("relu", "recompute")))
    paths = {graph.nodes[graph.storages[s].creator].source.module_path for s in recomputed}
    assert paths == {"experts.1.1"}


@pytest.mark.parametrize("seed", range(4))
def test_what_must_be_recomputed_is_dropped_in_every_plan(seed: int) -> None:
    graph = random_dag(seed, 12)
    must = frozenset(s.index for s in graph.storages if s.recipe is not None and s.index % 3 == 0)
    for point in enforce(graph, PLANNERS["intervals"](graph, seconds=20.0), must):
        assert must <= set(point.plan.dropped)
        timeline = simulate(graph, point.plan)
        assert (timeline.peak_bytes, timeline.recompute_seconds) == (point.peak_bytes, point.recompute_seconds)


def test_optimize_follows_the_policy_and_the_numbers_stay() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(16, 16), nn.GELU()))), torch.randn(64, 16)
    optimized = fxmem.optimize(model, x, policy=[("gelu", "recompute"), ("0", "save")])
    rows = {row.name: row.decision for row in optimized.report.rows}
    assert any(name.startswith("gelu") and decision == "drop" for name, decision in rows.items())
    optimized(x).sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), found, strict=True))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("relu", "policy must be a sequence of"),
        ([("relu",)], "a rule of policy is a pair"),
        ([("relu", "keep")], "unknown action 'keep' in policy; known: save, recompute"),
        ([(3, "save")], "starts with a pattern, an op's name or a callable, not 3"),
    ],
)
def test_what_is_not_a_policy_is_refused(policy, message: str) -> None:
    with pytest.raises(fxmem.InputError, match=message):
        check_policy(policy)


def test_op_names() -> None:
    node = chain(2).nodes[0]
    assert op_name(dataclasses.replace(node, op="aten.relu.default")) == "relu"
    assert op_name(node) == "op"


# -- the check ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_every_plan_of_every_planner_passes_the_check(seed: int) -> None:
    graph = random_dag(seed, 16)
    for planner in PLANNERS.values():
        for point in planner(graph, seconds=20.0):
            check_plan(graph, point.plan)


def test_the_check_refuses_an_impure_rerun() -> None:
    graph = chain(4)
    nodes = (dataclasses.replace(graph.nodes[0], why_not="op0 writes a buffer"), *graph.nodes[1:])
    with pytest.raises(ValueError, match="the plan reruns op0, which may never run again: op0 writes a buffer"):
        check_plan(dataclasses.replace(graph, nodes=nodes), drop_all(graph))


def test_the_check_refuses_an_output() -> None:
    graph = chain(4)
    with pytest.raises(ValueError, match="may not be dropped"):
        check_plan(graph, Plan("bad", (KEEP, KEEP, KEEP, 3)))


def test_the_check_refuses_a_recipe_that_nobody_feeds() -> None:
    graph = build([Op(), Op((0,)), Op((1,))])
    recipes = (graph.recipes[0], dataclasses.replace(graph.recipes[1], inputs=()))
    with pytest.raises(ValueError, match="the rerun of op1 needs op0, which nobody holds for it"):
        check_plan(dataclasses.replace(graph, recipes=recipes), Plan("bad", (KEEP, 1, KEEP)))


def test_the_check_refuses_a_rerun_that_writes_what_it_does_not_make() -> None:
    graph = build([Op(), Op((0,)), Op((1,))])
    nodes = (graph.nodes[0], dataclasses.replace(graph.nodes[1], writes=(0,)), graph.nodes[2])
    with pytest.raises(ValueError, match="the plan reruns op1, which would write op0 again"):
        check_plan(dataclasses.replace(graph, nodes=nodes), Plan("bad", (KEEP, 1, KEEP)))


# -- the cache ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("FXMEM_CACHE", "1")
    monkeypatch.setenv("FXMEM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_frontier_comes_back_as_it_was(place) -> None:
    graph = random_dag(1, 12)
    points = PLANNERS["intervals"](graph, seconds=20.0)
    assert frontier_cache.load(graph, "intervals", 20.0) is None
    frontier_cache.store(graph, "intervals", 20.0, points)
    assert frontier_cache.load(graph, "intervals", 20.0) == points
    assert frontier_cache.load(graph, "auto", 20.0) is None
    assert frontier_cache.load(random_dag(2, 12), "intervals", 20.0) is None


@pytest.mark.parametrize(
    "harm", [lambda b: b[:-3], lambda b: b"", lambda b: b[:70] + b"x" + b[71:], lambda b: b"x" * 90]
)
def test_a_harmed_file_is_as_good_as_none(place, harm) -> None:
    disk_cache.write("test", "key", "text" * 50)
    assert disk_cache.read("test", "key") == "text" * 50
    (file,) = place.iterdir()
    file.write_bytes(harm(file.read_bytes()))
    assert disk_cache.read("test", "key") is None


def test_a_directory_that_cannot_be_written_does_no_harm(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FXMEM_CACHE", "1")
    monkeypatch.setenv("FXMEM_CACHE_DIR", str(tmp_path / "file" / "below"))
    disk_cache.write("test", "key", "text")
    assert disk_cache.read("test", "key") is None


def test_the_cache_can_be_switched_off(place, monkeypatch) -> None:
    monkeypatch.setenv("FXMEM_CACHE", "0")
    disk_cache.write("test", "key", "text")
    assert not place.exists()
    monkeypatch.setenv("FXMEM_CACHE", "1")
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert fxmem.optimize(model, torch.randn(2, 4), cache=False).report.floor_bytes
    assert not place.exists()
    assert fxmem.optimize(model, torch.randn(2, 4)).report.floor_bytes
    assert list(place.iterdir())


def test_what_fits_as_it_is_is_not_planned(monkeypatch) -> None:
    planned: list[float] = []

    def planner(profile, *, seconds: float):
        planned.append(seconds)
        return PLANNERS["chen"](profile, seconds=seconds)

    monkeypatch.setitem(PLANNERS, "auto", planner)
    model, x = nn.Sequential(*[nn.Linear(8, 8), nn.GELU()] * 4), torch.randn(64, 8)
    report = fxmem.optimize(model, x, budget=1 << 20, optimizer=None).report
    assert not planned
    assert "least reachable" not in str(report)
    assert report.predicted_peak_bytes > report.floor_bytes == report.floor_bytes
    assert len(planned) == 1
    tight = fxmem.optimize(model, x, budget=report.predicted_peak_bytes - 1, optimizer=None).report
    assert len(planned) == 2
    assert "least reachable" in str(tight)


def test_the_oldest_files_go_first(place, monkeypatch) -> None:
    monkeypatch.setattr(disk_cache, "MOST_FILES", 3)
    for key in "abcde":
        disk_cache.write("test", key, key)
    assert [disk_cache.read("test", key) for key in "de"] == ["d", "e"]
    assert len(list(place.iterdir())) == 3


# -- the frontier ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_frontier_falls_from_keeping_everything_and_budgets_are_met() -> None:
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))))
    x = torch.randn(256, 16)
    points = fxmem.frontier(model, x, optimizer=None)
    assert points[0].overhead_seconds == 0.0
    assert points[0].budget_bytes > points[-1].budget_bytes
    for left, right in itertools.pairwise(points):
        assert left.budget_bytes > right.budget_bytes
        assert left.overhead_ratio < right.overhead_ratio
    assert all(0.0 <= p.gap_ratio <= p.overhead_ratio for p in points)
    middle = points[len(points) // 2]
    optimized = fxmem.optimize(model, x, budget=middle.budget_bytes, optimizer=None)
    assert optimized.report.predicted_peak_bytes <= middle.budget_bytes
    assert optimized.report.overhead_ratio == pytest.approx(middle.overhead_ratio)
    assert 0.0 <= optimized.report.gap_ratio <= middle.overhead_ratio + 1e-9


@pytest.mark.slow
def test_a_frontier_is_drawn_as_the_staircase_it_is() -> None:
    pytest.importorskip("matplotlib")
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(16, 16), nn.Tanh())))
    points = fxmem.frontier(model, torch.randn(256, 16), optimizer=None)
    (axes,) = points.plot().axes
    stairs = next(line for line in axes.lines if line.get_label() == "fxmem")
    assert stairs.get_drawstyle() == "steps-pre"  # peaks fall: up to the next higher peak, the lower one's plan is had
    assert list(stairs.get_ydata()) == pytest.approx([100 * p.overhead_ratio for p in points])
    peaks = list(stairs.get_xdata())
    assert peaks[-1] / peaks[0] == pytest.approx(points[-1].budget_bytes / points[0].budget_bytes)


def test_keep_all_passes_the_check() -> None:
    graph = random_dag(0, 12)
    check_plan(graph, keep_all(graph))
