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
from fxmem.errors import InputError
from fxmem.op_facts.attention import CUDNN_FIRST, DEFAULT_ORDER, AttentionCall, AttentionSettings, attention_kernel
from fxmem.torch_patches import kernels_on_cuda
from fxmem.torch_private import attention_order

aten = torch.ops.aten
_MASK_ALIGNMENT = 8
"""Rows of a mask begin at multiples of this many elements for the efficient kernel."""


@contextmanager
def attention_of(device: DeviceModel) -> Iterator[None]:
    """Let attention on CUDA fakes choose as on ``device``.

    Errors: ``InputError`` in the body where no kernel that is enabled takes a call.
    """

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
        if 0 in (query.numel(), key.numel(), value.numel()):
            return _of_nothing(query, key, value)
        if _has_no_batch(query, key, value):
            q, k, v, mask = batch_of_one(query, key, value, attn_mask)
            return chosen(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa).squeeze(0)
        call = call_of(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        kernel = attention_kernel(call, device.capability, settings())
        if kernel is None:
            raise InputError(
                f"no attention kernel that is enabled takes this call on {device.name} ({call.dtype}, query "
                f"{call.query}, key {call.key}); allow another by torch.nn.attention.sdpa_kernel"
            )
        mask = _additive(attn_mask, query)
        output: torch.Tensor = _KERNELS[kernel](query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
        return output

    with kernels_on_cuda({"scaled_dot_product_attention": chosen}, with_autograd=True):
        yield


def call_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    grouped: bool,
) -> AttentionCall:
    """Return what the choice looks at in these tensors and in the mode of gradients."""
    q, k, v = query, key, value
    offsets = [int(t.storage_offset()) * t.element_size() if t.numel() else 0 for t in (q, k, v)]
    return AttentionCall(
        dtype=str(query.dtype).removeprefix("torch."),
        query=tuple(query.shape),
        key=tuple(key.shape),
        value=tuple(value.shape),
        last_strides=(q.stride(-1), k.stride(-1), v.stride(-1)),
        offset_bytes=(offsets[0], offsets[1], offsets[2]),
        mask=None if mask is None else tuple(mask.shape),
        mask_last_stride=1 if mask is None else mask.stride(-1),
        mask_needs_grad=mask is not None and mask.requires_grad,
        dropout=dropout,
        is_causal=is_causal,
        grouped=grouped,
        needs_grad=_need_grad(q, k, v),
    )


def batch_of_one(*tensors: torch.Tensor | None) -> list[Any]:
    """Return query, key, value and mask with four dimensions."""
    return [t if t is None else _four_dimensional(t) for t in tensors]


def _four_dimensional(tensor: torch.Tensor) -> torch.Tensor:
    while tensor.dim() < 4:
        tensor = tensor.unsqueeze(0)
    return tensor


def torch_release() -> tuple[int, int]:
    """Return the major and minor version of torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def settings() -> AttentionSettings:
    """Return what this process allows at present (``torch.nn.attention.sdpa_kernel``, determinism) and its torch."""
    backends = torch.backends.cuda
    flags = {
        "flash": backends.flash_sdp_enabled(),
        "efficient": backends.mem_efficient_sdp_enabled(),
        "cudnn": backends.cudnn_sdp_enabled(),
        "math": backends.math_sdp_enabled(),
    }
    order = tuple(name.lower().split("_")[0] for name in attention_order() if name != "OVERRIDEABLE")
    return AttentionSettings(
        enabled=frozenset(name for name, on in flags.items() if on),
        order=None if order == DEFAULT_ORDER or (order == CUDNN_FIRST and torch.cuda.is_available()) else order,
        deterministic=torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
        torch_version=torch_release(),
    )


def _has_no_batch(*tensors: torch.Tensor) -> bool:
    """Whether torch takes these for a batch of one: from 2.14 (NOTE [Versions] in fxmem.op_facts.attention)."""
    return torch_release() >= (2, 14) and all(t.dim() == 3 for t in tensors)


def _need_grad(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _of_nothing(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Zeros that depend on all three, so that each has a gradient."""
    out = torch.zeros((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=query.device)
    of_value, of_key, of_query = value.sum(), key.sum(), query.sum()
    nothing: torch.Tensor = aten.mul.Scalar(of_query + of_key + of_value, 0)
    return out + nothing


def _additive(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A mask of bools as one that is added: a new tensor of the query's dtype."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    nothing = torch.scalar_tensor(float("-inf"), dtype=query.dtype, device=mask.device)
    return torch.where(mask, 0.0, nothing)


def _flash(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: float | None, gqa: bool) -> Any:
    """Heads padded to a multiple of 8."""
    width = q.shape[-1]
    scale = width**-0.5 if scale is None else scale
    q, k, v = (_padded(t, 8) for t in (q, k, v))
    out = aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)[0]
    return out if out.shape[-1] == width else aten.slice(out, -1, 0, width)


def _efficient(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: float | None, gqa: bool) -> Any:
    if mask is not None:
        mask = _aligned(mask).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    needs_grad = _need_grad(q, k, v)
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, needs_grad, dropout, causal, scale=scale)[0]


def _cudnn(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: float | None, gqa: bool) -> Any:
    needs_grad = _need_grad(q, k, v)
    return aten._scaled_dot_product_cudnn_attention(q, k, v, mask, needs_grad, dropout, causal, False, scale=scale)[0]


def _math(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: float | None, gqa: bool) -> Any:
    whole = {"scale": scale, "enable_gqa": gqa}
    return aten._scaled_dot_product_attention_math(q, k, v, mask, dropout, causal, None, **whole)[0]


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    rest = tensor.shape[-1] % multiple
    return tensor if rest == 0 else pad(tensor, (0, multiple - rest))


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """``mask``, laid out anew with longer rows unless all of its rows begin at aligned elements."""
    *strides, last = mask.stride()
    if last == 1 and all(stride % _MASK_ALIGNMENT == 0 for stride in strides):
        return mask
    length = mask.shape[-1]
    longer = pad(mask, (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT))
    rows: torch.Tensor = aten.slice(longer, -1, 0, length)
    return rows


_KERNELS = {"flash": _flash, "efficient": _efficient, "cudnn": _cudnn, "math": _math}
