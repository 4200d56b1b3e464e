"""Which backend flags a model's ops ran under, noted in the graph while it is captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx

from fxmem.runtime.backend_flags import BackendFlags, present, set_flags
from fxmem.torch_patches import nodes_shown_to

NOTED = "fxmem_switches"
"""Key of a node's meta: the switches it was made under, where these are not those at the start."""


@contextmanager
def noted_in_nodes(model: torch.nn.Module) -> Iterator[None]:
    """Note in each fx node that a call of ``model`` makes in the body its switches (``NOTED``), where the call has set any.

    Only what the call sets counts: torch.export itself has cuDNN and oneDNN off meanwhile.
    """
    around = present()
    begun: list[BackendFlags] = []

    def note(node: fx.Node) -> None:
        switches = present()
        if begun and switches != begun[-1]:
            own = zip(around, begun[-1], switches, strict=True)
            node.meta[NOTED] = tuple([now if now != before else outside for outside, before, now in own])

    hook = model.register_forward_pre_hook(lambda *_: begun.append(present()), prepend=True)
    end = model.register_forward_hook(lambda *_: begun.clear())
    try:
        with nodes_shown_to(note):
            yield
    finally:
        hook.remove()
        end.remove()
        set_flags(present(), around)
