"""Process-wide switches that decide which kernel an op runs: attention's backends, cuDNN, oneDNN, precision, determinism.

``with torch.nn.attention.sdpa_kernel(...)`` and ``torch.backends.cudnn.flags(...)`` set such. A model may do so around
some of its ops, and a backward may run under others than its forward did: each node runs under its own, a re-run under
those of its forward, and a plan serves calls under the switches it was made under.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Switches = tuple[object, ...]
"""The values of all switches."""

_cudnn: Any = torch.backends.cudnn
_mkldnn: Any = torch.backends.mkldnn
_sdp: Any = torch.backends.cuda

_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (_sdp.flash_sdp_enabled, _sdp.enable_flash_sdp),
    (_sdp.mem_efficient_sdp_enabled, _sdp.enable_mem_efficient_sdp),
    (_sdp.math_sdp_enabled, _sdp.enable_math_sdp),
    (_sdp.cudnn_sdp_enabled, _sdp.enable_cudnn_sdp),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    (_sdp.fp16_bf16_reduction_math_sdp_allowed, _sdp.allow_fp16_bf16_reduction_math_sdp),
    (lambda: _cudnn.enabled, lambda value: _set_flags(_cudnn, enabled=value)),
    (lambda: _cudnn.benchmark, lambda value: _set_flags(_cudnn, benchmark=value)),
    (lambda: _cudnn.deterministic, lambda value: _set_flags(_cudnn, deterministic=value)),
    (lambda: _mkldnn.enabled, lambda value: _set_flags(_mkldnn, enabled=value)),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
)
_GETTERS = tuple([get for get, _ in _FLAGS])
_SETTERS = tuple([set_ for _, set_ in _FLAGS])


def _set_flags(backend: Any, **values: object) -> None:
    for name, value in values.items():
        setattr(backend, name, value)


def present() -> Switches:
    """Return the switches as they are."""
    return tuple([tuple(value) if type(value := get()) is list else value for get in _GETTERS])


class under:
    """Run the body under ``switches``; put back those before."""

    __slots__ = ("_before", "_switches")

    def __init__(self, switches: Switches) -> None:
        self._switches = switches

    def __enter__(self) -> None:
        self._before = present()
        set_flags(self._before, self._switches)

    def __exit__(self, *exc: object) -> None:
        set_flags(self._switches, self._before)


def set_flags(before: Switches, after: Switches) -> None:
    if before == after:
        return
    for old, new, set_ in zip(before, after, _SETTERS, strict=True):
        if old != new:
            set_(list(new) if isinstance(new, tuple) else new)
