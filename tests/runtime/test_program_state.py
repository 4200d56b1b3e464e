"""Programs when what they were written down for changes: the model, its state, modes and flags around its calls."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxmem
from tests.exactness import same_bits

pytestmark = pytest.mark.slow

NUM_BEFORE = 3
"""Steps after which a program runs."""


class Block(nn.Module):
    """Statistics, dropout, a weight used twice and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.twice = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("scale", torch.full((16,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.norm(self.first(x)))
        hidden = F.gelu(self.twice(self.drop(F.gelu(self.twice(hidden)))))
        return self.frozen(hidden) * self.scale


def _models() -> tuple[Block, Any, Tensor]:
    """Return a model, its twin whose next step runs as a program, and a batch."""
    torch.manual_seed(0)
    eager, x = Block(), torch.randn(12, 8)
    policy = [("gelu", "recompute"), ("dropout", "recompute")]
    optimized: Any = fxmem.optimize(
        copy.deepcopy(eager), x, optimizer=None, policy=policy, runtime="program", plan_seconds=1
    )
    for step in range(NUM_BEFORE):
        _assert_same(eager, optimized, x, step)
    assert optimized.fxmem.runtime == "program"
    return eager, optimized, x


def _step(model: nn.Module, x: Tensor, seed: int) -> list[Tensor | None]:
    torch.manual_seed(seed)
    output = model(x)
    loss = output.float().square().mean()
    if loss.requires_grad:
        loss.backward()
    found = [output, *(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()]
    found = [None if t is None else t.detach().clone() for t in found]
    model.zero_grad()
    return found


def _assert_same(eager: nn.Module, optimized: nn.Module, x: Tensor, seed: int = 7) -> None:
    pairs = zip(_step(eager, x, seed), _step(optimized, x, seed), strict=True)
    assert [i for i, (a, b) in enumerate(pairs) if not same_bits(a, b)] == []


def _write_parameters(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)


def _swap_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone().mul_(0.75)


def _swap_data_laid_out_otherwise(model: Any) -> None:
    weight = model.twice.weight
    weight.data = weight.data.t().contiguous().t().mul(0.5)


def _replace_a_parameter(model: Any) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach() * 2)


def _replace_a_buffer(model: Any) -> None:
    model.scale = model.scale * 3


def _write_a_buffer(model: Any) -> None:
    model.scale.mul_(0.5)


def _load(model: Any) -> None:
    model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()})


def _load_assigned(model: Any) -> None:
    model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()}, assign=True)


def _freeze(model: Any) -> None:
    model.first.requires_grad_(False)


def _unfreeze(model: Any) -> None:
    model.frozen.requires_grad_(True)


def _no_dropout(model: Any) -> None:
    model.drop.p = 0.0


def _part_in_eval(model: Any) -> None:
    model.norm.eval()


def _hook_forward(model: Any) -> None:
    model.twice.register_forward_hook(lambda module, args, output: output * 2)


def _hook_a_gradient(model: Any) -> None:
    model.first.weight.register_hook(lambda grad: grad * 2)


def _hook_after_accumulation(model: Any) -> None:
    def double(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    model.first.weight.register_post_accumulate_grad_hook(double)


def _hook_a_backward(model: Any) -> None:
    model.twice.register_full_backward_hook(lambda module, before, after: (before[0] * 2,))


def _to_double(model: Any) -> None:
    model.double()


def _replace_a_module(model: Any) -> None:
    model.frozen = nn.Identity()


def _add_a_parametrization(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.first)


CHANGES: list[Callable[[Any], None]] = [
    _write_parameters,
    _swap_data,
    _swap_data_laid_out_otherwise,
    _replace_a_parameter,
    _replace_a_buffer,
    _write_a_buffer,
    _load,
    _load_assigned,
    _freeze,
    _unfreeze,
    _no_dropout,
    _part_in_eval,
    _hook_a_gradient,
    _hook_after_accumulation,
    _hook_a_backward,
    _hook_forward,
    _replace_a_module,
    _add_a_parametrization,
]
QUICK = [_write_parameters, _swap_data, _replace_a_parameter, _replace_a_buffer, _freeze, _hook_after_accumulation]


@pytest.mark.parametrize(
    "change", [pytest.param(c, marks=() if c in QUICK else pytest.mark.exhaustive) for c in CHANGES]
)
def test_a_changed_model_has_no_stale_program(change: Callable[[Any], None]) -> None:
    eager, optimized, x = _models()
    for model in (eager, optimized):
        change(model)
    for step in range(NUM_BEFORE):
        _assert_same(eager, optimized, x, 10 + step)


def test_a_model_in_double_has_a_program_of_its_own() -> None:
    eager, optimized, x = _models()
    for model in (eager, optimized):
        _to_double(model)
    for step in range(NUM_BEFORE):
        _assert_same(eager, optimized, x.double(), 10 + step)


def test_calls_of_other_kinds_between_steps_change_nothing() -> None:
    eager, optimized, x = _models()
    for model in (eager, optimized):
        model.eval()
    _assert_same(eager, optimized, x)
    for model in (eager, optimized):
        model.train()
    _assert_same(eager, optimized, x, 8)
    outputs = []
    for model in (eager, optimized):
        torch.manual_seed(9)
        with torch.no_grad():
            outputs.append(model(x))
        torch.manual_seed(9)
        with torch.inference_mode():
            outputs.append(model(x).clone())
    assert same_bits(outputs[0], outputs[2])
    assert same_bits(outputs[1], outputs[3])
    for other in (x[:5], x.repeat(3, 1), x.t().contiguous().t(), torch.randn(24, 8)[::2], x.clone().requires_grad_()):
        for step in range(NUM_BEFORE):
            _assert_same(eager, optimized, other, 20 + step)
    _assert_same(eager, optimized, x, 30)
    assert optimized.fxmem.runtime == "program"


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def _anomalies() -> Any:
    return torch.autograd.set_detect_anomaly(True)


def _hooks_on_what_is_saved() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)


def _other_kernels() -> Any:
    return torch.backends.mkldnn.flags(enabled=False)


@pytest.mark.parametrize(
    "around",
    [_anomalies, _hooks_on_what_is_saved]
    + [pytest.param(each, marks=pytest.mark.exhaustive) for each in (_autocast, _deterministic, _other_kernels)],
)
def test_modes_that_come_and_go_are_eagers(around: Callable[[], Any]) -> None:
    eager, optimized, x = _models()
    for step in range(2):
        with around():
            _assert_same(eager, optimized, x, step)
    _assert_same(eager, optimized, x, 2)
    assert optimized.fxmem.runtime == "program"


def test_a_step_that_fails_leaves_programs_as_they_were() -> None:
    eager, optimized, x = _models()
    with pytest.raises(RuntimeError, match="must have the same"):
        optimized(x.to(torch.bfloat16))
    output = optimized(x)

    def fail(gradient: Tensor) -> None:
        raise ValueError("a user's own")

    output.register_hook(fail)
    with pytest.raises(ValueError, match="a user's own"):
        output.sum().backward()
    for model in (eager, optimized):
        model.zero_grad()
    optimized.norm.load_state_dict(eager.norm.state_dict())
    _assert_same(eager, optimized, x, 5)


Action = Callable[[Any, Tensor], Any]


def _checkpointed(model: Any, x: Tensor) -> None:
    checkpoint(model, x.clone().requires_grad_(), use_reentrant=True).square().mean().backward()


def _checkpointed_by_hooks(model: Any, x: Tensor) -> None:
    checkpoint(model, x.clone().requires_grad_(), use_reentrant=False).square().mean().backward()


class _TrainsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, model: nn.Module) -> Tensor:
        ctx.model = model
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            ctx.model(x.detach()).square().mean().backward()
        return gradients[0] * 2, None


def _inside_a_backward(model: Any, x: Tensor) -> None:
    model(_TrainsInBackward.apply(x.clone().requires_grad_(), model)).square().mean().backward()  # type: ignore[no-untyped-call]


def _last_forward_first(model: Any, x: Tensor) -> None:
    for output in [model(x * factor) for factor in (1, 2, 3)][::-1]:
        output.square().mean().backward()


def _two_losses_of_one_graph(model: Any, x: Tensor) -> None:
    output = model(x)
    output.square().mean().backward(retain_graph=True)
    output.sin().sum().backward()


def _batched(model: Any, x: Tensor) -> Any:
    directions = torch.eye(12 * 16).view(-1, 12, 16)[:3]
    return torch.autograd.grad(model(x), list(model.first.parameters()), directions, is_grads_batched=True)


def _laid_out_otherwise(model: Any, x: Tensor) -> None:
    model(x).backward(torch.randn(16, 12).t())


def _for_some_parameters(model: Any, x: Tensor) -> None:
    model(x).square().mean().backward(inputs=[model.first.weight])


ACTIONS: list[Action] = [
    _checkpointed,
    _inside_a_backward,
    _last_forward_first,
    _two_losses_of_one_graph,
    _for_some_parameters,
    _checkpointed_by_hooks,
    _laid_out_otherwise,
    _batched,
]


def test_what_autograd_can_do_with_a_model_it_can_with_a_program() -> None:
    eager, optimized, x = _models()
    for seed, action in enumerate(ACTIONS):
        found = []
        for model in (eager, optimized):
            torch.manual_seed(seed)
            returned = action(model, x) or ()
            found.append([*returned, *(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()])
            found[-1] = [None if t is None else t.detach().clone() for t in found[-1]]
            model.zero_grad()
        assert all(same_bits(a, b) for a, b in zip(*found, strict=True)), action.__name__


def test_steps_in_several_threads_do_not_see_the_one_that_is_written_down() -> None:
    eager, optimized, x = _models()
    for model in (eager, optimized):  # another program is to be made, in all threads at once
        model.norm.eval()
        model.drop.p = 0.0

    def gradients(model: Any) -> list[Tensor]:
        found: list[Any] = [None] * 3

        def run(number: int) -> None:
            loss = model(x * (number + 1)).square().mean()
            found[number] = torch.autograd.grad(loss, list(model.first.parameters()))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [gradient for each in found for gradient in each]

    expected = gradients(eager)
    for _ in range(4):
        assert all(map(same_bits, expected, gradients(optimized)))


def test_what_runtime_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FXMEM_RUNTIME", raising=False)
    x = torch.randn(4, 8)
    assert fxmem.optimize(Block(), x, optimizer=None).fxmem.runtime == "tape"
    optimized = fxmem.optimize(Block(), x, optimizer=None, runtime="program")
    assert optimized.fxmem.runtime == "tape: no step has been written down yet"
    with pytest.raises(fxmem.InputError, match="unknown runtime 'graph'; known: auto, program, tape"):
        fxmem.optimize(Block(), x, runtime="graph")
    with pytest.raises(fxmem.InputError, match="runtime= is not for backend"):
        fxmem.optimize(Block(), x, backend="inductor", runtime="tape")
