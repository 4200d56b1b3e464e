"""Chains of elementwise calls as one kernel each: eager's bits, no more memory, and only where that gains time."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxmem
from benchmarks.measure import allocator_rise_bytes
from fxmem.passes import fused_kernels
from fxmem.runtime.layout import View
from fxmem.runtime.programs.fused_calls import ELEMENTWISE, Chain, FusedCall, fused
from fxmem.runtime.programs.gradient_parts import sums_of_arguments
from fxmem.runtime.programs.instructions import Ref
from fxmem.runtime.programs.joint import JointSteps
from fxmem.runtime.programs.trial import Trial

pytestmark = pytest.mark.slow

ALLOW = ("recompute", "inplace", "fuse")


class Gated(nn.Module):
    """Layers of one shape, each with a chain in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 128) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            gate, up = layer(x).chunk(2, -1)
            x = x + F.silu(gate) * up * 0.5
        return x


def _optimized(**options: Any) -> tuple[nn.Module, Any, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(4096, 64)
    options = {"optimizer": None, "policy": [("silu", "recompute")], "allow": ALLOW, **options}
    return model, fxmem.optimize(copy.deepcopy(model), x, **options), x


def _gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


def _joint(optimized: Any) -> JointSteps:
    joint = optimized.fxmem.plans.latest.joint
    assert joint is not None
    return joint


def _is_fused(optimized: Any) -> bool:
    program = _joint(optimized).program
    assert program is not None, _joint(optimized).runtime
    return program.is_fused


def _given(op: Any) -> tuple[Any, ...]:
    """Return arguments for an op: the places of two numbers and of a mask, and what is no tensor."""
    name, _, overload = op.__name__.partition(".")
    others: dict[str, tuple[Any, ...]] = {
        "where": (Ref(2), Ref(0), Ref(1)),
        "threshold_backward": (Ref(0), Ref(1), 0),
        "leaky_relu": (Ref(0), 0.1),
    }
    if name in others:
        return others[name]
    return (Ref(0), *{"Tensor": (Ref(1),), "Scalar": (1.3,)}.get(overload, ()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_op_of_a_chain_has_eagers_bits_in_a_kernel(dtype: torch.dtype) -> None:
    x, y, mask = torch.randn(33, 65, dtype=dtype) * 4, torch.randn(65, dtype=dtype), torch.rand(33, 1) < 0.5
    reads = tuple((View.of(t, 0), t.device) for t in (x, y, mask))
    ops = sorted(ELEMENTWISE, key=str)
    expected = [op(*[(x, y, mask)[a.value] if isinstance(a, Ref) else a for a in _given(op)]) for op in ops]
    chain = Chain(
        tuple((op, _given(op), ()) for op in ops),
        reads,
        tuple(range(len(ops))),
        tuple((View.of(t, 0), t.device) for t in expected),
        0,
    )
    made = fused_kernels._made(chain)
    assert made is not None, "a kernel has other bits, or makes more than its results"
    for op, one, other in zip(ops, expected, made(x, y, mask), strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7)), op


def _gaining(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Have each kernel be quicker than its calls, and a step by them take less time by this share."""
    times = itertools.cycle((1.0, 0.5))
    monkeypatch.setattr(fused_kernels, "median_seconds", lambda run, device: next(times))
    monkeypatch.setattr(Trial, "_gain", lambda self, quicker, program: share)


def test_chains_that_gain_time_are_fused_with_eagers_bits_and_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _gaining(monkeypatch, 0.03)
    model, optimized, x = _optimized()
    _, plain, _ = _optimized(allow=ALLOW[:2], runtime="program")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    for _ in range(3):
        expected = _gradients(model, x)
        for each in (optimized, plain):
            assert all(map(torch.equal, expected, _gradients(each, x)))
    assert torch.equal(torch.get_rng_state(), state)
    assert _is_fused(optimized)
    assert not _is_fused(plain)
    assert optimized.fxmem.fused.endswith("as one kernel each: at least 3.0% of a step's time less")
    assert plain.fxmem.fused == "none: not asked for"
    rises = [allocator_rise_bytes(lambda each=each: _gradients(each, x)) for each in (optimized, plain)]
    assert rises[0] <= rises[1]
    assert optimized.fxmem.report.predicted_peak_bytes <= plain.fxmem.report.predicted_peak_bytes


def test_chains_that_gain_too_little_run_op_by_op_and_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    _gaining(monkeypatch, 0.01)
    model, optimized, x = _optimized()
    for _ in range(3):
        assert all(map(torch.equal, _gradients(model, x), _gradients(optimized, x)))
    assert not _is_fused(optimized)
    assert optimized.fxmem.fused.startswith("none (")
    assert "do not gain 2% of a step's time" in optimized.fxmem.fused


def test_without_a_compiler_steps_run_as_they_would_and_a_warning_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no compiler is there")

    monkeypatch.setattr(fused_kernels, "_compiled", fails)
    model, optimized, x = _optimized()
    _gradients(optimized, x)
    with pytest.warns(UserWarning, match="no compiler is there"):
        _gradients(optimized, x)
    assert all(map(torch.equal, _gradients(model, x), _gradients(optimized, x)))
    assert "no compiler is there" in optimized.fxmem.fused


def test_a_trial_that_fails_leaves_the_program_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> float:
        raise torch.OutOfMemoryError("no room for a trial")

    _gaining(monkeypatch, 0.03)
    monkeypatch.setattr(Trial, "_gain", fails)
    model, optimized, x = _optimized()
    for _ in range(3):
        assert all(map(torch.equal, _gradients(model, x), _gradients(optimized, x)))
    assert _joint(optimized).program is not None
    assert not _is_fused(optimized)
    assert optimized.fxmem.fused == "none: trying chains as one kernel each fails (no room for a trial)"


class Scaled(nn.Module):
    """Scales its input by one parameter in each of some layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(32, 32) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = F.silu(x @ x) * self.scale
        return x


def test_sums_of_an_arguments_gradients_are_in_no_chain() -> None:
    """Autograd adds those of several calls in its own order, so each has to be given by itself."""
    torch.manual_seed(0)
    model = Scaled()
    optimized: Any = fxmem.optimize(copy.deepcopy(model), torch.randn(32, 32), allow=ALLOW[:2], runtime="program")
    for _ in range(2):
        optimized(torch.randn(32, 32)).sum().backward()
    recording = _joint(optimized)._recording
    assert recording is not None
    sums = sums_of_arguments(recording)
    assert len(sums) == 2
    form = fused(recording, lambda chains: {chain: FusedCall(chain.graph(), chain.makes) for chain in chains})
    assert len(form.backward) < len(recording.backward)
    assert len(sums_of_arguments(form)) == 2


def test_a_kernel_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        return lambda *given: [t + 1e-3 for t in graph(*given)]

    monkeypatch.setattr(fused_kernels, "_compiled", other)
    _gaining(monkeypatch, 0.03)
    model, optimized, x = _optimized()
    for _ in range(3):
        assert all(map(torch.equal, _gradients(model, x), _gradients(optimized, x)))
    assert not _is_fused(optimized)


def test_equal_chains_are_one_and_what_is_read_elsewhere_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimized, x = _optimized(runtime="program", allow=ALLOW[:2])
    for _ in range(2):
        _gradients(optimized, x)
    recording = _joint(optimized)._recording
    assert recording is not None
    seen: list[Chain] = []

    def kernels(chains: Sequence[Chain]) -> dict[Chain, FusedCall]:
        seen.extend(chains)
        return {chain: FusedCall(chain.graph(), chain.makes) for chain in chains}

    form = fused(recording, kernels)
    assert len(set(seen)) < len(seen)
    assert all(len(chain.calls) > 1 and chain.results for chain in seen)
    num_spared = sum(len(chain.calls) - 1 for chain in seen)
    num_calls = [len(each.forward) + len(each.backward) for each in (recording, form)]
    assert num_calls[0] - num_calls[1] == num_spared
    assert fused(recording, lambda chains: {}) is recording


def test_chains_that_differ_in_the_sign_of_a_zero_are_two() -> None:
    lies = ((View.of(torch.ones(3), 0), torch.device("cpu")),)
    call = torch.ops.aten.mul.Scalar
    one, other, same = (Chain(((call, (Ref(0), zero), ()),), lies, (0,), lies, 0) for zero in (0.0, -0.0, 0.0))
    assert one == same
    assert one != other


def test_fused_chains_are_not_for_the_tape() -> None:
    with pytest.raises(fxmem.InputError, match='leave out runtime="tape"'):
        fxmem.optimize(Gated(), torch.randn(4, 64), allow=ALLOW, runtime="tape")
