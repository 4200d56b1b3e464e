"""Steps as programs (``FXMEM_RUNTIME=program``): eager's bits, at most the tape's peak, else the tape."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from fxmem.runtime.programs.joint import JointSteps
from tests.exactness import NUM_PROGRAMS, PLANS, check, same_bits
from tests.runtime.models import Net, Smooth, loss_of

pytestmark = pytest.mark.slow

Action = Callable[[nn.Module, Tensor], Any]


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXMEM_RUNTIME", "program")


def _plain(model: nn.Module, x: Tensor) -> None:
    loss_of(model(x)).backward()


def _steps(optimized: Any) -> JointSteps:
    joint = optimized.fxmem.plans.latest.joint
    assert joint is not None
    return joint


def _after(action: Action, model: nn.Module, x: Tensor, seed: int) -> list[Tensor | None]:
    """Return all that ``action`` returns and leaves behind."""
    torch.manual_seed(seed)
    mine = x.detach().clone().requires_grad_()
    returned = action(model, mine)
    returned = list(returned) if isinstance(returned, tuple | list) else [returned]
    state = [*(p.grad for p in model.parameters()), *model.buffers(), mine.grad, torch.get_rng_state()]
    tensors = [t for t in returned if isinstance(t, Tensor)]
    found = [None if t is None else t.detach().clone() for t in (*tensors, *state)]
    for parameter in model.parameters():
        parameter.grad = None
    return found


def _assert_same(action: Action, eager: nn.Module, optimized: nn.Module, x: Tensor, seed: int) -> None:
    pairs = zip(_after(action, eager, x, seed), _after(action, optimized, x, seed), strict=True)
    assert [i for i, (a, b) in enumerate(pairs) if not same_bits(a, b)] == []


def _pair(make: Callable[[], nn.Module], *recomputed: str) -> tuple[nn.Module, Any, Tensor]:
    """Return an eager model, its twin that computes these ops again, and a batch that requires grad."""
    x, models = torch.randn(32, 8).requires_grad_(), []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    policy = [(name, "recompute") for name in recomputed]
    optimized = fxmem.optimize(models[1], x, optimizer=None, loss_fn=loss_of, policy=policy)
    assert optimized.fxmem.plan.dropped
    return models[0], optimized, x


def _warm(make: Callable[[], nn.Module] = Net) -> tuple[nn.Module, Any, Tensor]:
    """Return an eager model and its twin, whose next step runs as a program."""
    eager, optimized, x = _pair(make, *(("gelu", "dropout") if make is Net else ("softplus",)))
    for seed in range(2):
        _assert_same(_plain, eager, optimized, x, seed)
    steps = _steps(optimized)
    assert steps.program is not None, steps.refusal
    return eager, optimized, x


def test_steps_as_programs_have_eagers_bits_and_stay_within_the_plan() -> None:
    before = NUM_PROGRAMS[0]
    check(Net, torch.randn(32, 8), loss=loss_of, plans=PLANS[:4])
    assert NUM_PROGRAMS[0] > before


def test_the_third_step_is_a_program_that_lets_go_of_what_it_has_used() -> None:
    eager, optimized, x = _warm()
    program = _steps(optimized).program
    assert program is not None
    assert "del " in program.source
    _assert_same(_plain, eager, optimized, x, 2)
    output = optimized(x)
    assert type(output["out"].grad_fn).__name__ == "_GateBackward"


def _retain(model: nn.Module, x: Tensor) -> None:
    loss = loss_of(model(x))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def _part(model: nn.Module, x: Tensor) -> Any:
    return torch.autograd.grad(loss_of(model(x)), [x, next(model.parameters())])


def _two_forwards(model: nn.Module, x: Tensor) -> None:
    (loss_of(model(x)) + loss_of(model(x * 2))).backward()


def _own_output(model: nn.Module, x: Tensor) -> None:
    loss_of(model(model(x)["hidden"])).backward()


def _used_outside(model: nn.Module, x: Tensor) -> None:
    (loss_of(model(x)) + x.pow(2).sum()).backward()


def _one_output(model: nn.Module, x: Tensor) -> None:
    model(x)["out"].sum().backward()


def _written_output(model: nn.Module, x: Tensor) -> None:
    output = model(x)
    output["hidden"].mul_(2)
    loss_of(output).backward()


def _micro_batches(model: nn.Module, x: Tensor) -> None:
    for _ in range(3):
        loss_of(model(x)).backward()


def _triple(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3)


def _hooked(model: nn.Module, x: Tensor) -> None:
    parameters = list(model.parameters())
    handles = [p.register_hook(lambda grad: grad * 2) for p in parameters]
    handles.append(parameters[0].register_post_accumulate_grad_hook(_triple))
    loss_of(model(x)).backward()
    for handle in handles:
        handle.remove()


STAYING = [_part, _written_output, _used_outside, _hooked, _two_forwards, _micro_batches, _retain]


class GivenTwice(nn.Module):
    """A gradient goes to a parameter, to be summed, and to what is computed next."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v, self.twice = (nn.Parameter(torch.randn(16, 16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y, h = (self.w * x).exp(), self.v * x + self.twice
        return ((h.sin() + self.twice) + y).tanh()


def test_a_program_whose_gradients_cannot_be_summed_in_place_is_tried_with_sums_apart() -> None:
    eager, x = GivenTwice(), torch.randn(16, 16)
    optimized = fxmem.optimize(copy.deepcopy(eager), x, optimizer=None)
    eager(x).sum().backward()
    for _ in range(3):
        optimized.zero_grad()
        optimized(x).sum().backward()
    assert optimized.fxmem.runtime == "program"
    for expected, found in zip(eager.parameters(), optimized.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)


def test_what_autograd_promises_holds_for_programs() -> None:
    eager, optimized, x = _warm()
    for seed, action in enumerate(STAYING):
        _assert_same(action, eager, optimized, x, seed)
        assert not _steps(optimized).refusal, action.__name__
    _assert_same(_plain, eager, optimized, x, 100)


def test_a_backward_from_other_outputs_goes_back_to_the_tape() -> None:
    for action in (_own_output, _one_output):
        eager, optimized, x = _warm()
        for seed in range(2):
            _assert_same(action, eager, optimized, x, seed)
        assert "no program is for" in _steps(optimized).refusal


def _penalty(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model(x))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + grad.square().sum()).backward()
    return grad


def test_gradients_that_are_differentiated_stay_on_the_tape() -> None:
    eager, optimized, x = _pair(Smooth, "softplus")
    for seed in range(3):
        _assert_same(_penalty, eager, optimized, x, seed)
    assert _steps(optimized).refusal == "its gradients are differentiated"


def test_gradients_that_are_differentiated_all_at_once_go_back_to_the_tape_with_a_warning() -> None:
    eager, optimized, x = _warm(Smooth)
    with pytest.warns(UserWarning, match="may equal eager's but for rounding"):
        found = _after(_penalty, optimized, x, 3)
    for ours, theirs in zip(found, _after(_penalty, eager, x, 3), strict=True):
        torch.testing.assert_close(ours, theirs)
    _assert_same(_penalty, eager, optimized, x, 4)


def test_an_output_that_is_saved_and_written_in_place_is_refused_as_by_eager() -> None:
    eager, optimized, x = _warm()
    for model in (eager, optimized):  # exp saves its output
        output = model(x.detach().clone().requires_grad_())
        output["out"].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss_of(output).backward()


def test_a_parameter_written_before_the_backward_raises() -> None:
    _, optimized, x = _warm()
    loss = loss_of(optimized(x))
    with torch.no_grad():
        optimized.head.weight.add_(1)
    with pytest.raises(fxmem.SavedTensorModifiedError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_backward_without_retaining_raises_as_autograd_does() -> None:
    _, optimized, x = _warm()
    loss = loss_of(optimized(x))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def _autocast(model: nn.Module, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model(x))
    loss.backward()


def _inside(model: nn.Module, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(model(x)).backward()


def _two_in_one_region(model: nn.Module, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model(x)) + loss_of(model(x * 2))
    loss.backward()


def test_programs_have_the_casts_of_their_region() -> None:
    eager, optimized, x = _pair(Net, "gelu", "dropout")
    for seed in range(4):
        _assert_same(_autocast, eager, optimized, x, seed)
    assert _steps(optimized).program is not None


@pytest.mark.parametrize(
    ("action", "why"), [(_inside, "its backward is under autocast"), (_two_in_one_region, "share a region of autocast")]
)
def test_what_autocast_does_to_a_backward_stays_on_the_tape(action: Action, why: str) -> None:
    eager, optimized, x = _pair(Smooth, "softplus")
    for seed in range(4):
        _assert_same(action, eager, optimized, x, seed)
    assert why in _steps(optimized).refusal


def test_a_second_call_in_a_region_of_autocast_goes_back_to_the_tape_with_a_warning() -> None:
    _, optimized, x = _pair(Smooth, "softplus")
    for seed in range(3):
        _after(_autocast, optimized, x, seed)
    with pytest.warns(UserWarning, match="two calls of a model in one autocast region"):
        _after(_two_in_one_region, optimized, x, 3)


class Deep(nn.Module):
    """Its gradients take more memory than what is alive as they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


@pytest.mark.parametrize("there", [False, True])
def test_gradients_are_given_in_parts_where_others_are_there(there: bool) -> None:
    x, eager, optimized = torch.randn(16, 64), Deep(), Deep()
    optimized.load_state_dict(eager.state_dict())
    optimized = fxmem.optimize(optimized, x, optimizer=None, accumulate=there, policy=[("gelu", "recompute")])
    planned_bytes, peaks = optimized.report.predicted_peak_bytes, []
    for _ in range(4):
        for model in (eager, optimized):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter) if there else None
        with fxmem.track(optimized, x) as memory:
            output = optimized(x)
            output.sum().backward()
        peaks.append(memory.peak_bytes)
        del output
        eager(x).sum().backward()
        pairs = zip(eager.parameters(), optimized.parameters(), strict=True)
        assert all(same_bits(a.grad, b.grad) for a, b in pairs)
    program = _steps(optimized).program
    assert program is not None
    assert (len(program.parts) > 1) == there
    assert max(peaks) == peaks[0] == planned_bytes
    assert peaks[-1] == optimized.report.predicted_peak_bytes


class Twice(nn.Module):
    """Returns the same tensor twice, and what does not require grad."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = F.gelu(self.layer(x)).exp()
        return y, y.detach().argmax(), y


def test_a_tensor_that_is_returned_twice_is_one_tensor() -> None:
    x = torch.randn(4, 8)
    optimized = fxmem.optimize(Twice(), x, optimizer=None, loss_fn=lambda output: (output[0] + output[2]).sum())
    for _ in range(3):
        first, _, second = optimized(x)
        assert first is second
        (first + second).sum().backward()
        optimized.zero_grad()
    assert _steps(optimized).program is not None


class Tied(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.weight, self.times = nn.Parameter(torch.randn(8, 8) / 3), times

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for _ in range(self.times):
            x = F.gelu(x @ self.weight)
        return {"hidden": x.sin(), "out": x.exp()}


@pytest.mark.parametrize("times", [2, 4])
def test_the_gradients_of_a_weight_used_twice_are_summed_in_eagers_order(times: int) -> None:
    eager, optimized, x = _pair(lambda: Tied(times), "gelu")
    for seed in range(3):
        _assert_same(_plain, eager, optimized, x, seed)
    assert _steps(optimized).program is not None
    _assert_same(_two_forwards, eager, optimized, x, 4)


class Counts(nn.Module):
    """Reads a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layer(x).tanh().exp()
        self.mean.lerp_(y.detach().mean(0), 0.1)
        return {"hidden": y.sin().square() + self.mean.clone(), "out": y.exp()}


def test_a_model_that_reads_what_it_writes_stays_on_the_tape() -> None:
    eager, optimized, x = _pair(Counts, "sin")
    for seed in range(3):
        _assert_same(_plain, eager, optimized, x, seed)
    assert _steps(optimized).refusal == "it reads a buffer that it writes"


def test_a_model_on_several_devices_stays_on_the_tape() -> None:
    steps = _steps(_pair(Smooth, "softplus")[1])
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert not JointSteps(steps.graph_module, lambda graph, leaves: [], [], devices[:1]).refusal
    assert "several devices" in JointSteps(steps.graph_module, lambda graph, leaves: [], [], devices).refusal


def test_nothing_leaks_in_a_thousand_steps() -> None:
    _, optimized, x = _warm(Smooth)
    counts = []
    for step in range(1_001):
        _plain(optimized, x)
        optimized.zero_grad()
        x.grad = None
        if step % 500 == 0:
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[2] - counts[1] < 50
