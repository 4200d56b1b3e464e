"""What a forward does to Python objects beside its tensors."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn

import fxmem
from tests.exactness import check, same_bits
from tests.hostile.models import WIDTH, batch

# -- what a forward reaches beside its graph ---------------------------------------------------------------------------


class Reversible(torch.autograd.Function):
    """Runs a module again in its backward, as reversible networks do, which so get their gradients by the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: nn.Module) -> Tensor:
        ctx.part, ctx.x = part, x.detach()
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            torch.autograd.backward(ctx.part(x), grad)
        return x.grad, None


class WithReversible(nn.Module):
    def __init__(self, *, normed: bool) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH) if normed else nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.after(Reversible.apply(self.before(x).sin(), self.part).cos())


@pytest.mark.slow
@pytest.mark.parametrize("normed", [False, True])
def test_modules_that_a_custom_function_holds_are_run_on_fakes_too(normed: bool) -> None:
    check(lambda: WithReversible(normed=normed), batch())
    model = WithReversible(normed=normed)
    fxmem.optimize(model, batch(), optimizer=None)
    assert all(p.grad is None for p in model.parameters())
    assert not normed or model.part[1].num_batches_tracked == 0


class WritesTensor(nn.Module):
    """Counts in a tensor that is no buffer."""

    def __init__(self, write: Callable[[Tensor, Tensor], Any], *, listed: bool = False) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(WIDTH, WIDTH), write
        self.count = [torch.zeros(WIDTH)] if listed else torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        count = self.count[0] if isinstance(self.count, list) else self.count
        self.write(count, y.detach())
        return y * count


@pytest.mark.slow
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    "write", [lambda c, y: c.add_(1.0), lambda c, y: c.copy_(y.mean(0)), lambda c, y: c[:2].mul_(0.9)]
)
def test_tensors_that_are_no_buffers_are_not_written_by_planning(write: Any, listed: bool) -> None:
    model = WritesTensor(write, listed=listed)
    with pytest.raises(fxmem.CaptureError, match="register_buffer"):
        fxmem.optimize(model, batch(), optimizer=None)
    assert torch.equal(model.count[0] if listed else model.count, torch.zeros(WIDTH))


def fills_a_buffer(m: Any, x: Tensor) -> Tensor:
    if m.extra is None:
        m.register_buffer("extra", torch.ones(WIDTH))
    return m.layer(x) * m.extra


def makes_a_part(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "late"):
        m.late = nn.LayerNorm(WIDTH)
    return m.late(m.layer(x))


def makes_a_parameter(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "scale"):
        m.scale = nn.Parameter(torch.ones(WIDTH))
    return m.layer(x) * m.scale


def loses_a_part(m: Any, x: Tensor) -> Tensor:
    if hasattr(m, "other"):
        del m.other
    return m.layer(x)


def takes_turns(m: Any, x: Tensor) -> Tensor:
    m.layer, m.other = m.other, m.layer
    return m.layer(x)


def turns_parameters(m: Any, x: Tensor) -> Tensor:
    m.layer.weight, m.other.weight = m.other.weight, m.layer.weight
    return m.layer(x)


class Unsteady(nn.Module):
    def __init__(self, way: Any) -> None:
        super().__init__()
        self.layer, self.other, self.way = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), way
        self.register_buffer("extra", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [fills_a_buffer, makes_a_part, makes_a_parameter, loses_a_part, takes_turns, turns_parameters]
)
def test_models_that_change_their_parts_are_refused_and_left_as_they_were(way: Any) -> None:
    model = Unsteady(way)

    def state() -> list[Any]:
        return [(m, *m._parameters.items(), *m._buffers.items(), *m._modules.items()) for m in model.modules()]

    before = state()
    with pytest.raises(fxmem.CaptureError, match="makes, removes or exchanges"):
        fxmem.optimize(model, batch(), optimizer=None)
    assert state() == before
    assert type(model(batch())) is Tensor


def test_modules_hidden_in_lists_are_left_as_they_were_by_planning() -> None:
    class Taught(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.teacher = [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.teacher[0].weight.mul_(0.5).add_(self.layer.weight, alpha=0.1)
            return self.layer(x) - self.teacher[0](x)

    model = Taught()
    before = model.teacher[0].weight.clone()
    fxmem.optimize(model, batch(), optimizer=None)
    assert same_bits(model.teacher[0].weight, before)


def hidden_in_slots(part: nn.Module) -> Any:
    class Holder:
        __slots__ = ("part",)

        def __init__(self) -> None:
            self.part = part

        def __call__(self, x: Tensor) -> Tensor:
            return self.part(x)

    return Holder()


def hidden_in_a_class(part: nn.Module) -> Any:
    kind = type("Holder", (), {"part": part, "__call__": lambda self, x: self.part(x)})
    return kind()


def hidden_out_of_reach(part: nn.Module) -> Any:
    there = weakref.ref(part)
    return type("Holder", (), {"__call__": lambda self, x, there=there: there()(x)})()


@pytest.mark.parametrize("hide", [hidden_in_slots, hidden_in_a_class])
def test_modules_are_found_wherever_a_custom_function_holds_them(hide: Any) -> None:
    class Holding(WithReversible):
        def forward(self, x: Tensor) -> Tensor:
            return self.after(Reversible.apply(self.before(x).sin(), hide(self.part)).cos())

    check(lambda: Holding(normed=True), batch())


def test_gradients_that_planning_would_touch_are_refused() -> None:
    class Holding(WithReversible):
        def forward(self, x: Tensor) -> Tensor:
            return self.after(Reversible.apply(self.before(x).sin(), hidden_out_of_reach(self.part)).cos())

    model = Holding(normed=False)
    with pytest.raises(fxmem.CaptureError, match="writes to the gradients of 2 parameters"):
        fxmem.optimize(model, batch(), optimizer=None)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_a_budget_that_is_too_small_is_said_so_where_other_sizes_do_not_run() -> None:
    layers = (nn.Conv2d(2, 4, 3), nn.GELU(), nn.ReflectionPad2d(2), nn.Conv2d(4, 4, 3), nn.GELU(), nn.Conv2d(4, 2, 1))
    model = nn.Sequential(*layers)
    floor = fxmem.optimize(model, torch.randn(2, 2, 12, 12), optimizer=None).report.floor_bytes
    optimized = fxmem.optimize(model, budget=floor, optimizer=None)
    optimized(torch.randn(2, 2, 12, 12)).sum().backward()
    with pytest.raises(fxmem.InfeasibleBudgetError):
        optimized(torch.randn(2, 2, 14, 14))
