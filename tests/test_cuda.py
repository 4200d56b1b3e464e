"""The caching allocator's rules, on streams worked out by hand, and, where there is a device, against the real one."""

import gc
import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
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
from fxmem.profiling.caching_allocator import (
    Allocation,
    CachingAllocator,
    StepEvents,
    allocator_peaks,
    cublas_workspace_bytes,
    rounded,
    segment_bytes,
)
from fxmem.profiling.training_step import run_step

MIB = 1 << 20


@pytest.mark.parametrize(("nbytes", "block"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)])
def test_requests_are_rounded_to_512_bytes(nbytes: int, block: int) -> None:
    assert rounded(nbytes) == block


@pytest.mark.parametrize(
    ("block", "segment"), [(512, 2), (MIB, 2), (MIB + 512, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB, 12)]
)
def test_segments_have_the_size_of_their_class(block: int, segment: int) -> None:
    assert segment_bytes(block) == segment * MIB


def test_small_blocks_share_a_segment_and_large_ones_another() -> None:
    peaks = allocator_peaks([("alloc", 0, 1000), ("alloc", 1, 1000), ("alloc", 2, 3 * MIB), ("alloc", 3, 3 * MIB)])
    assert peaks.allocated_bytes == 2 * 1024 + 6 * MIB
    assert peaks.reserved_bytes == 22 * MIB


def test_a_freed_block_is_used_again_and_reserved_stays() -> None:
    stream = [("alloc", 0, 16 * MIB), ("free", 0, 16 * MIB), ("alloc", 1, 15 * MIB)]
    assert allocator_peaks(stream).reserved_bytes == 16 * MIB
    stream = [("alloc", 0, 16 * MIB), ("free", 0, 16 * MIB), ("alloc", 1, 17 * MIB)]
    assert allocator_peaks(stream).reserved_bytes == 34 * MIB


def test_a_large_rest_of_at_most_one_mib_is_not_split_off_and_counts_as_allocated() -> None:
    stream = [("alloc", 0, 16 * MIB), ("free", 0, 0), ("alloc", 1, 15 * MIB)]
    assert allocator_peaks(stream).allocated_bytes == 16 * MIB
    allocator = CachingAllocator()
    allocator.alloc(0, 16 * MIB)
    allocator.free(0)
    allocator.alloc(1, 15 * MIB)
    assert allocator.allocated_bytes == 16 * MIB  # the whole block: 1 MiB is too little to cut off
    allocator.free(1)
    allocator.alloc(2, 14 * MIB)
    assert allocator.allocated_bytes == 14 * MIB


def test_free_neighbours_merge() -> None:
    allocator = CachingAllocator()
    for key in range(4):
        allocator.alloc(key, MIB // 2)
    for key in (0, 2, 1, 3):
        allocator.free(key)
    allocator.alloc(9, MIB)
    assert allocator.reserved_bytes == 2 * MIB


def test_an_expandable_segment_grows_by_pages_where_a_freed_block_is_too_small() -> None:
    stream = [("alloc", 0, 16 * MIB), ("free", 0, 16 * MIB), ("alloc", 1, 17 * MIB), ("alloc", 2, 4 * MIB)]
    assert allocator_peaks(stream, expandable=True).reserved_bytes == 40 * MIB  # 17 of 20 taken: a page for 1 more
    assert allocator_peaks(stream, expandable=False).reserved_bytes == 34 * MIB  # 16, into which the last goes, and 18
    stream = [("alloc", 0, 15 * MIB), ("alloc", 1, 30 * MIB)]
    assert allocator_peaks(stream, expandable=True).reserved_bytes == 60 * MIB  # the 5 left serve: 25 more are 2 pages
    assert allocator_peaks([("alloc", 0, 512), ("alloc", 1, 3 * MIB)], expandable=True).reserved_bytes == 22 * MIB


def test_the_end_of_an_expandable_segment_is_spared_where_another_block_serves() -> None:
    allocator = CachingAllocator(expandable=True)
    for key, mib in enumerate((12, 2, 6)):  # 20 MiB, full
        allocator.alloc(key, mib * MIB)
    allocator.free(2)  # the end: 6 MiB, the best fit
    allocator.free(0)
    for key, mib in ((3, 5), (4, 7), (5, 6)):  # 5 and 7 into the 12, for 6 the end is left
        allocator.alloc(key, mib * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.alloc(6, 1)
    allocator.alloc(7, 8 * MIB)
    assert allocator.reserved_bytes == (20 + 2 + 20) * MIB


def test_the_environment_says_whether_segments_are_expandable(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = [("alloc", 0, 16 * MIB)]
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    for setting, mib in (("", 16), ("expandable_segments:False", 16), ("backend:native, expandable_segments:True", 20)):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
        assert allocator_peaks(stream).reserved_bytes == mib * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_random_streams_keep_the_books(expandable: bool) -> None:
    draw = random.Random(0)
    allocator, live = CachingAllocator(expandable=expandable), {}
    for key in range(3000):
        if live and draw.random() < 0.5:
            gone = draw.choice(list(live))
            allocator.free(gone)
            del live[gone]
        else:
            live[key] = int(2 ** draw.uniform(3, 25))
            allocator.alloc(key, live[key])
        assert sum(rounded(n) for n in live.values()) <= allocator.allocated_bytes <= allocator.reserved_bytes
    for key in live:
        allocator.free(key)
    assert allocator.allocated_bytes == 0


def test_the_workspace_of_cublas_depends_on_the_device() -> None:
    assert cublas_workspace_bytes((9, 0)) == 32 * MIB
    assert cublas_workspace_bytes((8, 0)) == 8519680


# -- steps recorded from models ------------------------------------------------------------------------------------------

TRACES = Path(__file__).parent / "data"
"""One training step each, AdamW, on CPU: a list of ``[storage, bytes]``, negative where it is freed; in order."""


def recorded(name: str) -> list[Allocation]:
    events = json.loads((TRACES / f"{name}_step.json").read_text())
    return [("alloc" if nbytes > 0 else "free", key, abs(nbytes)) for key, nbytes in events]


@pytest.mark.parametrize("name", ["resnet18", "gpt2"])
def test_a_recorded_step_replays_to_the_same_peaks_between_its_bounds(name: str) -> None:
    stream = recorded(name)
    requested = peak_requested = rounded_live = peak_rounded = 0
    for kind, _, nbytes in stream:
        sign = 1 if kind == "alloc" else -1
        requested += sign * nbytes
        rounded_live += sign * rounded(nbytes)
        peak_requested, peak_rounded = max(peak_requested, requested), max(peak_rounded, rounded_live)
    peaks = allocator_peaks(stream)
    assert peaks == allocator_peaks(stream)
    assert peak_requested <= peak_rounded <= peaks.allocated_bytes <= peaks.reserved_bytes
    assert peaks.reserved_bytes % (2 * MIB) == 0
    assert peaks.reserved_bytes < 1.6 * peak_requested  # the cache is not wasteful on a step of few sizes


@pytest.mark.parametrize("name", ["resnet18", "gpt2"])
def test_workspaces_of_convolutions_are_beside_the_prediction(name: str) -> None:
    """One in the middle of the forward takes nothing where there is room still; one at the peak comes on top."""
    step = StepEvents(step=tuple(recorded(name)))
    live, at, most = 0, 0, 0
    for place, (kind, _, nbytes) in enumerate(step.step):
        live += nbytes if kind == "alloc" else -nbytes
        if live > most:
            at, most = place + 1, live
    alone, early, late = (
        replace(step, workspaces=workspaces).peaks() for workspaces in ((), ((1, 512),), ((1, 512), (at, 48 * MIB)))
    )
    assert (alone.most_allocated_bytes, alone.most_reserved_bytes) == (alone.allocated_bytes, alone.reserved_bytes)
    assert early == alone
    assert late.most_allocated_bytes == alone.allocated_bytes + 48 * MIB
    assert replace(late, most_allocated_bytes=0, most_reserved_bytes=0) == replace(
        alone, most_allocated_bytes=0, most_reserved_bytes=0
    )


@pytest.mark.parametrize("name", ["resnet18", "gpt2"])
def test_workspaces_of_libraries_are_taken_once_and_stay(name: str) -> None:
    step = StepEvents(step=tuple(recorded(name)))
    alone, beside = step.peaks(), replace(step, libraries=((0, 32 * MIB), (len(step.step) // 2, 32 * MIB))).peaks()
    assert (alone.workspace_bytes, beside.workspace_bytes) == (0, 64 * MIB)
    assert beside.allocated_bytes == alone.allocated_bytes + 64 * MIB
    assert beside.reserved_bytes == alone.reserved_bytes + 64 * MIB


@pytest.mark.parametrize("name", ["resnet18", "gpt2"])
def test_a_second_step_in_the_cache_of_the_first_reserves_nothing_more_for_equal_requests(name: str) -> None:
    """Blocks that the first step left serve the second where sizes recur; a cache that forgot would double."""
    first = recorded(name)
    living = {key for kind, key, _ in first if kind == "alloc"} - {key for kind, key, _ in first if kind == "free"}
    stream = [*first, *(("free", key, 0) for key in living), *first]
    assert allocator_peaks(stream).reserved_bytes == allocator_peaks(first).reserved_bytes


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
        assert fxmem.api.budget._free_bytes(torch.device("cpu"), (model, "adamw", None)) == expected


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
def test_a_model_trains_on_cuda_inside_its_budget(present_bytes: int) -> None:
    model, x = (
        dropped_out(512, 8),
        torch.randn(16384, 512, device="cuda"),
    )  # an activation has 32 MiB, parameters 8 in all
    floor = fxmem.optimize(model, x, optimizer=None, plan_seconds=1).report.floor_bytes
    optimized = fxmem.optimize(model, x, budget=floor, optimizer=None, plan_seconds=1)
    peaks = []
    for candidate in (model, optimized, model, optimized):  # the first step makes the workspaces
        for p in model.parameters():
            p.grad = None
        with fxmem.track(model, x) as memory:
            run_step(lambda candidate=candidate: candidate(x))
        peaks.append(memory.peak_bytes - present_bytes)
    assert abs(peaks[2] - optimized.report.eager_peak_bytes) < MIB
    assert abs(peaks[3] - optimized.report.predicted_peak_bytes) < MIB
    assert peaks[3] <= floor < peaks[2]


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
