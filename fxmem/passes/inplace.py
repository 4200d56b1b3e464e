"""Ops that may write over their input: found from the profile, proved, and written into the captured graph.

In: a :class:`Profiled`. Out: an :class:`InplaceDecision` for every op that has an in-place form, and a captured graph
with the proved ones in place. An in-place op needs no memory of its own while it runs. It is legal when nobody needs
the old value: no other node saves, reads or aliases the overwritten storage, it belongs to the graph (no parameter,
buffer, input or output), and the result has its geometry. Only forms whose backward computes the same bits from the
result are considered (``elu_`` and ``silu_`` do not): the rows of :mod:`fxmem.op_facts.saving`, written in
:mod:`fxmem.runtime.inplace_ops`. Where the model
itself clips in place, what changes is that no copy of the input is saved: legal where the result is neither written
over later nor an output.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxmem.capture.graph import CaptureGraph, copied, with_graph
from fxmem.ir import InplaceDecision
from fxmem.op_facts.kinds import InPlaceForm
from fxmem.op_facts.lookup import by_op
from fxmem.passes.context import CompileContext, Settings
from fxmem.profiling.profile import Profiled
from fxmem.runtime.inplace_ops import FORMS
from fxmem.runtime.scoped_ops import Scoped, op_of

_IN_PLACE = by_op(InPlaceForm)


@dataclass(frozen=True)
class _Uses:
    """What is done to the managed storages of a graph, by storage."""

    readers: Counter[int]
    savers: dict[int, set[int]]
    last_write: dict[int, int]


def decide(profiled: Profiled) -> tuple[InplaceDecision, ...]:
    """Return a decision for each op of the graph that has an in-place form."""
    calls = [node for node in profiled.captured.graph_module.graph.nodes if node.op == "call_function"]
    uses = _Uses(Counter(), {}, {})
    for node in profiled.profile.nodes:
        uses.readers.update(v.storage for _, v in profiled.arguments[node.index])
        for s in node.saves:
            uses.savers.setdefault(s, set()).add(node.index)
        uses.last_write.update(dict.fromkeys(node.writes, node.index))
    decisions = []
    for k, node in enumerate(calls):
        fact = _IN_PLACE.get(op_of(node.target))
        if fact is None:
            continue
        unsaved = _why_result_not_saved(profiled, k, uses, node) if fact.saves_result else ""
        decisions.append(_decide(profiled, k, uses, unsaved))
        if fact.saves_result and not decisions[-1].why_not:
            (_, result), *_ = profiled.outputs[k]
            uses.savers.setdefault(result.storage, set()).add(k)
    return tuple(decisions)


def _decide(profiled: Profiled, k: int, uses: _Uses, why_not: str) -> InplaceDecision:
    node = profiled.profile.nodes[k]
    (_, result), *_ = profiled.outputs[k]
    nbytes = profiled.profile.storages[result.storage].nbytes if result.storage >= 0 else 0
    place, argument = min(profiled.arguments[k], default=(1, None))
    if why_not or result.storage in node.writes:  # the latter: it is in place already
        pass
    elif argument is None or place != 0:
        why_not = "its first argument is no tensor"
    elif argument.storage < 0:
        why_not = "it would overwrite a parameter, buffer or input"
    elif profiled.profile.storages[argument.storage].why_kept:
        why_not = f"what it would overwrite is {profiled.profile.storages[argument.storage].why_kept}"
    elif uses.savers.get(argument.storage, set()) - {k}:
        saver = min(uses.savers[argument.storage] - {k})
        why_not = f"the backward of {profiled.profile.nodes[saver].name} needs what it would overwrite"
    elif uses.readers[argument.storage] > 1:
        why_not = "another op reads what it would overwrite"
    elif argument.requires_grad != result.requires_grad:
        why_not = "only one of argument and result requires grad"
    elif (
        argument._replace(storage=result.storage) != result
        or profiled.profile.storages[argument.storage].nbytes != nbytes
    ):
        why_not = "argument and result differ in shape, strides or dtype"
    return InplaceDecision(node.name, nbytes, why_not)


def _why_result_not_saved(profiled: Profiled, k: int, uses: _Uses, node: fx.Node) -> str:
    """Why the backward of ``node``, the ``k``-th, may not read its result; empty if it may."""
    (_, result), *_ = profiled.outputs[k]
    if result.storage < 0:
        return "its result is a parameter, buffer or input"
    if profiled.profile.storages[result.storage].why_kept:
        return f"its result is {profiled.profile.storages[result.storage].why_kept}"
    if uses.last_write.get(result.storage, k) > k:
        return "its result is written over later"
    bounds: Any = (*node.args[1:], *node.kwargs.values())
    if any(torch.tensor(bound, dtype=result.dtype).item() != bound for bound in bounds):
        return f"{result.dtype} rounds its bounds, so its result does not tell which inputs were inside"
    return ""


class Inplace:
    """Ops that may write over their input do; the graph says what was decided of each that has an in-place form."""

    name = "inplace"

    def enabled(self, settings: Settings) -> bool:
        return settings.inplace and "inplace" in settings.allow

    def apply(self, graph: CaptureGraph, context: CompileContext) -> CaptureGraph:
        decisions = decide(context.profile_of(graph))
        if any(not decision.why_not for decision in decisions):
            return replace(in_place(graph, decisions), inplace=decisions)
        if not decisions:
            return graph
        return context.renamed(graph, replace(graph, inplace=decisions))


def in_place(captured: CaptureGraph, decisions: tuple[InplaceDecision, ...]) -> CaptureGraph:
    """Return ``captured`` with the proved ops done in place."""
    proved = {decision.node for decision in decisions if not decision.why_not}
    graph, _ = copied(captured)
    for node in graph.nodes:
        if node.name in proved:
            form = FORMS[_IN_PLACE[op_of(node.target)].form]
            node.target = Scoped(form, node.target.region) if isinstance(node.target, Scoped) else form
    return with_graph(captured, graph)
