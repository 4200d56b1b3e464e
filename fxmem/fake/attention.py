"""``scaled_dot_product_attention`` on fakes of a CUDA device that is not there: the kernel that the device would choose.

In: a GPU. Out: while the body runs, attention on CUDA fakes dispatches to that kernel's op, with its arguments padded as
PyTorch pads them (transformers/attention.cpp, ``scaled_dot_product_attention``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import pad

from fxmem.devices import DeviceModel
from fxmem.op_facts.attention import AttentionCall, attention_kernel

aten = torch.ops.aten


@contextmanager
def attention_of(device: DeviceModel) -> Iterator[None]:
    """Let attention on CUDA fakes choose as on ``device``."""

    def chosen(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        call = _call_of(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        kernel = attention_kernel(call, device.capability, _enabled())
        mask = _additive(attn_mask, query)
        return _KERNELS[kernel](query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)

    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCUDA", "CUDA"):
        library.impl("scaled_dot_product_attention", chosen, key, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _call_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    grouped: bool,
) -> AttentionCall:
    tensors = (query, key, value)
    return AttentionCall(
        dtype=str(query.dtype).removeprefix("torch."),
        query=tuple(query.shape),
        key=tuple(key.shape),
        value=tuple(value.shape),
        has_mask=mask is not None,
        mask_needs_grad=mask is not None and mask.requires_grad,
        dropout=dropout,
        is_causal=is_causal,
        grouped=grouped,
        needs_grad=torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
        rows_dense=all(t.stride(-1) == 1 for t in tensors),
    )


def _enabled() -> frozenset[str]:
    backends = torch.backends.cuda
    flags = {
        "flash": backends.flash_sdp_enabled(),
        "efficient": backends.mem_efficient_sdp_enabled(),
        "cudnn": backends.cudnn_sdp_enabled(),
    }
    return frozenset(name for name, on in flags.items() if on)


def _additive(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A mask of bools as one that is added: a new tensor of the query's dtype."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    out = torch.zeros_like(mask, dtype=query.dtype)
    return out.masked_fill_(mask.logical_not(), float("-inf"))


def _flash(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: float | None, gqa: bool) -> Any:
    """Heads padded to a multiple of 8."""
    width = q.shape[-1]
    scale = width**-0.5 if scale is None else scale
    q, k, v = (_padded(t, 8) for t in (q, k, v))
    out = aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)[0]
    return out if out.shape[-1] == width else out[..., :width]


def _efficient(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: float | None, gqa: bool) -> Any:
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    if mask is not None:
        mask = _aligned(mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, needs_grad, dropout, causal, scale=scale)[0]


def _cudnn(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: float | None, gqa: bool) -> Any:
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    op = aten._scaled_dot_product_cudnn_attention
    return op(q, k, v, mask, needs_grad, dropout, causal, False, scale=scale)[0]


def _math(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: float | None, gqa: bool) -> Any:
    op = aten._scaled_dot_product_attention_math
    return op(q, k, v, mask, dropout, causal, None, scale=scale, enable_gqa=gqa)[0]


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    rest = tensor.shape[-1] % multiple
    return tensor if rest == 0 else pad(tensor, (0, multiple - rest))


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """Rows of a mask begin at multiples of 16 elements: where they do not, it is laid out anew with longer rows."""
    length = mask.shape[-1]
    if length % 16 == 0:
        return mask
    longer = pad(mask, (0, 16 - length % 16))
    return longer[..., :length]


_KERNELS = {"flash": _flash, "efficient": _efficient, "cudnn": _cudnn, "math": _math}
