"""Compiled steps beside what else a process does: grad modes, profilers, other models, what Dynamo forgets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor.codecache import PyCodeCache
from torch.profiler import ProfilerActivity, profile, schedule

import fxmem
from benchmarks.measure import allocator_rise_bytes
from fxmem.compiled import graph_planner
from fxmem.compiled.refusals import check_one_graph
from fxmem.runtime.allocations import allocated_on_cpu

OPTIONS: dict[str, Any] = {"cost": "cpu", "plan_seconds": 1.0, "backend": "inductor"}


def _model(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 1))


@pytest.mark.slow
def test_planning_is_for_a_training_call_whatever_grad_mode_is_around() -> None:
    model, x = _model(), torch.randn(4, 8)
    expected = fxmem.estimate(model, x, **OPTIONS)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        assert fxmem.estimate(model, x, **OPTIONS) == expected
        assert fxmem.frontier(model, x, **OPTIONS)
        assert fxmem.optimize(model, x, **OPTIONS).fxmem.report.predicted_peak_bytes == expected.peak_bytes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_planning_leaves_inductors_caches_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, x = _model(), torch.randn(4, 8)
    compiled = torch.compile(_model())
    compiled(x).sum().backward()
    loaded = list(PyCodeCache.modules)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    fxmem.estimate(model, x, **OPTIONS)
    assert loaded
    assert PyCodeCache.modules == loaded
    assert not list(tmp_path.iterdir())


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).detach()


def test_a_call_without_gradients_is_not_planned_and_does_not_run() -> None:
    model = Detached()
    with pytest.raises(fxmem.InputError, match="no output of this call needs a gradient"):
        fxmem.optimize(model, torch.randn(4, 8), budget="1GB", **OPTIONS)
    assert int(model.norm.num_batches_tracked) == 0


@pytest.mark.slow
def test_a_plan_is_told_once() -> None:
    model, x = nn.Linear(8, 1), torch.randn(4, 8)
    optimized = fxmem.optimize(model, x, budget="1GB", loss_fn=torch.sum, **OPTIONS)
    for _ in range(2):
        optimized(x).sum().backward()
        optimized.zero_grad()
    assert len(optimized.fxmem.reports) == 1
    optimized(torch.randn(8, 8)).sum().backward()
    assert len(optimized.fxmem.reports) == 2


@pytest.mark.slow
def test_a_reset_of_dynamo_is_not_a_graph_that_is_cut_up() -> None:
    model, x = nn.Linear(8, 1), torch.randn(4, 8)
    backend = fxmem.backend(budget_gb=1, cost="cpu")
    compiled = torch.compile(lambda x: model(x).sum(), backend=backend, dynamic=False)
    for _ in range(2):
        compiled(x).backward()
        torch._dynamo.reset()
    assert len(backend.reports) == 2


def test_a_graph_that_is_cut_up_by_one_compilation_is_refused() -> None:
    one, other = object(), object()
    check_one_graph(one, None)
    check_one_graph(one, other)
    check_one_graph(None, None)
    with pytest.raises(fxmem.InputError, match="optimize_ddp = False"):
        check_one_graph(one, one)


@pytest.mark.slow
def test_as_many_models_of_a_class_as_one_likes_are_compiled() -> None:
    x = torch.randn(4, 8)
    with dynamo_config.patch(recompile_limit=2):
        for _ in range(4):
            optimized = fxmem.optimize(nn.Linear(8, 1), x, budget="1GB", loss_fn=torch.sum, **OPTIONS)
            optimized(x).sum().backward()


class WithLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, with_logits: bool) -> Any:
        logits = self.linear(x)
        return (logits, logits.sum()) if with_logits else logits.sum()


@pytest.mark.slow
def test_an_argument_may_decide_which_outputs_there_are() -> None:
    model, x = WithLogits(), torch.randn(4, 8)
    optimized = fxmem.optimize(
        model, budget="1GB", loss_fn=lambda out: out[1] if isinstance(out, tuple) else out, **OPTIONS
    )
    optimized(x, True)[1].backward()
    gradient, model.linear.weight.grad = model.linear.weight.grad, None
    optimized(x, False).backward()
    assert torch.equal(gradient, model.linear.weight.grad)


def _refused_steps(backend: Any, model: nn.Module, x: torch.Tensor) -> Iterator[str]:
    compiled = torch.compile(lambda x: model(x).sum(), backend=backend, dynamic=False)
    for _ in range(4):
        try:
            compiled(x).backward()
        except fxmem.InfeasibleBudgetError:
            yield "refused"
        else:
            yield "ran"


@pytest.mark.slow
def test_what_dynamo_has_dropped_is_forgotten() -> None:
    model, x, backend = nn.Linear(8, 1), torch.randn(4, 8), fxmem.backend(budget_gb=1, cost="cpu")
    for num_steps in (1, 2, 3):
        torch._dynamo.reset()
        torch.compile(lambda: model(x).sum(), backend=backend, dynamic=False)().backward()
        assert len(backend.reports) == num_steps
        assert len(backend._calls._steps) == len(backend._calls._variants) == 1


@pytest.mark.slow
def test_another_number_of_threads_is_planned_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor generates other code for it."""
    monkeypatch.setattr(graph_planner, "_KNOWN", {})
    model, x = _model(), torch.randn(4, 8)
    expected = fxmem.estimate(model, x, **OPTIONS)
    num_threads = torch.get_num_threads()
    assert fxmem.estimate(model, x, **OPTIONS) == expected
    assert len(graph_planner._KNOWN) == 1
    torch.set_num_threads(num_threads + 1)
    try:
        fxmem.estimate(model, x, **OPTIONS)
    finally:
        torch.set_num_threads(num_threads)
    assert len(graph_planner._KNOWN) == 2


@pytest.mark.slow
def test_a_step_that_was_refused_once_stays_refused() -> None:
    """Parameters of the optimizer that no graph reads are known of from the second step on."""
    model, unread = nn.Linear(8, 1), nn.Parameter(torch.zeros(250_000))
    optimizer = torch.optim.AdamW([*model.parameters(), unread])
    backend = fxmem.backend(budget="5.5MB", optimizer=optimizer, cost="cpu")
    assert list(_refused_steps(backend, model, torch.randn(4, 8))) == ["ran", "refused", "refused", "refused"]


@pytest.mark.slow
@pytest.mark.parametrize("donated", [True, False])
def test_a_peak_is_that_of_a_backward_that_may_or_may_not_write_over_saved_tensors(donated: bool) -> None:
    x, weight = torch.randn(64, 64, requires_grad=True), torch.randn(64, 256)
    with functorch_config.patch(donated_buffer=donated):
        backend = fxmem.backend(optimizer=None, cost="cpu")
        compiled = torch.compile(lambda x: (x @ weight).sin().sum(), backend=backend, dynamic=False)

        def step() -> None:
            compiled(x).backward()
            x.grad = None

        step()
        held = x.nbytes + weight.nbytes
        assert held + allocator_rise_bytes(step) == backend.reports[0].predicted_peak_bytes


def test_allocations_are_seen_beside_a_profiler_of_the_user() -> None:
    def run() -> torch.Tensor:
        return torch.ones(100).add_(torch.ones(1, dtype=torch.float64))

    alone = allocated_on_cpu(run)
    assert alone[0] == 400
    each_step = schedule(wait=1, warmup=1, active=2)
    with profile(activities=[ProfilerActivity.CPU], schedule=each_step, profile_memory=True) as profiler:
        for _ in range(4):
            assert allocated_on_cpu(run) == alone
            torch.ones(10).sin()
            profiler.step()
    assert [event.count for event in profiler.key_averages() if event.key == "aten::sin"] == [2]


@pytest.mark.slow
def test_a_backward_that_retains_its_graph_is_told_of_once() -> None:
    model, x = nn.Linear(8, 1), torch.randn(4, 8)
    with functorch_config.patch(donated_buffer=False):
        optimized = fxmem.optimize(model, x, budget="1GB", loss_fn=torch.sum, **OPTIONS)
        loss = optimized(x).sum()
        with pytest.warns(UserWarning, match="retain_graph=True keeps what a compiled step saved"):
            loss.backward(retain_graph=True)
        loss.backward()
        optimized(x).sum().backward(retain_graph=True)  # a second warning would be an error
