"""Calls of the CUDA runtime in one training step, eager and recomputing, counted on the emulated device.

``python -m tests.cuda_stub.launch h100-80gb -m benchmarks.cuda_calls FILE`` prints the table and writes FILE. What waits
for the device must be as often in both: a re-run that read one number from the device would stall every step. A
recomputing step launches more kernels, and may ask the driver for memory at other places.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxmem
from benchmarks.results_file import machine
from fxmem.profiling.training_step import run_step

WAITING = (
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaEventQuery", "cudaStreamQuery",
    "cudaStreamWaitEvent", "cudaEventRecord", "cudaEventRecordWithFlags", "cudaMemcpy", "cudaMemcpyAsync", "cudaMemset",
    "cudaMemsetAsync", "cudaHostAlloc", "cudaFreeHost", "cudaMemGetInfo", "cudaFree", "cuStreamSynchronize",
    "cuCtxSynchronize", "cuMemcpyDtoH_v2", "cuMemcpyDtoHAsync_v2",
)  # fmt: skip
"""What waits for the device, copies, or makes others wait."""
WORKING = (
    "__cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cublasSgemm_v2", "cublasGemmEx",
    "cublasLtMatmul", "cudaMalloc",
)  # fmt: skip
"""Work, of which recomputation adds some, and memory asked of the driver."""

Counts = dict[str, int]


def is_emulated() -> bool:
    """True on the emulated device."""
    return torch.cuda.is_available() and torch.cuda.get_device_name().endswith("(emulated)")


def counted(step: Callable[[], object]) -> Counts:
    """Return how often ``step`` calls each function, on the emulated device."""
    stub_calls = ctypes.CDLL(None).stub_calls
    stub_calls.argtypes, stub_calls.restype = [ctypes.c_char_p], ctypes.c_long
    names = (*WAITING, *WORKING)
    before = [stub_calls(name.encode()) for name in names]
    step()
    return {name: stub_calls(name.encode()) - count for name, count in zip(names, before, strict=True)}


@dataclass(frozen=True, slots=True)
class Pair:
    """One model's steps side by side."""

    name: str
    eager: Counts
    optimized: Counts

    @property
    def more_waiting(self) -> Counts:
        """Calls that wait, made oftener by the optimized step."""
        more = {name: self.optimized[name] - self.eager[name] for name in WAITING}
        return {name: count for name, count in more.items() if count > 0}


def dropped_out() -> tuple[nn.Module, Tensor]:
    """Return linear layers with GELU and dropout, and a batch."""
    layers = (nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)) for _ in range(6))
    return nn.Sequential(*layers).cuda(), torch.zeros(512, 128, device="cuda")


def normed() -> tuple[nn.Module, Tensor]:
    """Return convolutions with BatchNorm and dropout of channels, and a batch."""
    layers = (
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout2d(0.1))
        for _ in range(4)
    )
    return nn.Sequential(*layers).cuda(), torch.zeros(8, 16, 32, 32, device="cuda")


def attending() -> tuple[nn.Module, Tensor]:
    """Return two of PyTorch's transformer layers with dropout, and a batch."""
    layers = (nn.TransformerEncoderLayer(64, 4, 256, 0.1, batch_first=True, norm_first=True) for _ in range(2))
    return nn.Sequential(*layers).cuda(), torch.zeros(8, 64, 64, device="cuda")


MODELS = {"linear, GELU, dropout": dropped_out, "convolution, BatchNorm, dropout": normed, "transformer": attending}


def compared(name: str) -> Pair:
    """Return the calls of the third step, eager and at the least budget."""
    model, x = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"optimizer": optimizer, "cost": "h100", "plan_seconds": 1.0}
    floor = fxmem.optimize(model, x, **options).report.floor_bytes
    optimized = fxmem.optimize(model, x, budget=floor, **options)
    assert optimized.report.overhead_ratio > 0, f"{name}: nothing is recomputed"
    counts = []
    for candidate in (model, optimized):
        for _ in range(2):
            run_step(lambda candidate=candidate: candidate(x), optimizer=optimizer)
        counts.append(counted(lambda candidate=candidate: run_step(lambda: candidate(x), optimizer=optimizer)))
    return Pair(name, *counts)


def table(pairs: list[Pair]) -> str:
    """Return the calls that any step makes, one column for each step."""
    rows = [[name, *(c[name] for pair in pairs for c in (pair.eager, pair.optimized))] for name in (*WAITING, *WORKING)]
    headers = ["calls a step", *(f"{pair.name}: {what}" for pair in pairs for what in ("eager", "optimized"))]
    return tabulate([row for row in rows if any(row[1:])], headers=headers, maxheadercolwidths=18)


def results(pairs: list[Pair]) -> dict[str, Any]:
    """Return the calls that any step makes, as JSON has them."""

    def made(counts: Counts) -> Counts:
        return {name: count for name, count in counts.items() if count}

    models = {pair.name: {"eager": made(pair.eager), "optimized": made(pair.optimized)} for pair in pairs}
    return {"machine": machine(), "models": models, "more_waiting": {pair.name: pair.more_waiting for pair in pairs}}


if __name__ == "__main__":
    if not is_emulated():
        raise SystemExit(
            "calls are counted on the emulated device only: python -m tests.cuda_stub.launch h100-80gb -m ..."
        )
    found = [compared(name) for name in MODELS]
    print(table(found))
    for file in sys.argv[1:]:
        Path(file).write_text(json.dumps(results(found), indent=1) + "\n", encoding="utf-8")
