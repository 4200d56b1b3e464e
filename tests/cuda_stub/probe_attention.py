"""Records which attention kernel PyTorch chooses on the emulated device, and what it passes to it: ``python -m
tests.cuda_stub.launch DEVICE -m tests.cuda_stub.probe_attention OUT.json`` adds the device to the file.

Choices are one letter a call, in the order of ``attention_cases.blocks``. ``python -m tests.cuda_stub.probe_attention
--table OUT.json`` prints the table of the documentation from them.
"""

from __future__ import annotations

import json
import sys
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda_stub.attention_cases import (
    BACKENDS,
    AttentionCase,
    blocks,
    call,
    module_traces,
    setting_of,
    tensors_of,
    trace_of,
    traced,
)

TRACED_ON = ("h100-80gb", "a100-80gb", "t4")
NAMES = {"f": "flash", "e": "efficient", "c": "cudnn", "m": "math"}
_LETTER = {backend.value: letter for letter, backend in BACKENDS.items()}


class Reached(Exception):
    """An op that computes."""


class UpToKernel(TorchDispatchMode):
    """Lets only ops run that prepare arguments."""

    PREPARE = ("unsqueeze", "scalar_tensor", "where", "constant_pad_nd", "slice", "expand")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if name not in self.PREPARE:
            raise Reached(name)
        return func(*args, **(kwargs or {}))


def first_kernel(case: AttentionCase) -> str:
    tensors = tensors_of(case, "cuda")
    with setting_of(case), UpToKernel():
        try:
            call(case, tensors)
        except Reached as reached:
            return next((letter for letter, name in NAMES.items() if f"{name}_attention" in str(reached)), "m")
    raise AssertionError(case)


def choice(case: AttentionCase) -> str:
    """Return what torch says it chooses; for three dimensions what it runs, as it is asked before it knows of gradients."""
    if case.layout == "3d":
        return first_kernel(case)
    query, key, value, mask = tensors_of(case, "cuda")
    with setting_of(case):
        try:
            found = torch._fused_sdp_choice(query, key, value, mask, case.dropout, case.causal, enable_gqa=case.grouped)
        except RuntimeError:
            return "-"
    return _LETTER[found]


def record(out: Path) -> None:
    warnings.simplefilter("ignore")
    torch.autograd.set_multithreading_enabled(False)
    choice(AttentionCase())  # the order of the kernels is set at the first call
    device = torch.cuda.get_device_properties(0).name.split()[0]
    known: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    known["head"] = {
        "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip
    known.setdefault("choices", {})[device] = {name: "".join(map(choice, cases)) for name, cases in blocks().items()}
    if device in TRACED_ON:
        lines = known.setdefault("lines", [])
        places = {line: place for place, line in enumerate(lines)}

        def numbered(trace: list[str]) -> list[int]:
            for line in trace:
                if line not in places:
                    places[line] = len(lines)
                    lines.append(line)
            return [places[line] for line in trace]

        traces = {name: trace_of(case) for name, case in traced().items()}
        known.setdefault("traces", {})[device] = {name: numbered(trace) for name, trace in traces.items()}
        modules = module_traces()
        known.setdefault("modules", {})[device] = {name: numbered(trace) for name, trace in modules.items()}
    out.write_text(as_json(known))


def as_json(known: dict[str, Any]) -> str:
    """One line for each thing that is recorded."""

    def part(value: Any, depth: int) -> str:
        if depth == 0 or not isinstance(value, (dict, list)) or not value:
            return json.dumps(value)
        if isinstance(value, list):
            return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        return "{\n" + ",\n".join(f"{json.dumps(k)}: {part(v, depth - 1)}" for k, v in value.items()) + "\n}"

    return part(known, 3) + "\n"


# -- the table of the documentation -----------------------------------------------------------------------------------

COLUMNS = {"t4": "7.5", "a100-80gb": "8.0", "l4": "8.6, 8.9", "h100-80gb": "9.0", "b200": "10.0", "rtx5090": "12.0"}
DTYPE_NAMES = {"float32": "fp32", "float16": "fp16, bf16"}
"""bf16 is as fp16, but for 7.5, where it is always math."""
MASK_NAMES = {"": "none", "bool b1qk": "yes", "add b1qk grad": "needs grad"}


def table(known: dict[str, Any]) -> list[str]:
    """Return the lines: training with as many rows of keys as of queries, widths that choose alike in one row."""
    by_kind: dict[tuple[str, str, str], dict[int, tuple[str, ...]]] = {}
    for place, case in enumerate(blocks()["widths"]):
        if case.grads == "qkv" and not case.causal and case.mask in MASK_NAMES and case.dtype in DTYPE_NAMES:
            kind = DTYPE_NAMES[case.dtype], MASK_NAMES[case.mask], "yes" if case.dropout else "no"
            chosen = tuple(NAMES[known["choices"][device]["widths"][place]] for device in COLUMNS)
            by_kind.setdefault(kind, {})[case.width] = chosen
    rows: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for kind, by_width in by_kind.items():
        for chosen in dict.fromkeys(by_width.values()):
            widths = ", ".join(str(width) for width, found in by_width.items() if found == chosen)
            rows.setdefault((widths, *chosen), []).append(kind)
    lines = [["dtype", "mask", "dropout", "head widths", *COLUMNS.values()], ["---"] * (4 + len(COLUMNS))]
    lines += [[*kind, *rest] for rest, kinds in rows.items() for kind in merged(kinds)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def merged(kinds: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return ``kinds`` with those that differ in one place only put together, place by place."""
    for place in (2, 1, 0):
        groups: dict[tuple[str, ...], list[str]] = {}
        for kind in kinds:
            groups.setdefault((*kind[:place], *kind[place + 1 :]), []).append(kind[place])
        kinds = [(*rest[:place], ", ".join(parts), *rest[place:]) for rest, parts in groups.items()]
    return kinds


if __name__ == "__main__":
    if sys.argv[1] == "--table":
        print(*table(json.loads(Path(sys.argv[2]).read_text())), sep="\n")
    else:
        record(Path(sys.argv[1]))
