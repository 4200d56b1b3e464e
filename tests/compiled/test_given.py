"""What a compiled step is given: gradients that are there, weights of any kind, arguments that nothing reads."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from benchmarks.measure import allocator_rise_bytes

OPTIONS: dict[str, Any] = {"cost": "cpu", "plan_seconds": 1.0}
SCALAR_BYTES = 4
"""Of the loss, which may be told of twice."""


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def measured_bytes(step: Callable[[], None], *there: torch.Tensor) -> int:
    """Return the peak of a step with what is there before it, by the CPU allocator's events."""
    step()
    gc.collect()
    return sum(t.nbytes for t in there) + allocator_rise_bytes(step)


@pytest.mark.slow
def test_gradients_that_are_added_to_others_are_gone_when_the_optimizer_steps() -> None:
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)), torch.randn(4, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    step_of = {"optimizer": optimizer, "accumulate": True, "loop": fxmem.Loop(keeps_output=False), "loss_fn": loss_of}
    optimized = fxmem.optimize(model, x, backend="inductor", budget="1GB", **OPTIONS, **step_of)

    def step() -> None:
        loss_of(optimized(x)).backward()
        optimizer.step()

    step()
    state = [t for each in optimizer.state.values() for t in each.values()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert measured_bytes(step, x, *model.parameters(), *state, *gradients) == (
        optimized.fxmem.report.predicted_peak_bytes
    )


@pytest.mark.slow
@pytest.mark.parametrize("by_name", [True, False])
def test_a_weight_that_is_no_parameter_has_a_gradient_and_state(by_name: bool) -> None:
    weight, x = torch.randn(256, 256, requires_grad=True), torch.randn(8, 256)
    optimizer = torch.optim.AdamW([weight])
    backend = fxmem.backend(budget="1GB", optimizer="adamw" if by_name else optimizer, **OPTIONS)
    compiled = torch.compile(lambda weight: loss_of(x @ weight), backend=backend, dynamic=False)

    def step() -> None:
        loss = compiled(weight)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [t for each in optimizer.state.values() for t in each.values()]
    told_bytes = backend.reports[-1].predicted_peak_bytes
    assert 0 <= told_bytes - measured_bytes(step, x, weight, *state) <= SCALAR_BYTES
    assert [report.num_calls for report in backend.reports] == [1]


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, unread: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.slow
def test_an_argument_that_nothing_reads_counts_in_every_plan() -> None:
    model = Taking()
    optimizer = torch.optim.SGD(model.parameters())
    batch = torch.randn(8, 64), torch.randn(300, 300)
    options = {**OPTIONS, "loss_fn": loss_of, "optimizer": optimizer}
    optimized = fxmem.optimize(model, batch, backend="inductor", budget="1GB", **options)
    for _ in range(3):
        loss = loss_of(optimized(*(t.clone() for t in batch)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    first, later = (report.fixed_bytes for report in optimized.fxmem.reports)
    assert first == later > batch[1].nbytes


@pytest.mark.slow
def test_a_call_is_known_by_its_own_node_also_where_it_returns_views_first() -> None:
    """Whether its backward has begun decides whether the next call is of the same step."""
    weight, x = nn.Parameter(torch.randn(64, 64)), torch.randn(32, 64)
    backend = fxmem.backend(budget="1GB", **OPTIONS)

    def encoded(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(x @ weight)
        return hidden[:, 0], hidden

    compiled = torch.compile(encoded, backend=backend, dynamic=False)
    for _ in range(3):
        pooled, hidden = compiled(x, weight)
        loss_of(hidden).backward()
        weight.grad = None
    assert pooled.grad_fn is not None
    assert type(pooled.grad_fn).__name__ != "CompiledFunctionBackward"
    assert [report.num_calls for report in backend.reports] == [1]


@pytest.mark.slow
def test_gradients_of_two_calls_are_summed_before_they_are_added_to_others() -> None:
    """What the second call's backward makes is there while the first one's runs."""
    layer, x = nn.Linear(512, 512), torch.randn(4, 512)
    options = {"optimizer": None, "accumulate": True, "loss_fn": loss_of, "loop": fxmem.Loop(keeps_output=False)}
    optimized = fxmem.optimize(layer, x, backend="inductor", budget="1GB", **OPTIONS, **options)

    def step() -> None:
        (loss_of(optimized(x)) + loss_of(optimized(2 * x))).backward()

    for _ in range(2):
        step()
    weights = [*layer.parameters(), *(p.grad for p in layer.parameters() if p.grad is not None)]
    measured, told = measured_bytes(step, x, *weights), optimized.fxmem.report.predicted_peak_bytes
    assert optimized.fxmem.report.num_calls == 2
    assert measured <= told
    assert told - measured < layer.weight.nbytes // 10, "neither gradient is told of twice"


class Chosen(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[(x[:, 0] > 0).nonzero()[:, 0]])


def test_a_model_whose_shapes_go_by_values_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(32, 32), Chosen(32, 4))
    with pytest.raises(fxmem.CaptureError, match=r"aten.nonzero.default in 1 \(test_given.py.* only a run has"):
        fxmem.optimize(model, torch.randn(8, 32), budget="1GB", backend="inductor", **OPTIONS)
