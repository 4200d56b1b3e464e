"""Programs when what they were written down for changes: the model, its state, modes and flags around its calls."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


AROUND: list[Callable[[], Any]] = [
    lambda: torch.autocast("cpu", torch.bfloat16),
    _deterministic,
    lambda: torch.autograd.set_detect_anomaly(True),
    lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
    lambda: torch.backends.mkldnn.flags(enabled=False),
]


def test_modes_that_come_and_go_are_eagers() -> None:
    eager, optimized, x = _models()
    for number, around in enumerate(AROUND):
        for step in range(2):
            with around():
                _assert_same(eager, optimized, x, 100 * number + step)
        _assert_same(eager, optimized, x, 100 * number + 2)
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


def test_what_runtime_says() -> None:
    x = torch.randn(4, 8)
    assert fxmem.optimize(Block(), x, optimizer=None).fxmem.runtime == "tape"
    optimized = fxmem.optimize(Block(), x, optimizer=None, runtime="program")
    assert optimized.fxmem.runtime == "tape: no step has been written down yet"
    with pytest.raises(fxmem.InputError, match="unknown runtime 'graph'; known: auto, program, tape"):
        fxmem.optimize(Block(), x, runtime="graph")
    with pytest.raises(fxmem.InputError, match="runtime= is not for backend"):
        fxmem.optimize(Block(), x, backend="inductor", runtime="tape")
