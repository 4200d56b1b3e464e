"""Whether a model treats each sample of a batch by itself: what the graph with a symbolic batch size tells.

In: a graph captured with the batch dimension dynamic. Out: nothing, or an error that names the first op that mixes samples.
Each value that depends on samples has one dimension of symbolic size, the *batch dimension*; each op is looked at: it must
leave one such dimension, and do nothing along it. Conservative: an op that is not known refuses.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from fxmem.capture.graph import CaptureGraph, source_of
from fxmem.errors import InputError
from fxmem.op_facts.kinds import SampleRole
from fxmem.op_facts.lookup import by_op, with_role
from fxmem.torch_private import OpOverload, arguments_by_name, schema_of

NEW = with_role(SampleRole, "new")
"""What reads no value of its argument."""
MADE = NEW | with_role(SampleRole, "made", "expanded")
"""The same for all samples, or drawn for each."""
NOTHING = with_role(SampleRole, "check")
BATCH_NORM, INSTANCE_NORM = with_role(SampleRole, "batch norm"), with_role(SampleRole, "instance norm")
SLICES, STACKS = with_role(SampleRole, "slice"), with_role(SampleRole, "stack")


def check_samples_apart(graph: CaptureGraph) -> None:
    """Errors: ``InputError`` that names the first place where samples of a batch meet, or may meet."""
    symbolic = [node for node in graph.graph_module.graph.nodes if node.op == "placeholder" and batch_dims_of(node)]
    size = str(_tensors(symbolic[0])[0].shape[0]) if symbolic else ""
    mixed, live = set(symbolic), _live(graph.graph_module.graph)
    for node in graph.graph_module.graph.nodes:
        if node.op != "call_function" or node not in live or not _tensors(node):
            continue
        reads_samples = node.target not in NEW and bool(mixed & set(node.all_input_nodes))
        if reads_samples or batch_dims_of(node):
            mixed.add(node)
            why = _why_coupled(node) if reads_samples else _why_not_alike(node)
            if why:
                raise InputError(f"micro-batches: {why} at {source_of(node)} ({node.name}). {REMEDY}")
    for node in graph.graph_module.graph.nodes:
        if node.op == "call_function" and _writes_state(node):
            raise InputError(
                f"micro-batches: {node.name} at {source_of(node)} writes to the model's state, in each piece. {REMEDY}"
            )
    (output,) = (node for node in graph.graph_module.graph.nodes if node.op == "output")
    for leaf in output.all_input_nodes:
        tensors = _tensors(leaf)
        if leaf not in mixed or any(str(t.shape[0] if t.dim() else None) != size for t in tensors):
            raise InputError(
                f"micro-batches: the output {leaf.name} at {source_of(leaf)} is no tensor with one entry for each sample. "
                f"{REMEDY}"
            )


REMEDY = (
    'Take "microbatch" out of allow=, return outputs with the batch first and take the loss of them outside of the model, '
    "or keep BatchNorm in eval mode"
)


def batch_dims_of(node: fx.Node) -> list[int]:
    """Return the dimensions of symbolic size of a node's tensor, or of its first."""
    tensors = _tensors(node)
    return [d for d, n in enumerate(tensors[0].shape) if isinstance(n, torch.SymInt)] if tensors else []


def _live(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that outputs and writes depend on."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        writes = isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable
        if node in live or node.op == "output" or writes:
            live |= {node, *node.all_input_nodes}
    return live


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    return [t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, torch.Tensor)]


def _writes_state(node: fx.Node) -> bool:
    op = node.target
    if not isinstance(op, OpOverload):
        return False
    arguments = zip(schema_of(op).arguments, node.args, strict=False)
    return any(a.is_write and isinstance(value, fx.Node) and value.op == "get_attr" for a, value in arguments)


def _why_not_alike(node: fx.Node) -> str:
    """Return why a tensor that is made for a batch may tell samples apart by their places; empty if it does not."""
    op = node.target
    known = op in MADE
    return "" if known else "something is made that tells samples apart by their place in the batch"


def _why_coupled(node: fx.Node) -> str:
    """Return why samples may meet in ``node``, which reads some; empty if they do not."""
    op = node.target
    if op is operator.getitem:
        return ""
    if not isinstance(op, OpOverload):
        return "it cannot be told whether samples of a batch meet in what is no op of ATen"
    if op in BATCH_NORM and node.args[5]:
        return "BatchNorm in training mode takes its statistics over all samples of a batch"
    if op in INSTANCE_NORM and node.args[3] is not None:
        return "running statistics are updated with those of all samples"
    if op in NOTHING:
        return ""
    if len(batch_dims_of(node)) != 1:
        return "samples of a batch meet"
    role = by_op(SampleRole).get(op)
    rule = None if role is None else _RULES.get(role.name)
    if rule is None and torch.Tag.pointwise in op.tags:
        if any(isinstance(each.meta.get("val"), torch.SymInt | torch.SymFloat) for each in node.all_input_nodes):
            return "it is computed with the size of the batch"
        rule = _aligned
    if rule is None:
        return f"it cannot be told whether samples of a batch meet in {op.overloadpacket}"
    return "" if rule(node) else "samples of a batch meet"


def _read(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """Return what ``node`` reads of samples, each with its batch dimension."""
    return [(each, dims[0]) for each in node.all_input_nodes if (dims := batch_dims_of(each))]


def _aligned(node: fx.Node) -> bool:
    """True where all batch dimensions fall together, counted from the last dimension."""
    after = _tensors(node)[0].dim() - batch_dims_of(node)[0]
    return all(_tensors(each)[0].dim() - dim == after for each, dim in _read(node))


def _first(node: fx.Node) -> bool:
    return batch_dims_of(node) == [0] and [dim for _, dim in _read(node)] == [0]


def _along_others(node: fx.Node) -> bool:
    """True if the dimensions that the op goes along are none of samples."""
    assert isinstance(node.target, OpOverload)
    given = arguments_by_name(node.target, node.args, node.kwargs)
    dims = given.get("dims", given.get("dim"))
    if dims is None:
        return False
    if node.target in SLICES and _is_whole(node):
        return True
    for each, batch_dim in _read(node):
        num_dims = _tensors(each)[0].dim() + (node.target in STACKS)
        if any(dim % num_dims == batch_dim for dim in ([dims] if isinstance(dims, int) else dims)):
            return False
    return True


def _is_whole(node: fx.Node) -> bool:
    (source, *_) = node.all_input_nodes
    return str(_tensors(source)[0].shape) == str(_tensors(node)[0].shape) and node.args[4:] in ((), (1,))


def _padded(node: fx.Node) -> bool:
    padding: Any = node.args[1]
    return _aligned(node) and batch_dims_of(node)[0] < _tensors(node)[0].dim() - len(padding) // 2


def _viewed(node: fx.Node) -> bool:
    """True if samples stay apart: they are outermost before and after, or nothing changes up to them."""
    ((before, dim),) = _read(node)[:1] or ((node, 0),)
    (new_dim,) = batch_dims_of(node)
    old, new = _tensors(before)[0].shape, _tensors(node)[0].shape
    outermost = _outer(old, dim) == 1 and _outer(new, new_dim) == 1
    return outermost or (dim == new_dim and str(old[: dim + 1]) == str(new[: dim + 1]))


def _outer(shape: Sequence[Any], dim: int) -> int:
    return prod(int(n) for n in shape[:dim])


def _normed(node: fx.Node) -> bool:
    shape: Any = node.args[1]
    return _aligned(node) and batch_dims_of(node)[0] < _tensors(node)[0].dim() - len(shape)


def _attention(node: fx.Node) -> bool:
    return all(dim < _tensors(each)[0].dim() - 2 for each, dim in _read(node)) and _aligned_from_first(node)


def _aligned_from_first(node: fx.Node) -> bool:
    return {dim for _, dim in _read(node)} == set(batch_dims_of(node))


def _embedded(node: fx.Node) -> bool:
    return not batch_dims_of(node.all_input_nodes[0])


_RULES: dict[str, Callable[[fx.Node], bool]] = {
    "anywhere": lambda node: True,
    "expanded": lambda node: True,
    "first": _first,
    "batch norm": _first,
    "instance norm": _first,
    "embedding": _embedded,
    "along": _along_others,
    "slice": _along_others,
    "stack": _along_others,
    "view": _viewed,
    "norm": _normed,
    "pad": _padded,
    "attention": _attention,
}
"""By role: whether samples stay apart."""
