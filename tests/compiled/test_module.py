"""A compiled module is what its model is, to whoever trains, wraps, copies or saves it."""

from __future__ import annotations

import copy
import inspect
import io
import warnings
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import fxmem

OPTIONS: dict[str, Any] = {"backend": "inductor", "optimizer": None, "cost": "cpu", "plan_seconds": 1.0}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return scale * (x + self.down(self.up(x).relu())).square().mean()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).square().mean()


@pytest.fixture
def model() -> Scaled:
    torch.manual_seed(0)
    return Scaled()


X = torch.linspace(-1, 1, 16 * 32).view(16, 32)


def compiled(model: nn.Module, example: Any = X, **options: Any) -> Any:
    return fxmem.optimize(model, example, budget="1MB", **{**OPTIONS, **options})


def test_trainers_read_its_signature_and_what_wraps_its_forward_runs_around_it(model: Scaled) -> None:
    module = compiled(model)
    assert inspect.signature(module.forward) == inspect.signature(model.forward)
    planned = module.forward
    module.forward = lambda *args, **kwargs: 2 * planned(*args, **kwargs)
    assert torch.equal(module(X), 2 * model(X))
    del module.forward
    assert torch.equal(module(X), model(X))
    assert "budget 1 MB" in repr(module)


def test_copies_and_what_is_unpickled_are_planned_again(model: Scaled) -> None:
    module, saved = compiled(model), io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    for made in (copy.deepcopy(module), torch.load(saved, weights_only=False)):
        assert made.up.weight is not model.up.weight
        assert torch.equal(made(X), model(X))
        assert made.fxmem.report.budget_bytes == 1_000_000
    assert copy.copy(module).up is model.up


def test_it_becomes_its_model_again(model: Scaled) -> None:
    module = compiled(model)
    assert fxmem.restore(module) is model
    assert type(module) is Scaled
    holder = nn.Sequential(compiled(model))
    fxmem.restore(holder)
    assert holder[0] is model


def test_a_model_is_compiled_in_place_and_stays_as_it_was_where_that_is_refused(model: Scaled) -> None:
    with pytest.raises(fxmem.InfeasibleBudgetError):
        fxmem.optimize_(model, X, budget=20_000, **OPTIONS)
    assert type(model) is Scaled
    expected = model(X)
    assert fxmem.optimize_(model, X, budget="1MB", **OPTIONS) is model  # type: ignore[comparison-overlap]
    assert isinstance(model, fxmem.CompiledModule)
    assert torch.equal(model(X), expected)
    assert len(model.fxmem.reports) == 1


def test_other_methods_are_compiled_each_as_a_step_of_its_own(model: Scaled) -> None:
    module = compiled(model, None, methods=("forward", "encode"))
    torch.testing.assert_close(module.encode(X), model.encode(X))
    assert module.fxmem.methods["encode"].report.budget_bytes == 1_000_000


def test_hooks_run_once_around_it(model: Scaled) -> None:
    module, calls = compiled(model), []
    module.register_forward_hook(lambda *_: calls.append("forward"))
    module(X)
    module.eval()(X)
    assert calls == ["forward", "forward"]


def test_what_cannot_be_is_refused_by_name(model: Scaled) -> None:
    module = compiled(model)
    with pytest.raises(fxmem.InputError, match=r"pass model\.fxmem\.original"):
        fxmem.optimize(module, X, budget="1MB")
    with pytest.raises(fxmem.InputError, match="DataParallel copies a model"):
        module._replicate_for_data_parallel()
    with pytest.raises(fxmem.InputError, match="is an optimized module inside of"):
        fxmem.optimize(nn.Sequential(module), X, budget="1MB")
    with pytest.raises(fxmem.InputError, match=r'methods= is not for backend="auto"'):
        compiled(model, backend="auto", methods=("forward", "encode"))


def test_a_step_can_be_told_of_later(model: Scaled) -> None:
    module = compiled(model)
    before = module.fxmem.report.predicted_peak_bytes
    module.fxmem.plan_anew(fxmem.TrainingStep(accumulate=True, optimizer=None))
    module(X)
    gradients = sum(p.nbytes for p in model.parameters())
    assert module.fxmem.report.predicted_peak_bytes == before + gradients


def test_a_forward_that_goes_around_it_is_compiled_from_the_next_call_on(model: Scaled) -> None:
    """As trainers do that compute a loss in pieces."""
    module = compiled(model)

    def in_pieces(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()

    module.forward = MethodType(in_pieces, module)
    around = module(X)
    with pytest.warns(UserWarning, match="in_pieces trains up around the plan.*not known; the budget is 1000000 bytes"):
        planned = module(X)
    torch.testing.assert_close(planned, around)
    assert len(module.fxmem.set_forwards) == 1


def test_a_loss_that_nobody_told_of_is_said_once() -> None:
    layer, x = nn.Linear(8, 4), torch.randn(4, 8)
    with pytest.warns(UserWarning, match="Linear returns no loss: what is computed outside of it is not seen"):
        module = compiled(layer, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        module(x).square().mean().backward()
