"""Which sizes of a call's inputs stay symbolic, as torch.export wants it said, and which it fixed all the same."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from fxmem.capture.graph import CaptureGraph, Dims, Inputs


def dynamic_shapes_of(model: torch.nn.Module, inputs: Inputs, dynamic: Dims) -> dict[str, Any] | None:
    """Return ``dynamic`` as torch.export wants it: by argument name, in the shape of the arguments."""
    if not dynamic:
        return None
    leaves = []
    for i in range(len(inputs.leaves)):
        dims = {d: torch.export.Dim.AUTO for j, d in dynamic if j == i}
        leaves.append(dims or None)  # an empty dict would be one without leaves
    args, kwargs = Inputs(tuple(leaves), inputs.spec).call()
    return dict(signature_of(model, inputs).bind(*args, **kwargs).arguments)


def signature_of(model: torch.nn.Module, inputs: Inputs) -> inspect.Signature:
    """Return the signature of the model's forward, with what it takes as ``**kwargs`` in this call by name."""
    signature = inspect.signature(model.forward)
    extra = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    if extra is None:
        return signature
    args, kwargs = inputs.call()
    named = [p for p in signature.parameters.values() if p.name != extra]
    names = signature.bind(*args, **kwargs).arguments.get(extra, {})
    return signature.replace(
        parameters=[*named, *(inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names)]
    )


@contextmanager
def extras_named(model: torch.nn.Module, signature: inspect.Signature) -> Iterator[None]:
    """Let the model's forward say that it has ``signature``: torch.export mixes up dynamic shapes where arguments come as
    ``**kwargs``."""
    forward = model.forward
    if inspect.signature(forward) == signature:
        yield
        return

    @wraps(forward)
    def named(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    named.__dict__.update(__signature__=signature, __func__=getattr(forward, "__func__", forward))
    own = vars(model).get("forward")
    object.__setattr__(model, "forward", named)
    try:
        yield
    finally:
        if own is None:
            object.__delattr__(model, "forward")
        else:
            object.__setattr__(model, "forward", own)


def tied_dims(captured: CaptureGraph) -> Dims:
    """Return the dynamic dimensions that torch.export quietly fixed, since the model's code is tied to their size."""
    placeholders = [node for node in captured.graph_module.graph.nodes if node.op == "placeholder"]
    return frozenset((i, d) for i, d in captured.dynamic if _is_fixed(placeholders[i].meta["val"].shape[d]))


def _is_fixed(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) or bool(size.node.expr.is_number)
