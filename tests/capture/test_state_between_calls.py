"""State that a call leaves and the next one reads, gradients included: potentials of neurons, hidden states of cells."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.capture import model_states
from fxmem.capture.model_states import ModelStates
from fxmem.profiling.storage_tracker import StorageTracker, tensors_of

WIDTH, HIDDEN, ROWS, TIMES = 16, 128, 32, 6


class Spike(torch.autograd.Function):
    """A step whose gradient is that of a smooth one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / (1 + x.square())


class Neurons(nn.Module):
    """Leaky neurons with their potential in a buffer, made by shape in the first call, and their reset in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("potential", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.potential.shape != x.shape:
            self.potential = torch.zeros_like(x)
        self.reset = Spike.apply(self.potential - 1).detach()
        self.potential = 0.9 * self.potential + x - self.reset
        return Spike.apply(self.potential - 1)

    def restart(self) -> None:
        self.potential = torch.zeros_like(self.potential)


class Cell(nn.Module):
    """Keeps its hidden state, two tensors in a tuple, in an attribute that is None at first."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(HIDDEN, HIDDEN)
        self.hidden: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.cell(x, self.hidden)
        return self.hidden[0]

    def restart(self) -> None:
        self.hidden = None


class Net(nn.Module):
    """``whole``: one forward is a whole sequence, which begins anew; else it is one step of time."""

    def __init__(self, make: Callable[[], nn.Module], whole: bool) -> None:
        super().__init__()
        self.up, self.first, self.mid = nn.Linear(WIDTH, HIDDEN), make(), nn.Linear(HIDDEN, HIDDEN)
        self.second, self.down, self.whole = make(), nn.Linear(HIDDEN, 4), whole

    def restart(self) -> None:
        for module in (self.first, self.second):
            module.restart()

    def forward(self, x: Tensor) -> Tensor:
        if not self.whole:
            return self.down(self.second(self.mid(self.first(self.up(x)))))
        self.restart()
        return torch.stack([self.down(self.second(self.mid(self.first(self.up(x))))) for _ in range(TIMES)]).mean(0)


def made(make: Callable[[], nn.Module], whole: bool) -> Net:
    torch.manual_seed(0)
    return Net(make, whole).train()


def outputs(model: Any, x: Tensor) -> Tensor:
    if model.whole:
        return model(x)
    model.restart()
    return torch.stack([model(x) for _ in range(TIMES)]).mean(0)


def trained(model: Any, rows: tuple[int, ...] = (ROWS,) * 4) -> tuple[list[Tensor], int]:
    """Return losses, gradients and weights, and the peak of the last step."""
    optimizer, found = torch.optim.AdamW(model.parameters()), []
    torch.manual_seed(1)
    for count in rows:
        x, y = torch.rand(count, WIDTH), torch.randint(0, 4, (count,))
        tracker = StorageTracker()
        tracker.hold([*tensors_of((model, optimizer)), x, y])
        with tracker:
            loss = nn.functional.cross_entropy(outputs(model, x), y)
            loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach() for p in model.parameters())], tracker.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("make", [Neurons, Cell])
@pytest.mark.parametrize("whole", [True, False], ids=["sequence", "step of time"])
@pytest.mark.parametrize("rows", [(ROWS,) * 4, (ROWS, ROWS, 8, ROWS)], ids=["alike", "last batch smaller"])
def test_state_goes_on_with_its_gradient(make: Callable[[], nn.Module], whole: bool, rows: tuple[int, ...]) -> None:
    expected, _ = trained(made(make, whole), rows)
    optimized = fxmem.optimize(made(make, whole), planner="chen", cost="cpu", budget=None, policy=[("*", "recompute")])
    found, _ = trained(optimized, rows)
    assert all(map(torch.equal, expected, found))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "share"), [(Neurons, 0.7), (Cell, 0.95)])
def test_a_sequence_has_the_peak_that_was_planned(make: Callable[[], nn.Module], share: float) -> None:
    expected, eager_bytes = trained(made(make, True), (128,) * 4)
    optimized = fxmem.optimize(made(make, True), planner="chen", cost="cpu", budget=int(share * eager_bytes))
    found, peak_bytes = trained(optimized, (128,) * 4)
    assert all(map(torch.equal, expected, found))
    assert peak_bytes == optimized.fxmem.report.predicted_peak_bytes <= share * eager_bytes
    assert optimized.fxmem.report.dropped_bytes > 0


class Detached(nn.Module):
    """Goes on from the hidden state of the call before without its gradient, as truncated backpropagation does."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.down = nn.GRUCell(WIDTH, HIDDEN), nn.Linear(HIDDEN, 4)
        self.hidden = torch.zeros(HIDDEN)
        self.whole = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.cell(x, self.hidden.expand(len(x), -1))
        self.hidden = hidden.detach().mean(0)
        return self.down(hidden)


def test_state_goes_on_without_a_gradient() -> None:
    torch.manual_seed(0)
    model = Detached().train()
    expected, _ = trained(copy.deepcopy(model))
    optimized = fxmem.optimize(copy.deepcopy(model), planner="chen", cost="cpu", policy=[("*", "recompute")])
    found, _ = trained(optimized)
    assert all(map(torch.equal, expected, found))
    assert optimized.fxmem.plans.asked.num_planned == 1


@pytest.mark.slow
def test_calls_outside_of_training_read_the_same_state() -> None:
    model = made(Neurons, False)
    optimized = fxmem.optimize(copy.deepcopy(model), planner="chen", cost="cpu")
    x, found = torch.rand(ROWS, WIDTH), []
    for each in (model, optimized):
        first = each(x)
        with torch.no_grad():
            second = each(x)
        found.append([first, second, each(x)])
        assert each.first.potential.requires_grad
    assert all(map(torch.equal, *found))


def test_a_parameter_s_facts_are_looked_at_in_each_call_and_autocast_is_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(4, 4)
    states = ModelStates(model)
    first = states.number()
    with monkeypatch.context() as patch:
        patch.setattr(model_states, "_state_of", lambda *args, **kwargs: pytest.fail("nothing has changed"))
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                assert states.number() == first
            assert states.number() == first
    changes: list[Callable[[], Any]] = [
        lambda: model.weight.requires_grad_(False),
        lambda: setattr(model.weight, "data", torch.zeros(4, 4).t()),
        lambda: setattr(model.weight, "data", torch.zeros(4, 8)[:, :4]),
        lambda: setattr(model.weight, "data", torch.zeros(17)[1:].view(4, 4)),
        lambda: setattr(model.weight, "data", torch.zeros(4, 4, dtype=torch.float64)),
        lambda: setattr(model, "bias", None),
        lambda: setattr(model, "scale", 2.0),
    ]
    seen = [first]
    for change in changes:
        change()
        seen.append(states.number())
    assert seen == list(range(first, first + len(changes) + 1))
