"""Calls of attention to ask a CUDA device about, and what a call dispatches: for the stub's probe and the test on fakes.

Tensors are named by letters: b batch, h heads, q rows of the query, k rows of the key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LETTERS = {"flash": "f", "efficient": "e", "cudnn": "c", "math": "m", None: "-"}
"""Kernel -> how it is recorded. None: none of those allowed takes the call."""
BACKENDS = {
    "f": SDPBackend.FLASH_ATTENTION, "e": SDPBackend.EFFICIENT_ATTENTION,
    "c": SDPBackend.CUDNN_ATTENTION, "m": SDPBackend.MATH,
}  # fmt: skip
SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "uint64": "u64", "uint8": "u8"}


@dataclass(frozen=True)
class AttentionCase:
    dtype: str = "bfloat16"
    width: int = 64
    value_width: int = 0
    """0: the width."""
    rows: tuple[int, int] = (128, 128)
    """Of the query and of the key."""
    heads: tuple[int, int, int] = (4, 4, 4)
    mask: str = ""
    """One of MASKS."""
    dropout: float = 0.0
    causal: bool = False
    grads: str = "qkv"
    """Which of the tensors require grad; "none": all, but under ``no_grad``."""
    grouped: bool = False
    layout: str = "plain"
    allowed: str = ""
    """Letters of the kernels allowed, "" for all; ">" before them: in that order. "deterministic"."""
    autocast: str = ""
    batch: int = 2


# -- the calls --------------------------------------------------------------------------------------------------------

DTYPES = ("float32", "float16", "bfloat16")
WIDTHS = (8, 20, 32, 36, 64, 80, 96, 128, 160, 192, 200, 256, 264)
MASKS = (
    "bool b1qk", "bool 11qk", "bool qk", "bool b11k", "bool 1k", "bool bhqk", "bool hqk", "bool b1qk expanded",
    "bool b1qk columns", "bool b1qk wide", "bool b1q1",
    "add b1qk", "add 11qk", "add qk", "add b11k", "add bhqk", "add hqk", "add b1qk grad", "add qk grad", "add bhqk grad",
    "add b1qk expanded", "add b1qk columns", "add b1qk wide", "add b1q1", "float b1qk",
)  # fmt: skip
"""Kind ("bool", "add" of the query's dtype, "float"), dimensions, and how it lies in memory or that it requires grad."""
HEADS = ((4, 2, 2), (4, 1, 1), (4, 4, 4), (4, 3, 3), (4, 2, 1), (4, 4, 2), (4, 1, 4), (4, 8, 8), (4, 4, 1))
ROWS = ((1, 128), (1, 1), (128, 1), (77, 77), (197, 197), (77, 128), (128, 77), (2, 2))
VALUES = (
    (64, 32), (64, 128), (192, 128), (192, 192), (128, 192), (128, 256), (256, 128), (256, 256), (256, 192), (64, 20),
    (20, 64), (36, 40), (64, 264), (264, 64), (40, 44),
)  # fmt: skip
LAYOUTS = (
    "rows", "packed", "strided", "columns", "key_columns", "offset1", "offset2", "offset4", "offset8", "3d", "2d", "5d",
)  # fmt: skip
ALLOWED = (
    "f", "e", "c", "m", "fe", "fc", "ec", "em", "fm", "cm", ">mf", ">fcem", ">ecfm", ">efcm", ">mfec", ">fc", ">ce",
    ">cfem", "deterministic",
)  # fmt: skip


def blocks() -> dict[str, list[AttentionCase]]:
    """Return the calls whose choice is recorded, by the name of their block, in the order of their letters."""
    case = AttentionCase
    masked = (("", False), ("", True), ("bool b1qk", False), ("add b1qk", False), ("add b1qk grad", False))
    return {
        "widths": [
            case(dtype, width, mask=mask, causal=causal, dropout=dropout, grads=grads)
            for dtype, width, (mask, causal), dropout, grads in product(
                DTYPES, WIDTHS, masked, (0.0, 0.1), ("qkv", "", "none")
            )
        ],
        "rows": [
            case(dtype, width, rows=rows, mask=mask, causal=causal, dropout=dropout)
            for dtype, width, rows, (mask, causal), dropout in product(
                DTYPES, (64, 128), ROWS, masked[:3], (0.0, 0.1, 0.125)
            )
        ],
        "values": [
            case(dtype, width, value_width, mask=mask, grads=grads)
            for dtype, (width, value_width), mask, grads in product(
                DTYPES, VALUES, ("", "bool b1qk"), ("qkv", "", "none", "k")
            )
        ],
        "heads": [
            case(dtype, width, heads=heads, grouped=grouped, allowed=allowed, mask=mask)
            for dtype, width, heads, grouped, allowed, mask in product(
                DTYPES, (64, 160), HEADS, (False, True), ("", "f", "e", "c"), ("", "add qk")
            )
        ],
        "masks": [
            case(dtype, width, rows=(rows, rows), mask=mask, grads=grads, dropout=dropout)
            for dtype, width, rows, mask, grads, dropout in product(
                DTYPES, (64, 20), (128, 77), MASKS, ("qkv", "", "v"), (0.0, 0.1)
            )
        ],
        "allowed": [
            case(dtype, width, mask=mask, dropout=dropout, allowed=allowed)
            for dtype, width, mask, dropout, allowed in product(
                DTYPES, (20, 64, 160, 192, 256), ("", "bool b1qk", "add qk grad"), (0.0, 0.1, 0.5), ALLOWED
            )
        ],
        "unbatched": [
            case(dtype, width, layout="3d", mask=mask, dropout=dropout, batch=1, heads=heads, grouped=grouped)
            for dtype, width, mask, dropout, heads, grouped in product(
                DTYPES, (20, 64), ("", *MASKS), (0.0, 0.1), HEADS[:3], (False, True)
            )
        ],
        "layouts": [
            case(dtype, width, layout=layout, mask=mask, dropout=dropout, batch=batch)
            for dtype, width, layout, mask, dropout, batch in product(
                DTYPES, (1, 4, 64), LAYOUTS, ("", "bool qk"), (0.0, 0.1), (2, 1)
            )
        ],
        "batches": [
            case(dtype, 8, rows=(2, 2), batch=batch, heads=(heads,) * 3, allowed=allowed)
            for dtype, (batch, heads), allowed in product(
                DTYPES, ((65535, 1), (65536, 1), (1, 65535), (1, 65536)), ("", "c", "e")
            )
        ],
    }


def traced() -> dict[str, AttentionCase]:
    """Return the calls of which all that is dispatched is recorded, forward and backward, by their names."""
    case = AttentionCase
    refused = ("bool b1q1", "add b1q1", "float b1qk")  # by the efficient kernel itself, with an error
    masks = [mask for mask in MASKS if mask not in refused]
    found = [
        *(case(dtype, width) for dtype, width in product(DTYPES, (8, 20, 64, 192, 256, 264))),
        *(case(mask=mask, rows=(rows, rows)) for mask, rows in product(masks, (128, 77))),
        *(case("float32", mask=mask, rows=(77, 77)) for mask in masks),
        *(case(width=width, causal=True, dropout=dropout) for width, dropout in product((20, 64), (0.0, 0.1, 0.125))),
        *(case(heads=heads, grouped=True, allowed=only) for heads, only in product(HEADS, ("", "f", "e", "c", "m"))),
        *(case(heads=heads, allowed=only) for heads, only in product(((4, 1, 1), (4, 4, 1)), ("", "e", "c"))),
        *(case("float32", heads=heads, grouped=True, grads=g) for heads, g in product(HEADS[:4], ("qkv", ""))),
        *(case(width=64, value_width=32, mask=mask) for mask in ("", "bool b1qk")),
        *(case(layout=layout, width=width) for layout, width in product(LAYOUTS, (64, 20))),
        *(
            case(layout="3d", mask=mask, allowed=only, batch=1)
            for mask, only in product(
                ("", "bool hqk", "add qk", "bool 11qk", "add hqk grad", "bool b11k"), ("", "e", "m")
            )
        ),
        *(case(grads=grads, allowed=only) for grads, only in product(("", "q", "v", "none"), ("", "f", "e", "m"))),
        *(case("float32", autocast=to, mask=mask) for to, mask in product(DTYPES[1:], ("", "bool b1qk", "add b1qk"))),
        *(
            case("float32", autocast="bfloat16", grads="none", dropout=d, width=w)
            for d, w in product((0.0, 0.1), (64, 20))
        ),
        *(case("float32", mask=mask, allowed="m") for mask in ("", "bool b1qk", "add qk grad")),
        *(case(mask=mask, allowed="m", dropout=d) for mask, d in product(("", "bool b1qk", "add qk grad"), (0.0, 0.1))),
        case(allowed="m", causal=True),
        case(rows=(0, 128)),
        case(rows=(128, 0), mask="bool qk"),
        case(rows=(77, 128), causal=True),
    ]
    return {name_of(one): one for one in found}


def name_of(case: AttentionCase) -> str:
    """Return what distinguishes ``case`` from the plain one."""
    fields = vars(case).items()
    return " ".join(f"{name}={value!s}" for name, value in fields if value != getattr(AttentionCase(), name)) or "plain"


# -- their tensors ----------------------------------------------------------------------------------------------------


def tensors_of(case: AttentionCase, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return query, key, value and mask."""
    rows, keys = case.rows
    value_width = case.value_width or case.width
    shapes = zip("qkv", case.heads, (rows, keys, keys), (case.width, case.width, value_width), strict=True)
    qkv = []
    for name, heads, length, width in shapes:
        needs_grad = case.grads == "none" or name in case.grads
        options = {"dtype": getattr(torch, case.dtype), "device": device, "requires_grad": needs_grad}
        layout = case.layout if name == "k" or not case.layout.startswith("key_") else "plain"
        qkv.append(
            _laid_out(layout.removeprefix("key_"), (case.batch, heads, length, width), options, "qkv".index(name))
        )
    return qkv[0], qkv[1], qkv[2], _mask_of(case, device)


def _laid_out(layout: str, shape: tuple[int, int, int, int], options: dict[str, Any], which: int) -> Tensor:
    batch, heads, rows, width = shape
    if layout.startswith("offset"):
        offset = int(layout.removeprefix("offset"))
        return torch.empty(offset + math.prod(shape), **options)[offset:].view(shape)
    makes: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: torch.empty(shape, **options),
        "rows": lambda: torch.empty(batch, rows, heads, width, **options).transpose(1, 2),
        "packed": lambda: torch.empty(batch, rows, 3, heads, width, **options)[:, :, which].transpose(1, 2),
        "strided": lambda: torch.empty(batch, heads, rows, 2 * width, **options)[..., ::2],
        "columns": lambda: torch.empty(batch, heads, width, rows, **options).transpose(2, 3),
        "2d": lambda: torch.empty(rows, width, **options),
        "3d": lambda: torch.empty(heads, rows, width, **options),
        "5d": lambda: torch.empty(batch, 2, heads, rows, width, **options),
    }
    return makes[layout]()


def _mask_of(case: AttentionCase, device: str) -> Tensor | None:
    if not case.mask:
        return None
    kind, letters, *how = case.mask.split()
    sizes = {"b": case.batch, "h": case.heads[0], "q": case.rows[0], "k": case.rows[1], "1": 1}
    shape = [sizes[letter] for letter in letters]
    dtype = {"bool": torch.bool, "add": getattr(torch, case.dtype), "float": torch.float32}[kind]
    options = {"dtype": dtype, "device": device, "requires_grad": "grad" in how}
    if "expanded" in how:
        return torch.empty(*shape[:-2], 1, shape[-1], **options).expand(shape)
    if "columns" in how:
        return torch.empty(*shape[:-2], shape[-1], shape[-2], **options).transpose(-1, -2)
    if "wide" in how:
        return torch.empty(*shape[:-1], shape[-1] + 5, **options)[..., : shape[-1]]
    return torch.empty(shape, **options)


@contextmanager
def setting_of(case: AttentionCase) -> Iterator[None]:
    """Let the body run with the kernels allowed, autocast and gradients of ``case``."""
    with ExitStack() as stack:
        if case.allowed == "deterministic":
            torch.use_deterministic_algorithms(True)
            stack.callback(torch.use_deterministic_algorithms, False)
        elif case.allowed:
            wanted = [BACKENDS[letter] for letter in case.allowed.removeprefix(">")]
            stack.enter_context(sdpa_kernel(wanted, set_priority=case.allowed.startswith(">")))
        if case.autocast:
            stack.enter_context(torch.autocast("cuda", getattr(torch, case.autocast)))
        stack.enter_context(torch.set_grad_enabled(case.grads != "none"))
        yield


def call(case: AttentionCase, tensors: tuple[Tensor, Tensor, Tensor, Tensor | None]) -> Tensor:
    query, key, value, mask = tensors
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, case.dropout, case.causal, enable_gqa=case.grouped
    )


# -- what a call dispatches -------------------------------------------------------------------------------------------


class Trace(TorchDispatchMode):
    """Writes down every dispatched op: its name, what it is given, what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name = str(func).removeprefix("aten.").removesuffix(".default")
        if name not in ("detach", "prim.device", "lift_fresh"):
            said = [args, *(value for key, value in kwargs.items() if key not in ("device", "layout", "pin_memory"))]
            given, made = (" ".join(map(_text, tree_leaves(values))) for values in (said, output))
            self.lines.append(f"{name} {given} -> {made}")
        return output


def _text(value: Any) -> str:
    """A tensor as its dtype, shape and, where it is not contiguous, strides."""
    if not isinstance(value, Tensor):
        return f"{value:.6g}" if isinstance(value, float) else str(value).removeprefix("torch.")
    if value.dim() == 0 and value.device.type == "cpu":
        return "cpu"
    name = str(value.dtype).removeprefix("torch.")
    dense = value.is_contiguous()
    strides = "" if dense else "/" + ",".join(map(str, value.stride()))
    return f"{SHORT.get(name, name)}[{','.join(map(str, value.shape))}{strides}]"


def trace_of(case: AttentionCase, device: str = "cuda") -> list[str]:
    """Return what ``case`` dispatches forward and backward, or the error that it raises."""
    tensors = tensors_of(case, device)
    with Trace() as trace:
        try:
            with setting_of(case):
                output = call(case, tensors)
            if output.requires_grad:
                trace.lines.append("backward")
                wanted = [t for t in tensors if t is not None and t.requires_grad]
                torch.autograd.grad(output, wanted, output.detach())
        except (RuntimeError, ValueError):
            trace.lines.append("an error")
    return trace.lines


# -- modules that call attention --------------------------------------------------------------------------------------


def module_traces(device: str = "cuda") -> dict[str, list[str]]:
    """Return, by name, what the modules of ``torch.nn`` that contain attention dispatch to it, forward and backward."""
    found = {}
    for dtype, autocast, masked, how in product(DTYPES, ("", "bfloat16"), (False, True), ("train", "eval", "weights")):
        if autocast and dtype != "float32":
            continue
        name = f"{dtype} autocast={autocast} masked={masked} {how}"
        found[f"MultiheadAttention {name}"] = _module_trace("attention", dtype, autocast, masked, how, device)
        if how != "weights":
            found[f"TransformerEncoderLayer {name}"] = _module_trace("layer", dtype, autocast, masked, how, device)
    return found


def _module_trace(which: str, dtype: str, autocast: str, masked: bool, how: str, device: str) -> list[str]:
    options = {"batch_first": True, "dtype": getattr(torch, dtype), "device": device}
    module: Any
    if which == "attention":
        module = torch.nn.MultiheadAttention(128, 4, dropout=0.1, **options)  # type: ignore[arg-type]
    else:
        module = torch.nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, **options)  # type: ignore[arg-type]
    module.train(how != "eval")
    x = torch.empty(2, 77, 128, dtype=getattr(torch, dtype), device=device, requires_grad=True)
    padding = torch.empty(2, 77, dtype=torch.bool, device=device) if masked else None
    with Trace() as trace:
        with torch.autocast("cuda", getattr(torch, autocast or "bfloat16"), enabled=bool(autocast)):
            if which == "attention":
                output = module(x, x, x, key_padding_mask=padding, need_weights=how == "weights")[0]
            else:
                output = module(x, src_key_padding_mask=padding)
        torch.autograd.grad(output, x, output.detach())
    return [line for line in trace.lines if "attention" in line] or ["no fused attention"]


def plain_calls() -> list[AttentionCase]:
    """Return the calls of the table in the documentation."""
    return [replace(one, grads="qkv") for one in blocks()["widths"] if one.grads == "qkv"]
