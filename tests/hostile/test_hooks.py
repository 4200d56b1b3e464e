"""Hooks of modules, tensors and gradients run as often as in eager mode, on real tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn

import fxmem
from tests.exactness import check, same_bits
from tests.hostile.models import LINEAR, WIDTH, Body, _pair, batch, model_of
from tests.hostile.module_models import first_part
from tests.tiers import diagonal

# -- custom Functions, hooks, custom ops -------------------------------------------------------------------------------


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope = slope
        return x * torch.sigmoid(slope * x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(ctx.slope * x)
        return grad * (s + ctx.slope * x * s * (1 - s)), None


class StraightThrough(torch.autograd.Function):
    """Another gradient than its forward has: lost without a trace if a tracer looks through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.rand_like(x) > 0.5
        ctx.mask = mask  # not by save_for_backward: no plan can drop it
        out = x * y
        ctx.save_for_backward(x, y, out)
        return out * mask, out.exp()

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        x, y, out = ctx.saved_tensors
        total = g * ctx.mask + h * out.exp()
        return total * y, total * x


class AddsInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


early_bound_swish = Swish.apply


def custom_functions(m: Any, x: Tensor) -> Tensor:
    y = Swish.apply(x * m.scale, 1.5)
    y = early_bound_swish(y + x, 0.5).exp()
    a, b = TwoOutputs.apply(y, x)
    return (a + b).tanh() + StraightThrough.apply(y * 3)


def custom_function_in_place(m: Any, x: Tensor) -> Tensor:
    return AddsInPlace.apply(x * m.scale).exp()


def custom_function_in_no_grad_and_autocast(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = Swish.apply(x, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        y = Swish.apply(m.first(x), 2.0)
    return y.float() * gate


def hook_in_forward(m: Any, x: Tensor) -> Tensor:
    y = x * m.scale
    y.register_hook(lambda grad: grad * 0.5)
    return y.exp()


@torch.library.custom_op("fxmem_tests::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


cube.register_fake(lambda x: torch.empty_like(x))


cube.register_autograd(
    lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def custom_op(m: Any, x: Tensor) -> Tensor:
    return cube(x * m.scale).tanh()


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [custom_functions, custom_function_in_place, custom_function_in_no_grad_and_autocast, hook_in_forward, custom_op],
)
def test_what_a_tracer_would_look_through_is_kept(body: Body) -> None:
    check(model_of(body), batch())


def test_a_hook_that_needs_another_tensor_of_the_forward_is_refused() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        y = x * m.scale
        y.register_hook(lambda grad: grad * x)
        return y

    with pytest.raises(fxmem.CaptureError, match=r"hook .* refers to another tensor .*autograd\.Function"):
        fxmem.optimize(model_of(body)(), batch())


# -- hooks of modules and parameters -----------------------------------------------------------------------------------

Hook = Callable[[Any, list[Any]], Any]
"""Sets a hook on a model; what the hook notes goes to the list."""


def forward_hook_that_changes(m: Any, notes: list[Any]) -> None:
    m.parts[0].register_forward_hook(lambda module, args, output: output.sin())


def forward_hook_that_writes_in_place(m: Any, notes: list[Any]) -> None:
    def hook(module: Any, args: Any, output: Tensor) -> None:
        output.mul_(2)

    m.parts[0].register_forward_hook(hook)


def forward_hook_that_keeps_activations(m: Any, notes: list[Any]) -> None:
    m.parts[0].register_forward_hook(lambda module, args, output: notes.append(output))


def forward_hook_that_counts(m: Any, notes: list[Any]) -> None:
    m.parts[0].register_forward_hook(lambda module, args, output: notes.append(float(output.detach().sum())))


def forward_hook_with_keywords(m: Any, notes: list[Any]) -> None:
    def hook(module: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        return output * 2

    m.parts[0].register_forward_hook(hook, with_kwargs=True)


def forward_hook_on_the_model(m: Any, notes: list[Any]) -> None:
    m.register_forward_hook(lambda module, args, output: notes.append(len(args)) or output.exp())


def forward_pre_hook(m: Any, notes: list[Any]) -> None:
    m.parts[0].register_forward_pre_hook(lambda module, args: notes.append(1) or (args[0] * 2,))


def full_backward_hook(m: Any, notes: list[Any]) -> None:
    m.parts[0].register_full_backward_hook(lambda module, before, after: notes.append(after[0].clone()))


def full_backward_hook_that_changes(m: Any, notes: list[Any]) -> None:
    m.parts[0].register_full_backward_hook(lambda module, before, after: (before[0] * 2,))


def full_backward_pre_hook(m: Any, notes: list[Any]) -> None:
    m.parts[0].register_full_backward_pre_hook(lambda module, after: (after[0] * 3,))


def full_backward_hooks_inside_each_other(m: Any, notes: list[Any]) -> None:
    for module in (m, m.parts[0], m.first):
        module.register_full_backward_hook(lambda module, before, after: notes.append(type(module).__name__))


def parameter_hook(m: Any, notes: list[Any]) -> None:
    m.first.weight.register_hook(lambda grad: grad * 2)


def post_accumulate_grad_hook(m: Any, notes: list[Any]) -> None:
    m.first.weight.register_post_accumulate_grad_hook(lambda p: notes.append(p.grad.clone()))


HOOKS = [
    forward_hook_that_changes,
    forward_hook_that_writes_in_place,
    forward_hook_that_keeps_activations,
    forward_hook_that_counts,
    forward_hook_with_keywords,
    forward_hook_on_the_model,
    forward_pre_hook,
    full_backward_hook,
    full_backward_hook_that_changes,
    full_backward_pre_hook,
    full_backward_hooks_inside_each_other,
    parameter_hook,
    post_accumulate_grad_hook,
]


def _tight(model: nn.Module, *args: Tensor) -> Any:
    """Return ``model`` optimized to the least budget that fits."""
    with pytest.raises(fxmem.InfeasibleBudgetError) as info:
        fxmem.optimize(model, args, budget="1B", optimizer=None)
    return fxmem.optimize(model, args, budget=info.value.least_bytes, optimizer=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "when"), diagonal(HOOKS, ["before", "after"]), ids=lambda value: getattr(value, "__name__", None)
)
def test_hooks_run_as_often_as_in_eager_mode_and_on_real_tensors(hook: Hook, when: str) -> None:
    eager, model = _pair(first_part, LINEAR)
    notes: tuple[list[Any], list[Any]] = ([], [])
    x = batch(64, WIDTH)
    if when == "before":
        hook(eager, notes[0]), hook(model, notes[1])
    optimized = _tight(model, x) if when == "before" else fxmem.optimize(model, x, optimizer=None)
    if when == "after":
        hook(eager, notes[0]), hook(model, notes[1])
    assert not notes[1], "planning left a trace"
    for m in (eager, optimized):
        for step in range(2):
            torch.manual_seed(step)
            m(x).square().sum().backward()
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        assert same_bits(p.grad, q.grad)
    assert len(notes[0]) == len(notes[1])
    for a, b in zip(*notes, strict=True):
        assert same_bits(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.slow
@pytest.mark.parametrize("hook", [forward_hook_that_changes, forward_pre_hook, full_backward_hook_that_changes])
def test_models_with_hooks_train_to_the_same_bits_under_every_plan(hook: Hook) -> None:
    def build() -> nn.Module:
        model = model_of(first_part, LINEAR)()
        hook(model, [])
        return model

    check(build, batch())


def test_the_optimizer_inside_the_backward() -> None:
    eager, model = _pair(first_part, LINEAR)
    for p in (*eager.parameters(), *model.parameters()):
        sgd = torch.optim.SGD([p], lr=0.01)
        p.register_post_accumulate_grad_hook(lambda p, sgd=sgd: sgd.step() or sgd.zero_grad())
    optimized = fxmem.optimize(model, batch())
    for m in (eager, optimized):
        for step in range(3):
            torch.manual_seed(step)
            m(batch()).sum().backward()
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(eager.parameters(), model.parameters(), strict=True))


def test_hooks_on_saved_tensors_around_the_first_call_see_no_fakes() -> None:
    seen: list[type] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(type(tensor))
        return tensor

    optimized = fxmem.optimize(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), optimizer=None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        optimized(batch()).sum().backward()
    assert seen
    assert not any("Fake" in kind.__name__ for kind in seen)


def test_the_first_call_may_be_inside_a_checkpoint() -> None:
    def gradients(*, optimized: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))
        run = fxmem.optimize(model, policy=[(lambda node: True, "recompute")], optimizer=None) if optimized else model
        for _ in range(2):
            torch.utils.checkpoint.checkpoint(run, batch(), use_reentrant=False).sum().backward()
        return [p.grad for p in model.parameters()]

    assert all(map(same_bits, gradients(optimized=False), gradients(optimized=True)))
