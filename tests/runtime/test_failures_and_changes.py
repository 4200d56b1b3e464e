"""Nothing leaks or is left behind; what changes between forward and backward is reported."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.api.module import OptimizedModule
from fxmem.profiling.storage_tracker import StorageTracker
from tests.exactness import same_bits
from tests.runtime.models import Smooth, assert_both_do, loss_of, pair
from tests.tiers import diagonal

# -- nothing leaks -----------------------------------------------------------------------------------------------------


def _live_bytes_after(optimized: OptimizedModule, action: Callable[[], Any]) -> int:
    tracker = StorageTracker()
    tracker.hold([*optimized.parameters(), *optimized.buffers()])
    start_bytes = tracker.live_bytes
    with tracker:
        action()
    return int(tracker.live_bytes - start_bytes)


@pytest.mark.slow
def test_forward_without_backward_leaks_nothing() -> None:
    _, optimized, x = pair()
    assert _live_bytes_after(optimized, lambda: optimized(x) and None) == 0


@pytest.mark.slow
def test_outputs_that_die_take_the_graph_along() -> None:
    _, optimized, x = pair()
    output = optimized(x)
    references = [weakref.ref(tensor) for tensor in output.values()]
    del output
    assert [reference() for reference in references] == [None, None]


@pytest.mark.slow
def test_partial_backward_then_dropping_the_rest_leaks_nothing() -> None:
    _, optimized, x = pair()

    def action() -> None:
        output = optimized(x)
        torch.autograd.grad(output["hidden"].sum(), optimized.blocks[2].up.weight, retain_graph=True)

    assert _live_bytes_after(optimized, action) == 0


# -- errors on the way -------------------------------------------------------------------------------------------------


class Bomb(torch.utils._python_dispatch.TorchDispatchMode):
    """Raises at the n-th dispatched op."""

    def __init__(self, countdown: int, error: type[BaseException]) -> None:
        super().__init__()
        self.countdown, self.error = countdown, error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.countdown -= 1
        if self.countdown == 0:
            raise self.error("the bomb")
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("countdown", "error"), diagonal([3, 20, 41, 55, 69, 90, 120], [RuntimeError, KeyboardInterrupt])
)
def test_an_error_midway_leaves_hooks_and_generator_clean(countdown: int, error: type[BaseException]) -> None:
    eager, optimized, x = pair()
    states: list[Tensor] = []

    def step() -> None:
        loss = loss_of(optimized(x))
        states.append(torch.get_rng_state())
        loss.backward()

    with pytest.raises(error, match="the bomb"), Bomb(countdown, error):
        step()
    assert all(torch.equal(state, torch.get_rng_state()) for state in states)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        x.exp()
    assert len(packed) == 1, "a hook was left on the stack"
    optimized.zero_grad()
    optimized.load_state_dict(eager.state_dict())
    gradients = []
    for model in (eager, optimized):
        torch.manual_seed(3)
        loss_of(model(x)).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(same_bits(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.slow
def test_a_failed_backward_may_be_repeated_on_a_retained_graph() -> None:
    eager, optimized, x = pair()
    for model in (eager, optimized):
        torch.manual_seed(3)
        loss = loss_of(model(x))
        if model is optimized:
            with pytest.raises(RuntimeError, match="the bomb"), Bomb(12, RuntimeError):
                torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
    assert all(same_bits(a.grad, b.grad) for a, b in zip(eager.parameters(), optimized.parameters(), strict=True))


# -- in-place writes that autograd reports -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_parameter_changed_between_forward_and_backward_is_reported() -> None:
    _, optimized, x = pair()
    loss = loss_of(optimized(x))
    with torch.no_grad():
        for parameter in optimized.parameters():
            parameter.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow
def test_an_input_changed_between_forward_and_backward_is_reported() -> None:
    _, optimized, x = pair()
    loss = loss_of(optimized(x))
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow
def test_an_output_changed_before_its_backward_is_reported() -> None:
    eager, optimized, x = pair()
    for model in (eager, optimized):
        output = model(x)
        loss = output["out"].sum()
        output["out"].detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.slow
def test_an_output_changed_where_eager_allows_it_gives_the_same_numbers() -> None:
    def action(model: nn.Module, x: Tensor) -> None:
        output = model(x)
        output["hidden"].mul_(2)
        loss_of(output).backward()

    assert_both_do(action)


# -- function transforms -----------------------------------------------------------------------------------------------


def test_torch_func_is_refused_by_name() -> None:
    eager, optimized, x = pair(Smooth)
    with pytest.raises(fxmem.InputError, match=r"torch\.func .*\.original"):
        torch.func.grad(lambda t: loss_of(optimized(t)))(x.detach())
    expected = torch.func.grad(lambda t: loss_of(eager(t)))(x.detach())
    assert same_bits(expected, torch.func.grad(lambda t: loss_of(optimized.original(t)))(x.detach()))


@pytest.mark.slow
def test_functional_call_with_other_parameters_uses_them() -> None:
    eager, optimized, x = pair(Smooth)
    others = {name: (p.detach() * 2).requires_grad_() for name, p in eager.named_parameters()}
    expected = torch.autograd.grad(loss_of(torch.func.functional_call(eager, others, (x,))), list(others.values()))
    try:
        found = torch.autograd.grad(loss_of(torch.func.functional_call(optimized, others, (x,))), list(others.values()))
    except fxmem.FxMemError:
        return
    assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))
