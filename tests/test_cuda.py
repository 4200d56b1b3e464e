"""Steps on CUDA: what reports and budgets say without a device, and what is measured where there is one."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxmem
from benchmarks import cuda_calls
from fxmem.capture.export import _check_recurrent, capture
from fxmem.capture.graph import Inputs
from fxmem.emitted import slack_of
from fxmem.profiling.allocator_state import MOST_UNSPLIT_BYTES, ORDERS
from fxmem.profiling.training_step import run_step

MIB = 1 << 20


def test_an_estimate_for_cuda_carries_rounded_and_reserved_bytes() -> None:
    model, x = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).train(), torch.randn(64, 512)
    assert fxmem.estimate(model, x).cuda is None
    with torch.device("meta"):
        ghost, ghostly = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).train(), torch.empty(64, 512)
    for candidate, batch in ((model, x), (ghost, ghostly)):
        estimate = fxmem.estimate(candidate, batch, device="cuda", optimizer="sgd")
        assert estimate.cuda is not None
        assert estimate.cuda.workspace_bytes == 64 * MIB < estimate.peak_bytes
        assert 0 <= estimate.cuda.allocated_bytes - estimate.peak_bytes < MIB
        assert estimate.cuda.allocated_bytes <= estimate.cuda.reserved_bytes
        assert f"reserved {estimate.cuda.reserved_bytes / 1e6:.4f} MB" in str(estimate)


def test_a_report_of_a_model_on_cuda_says_what_the_emitted_step_reserves() -> None:
    model, x = (
        nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4))).train(),
        torch.randn(64, 256),
    )
    report = fxmem.optimize(model, x, plan_seconds=1).report
    assert report.cuda is None
    assert "reserved" not in str(report)
    planned = fxmem.optimize(model, x, plan_for="h100", plan_seconds=1).report
    assert planned.cuda is not None
    assert 0 <= planned.cuda.allocated_bytes - planned.predicted_peak_bytes < MIB
    assert f"{planned.cuda.reserved_bytes / 1e6:.4f}" in str(planned)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_refused_where_cudnn_runs_them(kind: Any) -> None:
    model, inputs = kind(4, 4).train(), Inputs.of((torch.randn(3, 2, 4),), {})
    captured = capture(model, inputs)  # on the CPU it can be
    on_cuda: Any = SimpleNamespace(parameters=lambda: [SimpleNamespace(is_cuda=True)])
    with pytest.raises(fxmem.CaptureError, match=r"recurrent layer in cuDNN .*cudnn\.enabled = False"):
        _check_recurrent(on_cuda, captured)
    with torch.backends.cudnn.flags(enabled=False):
        _check_recurrent(on_cuda, captured)


def test_the_budget_of_a_device_is_what_the_step_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(256, 256)
    own_bytes = sum(p.untyped_storage().nbytes() for p in model.parameters())
    statics = {"memory_allocated": 7 * MIB, "memory_reserved": 40 * MIB, "mem_get_info": (10_000 * MIB, 20_000 * MIB)}
    for share, most_mib in ((1.0, 10_040), (0.25, 5_000)):
        for name, value in {**statics, "get_per_process_memory_fraction": share}.items():
            monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
        expected = most_mib * MIB - (7 * MIB - own_bytes) - int(0.03 * 20_000 * MIB)
        assert fxmem.api.budget.free_bytes(torch.device("cpu"), (model, "adamw", None)) == expected


def test_an_estimate_for_cuda_has_the_temporaries_of_multi_tensor_kernels() -> None:
    model, x = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8))), torch.randn(2, 128)
    parameters_bytes = sum(p.nbytes for p in model.parameters())
    here, there = (fxmem.estimate(model, x, optimizer="adamw", device=device) for device in ("cpu", "cuda"))
    assert there.cuda is not None
    more_bytes = there.peak_bytes - there.cuda.workspace_bytes - here.peak_bytes
    assert 0.7 * parameters_bytes < more_bytes < parameters_bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_fakes_on_cuda_without_a_device_are_estimated_and_not_optimized() -> None:
    with torch._subclasses.FakeTensorMode():
        model, x = nn.Linear(8, 8, device="meta").train(), torch.empty(2, 8, device="cuda")
        model.weight, model.bias = (nn.Parameter(torch.empty(*shape, device="cuda")) for shape in ((8, 8), (8,)))
    assert fxmem.estimate(model, x).cuda is not None
    with pytest.raises(fxmem.InputError, match="finds no CUDA device"):
        fxmem.optimize(model, x)


# -- on a device: a real one, or the emulated one of tests/cuda_stub, which computes nothing -------------------------------

on_emulated_device = cuda_calls.is_emulated()


@pytest.fixture
def present_bytes() -> Iterator[int]:
    """What other tests left on the device, without libraries' workspaces."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    yield torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("default")


def dropped_out(width: int, depth: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth))
    ).cuda()


def gradients_after(candidate: nn.Module, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of a step from seed 0, taken off the model."""
    torch.manual_seed(0)
    with deterministic():
        run_step(lambda: candidate(x))
    gradients = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return gradients


@pytest.mark.cuda
@pytest.mark.parametrize("runtime", ["tape", "auto"])
def test_a_model_trains_on_cuda_inside_its_budget(present_bytes: int, runtime: str) -> None:
    """On the tape its peak is the one planned; as a program, the default, it lets go of some values earlier, and needs some
    slack."""
    model, x = (
        dropped_out(512, 8),
        torch.randn(16384, 512, device="cuda"),
    )  # an activation has 32 MiB, parameters 8 in all
    floor = fxmem.optimize(model, x, optimizer=None, plan_seconds=1).report.floor_bytes
    budget = floor if runtime == "tape" else floor + slack_of(2 * floor)
    optimized = fxmem.optimize(model, x, budget=budget, optimizer=None, plan_seconds=1, runtime=runtime)
    peaks = []
    for candidate in (model, optimized, model, optimized):  # the first step makes the workspaces
        for p in model.parameters():
            p.grad = None
        with fxmem.track(model, x) as memory:
            run_step(lambda candidate=candidate: candidate(x))
        peaks.append(memory.peak_bytes - present_bytes)
    off = abs(peaks[2] - optimized.report.eager_peak_bytes)
    assert off < MIB or (len(ORDERS) > 1 and off == MOST_UNSPLIT_BYTES)  # one block unsplit, where addresses decide
    if runtime == "tape":
        assert abs(peaks[3] - optimized.report.predicted_peak_bytes) < MIB
    assert peaks[3] <= budget < peaks[2]
    assert optimized.fxmem.runtime == ("tape" if runtime == "tape" else "program")


@pytest.mark.cuda
def test_steps_on_cuda_run_as_programs_inside_the_plan(present_bytes: int) -> None:
    """Dropout is drawn again in the device's own thread, also in the step that is written down in the caller's."""
    model, x = dropped_out(512, 8), torch.randn(16384, 512, device="cuda")
    optimized = fxmem.optimize(model, x, policy=[("dropout", "recompute")], optimizer=None, plan_seconds=1)
    for _ in range(4):
        for p in model.parameters():
            p.grad = None
        with fxmem.track(model, x) as memory:
            run_step(lambda: optimized(x))
        assert memory.peak_bytes - present_bytes < optimized.report.predicted_peak_bytes + MIB
    joint = optimized.fxmem.plans.latest.joint
    assert joint.program is not None, joint.refusal


@pytest.mark.cuda
@pytest.mark.parametrize("stepped", [False, True])
def test_what_is_told_of_a_program_is_what_its_steps_take(present_bytes: int, stepped: bool) -> None:
    """From what the allocator holds when the first of them begins, the blocks of cuBLAS's workspaces as they are."""
    model, x = dropped_out(1000, 8), torch.randn(4096, 1000, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters()) if stepped else None
    optimized = fxmem.optimize(model, x, budget="60%", optimizer=optimizer, plan_seconds=1)
    peaks = []
    for _ in range(4):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        run_step(lambda: optimized(x), optimizer=optimizer)
        peaks.append(torch.cuda.max_memory_allocated() - present_bytes)
    assert optimized.fxmem.runtime == "program"
    told = optimized.fxmem.report.cuda.allocated_bytes
    assert max(peaks[2:]) <= told < max(peaks[2:]) + (1 if on_emulated_device else 2 * MIB)


@pytest.mark.cuda
def test_gradients_that_go_before_the_backward_wait_aside_while_a_step_is_written_down(present_bytes: int) -> None:
    """They are the same tensors with the same bits after it, and no step takes more than is told, nor that than the
    budget."""
    model, x = dropped_out(1024, 8), torch.randn(4096, 1024, device="cuda")  # an activation has 16 MiB, gradients 32
    optimizer, loop = torch.optim.AdamW(model.parameters()), fxmem.Loop(zero_grad_before_backward=True)
    optimized = fxmem.optimize(model, x, budget="60%", optimizer=optimizer, loop=loop, plan_seconds=1)
    budget, most_dims = optimized.fxmem.report.budget_bytes, 1 if on_emulated_device else 2  # it copies what is small
    peaks = []
    for _ in range(5):
        gradients = [p.grad for p in model.parameters() if p.grad is not None and p.dim() <= most_dims]
        values = [torch.randn(g.shape) for g in gradients]
        for gradient, value in zip(gradients, values, strict=True):
            gradient.copy_(value)
        torch.cuda.reset_peak_memory_stats()
        loss = optimized(x).sum()
        assert all(any(g is p.grad for p in model.parameters()) for g in gradients)
        assert all(torch.equal(g.cpu(), value) for g, value in zip(gradients, values, strict=True))
        gradients.clear()
        gradient = None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        del loss
        peaks.append(torch.cuda.max_memory_allocated() - present_bytes)
    assert optimized.fxmem.runtime == "program"
    told = optimized.fxmem.report.cuda.allocated_bytes
    assert 0.99 * told < max(peaks) <= told <= budget


@pytest.mark.cuda
@pytest.mark.skipif(on_emulated_device, reason="the emulated device computes nothing: all bits are zero")
def test_a_model_recomputed_on_cuda_has_eager_bits() -> None:
    model, x = dropped_out(512, 8), torch.randn(4096, 512, device="cuda")
    floor = fxmem.optimize(model, x, optimizer=None, plan_seconds=1).report.floor_bytes
    optimized = fxmem.optimize(model, x, budget=floor, optimizer=None, plan_seconds=1)
    assert optimized.report.overhead_ratio > 0
    eager, recomputed = (gradients_after(candidate, model, x) for candidate in (model, optimized))
    assert any(bool(g.any()) for g in eager)
    assert all(torch.equal(a, b) for a, b in zip(eager, recomputed, strict=True))


@pytest.mark.cuda
def test_what_convolutions_take_inside_is_within_the_budget(present_bytes: int) -> None:
    """On a GPU that is cuDNN's workspaces, which are measured; the emulated one has those of FXMEM_STUB_CUDNN_WORKSPACE."""
    blocks = (nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.SiLU()) for _ in range(6))
    model, x = nn.Sequential(*blocks).cuda(), torch.randn(16, 64, 112, 112, device="cuda")
    least = fxmem.optimize(model, x, optimizer=None, plan_seconds=1).report.floor_bytes
    optimized = fxmem.optimize(model, x, budget=least, optimizer=None, plan_seconds=1, runtime="tape")
    for _ in range(2):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        run_step(lambda: optimized(x))
    cuda = optimized.fxmem.report.cuda
    assert cuda is not None
    assert cuda.most_allocated_bytes == cuda.allocated_bytes  # nothing is left to a bound
    assert torch.cuda.max_memory_allocated() - present_bytes <= cuda.allocated_bytes <= least


@pytest.mark.cuda
def test_an_optimizer_on_cuda_is_planned_with_its_multi_tensor_kernels(present_bytes: int) -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
    x = torch.randn(8, 1024, device="cuda")
    estimated = fxmem.estimate(model, x, optimizer="adamw", plan_seconds=1)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with fxmem.track(model, optimizer, x) as memory:
            run_step(lambda: model(x), optimizer=optimizer)
    assert abs(memory.peak_bytes - present_bytes - estimated.peak_bytes) < MIB


@pytest.mark.cuda
@pytest.mark.parametrize("share", [None, 0.5])
def test_a_compiled_step_on_cuda_takes_what_was_told_and_no_more_than_its_budget(
    present_bytes: int, share: float | None
) -> None:
    from fxmem.compiled.fakerun import HOLDS_TANGENTS  # which imports Inductor

    model, x = dropped_out(512, 4), torch.randn(16384, 512, device="cuda")
    options = {"optimizer": None, "backend": "inductor", "plan_seconds": 1}
    estimate = fxmem.estimate(model, x, **options)
    above = estimate.peak_bytes - estimate.fixed_bytes
    budget = None if share is None else estimate.fixed_bytes + int(share * above)
    try:
        compiled = fxmem.optimize(model, x, budget=budget, **options)
    except fxmem.InfeasibleBudgetError as error:
        budget = error.least_bytes
    if share is not None:
        compiled = fxmem.optimize(model, x, budget=budget, **options)
    torch.cuda.reset_peak_memory_stats()
    first = steady = 0
    for _ in range(3):
        run_step(lambda: compiled(x))
        first, steady = max(first, steady), torch.cuda.max_memory_allocated() - present_bytes
        torch.cuda.reset_peak_memory_stats()
        model.zero_grad()
    report = compiled.fxmem.report
    assert max(first, steady) <= report.most_bytes
    assert steady <= report.predicted_peak_bytes + 2 * MIB
    if not HOLDS_TANGENTS:  # else an expanded gradient of the output counts in full
        assert report.predicted_peak_bytes <= steady + 2 * MIB
    assert budget is None or report.most_bytes <= budget


@pytest.mark.cuda
@pytest.mark.skipif(on_emulated_device, reason="the emulated device has none of cuDNN's recurrent layers")
def test_recurrent_layers_of_cudnn_are_refused_by_name() -> None:
    with pytest.raises(fxmem.CaptureError, match=r"recurrent layer in cuDNN.*cudnn\.enabled = False"):
        fxmem.optimize(nn.LSTM(8, 8).cuda(), torch.randn(4, 2, 8, device="cuda"))


@pytest.mark.cuda
@pytest.mark.skipif(not on_emulated_device, reason="calls of the CUDA runtime are counted on the emulated device")
@pytest.mark.parametrize("name", cuda_calls.MODELS)
def test_a_recomputing_step_waits_for_the_device_no_oftener_than_eager(name: str) -> None:
    pair = cuda_calls.compared(name)
    assert pair.more_waiting == {}
    launches = "__cudaLaunchKernel"
    assert 0 < pair.eager[launches] < pair.optimized[launches]  # what was counted is a step, and what it recomputes


@pytest.mark.cuda
def test_a_recomputing_step_passes_where_torch_forbids_synchronization(present_bytes: int) -> None:
    model, x = dropped_out(128, 6), torch.randn(512, 128, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    floor = fxmem.optimize(model, x, optimizer=optimizer, plan_seconds=1).report.floor_bytes
    optimized = fxmem.optimize(model, x, budget=floor, optimizer=optimizer, plan_seconds=1)
    assert optimized.report.overhead_ratio > 0
    run_step(lambda: optimized(x), optimizer=optimizer)  # makes the optimizer's state
    torch.cuda.set_sync_debug_mode("error")
    run_step(lambda: optimized(x), optimizer=optimizer)


class StreamsUsed(TorchDispatchMode):
    """Notes the stream of every op."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[tuple[str, torch.cuda.Stream]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.used.append((str(func), torch.cuda.current_stream()))
        return func(*args, **(kwargs or {}))


@pytest.mark.cuda
def test_what_is_recomputed_runs_on_the_stream_of_its_forward() -> None:
    """Autograd runs a node's backward on the stream of its forward, whichever stream ``backward`` is called on."""
    model, x = dropped_out(128, 6), torch.randn(512, 128, device="cuda")
    floor = fxmem.optimize(model, x, optimizer=None, plan_seconds=1).report.floor_bytes
    optimized = fxmem.optimize(model, x, budget=floor, optimizer=None, plan_seconds=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        loss = optimized(x).sum()
    with StreamsUsed() as streams:
        loss.backward()
    recomputed = [used for op, used in streams.used if op in ("aten.gelu.default", "aten.native_dropout.default")]
    assert recomputed
    assert set(recomputed) == {stream}
    torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic algorithms; of cuBLAS, which must be told before it starts, a warning will do."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only="CUBLAS_WORKSPACE_CONFIG" not in os.environ)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
