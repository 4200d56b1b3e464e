"""Optimize, estimate and frontier take the same arguments, check them alike and find each other's plans."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from fxmem.api.arguments import settings_of
from fxmem.passes.inplace import decide
from fxmem.planners import frontier_cache
from fxmem.planners.registry import PLANNERS
from fxmem.profiling.op_benchmark import with_measured_times

ENTRY_POINTS: list[Callable[..., Any]] = [fxmem.optimize, fxmem.estimate, fxmem.frontier]
each_entry_point = pytest.mark.parametrize("entry_point", ENTRY_POINTS, ids=lambda f: f.__name__)


def build() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))).train()


def batch() -> torch.Tensor:
    return torch.randn(32, 16)


def options_of(entry_point: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(entry_point).parameters.values()
    own = {
        "plan",
        "plan_for",
        "budget_mb",
        "methods",
        "shapes",
        "model",
        "example_args",
        "example_kwargs",
        "budget",
        "budget_gb",
        "device",
        "backend",
    }
    return {p.name: p.default for p in parameters if p.name not in own}


def test_all_entry_points_have_the_same_options_with_the_same_defaults() -> None:
    of_optimize, of_estimate, of_frontier = map(options_of, ENTRY_POINTS)
    assert of_optimize == of_estimate == of_frontier
    assert {"step", "optimizer", "planner", "policy", "inplace", "cost", "cache", "plan_seconds"} <= of_optimize.keys()


@each_entry_point
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"planner": "x"}, "unknown planner 'x'; known: auto, chen, intervals, mincut"),
        ({"cost": "abacus"}, "unknown cost 'abacus'; known: a100"),
        ({"plan_seconds": 0}, "plan_seconds must be a finite number above 0, not 0"),
        ({"plan_seconds": True}, "plan_seconds must be a finite number above 0, not True"),
        ({"optimizer": "adamv"}, "unknown optimizer 'adamv'; known: "),
        ({"optimizer": 3}, "optimizer must be a torch.optim.Optimizer"),
        ({"loss_fn": "mse"}, "loss_fn must be a function of the model's output"),
        ({"autocast": True}, "autocast must be a dtype such as torch.bfloat16"),
        ({"scaler": True}, "scaler must be a torch.amp.GradScaler"),
        ({"policy": [("relu", "forget")]}, "policy"),
        ({"step": "adamw"}, "step must be a fxmem.TrainingStep"),
    ],
)
def test_a_bad_option_is_refused_before_anything_is_captured(
    entry_point: Callable[..., Any], options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("captured")

    monkeypatch.setattr(torch.export, "export", never)
    with pytest.raises(fxmem.InputError) as refusal:
        entry_point(build(), batch(), **options)
    assert message in str(refusal.value)


@each_entry_point
def test_an_unknown_argument_is_refused_with_those_there_are(entry_point: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"has no argument 'budjet'; it has .*optimizer"):
        entry_point(build(), batch(), budjet=1)


@each_entry_point
def test_a_model_in_eval_mode_is_refused(entry_point: Callable[..., Any]) -> None:
    with pytest.raises(fxmem.InputError, match=r"eval mode; call model\.train\(\)"):
        entry_point(build().eval(), batch())


@each_entry_point
def test_a_frozen_model_is_refused(entry_point: Callable[..., Any]) -> None:
    with pytest.raises(fxmem.InputError, match="none of the 12 parameters of Sequential requires grad"):
        entry_point(build().requires_grad_(False), batch())


@each_entry_point
def test_an_optimized_model_is_refused(entry_point: Callable[..., Any]) -> None:
    with pytest.raises(fxmem.InputError, match=r"already optimized; pass model\.fxmem\.original"):
        entry_point(fxmem.optimize(build()), batch())


@each_entry_point
def test_a_step_is_given_whole_or_in_parts_but_not_both(entry_point: Callable[..., Any]) -> None:
    with pytest.raises(fxmem.InputError, match="pass step= or its parts"):
        entry_point(build(), batch(), step=fxmem.TrainingStep(optimizer="sgd"), accumulate=True)


@pytest.mark.slow
def test_a_step_says_what_its_parts_say() -> None:
    parts: dict[str, Any] = {"optimizer": "sgd", "accumulate": True, "autocast": torch.bfloat16}
    whole = fxmem.TrainingStep(**parts)
    x = batch()
    assert fxmem.estimate(build(), x, step=whole).peak_bytes == fxmem.estimate(build(), x, **parts).peak_bytes
    assert fxmem.frontier(build(), x, step=whole) == fxmem.frontier(build(), x, **parts)
    reports = [fxmem.optimize(build(), x, **options).report for options in ({"step": whole}, parts)]
    assert reports[0].predicted_peak_bytes == reports[1].predicted_peak_bytes
    assert reports[0].predicted_peak_bytes != fxmem.optimize(build(), x).report.predicted_peak_bytes


def test_what_an_estimate_has_planned_is_not_planned_again(kept_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build(), batch()
    planned: list[str] = []
    auto = PLANNERS["auto"]
    monkeypatch.setitem(PLANNERS, "auto", lambda *args, **kwargs: planned.append("auto") or auto(*args, **kwargs))
    floor_bytes = fxmem.estimate(model, x).floor_bytes
    assert planned == ["auto"]
    points = fxmem.frontier(model, x)
    report = fxmem.optimize(model, x, budget=floor_bytes).report
    assert planned == ["auto"]
    assert points[-1].predicted_peak_bytes == floor_bytes == report.floor_bytes


@pytest.mark.slow
def test_estimate_follows_policy_inplace_cost_and_cache(kept_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(16, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 16)).train(), batch()
    free = fxmem.estimate(model, x, cost="a100")
    assert fxmem.estimate(model, x, policy=[("*", "save")], cost="a100").floor_bytes > free.floor_bytes
    done: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: done.append(name) or function(*args, **kwargs)

    monkeypatch.setattr("fxmem.passes.inplace.decide", noted("in place", decide))
    monkeypatch.setattr("fxmem.pipeline.with_measured_times", noted("measured", with_measured_times))
    assert fxmem.estimate(model, x, cost="a100", inplace=False).floor_bytes
    assert done == []
    assert fxmem.estimate(model, x, cost="measure").floor_bytes
    assert done == ["in place", "measured"]

    def never(*_: object) -> None:
        raise AssertionError("looked on disk")

    monkeypatch.setattr(frontier_cache, "load", never)
    assert fxmem.estimate(model, x, cost="a100", cache=False).floor_bytes == free.floor_bytes
    with pytest.raises(AssertionError, match="looked on disk"):
        _ = fxmem.estimate(model, x, cost="a100").floor_bytes


def test_nothing_is_run_to_estimate_a_model_on_the_meta_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXMEM_MEASURE", "1")
    real = fxmem.estimate(build(), batch(), cost="cpu", cache=False)
    with torch.device("meta"):
        model, x = build(), batch()

    def never(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("fxmem.pipeline.with_measured_times", never)
    found = fxmem.estimate(model, x, cache=False)
    assert found.peak_bytes == real.peak_bytes
    assert found.floor_bytes < found.peak_bytes


@each_entry_point
def test_choices_are_allowed_by_name(entry_point: Callable[..., Any]) -> None:
    with pytest.raises(fxmem.InputError, match=r"unknown choice 'magic' in allow; known: .*inplace.*recompute"):
        entry_point(build(), batch(), allow=("recompute", "magic"))
    with pytest.raises(fxmem.InputError, match=r"allow must be a sequence of choices, such as .*, not 'recompute'"):
        entry_point(build(), batch(), allow="recompute")
    with pytest.raises(fxmem.InputError, match="policy= says to recompute, which allow= does not"):
        entry_point(build(), batch(), allow=("inplace",), policy=[("gelu", "recompute")])


@pytest.mark.slow
def test_nothing_is_recomputed_that_may_not_be() -> None:
    model, x = build(), batch()
    kept = fxmem.estimate(model, x, cost="cpu", cache=False, allow=("inplace",))
    assert (
        kept.floor_bytes == kept.frontier()[0].predicted_peak_bytes > fxmem.estimate(model, x, cost="cpu").floor_bytes
    )
    with pytest.raises(fxmem.InfeasibleBudgetError, match='add "recompute" to it'):
        fxmem.optimize(model, x, budget=kept.floor_bytes - 1, allow=("inplace",), cost="cpu")
    assert fxmem.optimize(model, x, budget=kept.floor_bytes, allow=("inplace",), cost="cpu").fxmem.plan.dropped == ()


def test_inplace_is_a_choice_too() -> None:
    model = nn.Sequential(nn.Linear(16, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 16)).train()
    assert fxmem.optimize(model, batch(), allow=("recompute",)).fxmem.report.inplace == ()
    assert fxmem.optimize(model, batch()).fxmem.report.inplace != ()


def test_settings_of_earlier_versions_allow_what_they_did() -> None:
    settings = settings_of({})
    earlier = settings.__getstate__()[:-1]
    settings.__setstate__(earlier)
    assert settings == settings_of({})
    assert settings.allow == {"recompute", "inplace"}
