"""The benchmarks' own arithmetic, and that what they compare is what they say."""

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import (
    ablation,
    ablation_runtime,
    compare,
    compiled_budgets,
    cuda_suite,
    first_gpu,
    models,
    published,
    verdicts,
)
from benchmarks.comparison_page import with_both_backends
from benchmarks.keeping_seconds import keeping_seconds
from benchmarks.measure import Row, largest_relative_error, measure, quartiles, turns
from benchmarks.results_file import RESULTS, load_rows, save_rows, where_measured
from benchmarks.ways import EAGER, FUSED, LEAST, NO_RECOMPUTE, Way, peers, without_recompute
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.ir import FrontierPoint, Plan
from fxmem.passes.context import CompileContext, Settings
from fxmem.passes.lean_backwards import LeanBackwards
from fxmem.planners.portfolio import STAGES
from fxmem.profiling.roofline import PRESETS
from fxmem.profiling.training_step import TrainingStep
from tests.synthetic import residual_blocks


def _tiny() -> models.BenchModel:
    """Linear layers with BatchNorm and dropout, one block per pair."""

    def build(scale: str) -> nn.Module:
        block = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)]
        return nn.Sequential(*block, nn.Linear(32, 4)).train()

    def loss(output: Tensor) -> Tensor:
        return output.square().mean()

    return models.BenchModel("tiny", build, lambda scale: ((torch.randn(256, 32),), {}), loss, ("*",))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setitem(models.MODELS, "tiny", _tiny())
    monkeypatch.setenv("FXMEM_CACHE_DIR", str(tmp_path))
    return "tiny"


@pytest.mark.parametrize("path", sorted(Path(verdicts.__file__).parent.rglob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_takes_of_the_package_is_there(path: Path) -> None:
    """Also where it is imported inside of a function, which no test may call. Integrations import their framework."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("fxmem."):
            if str(node.module).startswith("fxmem.integrations."):
                assert importlib.util.find_spec(str(node.module))
                continue
            module = importlib.import_module(str(node.module))
            for name in (each.name for each in node.names):
                assert hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}"), name


@pytest.mark.slow
def test_a_measurement_has_peak_time_and_equal_numbers(tiny: str) -> None:
    budget = next(measure(tiny, "cpu", [Way("fxmem", "fxmem")], 0.01)).floor_bytes
    eager, ours, peer = measure(tiny, "cpu", [EAGER, Way("fxmem", "fxmem", budget), Way("c", "checkpoint")], 0.01)
    assert eager.peak_bytes == eager.eager_peak_bytes
    assert ours.peak_bytes == ours.predicted_peak_bytes <= budget < eager.peak_bytes
    assert (ours.gradients, ours.buffers) == ("bitwise", "equal")
    assert peer.gradients == "bitwise"
    assert ours.time_ratio_low <= ours.time_ratio <= ours.time_ratio_high


@pytest.mark.documents_peer
def test_checkpointing_updates_batchnorm_statistics_twice(tiny: str) -> None:
    (row,) = measure(tiny, "cpu", [Way("checkpoint", "checkpoint")], 0.01)
    assert "wrong" in row.buffers


@pytest.mark.slow
def test_what_does_not_fit_or_apply_is_a_row_with_a_reason(tiny: str) -> None:
    rows = measure(tiny, "cpu", [Way("fxmem", "fxmem", 1000), Way("s", "sequential"), Way("x", "nonsense")], 0.01)
    assert [row.problem.split(":")[0] for row in rows] == ["not reachable", "not applicable", "KeyError"]


def test_a_lost_gradient_counts_as_wrong_and_equal_bits_as_zero() -> None:
    gradient = {"w": torch.ones(3)}
    assert largest_relative_error(gradient, {"w": torch.ones(3)}) == 0
    assert largest_relative_error(gradient, {}) == 1
    zero = {"w": torch.zeros(3)}
    assert largest_relative_error(zero, {"w": torch.zeros(3)}) == 0
    assert largest_relative_error(zero, gradient) == 1
    assert largest_relative_error({}, gradient) == 0
    assert largest_relative_error(gradient, {"w": 2 * torch.ones(3)}) == pytest.approx(1)


def test_rows_survive_the_file_and_are_not_measured_twice(tmp_path: Path) -> None:
    rows = [Row("m", "a", "checkpoint", peak_bytes=7, time_ratio=1.5), Row("m", "b", "fxmem", problem="x")]
    save_rows(tmp_path / "r.json", rows, scale="cpu")
    assert load_rows(tmp_path / "r.json") == rows
    assert load_rows(tmp_path / "none.json") == []


def test_only_rows_of_the_models_named_are_redone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Row(model, way, "checkpoint", problem="not run")
        for model in ("gpt2", "vit")
        for way in ("fxmem floor", "selective")
    ]
    path = tmp_path / "rows.json"
    save_rows(path, rows, scale="cpu")
    monkeypatch.setattr(
        compare, "missing_rows", lambda name, known, *_: iter([Row(name, str(len(known)), "", problem="not run")])
    )
    compare.main(["--models", "vit", "--again", "fxmem", "--results", str(path)])
    left = [(row.model, row.way) for row in load_rows(path)]
    assert left == [("gpt2", "fxmem floor"), ("gpt2", "selective"), ("vit", "selective"), ("vit", "3")]


def test_a_compiled_peer_is_judged_by_its_own_time_without_recompute() -> None:
    rows = [
        Row("m", NO_RECOMPUTE.name, "aot", peak_bytes=100, time_ratio=1.5),
        Row("m", "p", "partitioner", 0.5, peak_bytes=50, time_ratio=1.8, eager_peak_bytes=100),
        Row("m", "fxmem at p", "fxmem", 50, peak_bytes=49, time_ratio=1.1, time_ratio_low=1.09, time_ratio_high=1.11),
    ]
    (verdict,) = verdicts.verdicts_of(rows, "m")
    assert verdict.peer_extra == pytest.approx(0.2)
    assert verdict.ratio == pytest.approx(0.5)
    assert not verdict.lost


def test_the_compiled_backend_is_compared_at_torchs_own_points_by_its_compilers_time() -> None:
    rows = [
        Row("m", "torch 1", "inductor", 1.0, peak_bytes=80, time_ratio=0.8),
        Row("m", "torch 0.5", "inductor", 0.5, peak_bytes=50, time_ratio=0.9, own_ratio=1.2, gradient_error=0.9),
    ]
    ways = compare.compiled_ways(rows)
    assert [(way.name, way.amount) for way in ways] == [
        ("fxmem, inductor at torch 1", 80),
        ("fxmem, inductor at torch 0.5", 50),
        ("fxmem, inductor least", LEAST),
    ]
    assert without_recompute(ways[0]) == FUSED
    rows.append(Row("m", ways[1].name, ways[1].kind, 50, peak_bytes=49, time_ratio=0.85, own_ratio=1.1))
    (verdict,) = verdicts.verdicts_of(rows, "m", verdicts.OURS_COMPILED)
    assert verdict.our_extra == pytest.approx(0.1)
    assert verdict.ratio == pytest.approx(0.5)
    assert verdict.note == "peer's gradients wrong"
    assert not verdict.lost
    assert not list(verdicts.verdicts_of(rows, "m"))


@pytest.mark.parametrize(("error", "by_rounding", "wrong"), [(2e-3, 0.0, True), (2e-3, 1e-3, False), (0.5, 4.0, True)])
def test_gradients_are_wrong_that_differ_by_more_than_rounding(
    error: float, by_rounding: float, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "_rounding_errors", lambda: {"m": by_rounding})
    assert verdicts.is_wrong(Row("m", "way", "inductor", gradient_error=error)) == wrong


@pytest.mark.parametrize(
    ("eager", "compiled", "own", "said"),
    [
        (1.1, 2.0, 2.0, "at 1 of 1 points (100.0%); at 0 of the other 0"),
        (2.0, 0.95, 1.1, "at 1 of 1 points (100.0%); at 0 of the other 0"),
        (2.0, 0.85, 1.3, "at 0 of 1 points (0.0%); at 1 of the other 1"),
        (2.0, 0.95, 1.3, "at 0 of 1 points (0.0%); at 0 of the other 1"),
    ],
)
def test_a_point_is_lost_where_neither_backend_is_ahead(eager: float, compiled: float, own: float, said: str) -> None:
    rows = [
        Row("m", "p", "inductor", 0.5, peak_bytes=50, time_ratio=0.9, own_ratio=1.2),
        Row("m", "fxmem at p", "fxmem", 50, peak_bytes=49, time_ratio=eager),
        Row("m", "fxmem, inductor at p", "fxmem, inductor", 50, peak_bytes=49, time_ratio=compiled, own_ratio=own),
    ]
    assert said in with_both_backends(rows)


@pytest.mark.slow
def test_a_compiled_peer_takes_turns_with_itself_without_recompute(tiny: str) -> None:
    ways = [Way(f"p {budget}", "partitioner", budget) for budget in (1.0, 0.0)]
    free, keeping, dropping = measure(tiny, "cpu", [NO_RECOMPUTE, *ways], 0.01)
    assert free.own_ratio is None
    assert keeping.own_ratio > 0
    assert dropping.own_ratio > 0
    assert dropping.peak_bytes < free.peak_bytes  # code compiled for one is not run for the other
    (old, new) = (Row("m", "p", "partitioner", 0.5, time_ratio=1.8, own_ratio=own) for own in (None, 1.1))
    assert [verdicts.own_ratio(row, [Row("m", "f", "aot", time_ratio=1.5), row]) for row in (old, new)] == [
        pytest.approx(1.2),
        1.1,
    ]


def test_quartiles_of_five() -> None:
    assert quartiles([5, 1, 4, 2, 3]) == (2, 3, 4)


def test_every_model_has_a_name_of_its_own_and_three_are_quick() -> None:
    assert sum(model.quick for model in models.MODELS.values()) == 3
    with pytest.raises(KeyError, match="known: resnet18"):
        models.get("resnet19")
    assert len({way.name for way in peers(inductor=True)}) == len(peers(inductor=True))


def test_published_ratios_are_ours_over_theirs() -> None:
    point = published.Result("p", "n", 1, None, None, 10.0, 0.1, 9.9, 0.05, 3.0)
    assert point.ratio == pytest.approx(0.5)
    assert point.better
    batch = published.Result("p", "n", 1, *[None] * 7, their_max_batch=10, our_max_batch=20)
    assert batch.ratio == 0.5
    assert batch.better
    assert not published.Result("p", "n", 1, None, None, 10.0, 0.1, None, None, 12.0).better


def test_committed_results_name_no_host_and_all_predictions_are_exact() -> None:
    rows = load_rows(RESULTS / "compare_cpu.json")
    ours = [row for row in rows if row.kind == "fxmem" and row.peak_bytes is not None]
    assert ours
    assert all(row.peak_bytes == row.predicted_peak_bytes for row in ours)
    assert all(row.gradients == "bitwise" and row.buffers == "equal" for row in ours)


def test_what_a_stage_brings_is_told_at_four_budgets_and_of_the_floor() -> None:
    plan = Plan("p", ())
    whole = tuple(FrontierPoint(plan, peak, s) for peak, s in ((800, 0.0), (600, 1.0), (400, 2.0)))
    without = tuple(FrontierPoint(plan, peak, s) for peak, s in ((800, 0.0), (500, 4.0)))
    assert ablation.lost_points(whole, without, step_seconds=10.0) == (20.0, 20.0, 30.0, 30.0)
    assert ablation.lost_points(whole, whole, step_seconds=10.0) == (0.0, 0.0, 0.0, 0.0)
    assert ablation.worst_points(whole, without, step_seconds=10.0) == 30.0


@pytest.mark.slow
def test_each_stage_is_left_out_once() -> None:
    rows = list(ablation.measured("blocks", residual_blocks(3)))
    assert [row.stage for row in rows] == list(STAGES)
    assert all(0.0 <= row.stage_seconds <= row.all_seconds for row in rows)


def test_every_stage_of_the_default_planner_pays() -> None:
    summaries = ablation.summary(ablation.load_rows())
    assert [each.stage for each in summaries] == list(STAGES)
    assert [each.stage for each in summaries if not each.pays] == [
        "chen"
    ]  # so that none is worse than a planner asked for by name
    assert all(each.worst_points >= ablation.LEAST_POINTS for each in summaries)


def test_every_form_of_compression_and_bindings_pay() -> None:
    results = ablation_runtime.load()
    assert {row.form for row in results.forms} == {form.title for form in ablation_runtime.FORMS}
    assert all(any(row.pays for row in results.forms if row.form == form.title) for form in ablation_runtime.FORMS)
    assert max(row.overloads_over_bindings.median for row in results.bindings) >= 1.02


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_without_a_gpu_the_gpu_suite_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cuda_suite.main([]) == 0
    assert "no CUDA device" in capsys.readouterr().out


def test_the_gpu_suite_takes_the_first_three_models_that_are_not_done(tmp_path: Path) -> None:
    results = tmp_path / "compare_gpu.json"
    assert cuda_suite.next_models(results) == cuda_suite.MODELS[:3]
    save_rows(results, [Row(cuda_suite.MODELS[1], cuda_suite.LAST_WAY, "fxmem")])
    assert cuda_suite.next_models(results) == (cuda_suite.MODELS[0], *cuda_suite.MODELS[2:4])
    with pytest.raises(SystemExit):
        cuda_suite.main(["--models", *cuda_suite.MODELS[:4]])


def test_the_first_run_on_a_gpu_has_fifteen_measurements_in_eight_minutes() -> None:
    assert sorted({m.number for m in first_gpu.PLAN}) == list(range(1, 16))
    assert first_gpu.MOST_SECONDS == 480
    assert sum(m.limit_seconds for m in first_gpu.PLAN if m.name != "suite") <= first_gpu.MOST_SECONDS


def test_a_measurement_that_is_cut_short_leaves_its_whole_rows_and_the_later_of_two(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    assert first_gpu._rows(rows) == []
    rows.write_text('{"what": "a", "real": 1}\n{"what": "a", "real": 1, "predicted": 2}\n{"what": "b", "re')
    assert first_gpu._rows(rows) == [{"what": "a", "real": 1, "predicted": 2}]


def test_the_table_of_the_first_run_shows_what_the_emulated_device_said(tmp_path: Path) -> None:
    def results(real: int) -> dict[str, Any]:
        rows = [{"what": "a sum", "predicted": 1000, "real": real}]
        return {"measurements": {"3 sums": {"ended": "done", "seconds": 1.0, "rows": rows}}}

    line = first_gpu.table(results(1100), results(1000)).splitlines()[-1]
    assert line.split() == ["a", "sum", "1,000", "1,000", "1,100", "-9.09", "%"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_a_measurement_that_fails_or_takes_too_long_says_so() -> None:
    failed = first_gpu.run(first_gpu.Measurement(3, "sums", 60), 60)
    assert failed["ended"] == "failed with 1"
    assert "no CUDA device" in failed["said"]
    assert first_gpu.run(first_gpu.Measurement(3, "sums", 1), 0.5)["ended"] == "cut short after 0 s"


@pytest.mark.slow
def test_a_convolutions_backward_takes_as_long_in_two_parts() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)), torch.empty(64, 8, 64, 64)
    inputs, hardware = Inputs.of((x,), {}), PRESETS["v100"]
    captured = capture(model.train(), inputs)
    settings = Settings(1, TrainingStep(optimizer=None), "auto", 1.0, hardware)
    split = LeanBackwards().apply(captured, CompileContext(model, inputs, settings))
    assert split is not captured
    whole, parts = (keeping_seconds(graph, inputs, torch.sum, hardware) for graph in (captured, split))
    assert parts == pytest.approx(whole, rel=1e-3)


def test_budgets_of_compiled_steps_are_judged_model_by_model() -> None:
    def row(model: str, budget: int | None, measured: int, ratio: float, error: float = 0.0) -> compiled_budgets.Row:
        return compiled_budgets.Row(model, budget, 90, measured, ratio, 0, error)

    first = [row("a", None, 90, 1.0), row("a", 95, 90, 1.2), row("a", 92, 100, 1.1, 0.5)]
    verdict = compiled_budgets.Verdict.of([*first, row("b", None, 90, 1.0)])
    assert (verdict.num_budgets, verdict.exceeded, verdict.not_bitwise, verdict.falling) == (2, 1, 1, 1)
    assert (verdict.apart, verdict.largest_error) == (pytest.approx(0.1), 0.5)


def test_where_rows_were_measured_is_read_from_the_rows() -> None:
    rows = [
        Row("m", str(i), "", cpu=cpu, date=date) for i, (cpu, date) in enumerate([("b", "2"), ("a", "1"), ("b", "3")])
    ]
    assert where_measured([*rows, Row("m", "of older times", "")]) == "a and b, 1 to 3"
    assert where_measured(rows[:1]) == "b, 2"


def test_turns_are_taken_in_both_orders_as_long_as_there_is_time() -> None:
    order: list[str] = []

    def seconds_of(name: str) -> float:
        order.append(name)
        return 0.5

    assert turns("ab", seconds_of, 3.0, least=2) == [{"a": 0.5, "b": 0.5}] * 3
    assert "".join(order) == "ab" + "ba" + "ab" + "ba"
    assert [len(turns("ab", seconds_of, s, least=2, most=4)) for s in (0.0, 99.0)] == [2, 4]
