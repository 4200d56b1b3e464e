"""Measured op times: plausible, kept on disk, and never in the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fxmem
from fxmem import pipeline
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.profiling import op_benchmark
from fxmem.profiling.op_benchmark import with_measured_times
from fxmem.profiling.profile import Profiled, profile
from fxmem.profiling.roofline import PRESETS, flops_of
from fxmem.runtime.layout import View
from fxmem.runtime.recompute import NodeRecompute, SavedInRerun


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch) -> None:
    monkeypatch.setattr(op_benchmark, "_remembered", {})


def profiled_model() -> Profiled:
    model = nn.Sequential(nn.Embedding(10, 256), nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 256))
    inputs = Inputs.of((torch.randint(0, 10, (64,)),), {})
    return profile(capture(model.train(), inputs), inputs, PRESETS["cpu"].seconds)


@pytest.mark.parametrize("on_tape", [True, False])
def test_ops_of_equal_geometry_get_equal_times_and_recipes_are_sums_of_their_nodes(on_tape: bool) -> None:
    """And of the tape's own Python, where they run on it."""
    graph = with_measured_times(profiled_model(), cache=False, on_tape=on_tape).profile
    linears = [node.seconds for node in graph.nodes if "linear" in node.op]
    assert all(seconds > 0.0 for seconds in linears)
    saved = [any(graph.storages[s].num_saves for s in recipe.products) for recipe in graph.recipes]
    assert set(saved) == {True, False}
    for recipe, is_saved in zip(graph.recipes, saved, strict=True):
        tape_seconds = on_tape * op_benchmark.TAPE_SECONDS / (1 if is_saved else 2)
        assert recipe.seconds == tape_seconds + sum(graph.nodes[k].seconds for k in recipe.nodes)


def test_the_backward_of_the_heaviest_geometry_stands_for_those_of_its_op(monkeypatch) -> None:
    num_backwards = 0

    def median(run: Callable[[], object], device: torch.device) -> float:
        nonlocal num_backwards
        is_backward = isinstance(run(), tuple)  # of gradients
        num_backwards += is_backward
        return 3.0 if is_backward else 1.0

    monkeypatch.setattr(op_benchmark, "median_seconds", median)
    profiled = profiled_model()
    graph = with_measured_times(profiled, cache=False).profile
    linears = [node.seconds for node in graph.nodes if node.op == "aten.linear.default"]
    assert len(linears) > 1
    assert set(linears) == {1.0}
    ops = {node.op for node in graph.nodes if node.seconds == 1.0}
    assert num_backwards == len(ops)
    assert graph.backward_seconds >= 3.0 * len(linears)


def test_what_there_is_no_time_to_measure_is_scaled_like_its_op(monkeypatch) -> None:
    profiled = profiled_model()
    estimates = {node.index: node.seconds for node in profiled.profile.nodes}

    def only_the_heaviest_linear(job: op_benchmark._Job, *_: object) -> op_benchmark.Seconds | None:
        is_heaviest_linear = "linear" in str(job.node.target) and job.heaviest
        return op_benchmark.Seconds(10 * estimates[job.node.index], None) if is_heaviest_linear else None

    monkeypatch.setattr(op_benchmark, "_measure", only_the_heaviest_linear)
    graph = with_measured_times(profiled, cache=False).profile
    for node in graph.nodes:
        assert node.seconds == pytest.approx(10 * estimates[node.index])
    monkeypatch.setattr(op_benchmark, "MOST_SECONDS", 0.0)
    monkeypatch.setattr(op_benchmark, "_remembered", {})
    assert with_measured_times(profiled, cache=False).profile == profiled.profile


def test_measuring_leaves_the_random_state_alone() -> None:
    profiled = profiled_model()
    state = torch.get_rng_state()
    with_measured_times(profiled, cache=False)
    assert torch.equal(torch.get_rng_state(), state)


def test_known_times_are_not_measured_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FXMEM_CACHE", "1")
    monkeypatch.setenv("FXMEM_CACHE_DIR", str(tmp_path))
    profiled = profiled_model()
    first = with_measured_times(profiled)

    def never(*_: object) -> float:
        raise AssertionError("measured again")

    monkeypatch.setattr(op_benchmark, "_measure", never)
    assert with_measured_times(profiled, cache=False).profile == first.profile
    monkeypatch.setattr(op_benchmark, "_remembered", {})
    assert with_measured_times(profiled).profile == first.profile
    monkeypatch.setattr(op_benchmark, "_remembered", {})
    for file in tmp_path.iterdir():
        file.write_bytes(b"no such thing")
    with pytest.raises(AssertionError, match="measured again"):
        with_measured_times(profiled)


def test_an_op_that_does_not_run_on_made_up_values_keeps_its_estimate(monkeypatch) -> None:
    def fails(*_: object) -> float:
        raise RuntimeError("no")

    monkeypatch.setattr(op_benchmark, "median_seconds", fails)
    profiled = profiled_model()
    assert with_measured_times(profiled, cache=False).profile == profiled.profile


@pytest.mark.slow
def test_optimize_measures_unless_told_otherwise(monkeypatch) -> None:
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)), torch.randn(64, 32)
    measured = []

    def noted(profiled: Profiled, *, cache: bool, on_tape: bool) -> Profiled:
        measured.append((cache, on_tape))
        return profiled

    monkeypatch.delenv("FXMEM_RUNTIME", raising=False)
    monkeypatch.setattr(pipeline, "with_measured_times", noted)
    for cost, environment, num_times in (("auto", "0", 0), ("measure", "0", 1), ("cpu", "1", 1), ("auto", "1", 2)):
        monkeypatch.setenv("FXMEM_MEASURE", environment)
        assert fxmem.optimize(model, x, cost=cost).report.floor_bytes
        assert len(measured) == num_times
    assert fxmem.optimize(model, x, cost="measure", cache=False, runtime="tape").report.floor_bytes
    assert measured == [(True, False)] * 2 + [(False, True)]  # later steps need not be on it
    with pytest.raises(fxmem.InputError, match="unknown cost 'measured'; known: a100, auto, "):
        fxmem.optimize(model, x, cost="measured")


class Experts(nn.Module):
    """Rows of a batch in four groups, each with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 128, 256))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, self.weight, offs=ends).tanh()


def test_a_grouped_matmul_is_measured_with_groups_that_hold_all_rows(monkeypatch) -> None:
    x, ends = torch.randn(512, 128), torch.tensor([128, 256, 384, 512], dtype=torch.int32)
    inputs = Inputs.of((x, ends), {})
    profiled = profile(capture(Experts(), inputs), inputs, PRESETS["cpu"].seconds)
    run, outputs = NodeRecompute.run, []

    def noting(node: NodeRecompute, bases: dict[int, torch.Tensor], saved: SavedInRerun) -> None:
        run(node, bases, saved)
        outputs.extend(t for t in bases.values() if t.numel() == 512 * 256)

    monkeypatch.setattr(NodeRecompute, "run", noting)
    with_measured_times(profiled, cache=False)
    assert outputs
    assert all((output != 0.0).all() for output in outputs)
    assert next(node for node in profiled.profile.nodes if "grouped" in node.op).flops == 2 * 512 * 128 * 256


@pytest.mark.parametrize(
    ("a", "b", "ends"),
    [((12, 4), (3, 4, 8), [4, 8, 12]), ((3, 5, 4), (4, 12), [4, 8, 12]), ((5, 12), (12, 8), [4, 8, 12])],
    ids=["rows", "columns", "inner"],
)
def test_groups_of_equal_size_end_where_the_last_one_ends_with_all(a, b, ends) -> None:
    tensors = [torch.randn(a), torch.randn(b), torch.zeros(3, dtype=torch.int32)]
    views = [View.of(tensor, place) for place, tensor in enumerate(tensors)]
    bases = {place: tensor.flatten() for place, tensor in enumerate(tensors)}
    op_benchmark._make_groups_equal(views, bases)
    assert bases[2].tolist() == ends
    output = torch._grouped_mm(tensors[0], tensors[1], offs=bases[2])
    multiplied = sum(2 * one.numel() * two.shape[1] for one, two in _groups(tensors[0], tensors[1]))
    assert flops_of(torch.ops.aten._grouped_mm.default, tensors, {}, output) == multiplied


def _groups(a: torch.Tensor, b: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the three pairs of matrices that a grouped matmul of these operands multiplies."""
    if a.dim() == 3:
        return list(zip(a, b.chunk(3, 1), strict=True))
    if b.dim() == 3:
        return list(zip(a.chunk(3), b, strict=True))
    return list(zip(a.chunk(3, 1), b.chunk(3), strict=True))
