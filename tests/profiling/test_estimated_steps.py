"""The predicted step equals the measured one, for each optimizer, scaler and kind of gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.ir import Phase
from fxmem.profiling.caching_allocator import Allocation
from fxmem.profiling.step_events import StepEvents
from fxmem.profiling.training_step import run_step
from fxmem.runtime.autocast import Autocast
from tests.profiling.steps import measured_peak
from tests.tiers import diagonal


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
        lambda p: torch.optim.Adam(p),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.RMSprop(p),
    ],
    ids=[
        "sgd",
        "momentum",
        "momentum-foreach",
        "adam",
        "adamw-foreach",
        "adamw-fused",
        "amsgrad",
        "adafactor",
        "rmsprop",
    ],
)
def test_the_step_of_each_optimizer_is_predicted_to_the_byte(make: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)).train()
    x = torch.randn(8, 64)
    optimizer = make(model.parameters())
    predicted = fxmem.estimate(model, x, optimizer=optimizer).peak_bytes
    run_step(lambda: model(x), None, optimizer)  # the state is there from now on
    assert measured_peak(model, ((x,), {}), None, optimizer) == predicted


# -- gradients that are there already, scalers, gradients of another kind ------------------------------------------------


def measured_steady(
    model: nn.Module,
    forward: nn.Module,
    x: Tensor,
    optimizer: torch.optim.Optimizer,
    *,
    accumulate: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    autocast: Autocast | None = None,
) -> int:
    """Peak of a step after a first one; with ``accumulate`` of its last micro-batch."""

    def step(optimizer: torch.optim.Optimizer | None) -> None:
        run_step(lambda: forward(x), None, optimizer, autocast, scaler=scaler if optimizer else None)

    step(optimizer)
    if accumulate:
        step(None)
    with fxmem.track(model, optimizer, scaler, x) as memory:
        step(optimizer)
    return memory.peak_bytes


def mlp() -> nn.Module:
    layers = (nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.LayerNorm(32))
    return nn.Sequential(*layers, *(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6))).train()


SGD = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1), "adamw": torch.optim.AdamW}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "accumulate", "scaled", "dtype"), diagonal(SGD, [False, True], [False, True], [None, torch.bfloat16])
)
def test_micro_batches_and_scalers_are_predicted_to_the_byte(
    optimizer: str, accumulate: bool, scaled: bool, dtype: torch.dtype | None
) -> None:
    model, x = mlp(), torch.randn(64, 32)
    region = dtype and Autocast("cpu", dtype)
    step: dict[str, Any] = {
        "optimizer": SGD[optimizer](model.parameters()),
        "accumulate": accumulate,
        "scaler": torch.amp.GradScaler("cpu") if scaled else None,
    }
    estimate = fxmem.estimate(model, x, autocast=dtype, plan_seconds=1, **step)
    assert measured_steady(model, model, x, autocast=region, **step) == estimate.peak_bytes
    assert sum(nbytes for _, nbytes in estimate.breakdown.rows()) == estimate.peak_bytes
    gradients = sum(p.nbytes for p in model.parameters())
    assert not accumulate or estimate.breakdown.gradients_bytes == gradients
    optimized = fxmem.optimize(model, x, budget=estimate.floor_bytes, autocast=dtype, plan_seconds=1, **step)
    measured = measured_steady(model, optimized, x, autocast=region, **step)
    assert measured == optimized.report.predicted_peak_bytes <= estimate.floor_bytes


@pytest.mark.slow
def test_gradients_of_earlier_micro_batches_raise_the_peak_by_what_the_backward_has_not_made_yet() -> None:
    model, x = mlp(), torch.randn(64, 32)
    first, later = (fxmem.estimate(model, x, optimizer=None, accumulate=a) for a in (False, True))
    gradients = sum(p.nbytes for p in model.parameters())
    assert first.breakdown.gradients_bytes < gradients
    assert first.peak_bytes < later.peak_bytes <= first.peak_bytes + gradients
    for phase in (Phase.FORWARD, Phase.LOSS):
        before, after = (max(s.live_bytes for s in e.timeline.steps if s.phase is phase) for e in (first, later))
        assert after - before == gradients


def test_gradients_of_another_dtype_than_their_parameters_count_as_such() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).train(), torch.randn(8, 64)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.bfloat16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for accumulate in (False, True):
        estimate = fxmem.estimate(model, x, optimizer=optimizer, accumulate=accumulate)
        assert measured_steady(model, model, x, optimizer, accumulate=accumulate) == estimate.peak_bytes
    assert estimate.breakdown.gradients_bytes == sum(p.nbytes for p in model.parameters()) // 2
    sizes = [estimate.max_batch_size(estimate.peak_bytes - lack) for lack in (0, 1)]
    assert sizes == [8, 7]


class Prompted(nn.Module):
    """A learned prompt before a table: its gradient is a part of both's."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.layer, self.unused = nn.Parameter(torch.randn(20, 8)), nn.Linear(8, 8), nn.Linear(100, 100)
        self.register_buffer("table", torch.randn(2000, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ torch.cat([self.prompt, self.table]).t()


@pytest.mark.parametrize("budgeted", [False, True])
def test_gradients_that_no_optimizer_clears_are_those_the_backward_leaves(budgeted: bool) -> None:
    model, x = Prompted(), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    predicted = fxmem.estimate(model, x, optimizer=optimizer).peak_bytes
    way = fxmem.optimize(model, x, optimizer=optimizer, budget=predicted) if budgeted else model
    assert measured_steady(model, way, x, optimizer) == predicted


def test_sparse_gradients_that_no_optimizer_clears_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with pytest.raises(fxmem.InputError, match="grows from step to step"):
        fxmem.estimate(model, torch.randint(50, (4,)), optimizer=optimizer)


def test_the_gradient_of_a_buffer_stays_and_counts() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 300)
            self.register_buffer("scale", torch.randn(300, requires_grad=True))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    x = torch.randn(4, 8)
    floor_bytes = fxmem.optimize(Scaled(), x, optimizer="adam").report.floor_bytes
    assert fxmem.optimize(Scaled(), x, optimizer="adam", budget=floor_bytes).report.predicted_peak_bytes == floor_bytes


@pytest.mark.parametrize("make", [SGD["sgd"], torch.optim.Adagrad, lambda p: torch.optim.SparseAdam(list(p))])
def test_sparse_gradients_count_by_the_entries_of_the_batch(make: Any) -> None:
    """As many entries as tokens, 8 bytes an index; repeated ones merge in some optimizers, which values decide."""
    distinct, repeated = torch.randperm(512)[:40], torch.zeros(40, dtype=torch.long)
    for tokens in (distinct, repeated):
        model = nn.Sequential(nn.Embedding(512, 16, sparse=True), nn.Tanh()).train()
        optimizer = make(model.parameters())
        estimate = fxmem.estimate(model, tokens, optimizer=optimizer)
        assert estimate.breakdown.gradients_bytes == 40 * (8 + 16 * 4)
        measured = measured_steady(model, model, tokens, optimizer)
        assert measured == estimate.peak_bytes if tokens is distinct else measured <= estimate.peak_bytes
        later = fxmem.estimate(model, tokens, optimizer=optimizer, accumulate=True)
        measured = measured_steady(model, model, tokens, optimizer, accumulate=True)
        assert later.peak_bytes > estimate.peak_bytes
        exact = make is SGD["sgd"]  # the others merge the micro-batches' entries
        assert measured == later.peak_bytes if exact else measured <= later.peak_bytes


def test_momentum_over_sparse_gradients_is_refused_for_it_has_no_steady_state() -> None:
    model, tokens = nn.Sequential(nn.Embedding(64, 16, sparse=True), nn.Tanh()).train(), torch.arange(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    peaks = [measured_steady(model, model, tokens, optimizer) for _ in range(2)]
    assert peaks[0] < peaks[1]
    for call in (fxmem.estimate, lambda *args, **step: fxmem.optimize(*args, budget="1GB", **step)):
        with pytest.raises(fxmem.InputError, match=r"momentum_buffer of SGD .* grows .* pass optimizer=None"):
            call(model, tokens, optimizer=optimizer)
    assert fxmem.estimate(model, tokens, optimizer=None).peak_bytes > 0


def test_planning_leaves_a_scaler_as_it_is() -> None:
    model, x, scaler = nn.Linear(8, 8).train(), torch.randn(2, 8), torch.amp.GradScaler("cpu", init_scale=8.0)
    before = fxmem.estimate(model, x, scaler=scaler).peak_bytes
    assert scaler._scale is None
    assert not scaler._per_optimizer_states
    scaler.scale(model(x).sum()).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.unscale_(optimizer)
    states = dict(scaler._per_optimizer_states)
    assert fxmem.estimate(model, x, scaler=scaler).peak_bytes == before
    assert scaler.get_scale() == 8.0
    assert dict(scaler._per_optimizer_states) == states
    with pytest.raises(fxmem.InputError, match="GradScaler"):
        fxmem.optimize(model, x, scaler=1024.0)  # type: ignore[arg-type]


def test_an_optimizer_that_holds_a_part_of_the_model_counts_only_that() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).train()
    whole = fxmem.estimate(model, torch.randn(4, 64), optimizer=torch.optim.AdamW(model.parameters()))
    half = fxmem.estimate(model, torch.randn(4, 64), optimizer=torch.optim.AdamW(model[0].parameters()))
    step_counters = 2 * 4  # one fp32 scalar a tensor
    moments = 2 * (64 * 64 + 64) * 4
    assert whole.breakdown.optimizer_state_bytes - half.breakdown.optimizer_state_bytes == moments + step_counters


class Unreached(nn.Module):
    """Three layers: one trains, one never runs, one runs but the loss does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.detached = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.used(x) * self.detached(x).detach()).relu()


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [False, True])
def test_what_the_backward_does_not_reach_has_neither_gradient_nor_optimizer_state(accumulate: bool) -> None:
    model, x = Unreached().train(), torch.randn(4, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    estimate = fxmem.estimate(model, x, optimizer=optimizer, accumulate=accumulate, plan_seconds=1)
    assert estimate.breakdown.optimizer_state_bytes == 2 * (64 * 64 + 64) * 4 + 2 * 4
    measured = measured_steady(model, model, x, optimizer, accumulate=accumulate)
    assert measured == estimate.peak_bytes
    optimized = fxmem.optimize(
        model, x, budget=estimate.floor_bytes, optimizer="adamw", accumulate=accumulate, plan_seconds=1
    )
    measured = measured_steady(model, optimized, x, torch.optim.AdamW(model.parameters()), accumulate=accumulate)
    assert measured == optimized.report.predicted_peak_bytes


def test_state_the_optimizer_has_already_counts_whether_this_step_reaches_its_parameter_or_not() -> None:
    model, x = Unreached().train(), torch.randn(4, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model.unused(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    estimate = fxmem.estimate(model, x, optimizer=optimizer, plan_seconds=1)
    assert estimate.breakdown.optimizer_state_bytes == 2 * (2 * (64 * 64 + 64) * 4 + 2 * 4)
    assert measured_steady(model, model, x, optimizer) == estimate.peak_bytes


def test_gradients_of_earlier_micro_batches_are_there_in_every_step_that_is_simulated() -> None:
    """A weight and a gradient are there; the step makes and frees 4 MiB, then the optimizer frees the gradient. Its state,
    which the first step ends with, meets the gradient in the second."""
    mib = 1 << 20
    step: tuple[Allocation, ...] = (("alloc", 3, 4 * mib), ("free", 3, 0), ("free", 1, 0))
    present: tuple[Allocation, ...] = (("alloc", 0, 2 * mib), ("alloc", 1, 2 * mib))
    events = StepEvents(present, (("alloc", 2, 2 * mib),), step, optimizer_at=2)
    assert events.peaks().allocated_bytes == 10 * mib
