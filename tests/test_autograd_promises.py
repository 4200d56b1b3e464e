"""What autograd promises holds for an optimized model: whatever order, part or number of backwards, and after errors."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from fxmem.api.module import OptimizedModule
from fxmem.profiling.storage_tracker import StorageTracker
from tests.exactness import same_bits
from tests.tiers import diagonal, representatives

ROWS, WIDTH = 32, 8


class Block(nn.Module):
    """Dropout, BatchNorm and ops that save inputs, outputs and internals."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(F.gelu(self.up(x)), 0.3)
        return x + self.norm(self.down(y)).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"hidden": x.sin(), "out": self.head(x).exp()}


class Smooth(nn.Module):
    """No op whose double backward is undefined or random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = F.softplus(layer(x)) * x.tanh()
        return {"hidden": x.sin(), "out": x.exp()}


def pair(make: Callable[[], nn.Module] = Net, batch: Tensor | None = None) -> tuple[nn.Module, OptimizedModule, Tensor]:
    """Return an eager model, its twin optimized to the least budget, and a batch that requires grad."""
    x = (torch.randn(ROWS, WIDTH) if batch is None else batch).requires_grad_()
    torch.manual_seed(0)
    eager = make()
    torch.manual_seed(0)
    model = make()
    options: dict[str, Any] = {"optimizer": None, "loss_fn": loss_of, "planner": "intervals"}
    with pytest.raises(fxmem.InfeasibleBudgetError) as info:
        fxmem.optimize(model, x, budget=1, **options)
    optimized = fxmem.optimize(model, x, budget=info.value.least_bytes, **options)
    assert optimized.plan.dropped
    return eager, optimized, x


def loss_of(output: dict[str, Tensor]) -> Tensor:
    return output["out"].mean() + output["hidden"].square().sum()


def assert_both_do(
    action: Callable[[nn.Module, Tensor], Any],
    make: Callable[[], nn.Module] = Net,
    before: Callable[[nn.Module], Any] = lambda model: None,
) -> None:
    """Assert that ``action(model, x)`` returns and leaves behind the same bits on eager and optimized model."""
    eager, optimized, x = pair(make)
    results = []
    for model in (eager, optimized):
        before(model)
        torch.manual_seed(5)
        mine = x.detach().clone().requires_grad_()
        returned = action(model, mine)
        returned = list(returned) if isinstance(returned, tuple | list) else [returned]
        tensors = [t for t in returned if isinstance(t, Tensor)]
        state = [*(p.grad for p in model.parameters()), *model.buffers(), mine.grad, torch.get_rng_state()]
        results.append([None if t is None else t.detach().clone() for t in (*tensors, *state)])
    assert len(results[0]) == len(results[1])
    wrong = [i for i, (a, b) in enumerate(zip(*results, strict=True)) if not same_bits(a, b)]
    assert wrong == []


@pytest.mark.slow
def test_second_backward_through_a_retained_graph() -> None:
    def action(model: nn.Module, x: Tensor) -> None:
        loss = loss_of(model(x))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()

    assert_both_do(action)


def test_second_backward_without_retaining_raises_as_autograd_does() -> None:
    _, optimized, x = pair()
    loss = loss_of(optimized(x))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_double_backward_of_a_gradient_penalty() -> None:
    def action(model: nn.Module, x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + grad.square().sum()).backward()
        return grad

    assert_both_do(action, Smooth)


def test_double_backward_with_respect_to_weights() -> None:
    def action(model: nn.Module, x: Tensor) -> list[Tensor]:
        grads = torch.autograd.grad(loss_of(model(x)), list(model.parameters()), create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in grads), list(model.parameters())))

    assert_both_do(action, Smooth)


def test_grad_of_a_part() -> None:
    def action(model: nn.Module, x: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss_of(model(x)), [x, model.blocks[1].up.weight]))

    assert_both_do(action)


@pytest.mark.parametrize("key", representatives(["hidden", "out"], "out", quick=["hidden"]))
def test_backward_of_one_output_only(key: str) -> None:
    assert_both_do(lambda model, x: model(x)[key].sum().backward())


@pytest.mark.slow
def test_backward_of_outputs_one_after_the_other() -> None:
    def action(model: nn.Module, x: Tensor) -> None:
        output = model(x)
        output["out"].sum().backward(retain_graph=True)
        output["hidden"].sum().backward()

    assert_both_do(action)


@pytest.mark.slow
@pytest.mark.parametrize("backwards", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_several_forwards_before_any_backward(backwards: tuple[int, ...]) -> None:
    def action(model: nn.Module, x: Tensor) -> None:
        losses = [loss_of(model(x)) for _ in range(3)]
        for i in backwards:
            losses[i].backward()

    assert_both_do(action)


@pytest.mark.slow
def test_one_backward_of_several_forwards() -> None:
    assert_both_do(lambda model, x: (loss_of(model(x)) + loss_of(model(x * 2))).backward())


@pytest.mark.slow
def test_model_applied_to_its_own_output() -> None:
    assert_both_do(lambda model, x: loss_of(model(model(x)["hidden"])).backward())


def test_accumulating_over_micro_batches() -> None:
    def action(model: nn.Module, x: Tensor) -> None:
        for _ in range(4):
            (loss_of(model(x)) / 4).backward()

    assert_both_do(action)


@pytest.mark.slow
def test_steps_of_an_optimizer() -> None:
    def action(model: nn.Module, x: Tensor) -> list[Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            optimizer.step()
        return list(model.parameters())

    assert_both_do(action)


@pytest.mark.slow
def test_train_and_eval_steps_interleaved() -> None:
    def action(model: nn.Module, x: Tensor) -> list[Tensor]:
        seen = []
        for _ in range(2):
            loss_of(model.train()(x)).backward()
            with torch.no_grad():
                seen.append(model.eval()(x)["out"])
            model.train()
            with torch.no_grad():
                seen.append(model(x)["out"])
        return seen

    assert_both_do(action)


@pytest.mark.slow
def test_anomaly_mode() -> None:
    def action(model: nn.Module, x: Tensor) -> None:
        with torch.autograd.detect_anomaly(check_nan=True):
            loss_of(model(x)).backward()

    with pytest.warns(UserWarning, match="Anomaly Detection"):
        assert_both_do(action)


@pytest.mark.slow
def test_backward_from_another_thread() -> None:
    def action(model: nn.Module, x: Tensor) -> None:
        loss = loss_of(model(x))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    assert_both_do(action)


@pytest.mark.slow
def test_forward_and_backward_in_two_threads_at_once() -> None:
    _, optimized, x = pair(Smooth)
    expected = [torch.autograd.grad(loss_of(optimized(x)), list(optimized.parameters())) for _ in range(2)]
    found: list[Any] = [None, None]

    def work(i: int) -> None:
        for _ in range(10):
            found[i] = torch.autograd.grad(loss_of(optimized(x)), list(optimized.parameters()))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert all(same_bits(a, b) for a, b in zip(expected[i], found[i], strict=True))


def test_hooks_on_parameters_and_outputs() -> None:
    def action(model: nn.Module, x: Tensor) -> list[Tensor]:
        seen: list[Tensor] = []
        handle = model.head.weight.register_hook(lambda g: g * 2)
        output = model(x)
        output["hidden"].register_hook(lambda g: seen.append(g.clone()))
        output["hidden"].retain_grad()
        loss_of(output).backward()
        handle.remove()
        return [*seen, output["hidden"].grad]

    assert_both_do(action)


@pytest.mark.slow
def test_hooks_on_the_optimized_module_itself() -> None:
    _, optimized, x = pair()
    calls: list[str] = []
    optimized.register_forward_pre_hook(lambda *_: calls.append("before"))
    optimized.register_forward_hook(lambda *_: calls.append("after"))
    optimized(x)
    assert calls == ["before", "after"]


def test_outer_saved_tensor_hooks_see_what_is_not_dropped_and_change_nothing() -> None:
    def action(model: nn.Module, x: Tensor) -> None:
        with torch.autograd.graph.save_on_cpu():
            output = model(x)
        loss_of(output).backward()

    assert_both_do(action)


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
