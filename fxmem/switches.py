"""Process-wide switches that decide which kernel an op runs: attention's backends, cuDNN, oneDNN, determinism.

``with torch.nn.attention.sdpa_kernel(...)`` and ``torch.backends.cudnn.flags(...)`` set such. A backward may run under
others than its forward did, so a re-run puts back those of its forward; a plan serves calls under the switches it was
made under.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

Switches = tuple[object, ...]
"""The values of all switches; those of attention come first."""

_C: Any = torch._C


def _set_deterministic(value: object) -> None:
    _C._set_deterministic_algorithms(value, warn_only=_C._get_deterministic_algorithms_warn_only())


_ATTENTION = (
    *((f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}") for name in ("flash", "mem_efficient", "math", "cudnn")),
    ("_get_sdp_priority_order", "_set_sdp_priority_order"),
)
_OTHERS = tuple(
    (f"_get_{name}", f"_set_{name}")
    for name in ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "mkldnn_enabled")
)
_GETTERS = (*(getattr(_C, get) for get, _ in (*_ATTENTION, *_OTHERS)), _C._get_deterministic_algorithms)
_SETTERS = (*(getattr(_C, set_) for _, set_ in (*_ATTENTION, *_OTHERS)), _set_deterministic)


def present() -> Switches:
    """Return the switches as they are."""
    return tuple([tuple(value) if type(value := get()) is list else value for get in _GETTERS])


def beside_attention(switches: Switches) -> Switches:
    """Return those that no ``sdpa_kernel`` sets."""
    return switches[len(_ATTENTION) :]


@contextmanager
def under(switches: Switches) -> Iterator[None]:
    """Run the body under ``switches``."""
    before = present()
    if before == switches:
        yield
        return
    _set(before, switches)
    try:
        yield
    finally:
        _set(switches, before)


def _set(before: Switches, after: Switches) -> None:
    for old, new, set_ in zip(before, after, _SETTERS, strict=True):
        if old != new:
            set_(list(new) if isinstance(new, tuple) else new)


class AttentionSwitches(TorchFunctionMode):
    """Notes the switches under which each attention of the body is called, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Switches] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.noted.append(present())
        return func(*args, **(kwargs or {}))


def differing(noted: Sequence[Switches]) -> bool:
    """True if some attention is called under other switches than the present ones."""
    return any(switches != present() for switches in noted)
