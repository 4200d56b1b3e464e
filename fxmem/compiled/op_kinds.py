"""What Inductor makes of single ops, and about how long they take.

In: nodes of a joint graph. Out: whether an op is computed inside of the kernels that read it, or generated at all; seconds
by a roofline.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from fxmem.compiled.joint import is_view, nbytes_of
from fxmem.op_facts.kinds import CompiledRole
from fxmem.op_facts.lookup import with_role
from fxmem.profiling.roofline import Hardware, flops_of
from fxmem.torch_private import OpOverload, schema_of, tree_map_only

FUSED = 0.5
"""Share of a fused kernel's traffic that it costs to run it again: its result stays in the kernel that asks."""
_POINTWISE, _REDUCTIONS = with_role(CompiledRole, "pointwise"), with_role(CompiledRole, "reduction")
_PRIMS_POINTWISE = frozenset({"prims::inductor_random", "prims::inductor_lookup_seed"})
_PRIMS_REDUCTIONS = frozenset({"prims::prepare_softmax_online"})
"""By name: there are no such ops before Inductor is imported."""


def is_pointwise(node: fx.Node) -> bool:
    """True for what Inductor computes inside of the kernels that read it, views included."""
    if node.op != "call_function":
        return False
    if is_view(node):
        return True
    if node.target is operator.getitem:
        return is_pointwise(node.args[0])  # type: ignore[arg-type]
    target = node.target
    return isinstance(target, OpOverload) and (
        torch.Tag.pointwise in target.tags or target in _POINTWISE or schema_of(target).name in _PRIMS_POINTWISE
    )


def is_generated(node: fx.Node) -> bool:
    """True for what Inductor generates code for, which reads values that need not be in memory."""
    target = node.target
    if is_pointwise(node) or target in _REDUCTIONS:
        return True
    return isinstance(target, OpOverload) and schema_of(target).name in _PRIMS_REDUCTIONS


def readers_of(node: fx.Node) -> list[fx.Node]:
    """Return what reads a value, through views."""
    found, todo = [], list(node.users)
    while todo:
        user = todo.pop()
        if is_view(user):
            todo += user.users
        else:
            found.append(user)
    return found


# -- times ----------------------------------------------------------------------------------------------------------------


def work_of(
    op: fx.Node, reads: Sequence[fx.Node], results: Sequence[fx.Node], hardware: Hardware
) -> tuple[int, int, float]:
    """Return FLOPs, bytes moved and seconds of one run of a kernel."""
    flops = _flops_of(op)
    if is_generated(op):
        moved_bytes = sum(nbytes_of(n) for n in (*results, *reads))
        return flops, moved_bytes, FUSED * hardware.seconds(0, moved_bytes)
    moved_bytes = nbytes_of(op) + sum(nbytes_of(n) for n in op.all_input_nodes)
    return flops, moved_bytes, hardware.seconds(flops, moved_bytes)


def seconds_of(node: fx.Node, hardware: Hardware) -> float:
    """Return about how long a node of the backward takes, by itself."""
    if node.op != "call_function" or is_view(node) or node.target is operator.getitem:
        return 0.0
    moved_bytes = nbytes_of(node) + (0 if is_pointwise(node) else sum(nbytes_of(n) for n in node.all_input_nodes))
    return (FUSED if is_generated(node) else 1.0) * hardware.seconds(_flops_of(node), moved_bytes)


def _flops_of(node: fx.Node) -> int:
    if not isinstance(node.target, OpOverload):
        return 0
    args, kwargs = tree_map_only(fx.Node, lambda n: n.meta.get("val"), (node.args, node.kwargs))
    return flops_of(node.target, args, kwargs, node.meta.get("val"))
