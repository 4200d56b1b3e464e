"""A model's own step is watched: of which kind is what is alive at the peak, who made it, and what cannot be told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.fake.fake_tensors import FakeWorld, ScalarReads
from fxmem.ir import Phase
from fxmem.profiling import optimizer_step
from fxmem.profiling.optimizer_on_meta import usual_step
from fxmem.profiling.optimizer_step import RecordedStep, SeenOptimizer, steady_state
from fxmem.profiling.storage_tracker import StorageTracker
from fxmem.profiling.training_step import TrainingStep, usual_gradients
from fxmem.runtime.layout import Geometry
from tests.profiling.steps import measured_peak

KIB = 1024


class KeepsOnSelf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x * 2  # 64 KiB
        return self.layer(x).sigmoid()


def test_a_value_kept_on_the_model_is_held_by_code_and_has_its_line() -> None:
    estimate = fxmem.estimate(KeepsOnSelf().train(), torch.randn(64, 256), optimizer=None)
    assert estimate.breakdown.held_by_code_bytes == 64 * KIB
    (kept,) = (each for each in estimate.alive if each.kind == "held_by_code")
    assert kept.site.name == "mul"
    assert kept.site.source.line.startswith("test_peak_watch.py:")


class NamesAll(nn.Module):
    """What learns is the last layer: the peak is in the forward, where code has names for what it is done with."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.last = nn.Linear(256, 256).requires_grad_(False), nn.Linear(256, 1)

    def forward(self, x: Tensor) -> Tensor:
        doubled = x * 2
        raised = doubled + 1
        return self.last(self.frozen(raised))


def test_a_graphs_peak_is_without_the_names_of_the_models_code() -> None:
    estimate = fxmem.estimate(NamesAll().train(), torch.randn(64, 256), optimizer=None)
    assert estimate.breakdown.held_by_code_bytes == 64 * KIB  # doubled; raised is read by the op of the peak
    # Without the name the peak is at the layer before: 64 results of the last one less.
    assert estimate.graph_peak_bytes == estimate.peak_bytes - 64 * KIB - 64 * 4


def test_the_peak_has_module_line_and_function() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 4096), nn.Sigmoid())).train()
    place = fxmem.estimate(model, torch.randn(64, 64), optimizer=None).peak_at
    assert (place.phase, place.node, place.module_path) == (Phase.BACKWARD, "linear", "1.0")


class AsksForANumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * x.abs().max().item()


def test_a_model_that_reads_a_number_is_left_to_capture_which_refuses_it() -> None:
    with pytest.raises(fxmem.CaptureError, match="reads a number from a tensor"):
        fxmem.estimate(AsksForANumber().train(), torch.randn(4, 8))


class CannotBeCaptured(nn.Module):
    """A hook set in forward changes the gradient: a graph would lose it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y.register_hook(lambda grad: grad * 2)
        return y.sigmoid()


def test_what_no_graph_can_be_made_of_is_estimated_all_the_same() -> None:
    model, x = CannotBeCaptured().train(), torch.randn(16, 64)
    estimate = fxmem.estimate(model, x, optimizer=None)
    assert measured_peak(model, ((x,), {}), None, None) == estimate.peak_bytes


def _on_fakes(name: str, parameters: list[Any]) -> SeenOptimizer | None:
    world, tracker = FakeWorld(()), StorageTracker()
    with world.active():
        fakes = [world.fake(p) for p in parameters]
        given = RecordedStep(usual_gradients(fakes))
        step = TrainingStep(optimizer=name)
        optimizer, _ = steady_state(step, list(zip(parameters, fakes, strict=True)), lambda: None, tracker, given)
        assert optimizer is not None
        tracker.hold(fakes)
        optimizer.hold()
        with tracker, ScalarReads():
            optimizer_step._give_gradients(fakes, given.gradients)
            tracker.hold(f.grad for f in fakes if f.grad is not None)
            optimizer.step()
        return optimizer.seen(fakes)


def _plain(seen: SeenOptimizer) -> Any:
    return seen.holds, seen.state_nbytes, [(kind, nbytes) for kind, _, nbytes in seen.allocations]


SEEN_ON_META = ("adadelta", "adagrad", "adam", "adamax", "adamw", "nadam", "radam", "rmsprop", "rprop", "sgd")


@pytest.mark.parametrize("name", SEEN_ON_META)
def test_an_optimizer_allocates_on_meta_what_it_does_on_fakes(name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Conv2d(4, 4, 3), nn.Embedding(10, 3), nn.Linear(8, 8))
    model[0].bias.requires_grad_(False)
    parameters = list(model.parameters())
    usual = usual_step(TrainingStep(optimizer=name), parameters)
    assert usual is not None
    assert usual.optimizer is not None
    on_fakes = _on_fakes(name, parameters)
    assert on_fakes is not None
    assert _plain(usual.optimizer) == _plain(on_fakes)


def test_gradients_that_a_known_optimizer_clears_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = list(nn.Linear(8, 8).parameters())
    step = TrainingStep(optimizer="adam")
    usual = usual_step(step, parameters)
    assert usual is not None
    monkeypatch.setattr(Geometry, "blank", lambda _: pytest.fail("a gradient was made"))
    world = FakeWorld(())
    with world.active():
        pairs = [(p, world.fake(p)) for p in parameters]
        steady_state(step, pairs, lambda: None, StorageTracker(), usual)
    assert all(fake.grad is None for _, fake in pairs)
