"""What cannot be captured or planned is told with its place and a way out."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import deque

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import fxmem
from tests.capture.models import ROWS, WIDTH, Extras, network, recomputing, same_gradients
from tests.exactness import same_bits


def test_planning_where_parametrizations_are_cached() -> None:
    model = network()
    nn.utils.parametrizations.weight_norm(model[0])
    optimized, x = recomputing(model), torch.randn(ROWS, WIDTH)
    with nn.utils.parametrize.cached():
        assert torch.equal(optimized(x), model(x))
    assert same_gradients(optimized, x)


def test_planning_in_anomaly_mode() -> None:
    x, model = torch.randn(ROWS, WIDTH), network()
    eager = copy.deepcopy(model)
    with torch.autograd.detect_anomaly(check_nan=True):
        for forward in (fxmem.optimize(model, optimizer=None, planner="chen"), eager):
            forward(x).sum().backward()
        assert torch.is_anomaly_enabled()
    assert all(same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))


class Selecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[x[:, 0] > 0].sin()


class Differentiating(Selecting):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]


class Rejecting(Selecting):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        while (noise.abs() > 2).any():
            noise = torch.randn_like(x)
        return self.linear(x + noise)


def test_a_loop_until_values_are_right_is_refused() -> None:
    with pytest.raises(fxmem.CaptureError, match="control flow depends on the values in tensors"):
        fxmem.optimize(Rejecting(), torch.randn(2, WIDTH), optimizer=None)


def test_what_cannot_be_captured_is_told_with_its_place_and_a_way_out() -> None:
    with pytest.raises(
        fxmem.CaptureError, match=r"in the model \(test_capture_errors.py:\d+\): the shape of what aten"
    ):
        fxmem.optimize(Selecting(), torch.randn(4, WIDTH), optimizer=None)
    with pytest.raises(fxmem.CaptureError, match="Take derivatives outside"):
        fxmem.optimize(Differentiating(), torch.randn(4, WIDTH, requires_grad=True), optimizer=None)


def test_an_argument_that_a_forward_changes_is_named() -> None:
    class Remembering(Extras):
        def forward(self, x: Tensor, cache: deque[Tensor]) -> Tensor:  # type: ignore[override]
            cache.append(self.linear(x))
            return cache[-1].exp()

    with pytest.raises(fxmem.CaptureError, match="Remembering changes its argument 'cache', a deque"):
        fxmem.optimize(Remembering(), torch.randn(4, WIDTH), {"cache": deque()}, optimizer=None)


def test_the_training_flag_is_the_originals() -> None:
    model = network()
    optimized = fxmem.optimize(model, optimizer=None)
    optimized.eval()
    assert not model.training
    model.train()
    assert optimized.training
    optimized.training = False
    assert (model.training, model[0].training) == (False, True)


def test_plain_tensors_in_place_of_parameters_are_refused_with_what_to_do() -> None:
    optimized = fxmem.optimize(network(), optimizer=None)
    plain = {name: p.detach().clone() for name, p in optimized.named_parameters()}
    with pytest.raises(fxmem.InputError, match=r"0\.weight is a plain tensor .* model\.fxmem\.original"):
        torch.func.functional_call(optimized, plain, (torch.randn(ROWS, WIDTH),))


@pytest.mark.slow
def test_a_gradient_of_an_earlier_shape_is_refused_with_what_to_do() -> None:
    model, x = network(), torch.randn(ROWS, WIDTH)
    optimized = fxmem.optimize(model, optimizer=None)
    optimized(x).sum().backward()
    model[4].weight.data, model[4].bias.data = torch.randn(6, 64), torch.randn(6)
    with pytest.raises(
        fxmem.InputError, match=r"gradient of 4\.weight has shape \(4, 64\).* \(6, 64\): call zero_grad"
    ):
        optimized(x)
    optimized.zero_grad()
    assert same_gradients(optimized, x)


def test_forward_mode_and_disabled_hooks_are_refused() -> None:
    optimized, x = fxmem.optimize(network(), optimizer=None), torch.randn(ROWS, WIDTH)
    with forward_ad.dual_level(), pytest.raises(fxmem.InputError, match=r"forward-mode.*model\.fxmem\.original"):
        optimized(forward_ad.make_dual(x, x))
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("off"),
        pytest.raises(fxmem.InputError, match=r"hooks are disabled.*model\.fxmem\.original"),
    ):
        optimized(x)


def test_batched_gradients_are_eagers() -> None:
    def dropping() -> nn.Sequential:
        return nn.Sequential(network(), nn.Dropout(0.2), nn.Linear(4, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 3))

    x = torch.randn(ROWS, WIDTH)
    model = dropping()
    optimized = recomputing(model, x)
    assert optimized.plan.dropped
    weights = torch.randn(3, ROWS, 3)

    def batched(module: nn.Module) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        return torch.autograd.grad(module(x), list(model.parameters()), weights, is_grads_batched=True)

    assert all(map(torch.equal, batched(model), batched(optimized)))


@pytest.mark.slow
def test_threads_may_plan_at_the_same_time() -> None:
    x, failed = torch.randn(ROWS, WIDTH), []

    def train() -> None:
        try:
            fxmem.optimize(network(), optimizer=None, planner="chen")(x).sum().backward()
        except Exception as error:
            failed.append(error)

    register_hook, call = Tensor.register_hook, nn.Module.__call__
    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert Tensor.register_hook is register_hook
    assert nn.Module.__call__ is call


def test_a_refused_budget_keeps_its_remedy_when_pickled() -> None:
    error = fxmem.InfeasibleBudgetError(1, 2, (("parameters", 2),), "here", "The largest batch that fits is 64.")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
