"""Which kernel ``scaled_dot_product_attention`` runs on CUDA. It cannot be observed without a device, which it asks.

Source: transformers/cuda/sdp_utils.cpp (``select_sdp_backend``), as PyTorch 2.11 to 2.15 have it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What the choice looks at. Shapes are (batch, heads, rows, width); ``dtype`` as "bfloat16"."""

    dtype: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    has_mask: bool
    mask_needs_grad: bool
    dropout: float
    is_causal: bool
    grouped: bool
    """``enable_gqa``."""
    needs_grad: bool
    rows_dense: bool
    """Whether the last dimension of each has stride 1."""


def attention_kernel(call: AttentionCall, capability: tuple[int, int], enabled: frozenset[str]) -> str:
    """Return "cudnn", "flash", "efficient" or "math"; ``enabled``: those that the process's flags allow."""
    order = ("cudnn", "flash", "efficient") if capability[0] in (9, 10) else ("flash", "efficient", "cudnn")
    for name in order:
        if name in enabled and _CHECKS[name](call, capability):
            return name
    return "math"


def _may_flash(call: AttentionCall, capability: tuple[int, int]) -> bool:
    width = call.query[-1]
    return (
        _is_usual(call, grouped=True)
        and capability >= (8, 0)
        and call.dtype in ("float16", "bfloat16")
        and not call.has_mask
        and width == call.key[-1] == call.value[-1]
        and width <= 256
        and not (call.is_causal and call.query[2] != call.key[2])
        and not (call.needs_grad and (8, 6) <= capability <= (8, 9) and width > 192 and call.dropout > 0)
    )


def _may_efficient(call: AttentionCall, capability: tuple[int, int]) -> bool:
    dtypes = ("float32", "float16", "bfloat16") if capability >= (8, 0) else ("float32", "float16")
    return _is_usual(call, grouped=False) and call.dtype in dtypes


def _may_cudnn(call: AttentionCall, capability: tuple[int, int]) -> bool:
    widths = (call.query[-1], call.value[-1])
    return (
        _is_usual(call, grouped=True)
        and capability >= (8, 0)
        and call.dtype in ("float16", "bfloat16")
        and call.dropout == 0
        and all(width % 8 == 0 and width <= 128 for width in widths)
        and not call.mask_needs_grad
    )


def _is_usual(call: AttentionCall, *, grouped: bool) -> bool:
    """Four dimensions, nothing empty, and as many heads of keys unless grouped ones are taken."""
    if any(len(shape) != 4 or 0 in shape for shape in (call.query, call.key, call.value)) or not call.rows_dense:
        return False
    if call.query[0] != call.key[0] or call.key[1] != call.value[1]:
        return False
    return call.query[1] == call.key[1] or (grouped and call.grouped and call.query[1] % call.key[1] == 0)


_CHECKS = {"flash": _may_flash, "efficient": _may_efficient, "cudnn": _may_cudnn}
