"""Frozen BatchNorms (eval mode, no gradient for weight and bias) in a model that trains.

In: a captured graph. Out: the same graph with these layers as :func:`fxmem.runtime.frozen_batch_norm.frozen_batch_norm`.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxmem.capture.graph import attribute_of
from fxmem.op_facts.kinds import CompressedForm
from fxmem.op_facts.lookup import by_op
from fxmem.runtime.frozen_batch_norm import frozen_batch_norm
from fxmem.runtime.scoped_ops import Scoped, op_of

_FROZEN_FORM = {op for op, fact in by_op(CompressedForm).items() if fact.form == frozen_batch_norm.__name__}


def with_frozen_norms(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Let the frozen BatchNorms of ``graph_module``, which is changed and returned, save nothing of their inputs' size."""
    for node in graph_module.graph.nodes:
        if op_of(node.target) in _FROZEN_FORM and _is_frozen(graph_module, node):
            region = node.target.region if isinstance(node.target, Scoped) else None
            node.target = frozen_batch_norm if region is None else Scoped(frozen_batch_norm, region)
    graph_module.recompile()
    return graph_module


def _is_frozen(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    _, weight, bias, mean, var, training = node.args[:6]
    return not (training or mean is None or var is None) and not any(
        _may_learn(graph_module, n) for n in (weight, bias)
    )


def _may_learn(graph_module: fx.GraphModule, argument: Any) -> bool:
    """True unless ``argument`` is None or read from a parameter or buffer that requires no gradient."""
    if not isinstance(argument, fx.Node) or argument.op != "get_attr":
        return argument is not None
    return bool(attribute_of(graph_module, str(argument.target)).requires_grad)
