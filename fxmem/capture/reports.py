"""Methods by which a model tells whoever trains it of values, as Lightning's ``self.log("loss", loss)``.

In: the class of a model. Out: the same methods, which may be called while the model is planned for: a captured graph has
each of their calls as a node, so that training tells what eager mode tells; on fakes nothing is told.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fxmem.capture.opaque_calls import told_in_graph
from fxmem.capture.unused_numbers import Untouchable
from fxmem.torch_private import FakeTensor, active_fake_mode, tree_leaves

METHODS = ("log", "log_dict", "print")
"""Of LightningModule. They return nothing."""
_PACKAGES = ("lightning.", "pytorch_lightning.")


def reporting_methods(kind: type[torch.nn.Module]) -> dict[str, Callable[..., None]]:
    """Return these methods of ``kind``, by name; none of what is no LightningModule."""
    of_lightning = (
        base.__name__ == "LightningModule" and base.__module__.startswith(_PACKAGES) for base in kind.__mro__
    )
    return {name: _for_planning(getattr(kind, name)) for name in METHODS} if any(of_lightning) else {}


def _for_planning(method: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(method)
    def report(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        for leaf in leaves:
            if type(leaf) is Untouchable:
                Untouchable.use(leaf)
        if told_in_graph(functools.partial(report, module), args, kwargs):
            return
        if active_fake_mode() is None and not any(isinstance(leaf, FakeTensor) for leaf in leaves):
            method(module, *args, **kwargs)

    return report
