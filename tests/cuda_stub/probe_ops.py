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
import weakref
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxmem.devices import DeviceModel, device_named
from fxmem.fake.fake_tensors import FakeWorld, ScalarReads
from fxmem.profiling import cuda_scratch_libraries  # noqa: F401  (its rules)
from fxmem.profiling.cuda_reduction import TensorRecord
from fxmem.profiling.cuda_scratch import Scratch, has_rule, scratch_of
from fxmem.profiling.device_memory import DeviceMemory
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


class OnDevice(DeviceMemory):
    """Counts the bytes that are asked for on CUDA, and none elsewhere."""

    def weight(self, device_type: str, nbytes: int) -> int:
        return nbytes if device_type == "cuda" else 0


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
        if after >= before:
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


def record_of(value: Any) -> Any:
    """What ``plain`` made, as the rules of ``fxmem.profiling.cuda_scratch`` take it."""
    if isinstance(value, dict):
        return TensorRecord(tuple(value["shape"]), tuple(value["strides"]), value["dtype"], value.get("offset", 0))
    return [record_of(v) for v in value] if isinstance(value, list) else value


def rule_on(record: Record, device: DeviceModel) -> Scratch:
    return scratch_of(record["op"], {name: record_of(v) for name, v in record["args"].items()}, device)


def on_fakes(make: Any, call: Any, device: DeviceModel) -> tuple[Record, Record, bool]:
    """Peaks that fakes show, the same with the rules' scratch added, and whether all rules met are exact."""
    inputs = make()
    world = FakeWorld(inputs)
    fakes = [world.fake(t) for t in inputs]
    truth = {"peak": 0, "kept": 0, "exact": True}

    def on_op(func: Any, args: Any, kwargs: Any, output: Any) -> None:
        scratch = rule_on({"op": str(func), "args": arguments(func, args, kwargs)}, device)
        if scratch.kept_bytes:  # less what the fakes of fxmem show of it by themselves
            storage = output.untyped_storage()
            unseen = max(0, scratch.kept_bytes + output.nbytes - storage.nbytes())
            truth["kept"] += unseen
            weakref.finalize(storage, lambda: truth.update(kept=truth["kept"] - unseen))
        truth["peak"] = max(truth["peak"], tracker.live_bytes + truth["kept"] + scratch.transient_bytes)
        truth["exact"] &= scratch.exact

    with world.active():
        tracker = StorageTracker(on_op=on_op, memory=OnDevice())
        tracker.hold(fakes)
        start = 0

        def mark() -> int:
            nonlocal start
            start = tracker.live_bytes
            tracker.peak_bytes, truth["peak"] = start, start + truth["kept"]
            kept.append(truth["kept"])
            return start

        kept: list[int] = []
        both: list[int] = []

        def peak() -> int:
            both.append(truth["peak"] - start - kept[-1])
            return tracker.peak_bytes

        with tracker, ScalarReads():
            seen = steps(call, fakes, peak, mark)
    return seen, dict(zip(("forward", "backward"), both, strict=True)), bool(truth["exact"])


def measure(case: Case, ops: dict[str, Record], device: DeviceModel) -> Record:
    name, make, call = case
    gc.collect()
    row: Record = {"case": name}
    try:
        row["stub"], records = on_device(make, call)
        ops.update((json.dumps(record, sort_keys=True), record) for record in records)
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {str(error)[:100]}"
        return row
    try:
        row["fakes"], row["fakes_and_rules"], row["exact"] = on_fakes(make, call, device)
    except Exception as error:
        row["fakes_failed"] = f"{type(error).__name__}: {str(error)[:100]}"
    return row


def main(out: Path, wanted: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.autograd.set_multithreading_enabled(False)
    a = torch.zeros(64, 64, device="cuda", requires_grad=True)
    torch.nn.functional.linear(a @ a, a, a[0]).sum().backward()  # cuBLAS's workspace is taken once, and stays
    chosen = [case for case in cases() if not wanted or any(text in case[0] for text in wanted)]
    properties = torch.cuda.get_device_properties(0)
    device = device_named(properties.name.split()[0])
    ops: dict[str, Record] = {}
    rows = [measure(case, ops, device) for case in chosen]
    head = {
        "device": device.name, "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
        "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip
    names = {record["op"] for record in ops.values()}
    kept = [r for r in ops.values() if r["scratch"] or r["kept"] > 0 or has_rule(r["op"])]
    nothing = sorted(names - {record["op"] for record in kept})
    lines, table = (",\n".join(map(json.dumps, part)) for part in (kept, rows))
    parts = {
        "head": json.dumps(head),
        "take_nothing": json.dumps(nothing),
        "ops": f"[\n{lines}\n]",
        "cases": f"[\n{table}\n]",
    }
    out.write_text("{" + ",\n".join(f'"{name}": {text}' for name, text in parts.items()) + "}\n")
    report(rows)


def report(rows: list[Record]) -> None:
    """Print how many cases fakes alone, and fakes with the rules, put right, and the cases that are not."""
    good = [r for r in rows if "fakes" in r]
    right = [r for r in good if r["fakes_and_rules"] == r["stub"]]
    alone = sum(r["fakes"] == r["stub"] for r in good)
    print(f"{len(rows)} cases: fakes alone equal the device in {alone}, with the rules in {len(right)}")
    for r in rows:
        if r not in right:
            off = {k: r["fakes_and_rules"][k] - r["stub"][k] for k in r["stub"]} if r in good else "?"
            why = r.get("failed") or r.get("fakes_failed") or ("" if r["exact"] else "a rule is a bound")
            print(f"  {r['case']}: rules less device {off} {why}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
