"""What of a model and of a call's inputs a graph writes, so that a forward that is given up leaves no trace.

In: a captured graph. Out: the parameters and buffers that its ops write (batch norm's running statistics, mostly), and
which input leaves. Only what ops say of themselves is seen: what an opaque call writes is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fxmem.capture.graph import CaptureGraph, attribute_of
from fxmem.op_facts.kinds import UpdatesOnly, WritesUnsaid
from fxmem.op_facts.lookup import by_op
from fxmem.runtime.recompute import RandomStates, set_random_states, stash_random_states
from fxmem.runtime.scoped_ops import op_of
from fxmem.torch_private import OpOverload, schema_of

UNSAID = {
    **{op: fact.places for op, fact in by_op(WritesUnsaid).items()},
    **{op: fact.places for op, fact in by_op(UpdatesOnly).items()},
}


class Before:
    """The state that a call of ``captured`` with ``leaves`` would change, as it is now."""

    def __init__(self, captured: CaptureGraph, leaves: tuple[Any, ...]) -> None:
        tensors = [t for t in (*captured.parameters, *leaves) if isinstance(t, torch.Tensor)]
        devices = {torch.device("cpu"), *(t.device for t in tensors)}
        self._random: RandomStates = stash_random_states(sorted(devices, key=str))
        self._written = [(tensor, tensor.detach().clone()) for tensor in written_by(captured, leaves)]

    def restore(self) -> None:
        """Put it all back."""
        set_random_states(self._random)
        with torch.no_grad():
            for tensor, value in self._written:
                tensor.copy_(value)


def written_by(captured: CaptureGraph, leaves: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the model's tensors, and those of ``leaves``, that ``captured`` writes."""
    module = captured.graph_module
    roots = dict.fromkeys(root for node in module.graph.nodes for root in _written_roots(node))
    given = dict(zip(captured.input_names, leaves, strict=True))
    values = [given[r.name] if r.op == "placeholder" else attribute_of(module, str(r.target)) for r in roots]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _written_roots(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the inputs and attributes that ``node`` writes, through views too."""
    op = op_of(node.target)
    if not isinstance(op, OpOverload):
        return
    unsaid = UNSAID.get(op, ())
    for place, argument in enumerate(schema_of(op).arguments):
        if argument.is_write or place in unsaid:
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            for given in value if isinstance(value, list | tuple) else (value,):
                root = _root(given)
                if root is not None:
                    yield root


def _root(value: Any) -> fx.Node | None:
    """Return the input or attribute that ``value`` is, or is a view of."""
    while isinstance(value, fx.Node):
        if value.op in ("placeholder", "get_attr"):
            return value
        op = op_of(value.target)
        returns = schema_of(op).returns if isinstance(op, OpOverload) else ()
        if not (returns and returns[0].alias_info is not None and value.args):
            return None
        value = value.args[0]
    return None
