"""Training steps counted for a GPU that is not here, beside what PyTorch's allocator counted on an emulated one.

The figures are those of ``benchmarks/results/cuda_eager_h100-80gb.json``, recorded with torch 2.14.1
(``python -m tests.cuda_stub.launch h100-80gb -m benchmarks.cuda_memory measure h100-80gb FILE``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxmem
from benchmarks.cuda_cases import CASES
from benchmarks.cuda_memory import step_of
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.devices import device_named, rounded
from fxmem.emitted import slack_of
from fxmem.fake.fake_tensors import FakeWorld
from fxmem.fake.stand_in import standing_in
from fxmem.profiling.allocator_state import AllocatorPeaks
from fxmem.profiling.caching_allocator import allocator_peaks
from fxmem.profiling.cuda_reduction import TensorRecord, contiguous
from fxmem.profiling.cuda_scratch import scratch_of
from fxmem.profiling.device_memory import DeviceMemory
from fxmem.profiling.step_events import StepEvents, StepLog
from fxmem.profiling.storage_tracker import StorageTracker
from fxmem.profiling.training_step import BARE
from fxmem.profiling.verify import eager_step, emitted_step
from fxmem.runtime.autocast import Autocast
from fxmem.torch_patches import as_in_training

RESULTS = Path(__file__).parents[2] / "benchmarks/results/cuda_eager_h100-80gb.json"
EXACT = (
    "mlp fp32",
    "causal fp32",
    "causal bf16 autocast, no dropout",
    "words fp32",
    "words bf16 autocast",
    "indexed rows",
    "sorted rows",
    "convolutions with GroupNorm",
    "generator against discriminator",
    "autoencoder, binary cross-entropy",
    "autoencoder, Huber",
)
MIB = 1 << 20


def counted(name: str) -> AllocatorPeaks:
    case = CASES[name]
    model, (args, kwargs) = case.build(), case.inputs()
    inputs = Inputs.of_example(args, kwargs, model)
    world = FakeWorld(inputs.leaves, "cuda", moved=True)
    moved = Inputs(tuple(world.fake_all(leaf) for leaf in inputs.leaves), inputs.spec)
    with as_in_training(), standing_in(device_named("h100-80gb")), world.state_of(model):
        captured = capture(model, moved, Autocast.of("cuda", case.autocast))
        return eager_step(model, captured, moved, step_of(case, "adamw", None)).events.peaks()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_allocated_and_reserved_bytes_are_those_recorded(name: str) -> None:
    recorded = json.loads(RESULTS.read_text())["cases"][name]
    peaks = counted(name)
    assert (peaks.allocated_bytes, peaks.reserved_bytes) == (recorded["allocated"], recorded["reserved"])


def test_ops_with_kernels_of_their_own_stay_whole() -> None:
    seen: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    world = FakeWorld((), "cuda", moved=True)
    with standing_in(device_named("h100")), world.active():
        x = torch.ones(2, 8, device="cuda", requires_grad=True)
        with Names():
            (nn.functional.silu(x) + nn.functional.mish(x) + nn.functional.rms_norm(x, (8,))).sum().backward()
    assert {"silu_backward", "mish_backward", "_fused_rms_norm"} <= set(seen)
    assert not {"sigmoid", "rsqrt", "tanh"} & set(seen)


class HeadFirst(nn.Module):
    """Its head is declared first and used last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(96, 128, bias=False)
        self.body = nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96))
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x * self.scale))  # type: ignore[no-any-return]


def events_of_head_first() -> tuple[StepEvents, StepEvents]:
    """Return what the step allocates, the model's and that of its graph."""
    model = HeadFirst()
    inputs = Inputs.of_example(torch.randn(32, 64), None, model)
    world = FakeWorld(inputs.leaves, "cuda", moved=True)
    moved = Inputs(tuple(world.fake_all(leaf) for leaf in inputs.leaves), inputs.spec)
    with as_in_training(), standing_in(device_named("h100-80gb")), world.state_of(model):
        captured = capture(model, moved)
        eager = eager_step(model, captured, moved, BARE)
        emitted = emitted_step(captured.graph_module, captured, moved, BARE)
    return eager.events, emitted.events


def test_parameters_and_buffers_come_to_the_device_in_the_order_of_the_model_s_modules() -> None:
    """The first block that fits serves, so order tells where gaps are."""
    for events in events_of_head_first():
        sizes = [nbytes for _, _, nbytes in events.present]
        head, body, scale = [96 * 128 * 4], [64 * 96 * 4, 512, 512, 512, 512, 512, 512], [512]
        assert sizes == [*head, *body, *scale, 32 * 64 * 4]


def test_cublas_takes_its_workspace_when_copies_of_matrices_are_made() -> None:
    """The sum's gradient is an expanded number, which the head's backward copies first."""
    for events in events_of_head_first():
        place, _ = events.libraries[1]
        copied = 32 * 128 * 4
        assert events.step[place - 1] == ("alloc", events.step[place - 1][1], copied)
        assert events.step[place] == ("free", events.step[place - 1][1], copied)


def allocated_by(call: Callable[[], Any]) -> list[int]:
    """Return the bytes of what ``call`` allocates on an H100, in order."""
    log, gpu = StepLog(), device_named("h100-80gb")
    with standing_in(gpu), FakeWorld((), "cuda", moved=True).active():
        with StorageTracker(log.note, memory=DeviceMemory(gpu)):
            held = call()
        del held
    return [nbytes for kind, _, nbytes in log.events(()).step if kind == "alloc" and nbytes]


def on_gpu(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(*shape, device="cuda", **options)


def test_a_dropout_s_mask_is_allocated_before_its_result() -> None:
    sizes = allocated_by(lambda: torch.native_dropout(on_gpu(64, 64), 0.5, True))
    assert sizes[1:] == [64 * 64, 64 * 64 * 4]


def test_an_attention_s_seed_is_allocated_before_its_result() -> None:
    memory = DeviceMemory(device_named("h100-80gb"))
    query, results = torch.ones(2, 4, 64, 32), ["result", "sums", "seed", "offset"]
    op = torch.ops.aten._scaled_dot_product_efficient_attention.default
    assert memory.made_first(op, (query, query, query, None, True), {}, results) == ["seed", "offset"]


def test_a_norm_copies_what_is_not_contiguous_before_its_result() -> None:
    def call() -> Any:
        x, weight = on_gpu(64, 32, 16).transpose(0, 1), on_gpu(16)
        return torch.ops.aten.native_layer_norm(x, [16], weight, weight, 1e-5)

    image, rows = 64 * 32 * 16 * 4, 64 * 32 * 4
    assert allocated_by(call)[2:] == [image, image, rows, rows]


def test_what_is_rolled_in_two_dimensions_is_there_once_more() -> None:
    image = 2 * 8 * 8 * 4
    assert allocated_by(lambda: torch.roll(on_gpu(2, 8, 8), (1, 1), (1, 2)))[1:] == [image, image]
    assert allocated_by(lambda: torch.roll(on_gpu(2, 8, 8), 1, 1))[1:] == [image]
    assert allocated_by(lambda: torch.roll(on_gpu(2, 8, 8).transpose(1, 2), 1, 1))[1:] == [image, image]


def test_an_attention_s_product_is_gone_before_its_accumulators_are_there() -> None:
    arguments = {"query": contiguous((2, 4, 64, 32), "float32")}
    arguments["grad_out_"] = TensorRecord((2, 4, 64, 32), (64 * 4 * 32, 32, 4 * 32, 1), "float32")
    scratch = scratch_of("_scaled_dot_product_efficient_attention_backward", arguments, device_named("h100-80gb"))
    assert (scratch.blocks, scratch.whole) == ((2 * 4 * 64 * 4,), ())
    product, (accumulators,) = scratch.between, scratch.phases
    assert product == (2 * 4 * 64 * 32 * 4, 2 * 4 * 64 * 4)
    assert scratch.transient_bytes == scratch.blocks[0] + max(sum(product), sum(accumulators))


def test_an_attention_s_product_is_made_before_the_row_sums_of_it() -> None:
    """In the order in which PyTorch's host code asks the allocator."""

    def call() -> Any:
        x, sums = on_gpu(2, 4, 64, 64), on_gpu(2, 4, 64)
        seed = torch.ones((), dtype=torch.long)
        backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        return backward(x, x, x, x, None, x, sums, seed, seed, 0.0, [True, True, True, False])

    image, sums, accumulators = 2 * 4 * 64 * 64 * 4, 2 * 4 * 64 * 4, 2 * 4 * (16 + 4 * 64 * 64)
    assert allocated_by(call)[2:] == [*4 * (image,), image, sums, sums, rounded(accumulators)]


def test_a_convolution_s_bias_gradient_is_made_when_the_copy_of_the_gradient_is_gone() -> None:
    """In the order in which PyTorch's host code asks the allocator: a copy that is counted smaller, to make up for the
    bias's gradient, is put into another block."""
    log, gpu = StepLog(), device_named("h100-80gb")
    with standing_in(gpu), FakeWorld((), "cuda", moved=True).active():
        x, weight = on_gpu(2, 32, 16, 16), on_gpu(32, 32, 3, 3)
        gradient = on_gpu(2, 17 * 16, 32)[:, :256].transpose(1, 2).reshape(2, 32, 16, 16)
        with StorageTracker(log.note, memory=DeviceMemory(gpu)):
            geometry = ([32], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
            held = torch.ops.aten.convolution_backward(gradient, x, weight, *geometry, [False, True, True])
        del held
    step = [event for event in log.events(()).step if event[0] == "free" or event[2]]
    copied, weight_s, gone, bias_s = step[:4]
    assert (copied[0], copied[2]) == ("alloc", x.nbytes)
    assert (weight_s[0], weight_s[2]) == ("alloc", weight.nbytes)
    assert gone[:2] == ("free", copied[1])
    assert (bias_s[0], bias_s[2]) == ("alloc", 512)


def test_bags_are_counted_before_they_are_made() -> None:
    def call() -> Any:
        table, ids = on_gpu(100, 64), on_gpu(64 * 16, dtype=torch.long)
        offsets = torch.arange(64, device="cuda") * 16
        return torch.ops.aten._embedding_bag(table, ids, offsets, False, 1)

    result, count, bag = 64 * 64 * 4, 64 * 8, 64 * 16 * 8
    sizes = allocated_by(call)
    assert sizes[sizes.index(result) - 2 :][:3] == [count, bag, result]


def test_a_depthwise_convolution_makes_the_weight_s_gradient_first() -> None:
    def call(groups: int) -> Any:
        x, weight = on_gpu(2, 32, 16, 16), on_gpu(32, 32 // groups, 3, 3)
        geometry = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
        return torch.ops.aten.convolution_backward(x, x, weight, *geometry, [True, True, False])

    image, kernel = 2 * 32 * 16 * 16 * 4, 32 * 9 * 4
    assert allocated_by(lambda: call(32))[2:] == [1536, image]
    assert allocated_by(lambda: call(1))[2:] == [image, 32 * kernel]


def blocks(dropout: float = 0.1) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(dropout)) for _ in range(4)))


@pytest.mark.slow
@pytest.mark.parametrize("budget_of", ["allocated", "reserved"])
def test_the_floor_that_an_estimate_names_can_be_kept_and_no_less(budget_of: str) -> None:
    model, x, options = (
        blocks(),
        torch.randn(4096, 256),
        {"optimizer": "sgd", "plan_seconds": 1, "budget_of": budget_of},
    )
    estimate = fxmem.estimate(model, x, device="cuda:h100", **options)
    assert estimate.cuda is not None
    bound = estimate.cuda.reserved_bytes if budget_of == "reserved" else estimate.cuda.allocated_bytes
    assert estimate.floor_bytes < estimate.bound_bytes == bound
    assert estimate.fits(bound)
    assert not estimate.fits(bound - 1)
    kept = fxmem.optimize(model, x, plan_for="h100", budget=estimate.floor_bytes, **options).fxmem.report
    assert kept.cuda is not None
    taken = kept.cuda.reserved_bytes if budget_of == "reserved" else kept.cuda.allocated_bytes
    assert taken <= estimate.floor_bytes
    with pytest.raises(fxmem.InfeasibleBudgetError) as refused:
        fxmem.optimize(model, x, plan_for="h100", budget=estimate.floor_bytes // 2, **options)
    fxmem.optimize(model, x, plan_for="h100", budget=refused.value.least_bytes, **options)


@pytest.mark.slow
def test_plans_leave_slack_to_programs_where_a_budget_has_it() -> None:
    model, x, options = blocks(), torch.randn(4096, 256), {"optimizer": "sgd", "planner": "chen"}
    estimate = fxmem.estimate(model, x, device="cuda:h100", **options)

    def allocated_bytes(budget: int, runtime: str) -> int:
        report = fxmem.optimize(model, x, budget=budget, runtime=runtime, plan_for="h100", **options).fxmem.report
        assert report.cuda is not None
        return report.cuda.allocated_bytes

    tight = allocated_bytes((estimate.floor_bytes + estimate.bound_bytes) // 2, "tape")
    assert allocated_bytes(tight, "tape") == tight
    assert allocated_bytes(tight, "program") <= tight - slack_of(tight)
    assert allocated_bytes(estimate.floor_bytes, "program") <= estimate.floor_bytes


def test_gradients_of_earlier_micro_batches_are_there_in_every_step() -> None:
    """With state made at the end of the first step, the largest step is the second."""
    model, x = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), torch.randn(8, 512)
    estimate = fxmem.estimate(model, x, device="cuda:h100", accumulate=True, plan_seconds=1)
    assert estimate.cuda is not None
    assert 0 <= estimate.cuda.allocated_bytes - estimate.peak_bytes < MIB


def test_state_is_made_where_the_first_step_ends_though_the_optimizer_allocates_nothing_else() -> None:
    events = StepEvents(state=(("alloc", 7, 3 * MIB),), step=(("alloc", 8, 2 * MIB), ("free", 8, 0)), optimizer_at=2)
    assert events.peaks().allocated_bytes == 5 * MIB


def test_planning_for_a_gpu_leaves_no_fakes_and_a_call_plans_for_where_it_is() -> None:
    model, x = blocks(), torch.randn(64, 256)
    optimized = fxmem.optimize(model, x, plan_for="a100-80gb", optimizer="sgd", plan_seconds=1)
    report = optimized.fxmem.report
    assert report.cuda is not None
    assert report.floor_bytes <= report.cuda.allocated_bytes
    assert (
        report.budget_bytes == fxmem.api.budget.parse_budget(None, "auto", model, gpu=device_named("a100-80gb")).nbytes
    )
    assert optimized.fxmem.constants == ()
    assert not optimized.fxmem.is_planned
    with pytest.raises(fxmem.NotPlannedError):
        _ = optimized.fxmem.graph_module
    optimized(x).sum().backward()
    assert optimized.fxmem.report.cuda is None
    assert all(p.grad is not None and p.grad.device.type == "cpu" for p in model.parameters())


@pytest.mark.slow
def test_the_largest_batch_on_a_gpu_is_that_whose_allocated_bytes_fit() -> None:
    model, options = blocks(0.0), {"device": "cuda:h100", "optimizer": "sgd", "plan_seconds": 1}
    budget = 96 * MIB
    largest = fxmem.estimate(model, torch.randn(64, 256), **options).max_batch_size(budget)
    inside, outside = (fxmem.estimate(model, torch.randn(n, 256), **options) for n in (largest, largest + 1))
    assert inside.bound_bytes <= budget < outside.bound_bytes


def test_a_gpu_that_is_not_known_and_a_budget_that_nothing_tells() -> None:
    model, x = blocks(), torch.randn(8, 256)
    with pytest.raises(fxmem.InputError, match="no GPU is known as 'h900'; known are h100-80gb"):
        fxmem.optimize(model, x, plan_for="h900")
    with pytest.raises(fxmem.InputError, match="no GPU is known as 'abacus'"):
        fxmem.estimate(model, x, device="cuda:abacus")
    with pytest.raises(fxmem.BudgetError, match="name a GPU with plan_for="):
        fxmem.optimize(model, x, budget="auto")
    with pytest.raises(fxmem.InputError, match="unknown budget_of 'used'; known: allocated, reserved"):
        fxmem.optimize(model, x, budget_of="used")


@pytest.mark.parametrize(
    ("make", "allocated_bytes"),
    [
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True), 80_329_216),
        (lambda p: torch.optim.SGD(p, 0.1, fused=True), 76_097_536),
        (lambda p: torch.optim.Adagrad(p, fused=True), 80_331_264),
        (lambda p: torch.optim.Adam(p, torch.tensor(0.1), fused=True), 84_562_944),
    ],
)
def test_fused_optimizers_on_a_gpu_that_is_not_here(make: Any, allocated_bytes: int, monkeypatch: Any) -> None:
    """Recorded on the emulated H100 with torch 2.14.1, from steps that let the model's output go: 2,048 bytes.

    Nothing is measured for it, also where op times are measured as a rule: there is nothing to measure on."""
    monkeypatch.setenv("FXMEM_MEASURE", "1")
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8))
    optimizer = make(model.parameters())
    estimate = fxmem.estimate(model, torch.randn(64, 1024), optimizer=optimizer, device="cuda:h100", plan_seconds=1)
    assert estimate.cuda is not None
    assert estimate.cuda.allocated_bytes == allocated_bytes + 2048


def test_a_norm_with_channels_last_makes_the_input_s_gradient_last() -> None:
    def call() -> Any:
        x = on_gpu(2, 32, 16, 16, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        weight = on_gpu(32)
        norm = torch.ops.aten.native_batch_norm_backward
        return norm(x, x, weight, None, None, weight, weight, True, 1e-5, [True, True, True])

    assert allocated_by(call)[3:6] == [512, 512, 2 * 32 * 16 * 16 * 2]


@pytest.mark.parametrize("last", ["input", "weight"])
def test_a_convolution_copies_its_input_before_there_is_a_result_and_its_weight_after(last: str) -> None:
    """In the order in which PyTorch's host code asks the allocator."""

    def call() -> Any:
        x, weight = on_gpu(2, 8, 64, 64), on_gpu(16, 8, 3, 3)
        if last == "input":
            return torch.conv2d(x.to(memory_format=torch.channels_last), weight, padding=1)
        return torch.conv2d(x, weight.to(memory_format=torch.channels_last), padding=1)

    image, kernel, result = 2 * 8 * 64 * 64 * 4, 16 * 8 * 9 * 4, 2 * 16 * 64 * 64 * 4
    assert allocated_by(call)[-2:] == ([result, kernel] if last == "input" else [image, result])


def test_a_scaler_s_state_is_made_where_the_first_loss_is_scaled() -> None:
    step = (("alloc", 8, 2 * MIB), ("free", 8, 0), ("alloc", 9, MIB), ("free", 9, 0))
    first = StepEvents(step=step, scaler=(("alloc", 7, 3 * MIB),), scaled_at=2, optimizer_at=4)
    assert allocator_peaks(first.history(1)).allocated_bytes == 4 * MIB
    assert first.peaks().allocated_bytes == 5 * MIB
    assert replace(first, workspaces=((0, 4 * MIB),)).peaks().most_allocated_bytes == 7 * MIB
