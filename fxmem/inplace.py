"""Ops that may write over their input: found from the profile, proved, and written into the captured graph.

In: a :class:`Profiled`. Out: an :class:`InplaceDecision` for every op that has an in-place form, and a captured graph with
the proved ones in place. An in-place op needs no memory of its own while it runs. It is legal when nobody needs the
old value: no other node saves, reads or aliases the overwritten storage, it belongs to the graph (no parameter, buffer,
input or output), and the result has its geometry. Only forms whose backward computes the same bits from the result are
considered (``elu_`` and ``silu_`` do not).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch import fx

from fxmem.capture import Captured, with_unused_state
from fxmem.profile import Profiled
from fxmem.regions import Scoped, op_of
from fxmem.types import InplaceDecision

aten = torch.ops.aten

INPLACE_FORMS = {
    aten.relu.default: aten.relu_.default,
    aten.relu6.default: aten.relu6_.default,
    aten.leaky_relu.default: aten.leaky_relu_.default,
    aten.hardtanh.default: aten.hardtanh_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
}
"""Ops and the forms that write the result over the first argument."""


def decide(profiled: Profiled) -> tuple[InplaceDecision, ...]:
    """Return a decision for each op of the graph that has an in-place form."""
    calls = [node for node in profiled.captured.graph_module.graph.nodes if node.op == "call_function"]
    readers: Counter[int] = Counter()
    savers: dict[int, set[int]] = {}
    for node in profiled.profile.nodes:
        readers.update(v.storage for _, v in profiled.arguments[node.index])
        for s in node.saves:
            savers.setdefault(s, set()).add(node.index)
    return tuple(
        _decide(profiled, k, readers, savers) for k, node in enumerate(calls) if op_of(node.target) in INPLACE_FORMS
    )


def _decide(profiled: Profiled, k: int, readers: Counter[int], savers: dict[int, set[int]]) -> InplaceDecision:
    node = profiled.profile.nodes[k]
    (_, result), *_ = profiled.outputs[k]
    nbytes = profiled.profile.storages[result.storage].nbytes if result.storage >= 0 else 0
    place, argument = min(profiled.arguments[k], default=(1, None))
    why_not = ""
    if argument is None or place != 0:
        why_not = "its first argument is no tensor"
    elif argument.storage < 0:
        why_not = "it would overwrite a parameter, buffer or input"
    elif profiled.profile.storages[argument.storage].why_kept:
        why_not = f"what it would overwrite is {profiled.profile.storages[argument.storage].why_kept}"
    elif savers.get(argument.storage, set()) - {k}:
        saver = min(savers[argument.storage] - {k})
        why_not = f"the backward of {profiled.profile.nodes[saver].name} needs what it would overwrite"
    elif readers[argument.storage] > 1:
        why_not = "another op reads what it would overwrite"
    elif argument.requires_grad != result.requires_grad:
        why_not = "only one of argument and result requires grad"
    elif (
        argument._replace(storage=result.storage) != result
        or profiled.profile.storages[argument.storage].nbytes != nbytes
    ):
        why_not = "argument and result differ in shape, strides or dtype"
    return InplaceDecision(node.name, nbytes, why_not)


def in_place(captured: Captured, decisions: tuple[InplaceDecision, ...]) -> Captured:
    """Return ``captured`` with the proved ops done in place."""
    proved = {decision.node for decision in decisions if not decision.why_not}
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in captured.graph_module.graph.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
        if node.name in proved:
            form = INPLACE_FORMS[op_of(node.target)]
            env[node].target = Scoped(form, node.target.region) if isinstance(node.target, Scoped) else form
    graph.lint()
    module = fx.GraphModule(captured.graph_module, graph, class_name="Captured")
    return replace(captured, graph_module=with_unused_state(module, captured.graph_module))
