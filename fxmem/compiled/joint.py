"""The joint graph of a compiled step: what is forward, what is backward, what may be either, what must not run again.

In: the GraphModule that AOTAutograd hands to a partitioner, Inductor's joint passes done: forward and backward in one
graph, inputs ``primals_*`` and ``tangents_*``, outputs first those of the forward, then gradients. Out: a
:class:`JointGraph`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxmem.op_facts.kinds import CompiledRole
from fxmem.op_facts.lookup import may_draw, with_role
from fxmem.torch_private import OpOverload, arguments_by_name, schema_of, tree_leaves

COPIES = with_role(CompiledRole, "copy")
"""What writes to the step's inputs, such as the running statistics of a BatchNorm."""
(KEPT,) = with_role(CompiledRole, "kept")
"""What keeps an input as it is before it is written over."""
_SAME_MEMORY = with_role(CompiledRole, "view")
"""Views where sizes allow, which in a compiled graph they do."""

_SEEDS = frozenset({"prims::inductor_seeds", "prims::inductor_seed"})
"""By name: there are no such ops before Inductor is imported."""


@dataclass(frozen=True, slots=True)
class JointGraph:
    """A joint graph's nodes by part, each in the graph's order; together they are all but inputs and the output."""

    graph_module: fx.GraphModule
    num_outputs: int
    """Of the forward: the first of the graph's outputs."""
    forward: tuple[fx.Node, ...]
    """What the forward's outputs or effects need."""
    either: tuple[fx.Node, ...]
    """What only the backward needs, and can be computed before it."""
    backward: tuple[fx.Node, ...]
    """What depends on a tangent."""
    read_once: frozenset[fx.Node]
    """What the backward needs and is computed from inputs that the forward writes over: it cannot be computed later."""

    @staticmethod
    def of(graph_module: fx.GraphModule, num_outputs: int) -> JointGraph:
        after = _after_tangents(graph_module)
        _copy_what_is_written_over(graph_module, after)
        nodes = _computed(graph_module)
        outputs = [n for n in outputs_of(graph_module)[:num_outputs] if isinstance(n, fx.Node)]
        effects = [n for n in nodes if n.target in COPIES and n not in after]
        needed = _with_sources([*outputs, *effects])
        backward = tuple(n for n in nodes if n in after)
        leads_to_backward = _with_sources(backward)
        lost = _written_over(graph_module, after)
        return JointGraph(
            graph_module,
            num_outputs,
            tuple(n for n in nodes if n in needed),
            tuple(n for n in nodes if n not in needed and n not in after),
            backward,
            frozenset(n for each in lost for n in each.users if n in leads_to_backward and n not in lost),
        )

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(n for n in self.graph_module.graph.nodes if n.op == "placeholder")

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Those of the forward: nodes or constants."""
        return outputs_of(self.graph_module)[: self.num_outputs]

    @property
    def gradients(self) -> tuple[Any, ...]:
        """The backward's outputs: nodes, or None."""
        return outputs_of(self.graph_module)[self.num_outputs :]

    @property
    def device_type(self) -> str:
        """Where the step runs: not on the CPU for a number that is there."""
        devices = (t.device.type for node in self.inputs for t in tensors_of(node))
        return next((device for device in devices if device != "cpu"), "cpu")

    def before_backward(self) -> Iterator[fx.Node]:
        """Yield what may run before the backward, in the graph's order."""
        computed = {*self.forward, *self.either}
        return (n for n in self.graph_module.graph.nodes if n in computed)


def _computed(graph_module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph_module.graph.nodes if n.op in ("call_function", "get_attr")]


def _after_tangents(graph_module: fx.GraphModule) -> set[fx.Node]:
    """Return the tangents, and what depends on them."""
    after = {n for n in graph_module.graph.nodes if is_tangent(n)}
    for node in _computed(graph_module):
        if any(source in after for source in node.all_input_nodes):
            after.add(node)
    return after


def _written_over(graph_module: fx.GraphModule, after: set[fx.Node]) -> dict[fx.Node, None]:
    """Return the inputs that the forward writes over, views of them, and what Inductor may write into their memory, in the
    graph's order. ``after``: as :func:`_after_tangents`."""
    effects = [n for n in _computed(graph_module) if n.target in COPIES and n not in after]
    found = {viewed(n.args[0]): None for n in effects}  # type: ignore[arg-type]
    for node in _computed(graph_module):
        first = node.args[0] if node.args else None
        is_of_them = isinstance(first, fx.Node) and first in found and node not in after and node not in effects
        if is_of_them and (is_view(node) or _may_be_in_place(node)):
            found[node] = None
    return found


def _may_be_in_place(node: fx.Node) -> bool:
    """True for what writes parts of a copy of its first argument, such as ``slice_scatter`` and ``index_put``."""
    target, (like,), made = node.target, tensors_of(node.args[0]), tensors_of(node)  # type: ignore[arg-type]
    is_generated = not isinstance(target, OpOverload) or torch.Tag.pointwise in target.tags
    return not is_generated and len(made) == 1 and (made[0].shape, made[0].dtype) == (like.shape, like.dtype)


def viewed(node: fx.Node) -> fx.Node:
    """Return what a view is of, through views."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _copy_what_is_written_over(graph_module: fx.GraphModule, after: set[fx.Node]) -> None:
    """Have the backward read copies of inputs that the forward writes over: at its time they are no longer there."""
    lost = _written_over(graph_module, after)
    for node in lost:
        readers = [n for n in node.users if n in after and n not in lost]
        if readers:
            place = _computed(graph_module)[0] if node.op == "placeholder" else node.next
            with graph_module.graph.inserting_before(place):
                copy = graph_module.graph.call_function(KEPT, (node,))
            copy.meta = dict(node.meta)
            for reader in readers:
                reader.replace_input_with(node, copy)


def outputs_of(graph_module: fx.GraphModule) -> tuple[Any, ...]:
    outputs: Any = graph_module.graph.output_node().args[0]
    return tuple(outputs)


def is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and "tangents" in str(node.target)


def _with_sources(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


# -- single nodes --------------------------------------------------------------------------------------------------------


def tensors_of(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """Return the fake tensors that a node is, or is a tuple of."""
    return tuple(t for t in tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor))


def nbytes_of(node: fx.Node) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_of(node))


def is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def is_view(node: fx.Node) -> bool:
    """True for what lies on the memory of its input."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    return node.target in (*_SAME_MEMORY, *COPIES) or (
        isinstance(node.target, OpOverload) and bool(node.target.is_view)
    )


def why_not_again(node: fx.Node) -> str:
    """Return why a node may never run again; empty if it may.

    Seeds are drawn once, and all that is random is computed from them: a mask that is computed again is the same mask.
    """
    target = node.target
    if target is operator.getitem:
        return why_not_again(node.args[0])  # type: ignore[arg-type]
    if node.op == "get_attr":
        return "a constant"
    if not isinstance(target, OpOverload):
        return "a higher-order op"
    if schema_of(target).name in _SEEDS:
        return "seeds are drawn once"
    if may_draw(target) and not _never_drops(node):
        is_known = torch.Tag.nondeterministic_seeded in target.tags
        return "it draws random numbers" if is_known else "a custom op may draw random numbers"
    if target.namespace in ("_c10d_functional", "c10d"):
        return "a collective"
    return "it writes to its input" if target in COPIES or node.is_impure(impure_random=False) else ""


def _never_drops(node: fx.Node) -> bool:
    """True for attention without dropout, which has the tag of random ops all the same."""
    return arguments_by_name(node.target, node.args, node.kwargs).get("dropout_p") == 0
