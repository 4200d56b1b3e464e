"""Process-wide switches that decide which kernel an op runs: attention's backends, cuDNN, oneDNN, precision, determinism.

``with torch.nn.attention.sdpa_kernel(...)`` and ``torch.backends.cudnn.flags(...)`` set such. A model may do so around
some of its ops, and a backward may run under others than its forward did: each node runs under its own, a re-run under
those of its forward, and a plan serves calls under the switches it was made under.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from fxmem.torch_patches import replaced

Switches = tuple[object, ...]
"""The values of all switches."""

NOTED = "fxmem_switches"
"""Key of a node's meta: the switches it was made under, where these are not those at the start."""

_C: Any = torch._C


def _set_deterministic(value: object) -> None:
    _C._set_deterministic_algorithms(value, warn_only=_C._get_deterministic_algorithms_warn_only())


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
        _set(self._before, self._switches)

    def __exit__(self, *exc: object) -> None:
        _set(self._switches, self._before)


def _set(before: Switches, after: Switches) -> None:
    if before == after:
        return
    for old, new, set_ in zip(before, after, _SETTERS, strict=True):
        if old != new:
            set_(list(new) if isinstance(new, tuple) else new)


@contextmanager
def noted_in_nodes(model: torch.nn.Module) -> Iterator[None]:
    """Note in each fx node that a call of ``model`` makes in the body its switches (``NOTED``), where the call has set any.

    Only what the call sets counts: torch.export itself has cuDNN and oneDNN off meanwhile.
    """
    around, create_node = present(), fx.Graph.create_node
    begun: list[Switches] = []

    def noting(graph: fx.Graph, *args: Any, **kwargs: Any) -> fx.Node:
        node = create_node(graph, *args, **kwargs)
        switches = present()
        if begun and switches != begun[-1]:
            own = zip(around, begun[-1], switches, strict=True)
            node.meta[NOTED] = tuple([now if now != before else outside for outside, before, now in own])
        return node

    hook = model.register_forward_pre_hook(lambda *_: begun.append(present()), prepend=True)
    end = model.register_forward_hook(lambda *_: begun.clear())
    try:
        with replaced(fx.Graph, "create_node", noting):
            yield
    finally:
        hook.remove()
        end.remove()
        _set(present(), around)
