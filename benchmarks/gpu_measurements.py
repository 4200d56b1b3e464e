"""What a first run on a real GPU settles, one function for each: rows of predicted, recorded and measured figures.

In: a name of ``MEASUREMENTS`` and a file, ``python -m benchmarks.gpu_measurements NAME FILE``. Out: one JSON object a line,
written as soon as it is known, so that a run that is cut short leaves what it had; of two rows of one name the later
counts. :mod:`benchmarks.first_gpu` runs all of them. The emulated device computes nothing: rows of bits say so there.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxmem
from benchmarks.cuda_calls import is_emulated
from benchmarks.cuda_cases import CASES
from benchmarks.cuda_memory import measured, predicted, under_budgets
from benchmarks.gpu_bits import bits
from benchmarks.gpu_compiled import compiled
from benchmarks.gpu_rows import DATA, Row, known_name, on_empty_device, row, stat, the_device
from fxmem.api.budget import CONTEXT_BYTES
from fxmem.devices import DEVICES
from fxmem.profiling.caching_allocator import expandable_segments
from fxmem.profiling.cudnn_workspace import workspace_bound
from fxmem.profiling.device_memory import cublas_workspace_bytes
from fxmem.profiling.training_step import run_step
from tests.cuda_stub import probe_attention
from tests.cuda_stub.op_cases import ROWS, cases
from tests.cuda_stub.probe_ops import OpScratch, measure, record_of, rule_on

Rows = Iterator[Row]
MEASUREMENTS: dict[str, Callable[[], Rows]] = {"bits": bits, "compiled": compiled}


def _measurement(run: Callable[[], Rows]) -> Callable[[], Rows]:
    MEASUREMENTS[run.__name__] = run
    return run


# -- tests, the smallest case, what ops take inside ------------------------------------------------------------------------


@_measurement
def tests() -> Rows:
    """The CUDA tests, with the workspace of cuBLAS that determinism asks for."""
    missing = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if missing:
        yield row("tests/test_cuda.py", real=f"not run: {', '.join(missing)} not installed")
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-m", "cuda", "--tb=line", "tests/test_cuda.py"]
    ran = subprocess.run(
        command, env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, capture_output=True, text=True
    )
    lines = ran.stdout.strip().splitlines()
    yield row("tests/test_cuda.py", real=lines[-1] if lines else ran.stderr[-200:])
    for line in lines:
        if line.startswith(("FAILED", "SKIPPED")):
            yield row(line[:110], real="")


WITHOUT_SCRATCH = 191_920_000
"""Bytes: what the tensors of the next measurement's model take at least."""


@_measurement
def floor_of_mlp() -> Rows:
    """Eight blocks of Linear, GELU and dropout under the least budget, of whose peak a sum's scratch is a large part, and
    under what would be the least without it and cuBLAS's workspaces."""
    on_empty_device()
    layers = (nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1)) for _ in range(8))
    model, x = nn.Sequential(*layers).cuda(), torch.randn(16384, 512, device="cuda")
    options: dict[str, Any] = {"optimizer": None, "plan_seconds": 1, "cost": "h100"}
    floor = fxmem.optimize(model, x, **options).report.floor_bytes
    optimized = fxmem.optimize(model, x, budget=floor, **options)
    for name, candidate in (("eager", model), ("at the floor", optimized)):
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            run_step(lambda candidate=candidate: candidate(x))
            model.zero_grad()
        report = optimized.report
        assert report.cuda is not None
        bytes_planned = report.eager_peak_bytes if name == "eager" else report.cuda.allocated_bytes
        yield row(f"{name}: allocated", predicted=bytes_planned, real=stat("allocated", "peak"))
        yield row(f"{name}: requested", real=stat("requested", "peak"))
    try:
        fxmem.optimize(model, x, budget=WITHOUT_SCRATCH, **options)
    except fxmem.InfeasibleBudgetError as error:
        yield row(
            f"budget of {WITHOUT_SCRATCH / 1e6} MB: refused",
            predicted=error.least_bytes,
            real=stat("allocated", "peak"),
        )
    else:
        yield row(f"budget of {WITHOUT_SCRATCH / 1e6} MB: not refused", real=0)


@_measurement
def sums() -> Rows:
    """Scratch of sums over rows and over batch and image, on 23 shapes."""
    shapes: list[tuple[tuple[int, ...], tuple[int, ...], bool]] = [(shape, (0,), False) for shape in ROWS]
    images = ((4, 8, 32, 32), (32, 64, 112, 112), (8, 64, 56, 56))
    shapes += [(shape, (0, 2, 3), nhwc) for shape in images for nhwc in (False, True)]
    recorded = _recorded_scratch()
    for shape, dims, nhwc in shapes:
        x = torch.zeros(shape, device="cuda")
        x = x.to(memory_format=torch.channels_last) if nhwc else x
        with OpScratch() as mode:
            x.sum(dims)
        (record,) = mode.records
        known = recorded.get(json.dumps([record["op"], record["args"]], sort_keys=True))
        rule = rule_on(record, the_device()).transient_bytes
        yield row(f"{shape} over {dims}{' nhwc' if nhwc else ''}", rule, known, record["scratch"])


def _recorded_scratch() -> dict[str, int]:
    """What the emulated device's ops took, by op and arguments; empty if it was not recorded."""
    path = DATA / f"cuda_scratch_{known_name()}_torch2.14.1.json"
    if not path.exists():
        return {}
    return {json.dumps([r["op"], r["args"]], sort_keys=True): r["scratch"] for r in json.loads(path.read_text())["ops"]}


@_measurement
def ops() -> Rows:
    """All op cases, forward and backward, in a random order, so that a run cut short has some of every family."""
    path = DATA / f"cuda_scratch_{known_name()}_torch2.14.1.json"
    recorded = {r["case"]: r for r in json.loads(path.read_text())["cases"]} if path.exists() else {}
    torch.autograd.set_multithreading_enabled(False)
    a = torch.zeros(64, 64, device="cuda", requires_grad=True)
    nn.functional.linear(a @ a, a, a[0]).sum().backward()
    order = list(cases())
    random.Random(0).shuffle(order)
    for case in order:
        found = measure(case, {}, the_device())
        for part in ("forward", "backward"):
            note = found.get("failed") or found.get("fakes_failed") or ("" if found["exact"] else "a bound")
            numbers = (found.get("fakes_and_rules"), recorded.get(case[0], {}).get("stub"), found.get("stub"))
            yield row(f"{case[0]}: {part}", *((n or {}).get(part) for n in numbers), note=note)


# -- whole steps -----------------------------------------------------------------------------------------------------------


def _predict(name: str, device: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    try:
        return predicted(CASES[name], device)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:120]}


@_measurement
def eager_peaks() -> Rows:
    """Allocated peaks of eager steps: first what the device says, meanwhile the predictions on other cores."""
    names = [name for name, case in CASES.items() if case.in_first_run]
    with multiprocessing.get_context("spawn").Pool(max(1, min(8, (os.cpu_count() or 2) // 2))) as pool:
        pending = {name: pool.apply_async(_predict, (name, known_name())) for name in names}
        real: dict[str, Any] = {}
        for name in names:
            try:
                real[name] = measured(CASES[name])["allocated"]
            except Exception as error:
                real[name] = f"{type(error).__name__}: {error}"[:120]
            yield row(name, real=real[name])
            for ready in [other for other in real if other in pending and pending[other].ready()]:
                yield _beside(ready, pending.pop(ready).get(), real[ready])
        for name, result in pending.items():
            yield _beside(name, result.get(), real[name])


def _beside(name: str, said: dict[str, Any], real: Any) -> Row:
    return row(name, said.get("allocated"), None, real, note=said.get("error", ""))


@_measurement
def workspace() -> Rows:
    """What the first matrix product of each thread leaves allocated."""
    on_empty_device()
    expected = cublas_workspace_bytes(the_device().capability)
    a = torch.ones(256, 256, device="cuda", requires_grad=True)
    before = stat("allocated", "current")
    product_ = a @ a
    after = stat("allocated", "current") - before - product_.nbytes
    yield row("after a matrix product", expected, None, after)
    product_.sum().backward()
    assert a.grad is not None
    rest = stat("allocated", "current") - before - product_.nbytes - a.grad.nbytes
    yield row("after its backward", 2 * expected, None, rest)


def _largest(records: list[dict[str, Any]], wanted: str) -> tuple[int, int]:
    """Return rule and measured scratch of the record of most scratch among ops whose name has ``wanted``."""
    found = [(r["scratch"], rule_on(r, the_device()).transient_bytes) for r in records if wanted in r["op"]]
    real, rule = max(found, default=(0, 0))
    return rule, real


CONVOLUTIONAL = (
    *("resnet50", "unet", "vgg16", "densenet121", "convnext_tiny", "efficientnet_b0"),
    *("mobilenet_v2", "regnet", "resnet18", "swin_t"),
)
MODES = {"": {}, ", deterministic": {"deterministic": True}, ", benchmark": {"benchmark": True}}
"""Settings of ``torch.backends.cudnn.flags``."""


@_measurement
def convolutions() -> Rows:
    """Scratch of each distinct call of a convolution, cuDNN's workspace in it: dtypes, layouts, settings."""
    torch.autograd.set_multithreading_enabled(False)
    for mode, half, last, name in product(MODES, (None, torch.bfloat16), (False, True), CONVOLUTIONAL):
        layout = torch.channels_last if last else torch.contiguous_format
        on_empty_device()
        label = f"{name} {'fp32' if half is None else 'bf16'} {'NHWC' if last else 'NCHW'}{mode}"
        try:
            case = next(case for case in CASES.values() if case.name.startswith(name))
            model = case.model().cuda().to(memory_format=layout)  # type: ignore[call-overload]
            x = case.inputs()[0][0].cuda().to(memory_format=layout)
            with torch.backends.cudnn.flags(**{"enabled": True, "allow_tf32": True, **MODES[mode]}):
                tries = torch.backends.cudnn.benchmark  # algorithms, in the first step
                for step in ("first", "second") if tries else ("only",):
                    with OpScratch() as ran, torch.autocast("cuda", half or torch.float16, enabled=half is not None):
                        model(x).sum().backward()
                    yield from _calls(f"{label}, {step} step", ran.records)
        except Exception as error:
            yield row(label, real=f"{type(error).__name__}: {error}"[:120])
        model = x = ran = None


def _calls(label: str, records: list[Row]) -> Rows:
    """Yield a row for each distinct convolution, with its arguments."""
    seen: dict[str, Row] = {json.dumps([r["op"], r["args"]], sort_keys=True): r for r in records}
    for number, record in enumerate(r for r in seen.values() if "convolution" in r["op"]):
        name = record["op"].split(".")[1]
        bound = workspace_bound(name, {key: record_of(v) for key, v in record["args"].items()})
        bound += rule_on(record, the_device()).transient_bytes
        sides = "x".join(map(str, record["args"]["input"]["shape"]))
        found = row(f"{label}: {number} {name} of {sides}", bound, None, record["scratch"], "a bound")
        yield {**found, "args": record["args"]}


@_measurement
def attention_backward() -> Rows:
    """Scratch of three kernels' backward, by rows and width."""
    backends = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    for (name, backend), width, num_rows in product(backends.items(), (64, 128), (1024, 4096, 8192)):
        label = f"{name} 1 x 16 x {num_rows} x {width} bf16"
        q, k, v = (
            torch.randn(1, 16, num_rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"
        )
        try:
            with sdpa_kernel(backend), OpScratch() as mode:
                mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                mixed.backward(torch.ones_like(mixed, memory_format=torch.contiguous_format))
            yield row(label, *_two(_largest(mode.records, "attention_backward")))
        except Exception as error:
            yield row(label, real=f"{type(error).__name__}: {error}"[:120])


def _two(pair: tuple[int, int]) -> tuple[int, None, int]:
    return pair[0], None, pair[1]


@_measurement
def attention_kernels() -> Rows:
    """Of each block of calls, how many choose another kernel than was recorded, which is what fxmem predicts."""
    torch.autograd.set_multithreading_enabled(False)
    path = DATA / "attention_torch2.14.1.json"
    choices, capability = json.loads(path.read_text())["choices"], the_device().capability
    recorded = next((rows for name, rows in choices.items() if DEVICES[name].capability == capability), None)
    if recorded is None:
        yield row("choices", real=f"none recorded of capability {capability}")
        return
    probe_attention.choice(probe_attention.AttentionCase())
    for name, block in probe_attention.blocks().items():
        other = []
        for case, expected in zip(block, recorded[name], strict=True):
            found = probe_attention.choice(case)
            if found != expected:
                other.append(f"{expected} is {found}: {case.dtype} {case.width} {case.mask} {case.dropout}")
        yield row(f"{name}: of {len(block)} calls", 0, 0, len(other), note="; ".join(other[:3]))


@_measurement
def budgets() -> Rows:
    """Allocated peaks under two budgets, with AdamW."""
    for name in ("gpt2 fp32", "resnet50 fp32", "bert fp32", "llama bf16"):
        for found in islice(under_budgets(CASES[name], {"budget_of": "allocated"}), 2):
            label = f"{name}, budget at {found['share']:.0%} of the span: {found['budget']:,}"
            if "refused" in found:
                yield row(label, real=found["refused"][:120])
                continue
            real = found["measured"]["allocated"]
            yield row(label, found["planned"]["allocated"], None, real, "EXCEEDED" if found["exceeded"] else "kept")


@_measurement
def reserved() -> Rows:
    """Reserved peaks, in the setting of the environment."""
    if is_emulated() and expandable_segments():
        yield row("expandable segments", real="torch asks NVML first, which the emulated device lacks")
        return
    for name in ("unet fp32", "mlp fp32", "words fp32"):
        real = measured(CASES[name])["reserved"]
        yield row(name, real=real)
        yield row(name, predicted(CASES[name], known_name())["reserved"], None, real)


MEASUREMENTS["reserved_expandable"] = reserved


@_measurement
def context() -> Rows:
    """Device memory that is taken and that PyTorch's allocator does not hold, of other processes too."""

    def outside() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    a = torch.zeros(8, device="cuda")
    yield row("after the first tensor", real=outside())
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(8 * 900, 10)).cuda()
    x: Tensor = torch.zeros(4, 3, 32, 32, device="cuda")
    run_step(lambda: net(x), optimizer=torch.optim.AdamW(net.parameters()))
    yield row("after a step with cuDNN and cuBLAS", CONTEXT_BYTES, None, outside())
    reported = DEVICES[known_name()].memory_bytes
    yield row(f"memory of {torch.cuda.get_device_name()}", reported, None, torch.cuda.mem_get_info()[1])
    del a


def main(name: str, out: Path) -> None:
    """Write the rows of one measurement."""
    torch.set_num_threads(1)
    with out.open("a") as file:
        for found in MEASUREMENTS[name]():
            file.write(json.dumps(found) + "\n")
            file.flush()
    gc.collect()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here")
    warnings.simplefilter("ignore")
    print(f"{sys.argv[1]} on {torch.cuda.get_device_name()}{', which computes nothing' if is_emulated() else ''}")
    main(sys.argv[1], Path(sys.argv[2]))
