"""What Inductor makes of single ops, and about how long they take.

In: nodes of a joint graph. Out: whether an op is computed inside of the kernels that read it, or generated at all; seconds
by a roofline.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from fxmem.compiled.joint import is_view, nbytes_of, viewed
from fxmem.op_facts.kinds import CompiledRole
from fxmem.op_facts.lookup import with_role
from fxmem.profiling.roofline import Hardware, flops_of
from fxmem.torch_private import OpOverload, schema_of, tree_map_only

FLOPS_OF_SERIES, FLOPS_OF_LONG_SERIES = 80, 200
"""Of one element of ``exp`` and of ``tanh``, as C++ computes them in vectors: what matrix products do meanwhile."""
FLOPS_OF_RANDOM = 1000
"""Of one random number: ten rounds of Philox, which Inductor's C++ does one number at a time."""
FLOPS_OF_MAXIMUM = 500
"""Of one maximum of a window with its place, which Inductor's C++ compares one number at a time."""
FUSED = 0.5
"""Share of a fused kernel's traffic that it costs to run it again: its result stays in the kernel that asks."""
_POINTWISE, _REDUCTIONS = with_role(CompiledRole, "pointwise", "kept"), with_role(CompiledRole, "reduction")
_SERIES, _LONG_SERIES = with_role(CompiledRole, "series"), with_role(CompiledRole, "long series")
_MAXIMA = with_role(CompiledRole, "maximum")
_PRODUCTS, _SUMS = with_role(CompiledRole, "product"), with_role(CompiledRole, "sum")
_RANDOM = frozenset({"prims::inductor_random", "prims::inductor_randint"})
_PRIMS_POINTWISE = _RANDOM | {"prims::inductor_lookup_seed", "prims::_low_memory_max_pool_offsets_to_indices"}
_PRIMS_REDUCTIONS = frozenset({"prims::prepare_softmax_online"})
_PRIMS_MAXIMA = frozenset({"prims::_low_memory_max_pool_with_offsets"})
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
        torch.Tag.pointwise in target.tags or target in _POINTWISE or _name_of(node) in _PRIMS_POINTWISE
    )


def is_generated(node: fx.Node) -> bool:
    """True for what Inductor generates code for, which reads values that need not be in memory."""
    target = node.target
    if is_pointwise(node) or target in _REDUCTIONS:
        return True
    return _name_of(node) in _PRIMS_REDUCTIONS


def is_read_by_op(node: fx.Node) -> bool:
    """True where something reads a value that Inductor generates no code for."""
    return any(reader.op == "call_function" and not is_generated(reader) for reader in readers_of(node))


def is_sum_of_product(node: fx.Node) -> bool:
    """True for what is added to a matrix product that nothing else reads: both are one op."""
    products = (read for read in node.all_input_nodes if read.target in _PRODUCTS)
    return node.target in _SUMS and any(len(product.users) == 1 for product in products)


def is_mask(node: fx.Node) -> bool:
    """True for booleans that random numbers are compared to: a byte of memory each, which many FLOPs make."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype != torch.bool:
        return False
    return is_pointwise(node) and any(_name_of(viewed(read)) in _RANDOM for read in node.all_input_nodes)


def _name_of(node: fx.Node) -> str:
    return schema_of(node.target).name if isinstance(node.target, OpOverload) else ""


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
    op: fx.Node,
    inner: Sequence[fx.Node],
    reads: Sequence[fx.Node],
    results: Sequence[fx.Node],
    hardware: Hardware,
) -> tuple[int, int, float]:
    """Return FLOPs, bytes moved and seconds of one run of a kernel. ``inner``: all that is computed inside of it."""
    flops = sum(_flops_of(node) for node in (op, *inner))
    if is_generated(op):
        moved_bytes = sum(nbytes_of(n) for n in (*results, *reads))
        return flops, moved_bytes, hardware.seconds(flops, int(FUSED * moved_bytes))
    moved_bytes = nbytes_of(op) + sum(nbytes_of(n) for n in op.all_input_nodes)
    return flops, moved_bytes, hardware.seconds(flops, moved_bytes)


def seconds_of(node: fx.Node, hardware: Hardware) -> float:
    """Return about how long a node of the backward takes, by itself."""
    if node.op != "call_function" or is_view(node) or node.target is operator.getitem:
        return 0.0
    moved_bytes = nbytes_of(node) + (0 if is_pointwise(node) else sum(nbytes_of(n) for n in node.all_input_nodes))
    return (FUSED if is_generated(node) else 1.0) * hardware.seconds(_flops_of(node), moved_bytes)


def _flops_of(node: fx.Node) -> int:
    target = node.target
    if not isinstance(target, OpOverload) or is_view(node):
        return 0
    value = node.meta.get("val")
    if is_generated(node):
        return _flops_of_element(node) * (value.numel() if isinstance(value, torch.Tensor) else 0)
    if target in _MAXIMA or _name_of(node) in _PRIMS_MAXIMA:
        return FLOPS_OF_MAXIMUM * int(value[0].numel())  # type: ignore[index]
    args, kwargs = tree_map_only(fx.Node, lambda n: n.meta.get("val"), (node.args, node.kwargs))
    return flops_of(target, args, kwargs, value)


def _flops_of_element(node: fx.Node) -> int:
    if _name_of(node) in _RANDOM:
        return FLOPS_OF_RANDOM
    if node.target in _LONG_SERIES:
        return FLOPS_OF_LONG_SERIES
    return FLOPS_OF_SERIES if node.target in _SERIES else 1
