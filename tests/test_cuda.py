"""The caching allocator's rules, on streams worked out by hand, and, where there is a device, against the real one."""

import random

import pytest
import torch
from torch import nn

import fxmem
from fxmem.cuda import CachingAllocator, allocator_peaks, cublas_workspace_bytes, rounded, segment_bytes
from fxmem.step import run_step

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


def test_random_streams_keep_the_books() -> None:
    draw = random.Random(0)
    allocator, live = CachingAllocator(), {}
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


@pytest.mark.cuda
def test_a_model_trains_on_cuda_inside_its_budget_with_eager_bits() -> None:
    torch.use_deterministic_algorithms(True)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1)) for _ in range(8))).cuda()
    x = torch.randn(256, 512, device="cuda")
    floor = fxmem.optimize(model, x, optimizer=None).report.floor_bytes
    optimized = fxmem.optimize(model, x, budget=floor, optimizer=None)
    gradients = []
    for candidate in (model, optimized):
        torch.manual_seed(0)
        for p in model.parameters():
            p.grad = None
        with fxmem.track(model, x) as memory:
            run_step(lambda candidate=candidate: candidate(x))
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert memory.peak_bytes <= optimized.report.predicted_peak_bytes * 1.01 + cublas_workspace_bytes((9, 0)) * 2
