"""Process-wide switches that decide which kernel an op runs: attention's backends, cuDNN, oneDNN, precision, determinism.

``with torch.nn.attention.sdpa_kernel(...)`` and ``torch.backends.cudnn.flags(...)`` set such. A model may do so around
some of its ops, and a backward may run under others than its forward did: each node runs under its own, a re-run under
those of its forward, and a plan serves calls under the switches it was made under.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BackendFlags = tuple[object, ...]
"""The values of all switches."""

_C: Any = torch._C


def _set_deterministic(value: object) -> None:
    _C._set_deterministic_algorithms(value, warn_only=_C._get_deterministic_algorithms_warn_only())


# In C++, though torch has public functions around them: all are read at each call and each recomputation, the public ones
# take more than twice the time, and some refuse to be set or lose whether determinism only warns.
_NAMES = (
    *((f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}") for name in ("flash", "mem_efficient", "math", "cudnn")),
    *(
        (f"_get_{name}", f"_set_{name}")
        for name in (
            "sdp_priority_order",
            "math_sdp_allow_fp16_bf16_reduction",
            "cudnn_enabled",
            "cudnn_benchmark",
            "cudnn_deterministic",
            "mkldnn_enabled",
            "float32_matmul_precision",
        )
    ),
)
_GETTERS: tuple[Callable[[], Any], ...] = (
    *(getattr(_C, get) for get, _ in _NAMES),
    _C._get_deterministic_algorithms,
)
_SETTERS: tuple[Callable[[Any], object], ...] = (*(getattr(_C, set_) for _, set_ in _NAMES), _set_deterministic)


def present() -> BackendFlags:
    """Return the switches as they are."""
    return tuple([tuple(value) if type(value := get()) is list else value for get in _GETTERS])


class under:
    """Run the body under ``switches``; put back those before."""

    __slots__ = ("_before", "_switches")

    def __init__(self, switches: BackendFlags) -> None:
        self._switches = switches

    def __enter__(self) -> None:
        self._before = present()
        set_flags(self._before, self._switches)

    def __exit__(self, *exc: object) -> None:
        set_flags(self._switches, self._before)


def set_flags(before: BackendFlags, after: BackendFlags) -> None:
    if before == after:
        return
    for old, new, set_ in zip(before, after, _SETTERS, strict=True):
        if old != new:
            set_(list(new) if isinstance(new, tuple) else new)
