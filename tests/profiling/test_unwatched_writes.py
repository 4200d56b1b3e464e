"""What autograd writes in place counts once, as PyTorch's own profiler of the allocator sees it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import fxmem

SIZE = 256
ROWS = torch.randint(0, SIZE, (SIZE,))
SLACK = 1024
"""Scalars: the loss, a count; the profiler sees some that live shorter than an op."""

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda x: x[ROWS],
    "gather": lambda x: x.gather(0, ROWS[:, None].expand(SIZE, SIZE)),
    "index_select": lambda x: x.index_select(0, ROWS),
    "topk": lambda x: x.topk(32)[0],
    "max": lambda x: x.max(0)[0],
    "take": lambda x: x.take(ROWS),
    "cummax": lambda x: x.cummax(0)[0],
    "logits": lambda x: functional.binary_cross_entropy_with_logits(x, x.detach().sigmoid(), reduction="none"),
    "weighed logits": lambda x: functional.binary_cross_entropy_with_logits(x, x.detach(), pos_weight=x.detach()),
    "three uses": lambda x: (x * 2) + (x * 3) + x.relu(),
    "chunks": lambda x: sum((chunk.relu() for chunk in x.chunk(4)), torch.zeros(())),
    "halves": lambda x: x[::2].relu() + x[1::2],
    "shared by a sum": lambda x: (x + x.sigmoid()) * x,
}


class _Op(nn.Module):
    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.op = nn.Parameter(torch.randn(SIZE, SIZE)), op

    def forward(self, scale: Tensor) -> Tensor:
        return self.op(self.weight * scale)


class _Twice(nn.Module):
    """Layers that are used two times. (Not convolutions: oneDNN takes scratch that only the profiler sees.)"""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.layers(x))  # type: ignore[no-any-return]


def _profiled_bytes(step: Callable[[], object]) -> int:
    """The peak of what the CPU's allocator gave out, as PyTorch's profiler has it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = step()
    live = peak = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del kept
    return peak


def _step(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    output = model(x)
    loss = output.sum()
    loss.backward()
    return output, loss


def _check(model: nn.Module, x: Tensor, slack: int) -> None:
    _step(model, x)
    model.zero_grad()
    present = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x))
    real = _profiled_bytes(lambda: _step(model, x))
    model.zero_grad()
    with fxmem.track(model, x) as memory:
        kept = _step(model, x)
    del kept
    model.zero_grad()
    estimate = fxmem.estimate(model, x, optimizer=None)
    constants = sum(t.nbytes for t in (ROWS,))
    assert abs(memory.peak_bytes - present - real) <= slack
    assert abs(estimate.peak_bytes - present - real) <= slack + constants


@pytest.mark.parametrize("name", OPS)
def test_gradients_that_autograd_writes_in_place(name: str) -> None:
    _check(_Op(OPS[name]), torch.ones(()), SLACK)


def test_a_module_used_twice() -> None:
    _check(_Twice(), torch.randn(512, 64), SLACK)


def test_a_sum_in_a_backward_of_ones_own_is_no_write_in_place() -> None:
    """The backward of a Function adds two tensors that it made: a third is there beside them."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return torch.add(grad * 2, grad * 3)

    x = torch.randn(SIZE, SIZE, requires_grad=True)

    def step() -> object:
        y = Doubled.apply(x * 1.0)
        y.sum().backward()
        return y

    step()
    x.grad = None
    real = _profiled_bytes(step)
    x.grad = None
    with fxmem.track(x) as memory:
        kept = step()
    del kept
    assert abs(memory.peak_bytes - x.nbytes - real) <= SLACK


class _Affine(nn.Module):
    """A linear layer over rows with gaps, called as ``call`` does; what follows saves nothing of it and takes less."""

    def __init__(self, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.bias, self.call = nn.Parameter(torch.randn(512, 8)), nn.Parameter(torch.randn(512)), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x.transpose(0, 1), self.weight, self.bias)[..., :8].sum()


@pytest.mark.parametrize(
    "call",
    [
        functional.linear,
        torch.ops.aten.linear.default,
        lambda x, weight, bias: x @ weight.t() + bias,
        lambda x, weight, bias: torch.add(torch.matmul(x, weight.t()), bias),
    ],
    ids=["linear", "op", "sum", "add"],
)
def test_the_bias_of_a_linear_layer_is_added_in_place(call: Callable[..., Tensor]) -> None:
    """Where the user adds it, sum and product are there at once."""
    _check(_Affine(call), torch.randn(64, 32, 8), SLACK)
