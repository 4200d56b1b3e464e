"""Backwards that retain their graph keep the saving: what they refill they empty again."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxmem
from fxmem.api.module import OptimizedModule
from tests.exactness import same_bits
from tests.runtime.models import Net, Smooth, assert_both_do, loss_of, pair

BLOCKS, ROWS, WIDTH = 6, 64, 16
VALUE = ROWS * WIDTH * 4
"""Bytes of one activation."""


def chain() -> tuple[nn.Module, OptimizedModule, Tensor]:
    """Return a chain of sines, its twin that recomputes them all, and a batch."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            for layer in self.layers:
                x = layer(x).sin()
            return x.cos(), x.square()

    eager, twin, x = Chain(), Chain(), torch.randn(ROWS, WIDTH)
    twin.load_state_dict(eager.state_dict())
    policy = [("sin", "recompute")]
    return eager, fxmem.optimize(twin, x, optimizer=None, policy=policy, inplace=False, compress_saved=False), x


def added_peak(model: nn.Module, x: Tensor, backward: Callable[[tuple[Tensor, Tensor]], None]) -> int:
    """Return what forward and ``backward`` take at most beside what is there before, gradients included."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with fxmem.track(model, x) as memory:
        backward(model(x))
    return memory.peak_bytes - memory.start_bytes


class Sines(TorchDispatchMode):
    """Counts the sines that are computed."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.sin.default
        return func(*args, **(kwargs or {}))


def plain(output: tuple[Tensor, Tensor]) -> None:
    (output[0].sum() + output[1].sum()).backward()


def retained(output: tuple[Tensor, Tensor]) -> None:
    (output[0].sum() + output[1].sum()).backward(retain_graph=True)


def twice(output: tuple[Tensor, Tensor]) -> None:
    loss = output[0].sum() + output[1].sum()
    loss.backward(retain_graph=True)
    loss.backward()


def several(output: tuple[Tensor, Tensor]) -> None:
    output[0].sum().backward(retain_graph=True)
    output[1].sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("backward", [retained, twice, several])
def test_a_retained_graph_keeps_the_saving(backward: Callable[[tuple[Tensor, Tensor]], None]) -> None:
    eager, optimized, x = chain()
    assert len(optimized.fxmem.plan.dropped) >= BLOCKS
    mine = added_peak(optimized, x, backward)
    # What a backward that lets go frees as it goes stays: the outputs' inputs and the values kept.
    assert mine <= added_peak(optimized, x, plain) + 3 * VALUE
    assert mine < 0.75 * added_peak(eager, x, backward)


def test_nothing_that_can_be_recomputed_is_held_after_a_retained_backward() -> None:
    _, optimized, x = chain()
    with fxmem.track(optimized, x) as memory:
        loss = optimized(x)[0].sum()
        before = len(memory.events)
        torch.autograd.grad(loss, list(optimized.parameters()), retain_graph=True)
        assert memory.events[-1].live_bytes == memory.events[before - 1].live_bytes
        torch.autograd.grad(loss, [optimized.layers[3].weight], retain_graph=True)  # a part
        assert memory.events[-1].live_bytes == memory.events[before - 1].live_bytes


@pytest.mark.slow
@pytest.mark.parametrize("num_before", [0, 2])
def test_each_value_is_recomputed_as_often_as_where_the_graph_is_let_go(num_before: int) -> None:
    """``num_before``: steps before; after some of them, steps run as programs."""
    _, optimized, x = chain()
    for _ in range(num_before):
        plain(optimized(x))
    output = optimized(x)
    with Sines() as once:
        plain(output)
    loss = sum(y.sum() for y in optimized(x))
    for _ in range(2):
        with Sines() as again:
            loss.backward(retain_graph=True)
        assert again.count == once.count >= BLOCKS


def test_a_retained_backward_that_fails_leaves_nothing_refilled() -> None:
    eager, optimized, x = chain()

    def fail(_: Tensor) -> None:
        raise KeyboardInterrupt

    left = []
    for model in (eager, optimized):
        with fxmem.track(model, x) as memory:
            loss = model(x)[0].sum()
            before = memory.events[-1].live_bytes
            handle = model.layers[1].weight.register_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            gc.collect()  # the traceback
            left.append(memory.events[-1].live_bytes - before)
            handle.remove()
        loss.backward()
    assert left[1] == left[0], "what autograd itself leaves"


def test_looking_at_a_saved_tensor_does_not_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXMEM_RUNTIME", "tape")  # a program's outputs come from one node, which saves no tensors
    _, optimized, x = chain()
    with fxmem.track(optimized, x) as memory:
        node = optimized(x)[0].grad_fn
        before = memory.events[-1].live_bytes
        assert node._saved_self.shape == (ROWS, WIDTH)
        assert memory.events[-1].live_bytes == before


@pytest.mark.slow
def test_parts_then_all_of_a_retained_graph_are_bitwise_eagers() -> None:
    def action(model: nn.Module, x: Tensor) -> list[Tensor]:
        output = model(x)
        loss, weight = loss_of(output), model.blocks[1].up.weight
        grads = [torch.autograd.grad(output[k].sum(), weight, retain_graph=True)[0] for k in ("hidden", "out")]
        grads += torch.autograd.grad(loss, [x, model.head.weight], retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return grads

    assert_both_do(action)


@pytest.mark.slow
def test_recorded_backwards_between_retained_ones_are_bitwise_eagers() -> None:
    def action(model: nn.Module, x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        loss.backward(retain_graph=True)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        loss.backward(retain_graph=True)
        (loss + grad.square().sum()).backward()
        return grad

    assert_both_do(action, Smooth)


@pytest.mark.slow
def test_threads_may_go_back_through_one_retained_graph() -> None:
    eager, optimized, x = pair(Net)
    grads: list[list[Tensor]] = []
    for model, number in ((eager, 1), (optimized, 4)):
        torch.manual_seed(3)
        loss = loss_of(model(x))

        def backward(model: nn.Module = model, loss: Tensor = loss) -> None:
            for _ in range(3):
                grads.append(list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)))

        threads = [threading.Thread(target=backward) for _ in range(number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(grads) == 3 + 12
    assert all(same_bits(a, b) for other in grads[1:] for a, b in zip(grads[0], other, strict=True))
