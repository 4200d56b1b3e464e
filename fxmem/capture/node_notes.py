"""What is noted in each fx node while a model is captured: the backend flags it ran under, and the lines that made it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx

from fxmem.runtime.backend_flags import BackendFlags, present, set_flags
from fxmem.torch_patches import nodes_shown_to
from fxmem.torch_private import FakeTensorMode
from fxmem.user_frames import lines_of_forwards

NOTED = "fxmem_switches"
"""Key of a node's meta: the switches it was made under, where these are not those at the start."""


@contextmanager
def noted_in_nodes(model: torch.nn.Module) -> Iterator[None]:
    """Note in each fx node that a call of ``model`` makes in the body the lines of the forwards that made it, and its
    switches (``NOTED``) where the call has set any.

    Only the switches that the call sets count: torch.export itself has cuDNN and oneDNN off meanwhile. The lines are those
    that torch.export notes of a node that has none; it looks up the code of each frame of the process, which takes a
    sixth of the time of a capture.
    """
    if torch.cuda.is_available() and any(parameter.is_cuda for parameter in model.parameters()):
        settle_order_of_attention()
    around = present()
    begun: list[BackendFlags] = []

    def note(node: fx.Node) -> None:
        node.stack_trace = node.stack_trace or lines_of_forwards()
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


def settle_order_of_attention() -> None:
    """Have torch decide in which order attention's kernels are tried on this GPU: the first attention of a process does,
    inside, and no model has set that."""
    with FakeTensorMode():
        rows = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="cuda")
        torch.nn.functional.scaled_dot_product_attention(rows, rows, rows)
