"""Measures on the emulated device what every op takes inside: ``python -m tests.cuda_stub.launch DEVICE -m
tests.cuda_stub.probe_ops OUT.json``.

Each case of ``op_cases`` runs forward and backward twice: as it is, for the real allocator's peak, and under a dispatch
mode that looks at the allocator before and after every ATen op. An op's scratch is the highest number of requested
bytes while it ran less the number after it; what it kept is what it added. Then once on fakes, for the peak they show.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxmem.fake.fake_tensors import FakeWorld, ScalarReads
from fxmem.profiling.storage_tracker import StorageTracker
from tests.cuda_stub.op_cases import Case, cases

Record = dict[str, Any]


def requested(what: str) -> int:
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{what}"])


def plain(value: Any) -> Any:
    """A tensor as {shape, strides, dtype, offset}; everything else as JSON can hold it."""
    if isinstance(value, Tensor):
        record = {"shape": list(value.shape), "strides": list(value.stride()), "dtype": str(value.dtype).split(".")[1]}
        return {**record, "offset": value.storage_offset()} if value.storage_offset() else record
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if isinstance(value, (int, float, bool, str, type(None))) else str(value).removeprefix("torch.")


def arguments(func: Any, args: Any, kwargs: Any) -> Record:
    names = [argument.name for argument in func._schema.arguments]
    return {name: plain(value) for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items()}


class OpScratch(TorchDispatchMode):
    """Notes (op, arguments, scratch bytes, kept bytes beyond the outputs' own) of every dispatched op."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Record] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        noted = arguments(func, args, kwargs or {})
        storages = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        before = requested("current")
        torch.cuda.reset_peak_memory_stats()
        output = func(*args, **(kwargs or {}))
        after, peak = requested("current"), requested("peak")
        new = {t.untyped_storage().data_ptr(): t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_cuda}
        own = sum(t.numel() * t.element_size() for key, t in new.items() if key not in storages)
        if not func._schema.is_mutable and after >= before:
            self.records.append({"op": str(func), "args": noted, "scratch": peak - after, "kept": after - before - own})
        return output


def steps(
    call: Callable[..., Tensor], inputs: list[Tensor], peak: Callable[[], int], mark: Callable[[], int]
) -> Record:
    """Run forward and backward; return the highest byte numbers above the start of each."""
    start = mark()
    output = call(*inputs)
    forward = peak() - start
    gradient = torch.zeros_like(output)
    start = mark()
    output.backward(gradient)
    return {"forward": forward, "backward": peak() - start}


def on_device(make: Any, call: Any) -> tuple[Record, list[Record]]:
    def mark() -> int:
        torch.cuda.reset_peak_memory_stats()
        return requested("current")

    inputs = make()
    seen = steps(call, inputs, lambda: requested("peak"), mark)
    for tensor in inputs:
        tensor.grad = None
    with OpScratch() as mode:
        call(*inputs).backward(torch.zeros_like(call(*inputs).detach()))
    return seen, mode.records


def on_fakes(make: Any, call: Any) -> Record:
    inputs = make()
    world = FakeWorld(inputs)
    fakes = [world.fake(t) for t in inputs]
    with world.active():
        tracker = StorageTracker()
        tracker.hold(fakes)

        def mark() -> int:
            tracker.peak_bytes = tracker.live_bytes
            return tracker.live_bytes

        with tracker, ScalarReads():
            return steps(call, fakes, lambda: tracker.peak_bytes, mark)


def measure(case: Case, ops: dict[str, Record]) -> Record:
    name, make, call = case
    gc.collect()
    row: Record = {"case": name}
    try:
        row["stub"], records = on_device(make, call)
        keys = []
        for record in records:
            key = json.dumps(record, sort_keys=True)
            ops.setdefault(key, record)
            keys.append(key)
        row["ops"] = keys
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {str(error)[:100]}"
        return row
    try:
        row["fakes"] = on_fakes(make, call)
    except Exception as error:
        row["fakes_failed"] = f"{type(error).__name__}: {str(error)[:100]}"
    return row


def main(out: Path, wanted: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.autograd.set_multithreading_enabled(False)
    a = torch.zeros(64, 64, device="cuda", requires_grad=True)
    torch.nn.functional.linear(a @ a, a, a[0]).sum().backward()  # cuBLAS's workspace is taken once, and stays
    chosen = [case for case in cases() if not wanted or any(text in case[0] for text in wanted)]
    ops: dict[str, Record] = {}
    rows = [measure(case, ops) for case in chosen]
    numbers = {key: i for i, key in enumerate(ops)}
    for row in rows:
        row["ops"] = list(dict.fromkeys(numbers[key] for key in row.get("ops", ())))
    properties = torch.cuda.get_device_properties(0)
    head = {
        "device": properties.name.split()[0], "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
        "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip
    lines = ",\n".join(json.dumps(op) for op in ops.values())
    table = ",\n".join(json.dumps(row) for row in rows)
    out.write_text(f'{{"head": {json.dumps(head)},\n"ops": [\n{lines}\n],\n"cases": [\n{table}\n]}}\n')
    print(
        f"{len(rows)} cases, {len(ops)} op calls; failed:",
        *[r for r in rows if "failed" in r or "fakes_failed" in r],
        sep="\n  ",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
