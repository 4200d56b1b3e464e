"""What autograd promises holds: second backwards, parts, threads, hooks, several forwards."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.exactness import same_bits
from tests.runtime.models import Smooth, assert_both_do, loss_of, pair
from tests.tiers import representatives


@pytest.mark.slow
def test_second_backward_through_a_retained_graph() -> None:
    def action(model: nn.Module, x: Tensor) -> None:
        loss = loss_of(model(x))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()

    assert_both_do(action)


@pytest.mark.slow
def test_second_backward_without_retaining_raises_as_autograd_does() -> None:
    _, optimized, x = pair()
    loss = loss_of(optimized(x))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.slow
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


@pytest.mark.slow
def test_grad_of_a_part() -> None:
    def action(model: nn.Module, x: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss_of(model(x)), [x, model.blocks[1].up.weight]))

    assert_both_do(action)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_outer_saved_tensor_hooks_see_what_is_not_dropped_and_change_nothing() -> None:
    def action(model: nn.Module, x: Tensor) -> None:
        with torch.autograd.graph.save_on_cpu():
            output = model(x)
        loss_of(output).backward()

    assert_both_do(action)
