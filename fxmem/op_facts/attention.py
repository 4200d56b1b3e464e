"""Which kernel ``scaled_dot_product_attention`` runs on CUDA. It cannot be observed without a device, which it asks.

In: a call, the device's compute capability, and what the process allows. Out: "cudnn", "flash", "efficient" or "math".
Source: transformers/cuda/sdp_utils.cpp (``select_sdp_backend`` and the checks of each kernel). Every choice that torch
2.14.1 made on emulated devices of seven capabilities is reproduced (tests/data/attention_torch2.14.1.json).

NOTE [Versions]
1. From torch 2.14 the efficient kernel takes grouped queries, one head of keys and values serves all queries without
   ``enable_gqa``, and three dimensions are taken for a batch of one. Before, these calls went to another kernel, in the
   end to "math". What is said of torch before 2.14 is read in its source and threads, not recorded.
2. cuDNN comes with torch's wheels: 9.19 with torch 2.11, 9.20 with 2.12 and 2.13, 9.24 with 2.14, 9.26 with 2.15. From
   9.15.1 it is the first choice on 9.x and 10.x, from 9.22.1 it takes heads of up to 256 there, with gradients only 256
   itself; before, 128, and 192 with values of 128.
3. torch 2.15 is taken to be as 2.14.
4. Wheels for CUDA 12.9 and older bring an older cuDNN; their choices may differ.

Not modelled: nested tensors; flash attention of another version (``activate_flash_attention_impl``); ROCm; and that
the first attention of a process, if it is inside ``sdpa_kernel(..., set_priority=True)``, ignores that order.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_ORDER = ("flash", "efficient", "math", "cudnn")
CUDNN_FIRST = ("cudnn", "flash", "efficient", "math")
_WIDEST_BATCH = 65535


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What the choice looks at. Shapes are (batch, heads, rows, width); ``dtype`` as "bfloat16"."""

    dtype: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    last_strides: tuple[int, int, int]
    """Of query, key and value."""
    offset_bytes: tuple[int, int, int]
    """Where each begins in its storage; 0 for an empty one."""
    mask: tuple[int, ...] | None
    mask_last_stride: int
    mask_needs_grad: bool
    dropout: float
    is_causal: bool
    grouped: bool
    """``enable_gqa``."""
    needs_grad: bool


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """What the process allows. ``order``: the user's, None for the device's own. ``deterministic``: only such kernels."""

    enabled: frozenset[str]
    order: tuple[str, ...] | None = None
    deterministic: bool = False
    torch_version: tuple[int, int] = (2, 14)

    @property
    def cudnn_version(self) -> int:
        """That of the wheels, as cuDNN counts: 92400 for 9.24.0."""
        return _CUDNN.get(self.torch_version, 92600 if self.torch_version > (2, 15) else 91900)


_CUDNN = {(2, 11): 91900, (2, 12): 92000, (2, 13): 92000, (2, 14): 92400, (2, 15): 92600}


def attention_kernel(call: AttentionCall, capability: tuple[int, int], settings: AttentionSettings) -> str | None:
    """Return "cudnn", "flash", "efficient" or "math"; None if none of those enabled takes the call."""
    checks = {"flash": _may_flash, "efficient": _may_efficient, "cudnn": _may_cudnn}
    for name in settings.order or own_order(capability):
        if name in settings.enabled and (name not in checks or checks[name](call, capability, settings)):
            return name
    return None


def own_order(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return the order in which kernels are tried where the user set none."""
    return CUDNN_FIRST if capability[0] in (9, 10) else DEFAULT_ORDER


def _may_flash(call: AttentionCall, capability: tuple[int, int], settings: AttentionSettings) -> bool:
    return (
        _is_filled(call)
        and (8, 0) <= capability <= (12, 1)
        and call.dtype in ("float16", "bfloat16")
        and call.mask is None
        and call.query[-1] == call.key[-1] == call.value[-1] <= 256
        and not (call.is_causal and call.query[2] != call.key[2])
        and _has_backward(call, capability)
        and _rows_are_dense(call, or_one_wide=True)
        and _heads_fit(call, settings, values_may_differ=False)
    )


def _has_backward(call: AttentionCall, capability: tuple[int, int]) -> bool:
    """Flash attention's backward of wide heads wants more shared memory than some devices have."""
    if not call.needs_grad or not ((8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)):
        return True
    width = call.query[-1]
    return width <= 192 or (width > 224 and call.dropout == 0)


def _may_efficient(call: AttentionCall, capability: tuple[int, int], settings: AttentionSettings) -> bool:
    if not _is_filled(call) or not (5, 0) <= capability <= (12, 1):
        return False
    aligned = _aligned_elements(call.dtype, capability)
    aligned_bytes = aligned * (4 if call.dtype == "float32" else 2)
    return (
        call.dtype in (("float32", "float16", "bfloat16") if capability >= (8, 0) else ("float32", "float16"))
        and call.query[-1] == call.key[-1]
        and call.query[-1] % aligned == call.value[-1] % aligned == 0
        and not (capability >= (8, 0) and any(offset % aligned_bytes for offset in call.offset_bytes))
        and _rows_are_dense(call, or_one_wide=False)
        and (settings.torch_version >= (2, 14) or call.query[1] == call.key[1] == call.value[1])
        and _heads_fit(call, settings, values_may_differ=False)
    )


def _aligned_elements(dtype: str, capability: tuple[int, int]) -> int:
    """Return of how many elements a row of the efficient kernel must be a multiple: what a tensor core loads at once."""
    if dtype == "float32":
        return 4 if capability >= (8, 0) else 1
    return 8 if capability >= (7, 0) else 1


def _may_cudnn(call: AttentionCall, capability: tuple[int, int], settings: AttentionSettings) -> bool:
    return (
        _is_filled(call)
        and (8, 0) <= capability <= (12, 1)
        and call.dtype in ("float16", "bfloat16")
        and not settings.deterministic
        and call.dropout * 16 % 1 == 0
        and not (call.dropout > 0 and call.query[2] == 1)
        and call.key[2] != 1
        and not (capability[0] == 10 and call.query[2] == 1)
        and max(call.query[:2]) <= _WIDEST_BATCH
        and _mask_fits_cudnn(call)
        and _widths_fit_cudnn(call, capability, settings.cudnn_version)
        and _rows_are_dense(call, or_one_wide=True)
        and _heads_fit(call, settings, values_may_differ=True)
    )


def _widths_fit_cudnn(call: AttentionCall, capability: tuple[int, int], version: int) -> bool:
    width, of_values = call.query[-1], call.value[-1]
    if width % 8 or of_values % 8:
        return False
    if width <= 128 and of_values <= 128:
        return True
    if capability != (9, 0) and capability[0] != 10:
        return False
    if (width, of_values) == (192, 128):
        return True
    return version > 92200 and width <= 256 and of_values <= 256 and (not call.needs_grad or width == of_values == 256)


def _mask_fits_cudnn(call: AttentionCall) -> bool:
    """A mask of one for all heads or one for each, as 2 or 4 dimensions."""
    if call.mask is None:
        return True
    batch, heads, rows, _ = call.query
    wanted = {2: (rows, call.key[2]), 4: (batch, heads, rows, call.key[2])}.get(len(call.mask))
    if wanted is None or call.mask_needs_grad:
        return False
    return all(size in (1, full) for size, full in zip(call.mask, wanted, strict=True))


def _is_filled(call: AttentionCall) -> bool:
    """Four dimensions, of which none is empty."""
    return all(len(shape) == 4 and 0 not in shape for shape in (call.query, call.key, call.value))


def _rows_are_dense(call: AttentionCall, *, or_one_wide: bool) -> bool:
    """Whether the last dimension of each, and of the mask, has stride 1."""
    if call.mask is not None and call.mask_last_stride != 1:
        return False
    return call.last_strides == (1, 1, 1) or (or_one_wide and call.query[-1] == 1)


def _heads_fit(call: AttentionCall, settings: AttentionSettings, *, values_may_differ: bool) -> bool:
    """As many heads of keys and values as of queries, or fewer where those are grouped."""
    if not call.query[0] == call.key[0] == call.value[0]:
        return False
    heads, of_keys, of_values = call.query[1], call.key[1], call.value[1]
    if call.grouped:
        return heads % of_keys == heads % of_values == 0 and (values_may_differ or of_keys == of_values)
    return heads == of_keys == of_values or (settings.torch_version >= (2, 14) and of_keys == of_values == 1)
