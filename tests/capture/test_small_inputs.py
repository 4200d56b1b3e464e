"""Small models that once were captured wrongly, told wrongly of, or not at all, each for a kind of them."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fxmem
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs


def eager_peak(model: nn.Module, x: torch.Tensor) -> int:
    """The measured peak of a step that holds its output until it is over."""
    for _ in range(2):
        with fxmem.track(model, x) as memory:
            output = model(x)
            loss = output.sum()
            loss.backward()
            for parameter in model.parameters():
                parameter.grad = None
            del output, loss
    return memory.peak_bytes


def eager_estimate(model: nn.Module, x: torch.Tensor) -> int:
    return fxmem.estimate(model, x, optimizer=None, planner="chen").peak_bytes


# -- random generators ---------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """A linear layer and what ``noise(self, y)`` makes of its result."""

    def __init__(self, noise: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.noise = nn.Linear(4, 4), noise
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.noise(self, self.linear(x))


def _reseeds(_: Any, y: torch.Tensor) -> torch.Tensor:
    torch.default_generator.manual_seed(42)
    return functional.dropout(y)


def _reseeds_and_puts_back(_: Any, y: torch.Tensor) -> torch.Tensor:
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(42)
    dropped = functional.dropout(y)
    torch.default_generator.set_state(state)
    return dropped


def _seeds_anew(_: Any, y: torch.Tensor) -> torch.Tensor:
    torch.seed()
    return y


def _reseeds_its_own(module: Any, y: torch.Tensor) -> torch.Tensor:
    module.generator.manual_seed(5)
    return y * torch.rand(y.shape, generator=module.generator)


def _makes_one(_: Any, y: torch.Tensor) -> torch.Tensor:
    return y * torch.rand(y.shape, generator=torch.Generator().manual_seed(5))


SEEDING = [_reseeds, _reseeds_and_puts_back, _seeds_anew, _reseeds_its_own, _makes_one]


@pytest.mark.parametrize("noise", SEEDING, ids=lambda noise: noise.__name__)
def test_a_forward_that_seeds_a_generator_is_refused_whatever_the_call_is_named(noise: Any) -> None:
    model = Noisy(noise)
    with pytest.raises(fxmem.CaptureError, match=r"manual_seed or set_state of a torch\.Generator"):
        capture(model, Inputs.of((torch.randn(4, 4),), {}))


@contextmanager
def drawing_thread() -> Iterator[None]:
    """Another thread that draws, seeds and sets hooks all the while, as a training step or a data loader does."""
    done, weight = threading.Event(), torch.ones(2, requires_grad=True)

    def draw() -> None:
        while not done.is_set():
            torch.rand(3)
            torch.manual_seed(1)
            weight.register_hook(lambda gradient: gradient).remove()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("noise", [None, *SEEDING], ids=lambda noise: getattr(noise, "__name__", "dropout"))
def test_what_another_thread_does_is_not_the_models(noise: Any) -> None:
    refused = pytest.raises(fxmem.CaptureError, match=r"manual_seed or set_state of a torch\.Generator")
    with drawing_thread(), nullcontext() if noise is None else refused:
        capture(Noisy(noise or (lambda _, y: functional.dropout(y))), Inputs.of((torch.randn(4, 4),), {}))


def test_planning_leaves_random_numbers_as_they_were() -> None:
    x = torch.randn(4, 4)
    for noise in (_reseeds, lambda module, y: functional.dropout(y) * torch.rand(4, 4, generator=module.generator)):
        model = Noisy(noise)
        states = torch.get_rng_state(), model.generator.get_state()
        try:
            fxmem.optimize(model, x, optimizer=None)
        except fxmem.CaptureError:
            assert noise is _reseeds
        assert torch.equal(states[0], torch.get_rng_state())
        assert torch.equal(states[1], model.generator.get_state())


# -- eager peaks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [nn.ReLU(inplace=True), nn.SiLU(inplace=True)])
def test_a_gradient_through_a_view_written_in_place_is_copied(activation: nn.Module) -> None:
    model, x = nn.Sequential(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4), activation), torch.randn(2, 2, 18, 18)
    assert eager_estimate(model, x) == eager_peak(model, x)


class Written(nn.Module):
    def __init__(self, write: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(16, 16), write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.write(self.linear(x))


def _other_view(y: torch.Tensor) -> torch.Tensor:
    view = y.view(-1)
    y.relu_()
    return view


WRITES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reshaped": lambda y: y.view(4, -1).relu_(),
    "transposed": lambda y: y.t().relu_(),
    "chained": lambda y: y.view(4, 16, 16).transpose(1, 2).sigmoid_(),
    "other view": _other_view,
    "not a view": lambda y: y.relu_(),
    "before the view": lambda y: y.relu_().view(-1),
    "part": lambda y: y[:32].relu_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_views_written_in_place_are_estimated_as_measured(write: Any) -> None:
    model, x = Written(write), torch.randn(64, 16)
    assert eager_estimate(model, x) == eager_peak(model, x)


class Replacing(nn.Module):
    """Gives the name of its buffer to a new tensor in each forward."""

    book: torch.Tensor

    def __init__(self, new: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.new = nn.Linear(16, 16), new
        self.register_buffer("book", torch.zeros(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.book = self.new(self.book, y)
        return y.relu().exp()


@pytest.mark.parametrize(
    "new",
    [lambda book, y: book * 0.9 + y.detach().mean(0), lambda book, y: torch.zeros(64, 16)],
    ids=["from it", "anew"],
)
def test_a_buffer_that_forward_replaces_is_let_go(new: Any) -> None:
    model, x = Replacing(new), torch.randn(64, 16)
    assert eager_estimate(model, x) == eager_peak(model, x)


# -- around planning -----------------------------------------------------------------------------------------------------


def test_track_around_a_call_that_plans_measures_the_step_alone() -> None:
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4))), torch.randn(64, 32)

    def step(optimized: Any) -> int:
        with fxmem.track(optimized, x) as memory:
            optimized(x).sum().backward()
        model.zero_grad()
        assert isinstance(memory.peak_bytes, int)
        return memory.peak_bytes

    optimized = fxmem.optimize(model, budget="85%", optimizer=None, planner="chen")
    assert step(optimized) == step(optimized)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_capture_lets_torch_warn_and_log_of_nothing(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(kind(4, 4, batch_first=True))
    with warnings.catch_warnings(), caplog.at_level(logging.DEBUG, "torch"):
        warnings.simplefilter("error")
        capture(model, Inputs.of((torch.randn(2, 3, 4),), {}))
    assert not [record for record in caplog.records if record.name.startswith("torch")]


def test_what_the_model_itself_warns_of_is_heard_once() -> None:
    def warns(_: Any, y: torch.Tensor) -> torch.Tensor:
        warnings.warn("not for production", stacklevel=1)
        return y

    with pytest.warns(UserWarning, match="not for production") as heard:
        fxmem.estimate(Noisy(warns), torch.randn(4, 4), planner="chen")
    assert len([w for w in heard if "production" in str(w.message)]) <= 2  # capture, and the step that counts


# -- TorchScript ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(2, 4))], ids=["script", "trace"]
)
def test_a_submodule_of_torchscript_is_named(make: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), make(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    for entry_point in (fxmem.estimate, fxmem.frontier):
        with pytest.raises(fxmem.CaptureError, match=r"holds the torch\.jit\.ScriptModule '1'"):
            entry_point(model, torch.randn(8, 4))


# -- losses whose fakes torch lacks ---------------------------------------------------------------------------------------


class Transcriber(nn.Module):
    """Probabilities of four letters over time, and the CTC loss of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6)), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor, texts: torch.Tensor, lengths: Any, **options: Any) -> torch.Tensor:
        return functional.ctc_loss(self.layers(x).log_softmax(-1), texts, *lengths, **options)


@pytest.mark.slow
def test_a_ctc_loss_is_planned() -> None:
    x, texts, lengths = torch.randn(24, 8, 16), torch.randint(1, 4, (8, 5)), (torch.full((8,), 24), torch.full((8,), 5))
    model = Transcriber()
    options: dict[str, Any] = {"optimizer": None, "planner": "chen"}
    floor = fxmem.optimize(model, (x, texts, lengths), **options).fxmem.report.floor_bytes
    optimized = fxmem.optimize(model, (x, texts, lengths), budget=floor, **options)
    gradients = []
    for candidate in (model, optimized):
        model.zero_grad()
        with fxmem.track(model, x, texts, lengths) as memory:
            loss = candidate(x, texts, lengths)
            loss.backward()
        gradients.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *gradients))
    assert memory.peak_bytes <= optimized.fxmem.report.predicted_peak_bytes == floor
    assert optimized.fxmem.plan.dropped


class Estimator(nn.Module):
    """Means and variances, and the Gaussian loss of them, which asks whether variances are below 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean, spread = self.layers(x).unbind(-1)
        return functional.gaussian_nll_loss(mean, y, spread.square(), eps=0.01)


def test_a_gaussian_loss_keeps_what_it_does_without_gradients() -> None:
    x, y, model, gradients = torch.randn(64, 16), torch.randn(64), Estimator(), []
    optimized = fxmem.optimize(model, (x, y), optimizer=None, planner="chen", policy=[("*", "recompute")])
    for candidate in (model, optimized):
        model.zero_grad()
        candidate(x, y).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))
    assert optimized.fxmem.plan.dropped


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"reduction": "none", "zero_infinity": True}])
@pytest.mark.parametrize("is_batched", [True, False])
def test_a_ctc_loss_of_lengths_in_lists_is_planned(options: dict[str, Any], is_batched: bool) -> None:
    x, texts, lengths = torch.randn(24, 8, 16), torch.randint(1, 4, (8, 5)), ((24,) * 8, (5, 4, 3, 2, 1, 5, 4, 5))
    if not is_batched:
        x, texts, lengths = x[:, 0], texts[0], ((24,), (5,))
    model, gradients = Transcriber(), []
    asked: dict[str, Any] = {"optimizer": None, "planner": "chen", "cost": "cpu"}
    optimized = fxmem.optimize(model, (x, texts, lengths), options, policy=[("*", "recompute")], **asked)
    for candidate in (model, optimized):
        model.zero_grad()
        loss = candidate(x, texts, lengths, **options)
        loss.sum().backward()
        gradients.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *gradients))
    assert optimized.fxmem.plan.dropped
