"""A plan written into a joint graph: what is dropped is cloned just before the backward first reads it.

In: :class:`Kernels`, their profile, a :class:`Plan`. Out: the forward's and the backward's GraphModule, by torch's own
``default_partition``: saved is exactly what the backward part reads of the forward part. No tags, no cut.

1. A kernel that runs again is a clone of its nodes, and of the values without memory that they are computed from.
2. Values without memory are cloned once and shared: cloned for each reader, Inductor writes many copies early.
3. A value that the plan holds from a recomputation on is shared by all later readers; one that it does not hold is cloned
   again for the next one, which is nested recomputation.
4. On the CPU a boolean that the backward reads is saved as ``uint8``, by way of ``float32``: as many bytes, and the same
   value. Of booleans Inductor's C++ writes one at a time, of such bytes a vector.
5. A mask that is drawn again and stays is a byte for each element then too. Without :data:`_STRIDED`, whose input is memory
   to Inductor, the random numbers are, four bytes each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from functorch.compile import default_partition
from torch import fx

from fxmem.compiled.joint import JointGraph, outputs_of
from fxmem.compiled.kernels import Kernels
from fxmem.compiled.op_kinds import is_mask, is_pointwise
from fxmem.ir import GraphProfile, Plan
from fxmem.torch_private import without_modes

Partitioned = tuple[fx.GraphModule, fx.GraphModule]
Clones = dict[fx.Node, fx.Node]
_CONVERT, _DIFFERS = torch.ops.prims.convert_element_type.default, torch.ops.aten.ne.Scalar
_STRIDED = torch.ops.aten.as_strided.default


def partition(kernels: Kernels, profile: GraphProfile, plan: Plan, static_inputs: Sequence[int] | None) -> Partitioned:
    """Return forward and backward under ``plan``. ``static_inputs``: places of inputs at fixed addresses."""
    joint = _Writer(kernels, profile, plan).written()
    inputs = None if static_inputs is None else list(static_inputs)
    parts: Partitioned = default_partition(
        joint, None, num_fwd_outputs=kernels.joint.num_outputs, static_lifetime_input_indices=inputs
    )
    return parts


class _Writer:
    def __init__(self, kernels: Kernels, profile: GraphProfile, plan: Plan) -> None:
        self._kernels, self._profile, self._plan = kernels, profile, plan
        self._values = kernels.values
        self._index = {value: i for i, value in enumerate(self._values)}
        dropped = set(plan.dropped)
        self._kept = {value for i, value in enumerate(self._values) if i not in dropped}
        self._graph = fx.Graph()
        self._copies: Clones = {}
        """Of inputs, the forward and the backward."""
        self._recomputed: Clones = {}
        """Dropped values that are there again."""
        self._shared: Clones = {}
        """Clones of values without memory."""
        self._as_bytes = {v for k in kernels.kernels if not k.why_not for v in k.values if _is_slow(v)} & self._kept
        self._order = {node: i for i, node in enumerate(kernels.joint.graph_module.graph.nodes)}
        self._before = set(kernels.joint.before_backward())

    def written(self) -> fx.GraphModule:
        joint = self._kernels.joint
        for node in joint.inputs:
            self._copy(node)
        early = _in_forward(joint, self._kept)
        for node in joint.before_backward():
            if node.op == "get_attr" or node in early:
                self._copy(node, "is_forward")
        for node, needs in zip(joint.backward, self._kernels.needs, strict=True):
            for value in sorted(needs, key=self._order.__getitem__):
                self._ask(value)
            self._copies[node] = self._clone(node, {})
        outputs = [self._output(value) for value in outputs_of(joint.graph_module)]
        self._graph.output(tuple(outputs)).meta = dict(joint.graph_module.graph.output_node().meta)
        written = fx.GraphModule(joint.graph_module, self._graph)
        written.meta = dict(joint.graph_module.meta)
        return written

    def _copy(self, node: fx.Node, part: str = "") -> None:
        copy = self._graph.node_copy(node, self._copies.__getitem__)
        copy.meta = {**node.meta, "partitioner_tag": part} if part else dict(node.meta)
        copy.meta.pop("recompute", None)  # of a checkpoint in the model, which the plan stands for
        self._copies[node] = copy

    def _output(self, value: Any) -> Any:
        if not isinstance(value, fx.Node) or value in self._copies:
            return self._copies.get(value) if isinstance(value, fx.Node) else value
        for source in self._kernels.sources[value]:  # a gradient that no tangent reaches
            self._ask(source)
        return self._found(value, {})

    def _ask(self, value: fx.Node) -> None:
        """Have a value in memory, running kernels again that it needs."""
        if value in self._kept or value in self._recomputed:
            return
        recipes, storages = self._profile.recipes, self._profile.storages
        position = storages[self._index[value]].recipe
        assert position is not None, f"{value} is dropped and may not run again"
        wanted: set[int] = set()
        todo = [position]
        while todo:
            recipe = recipes[todo.pop()]
            wanted.add(recipe.index)
            for source in recipe.inputs:
                maker = storages[source].recipe
                is_there = self._values[source] in self._kept or self._values[source] in self._recomputed
                if not is_there and maker not in wanted:
                    assert maker is not None
                    todo.append(maker)
        passing: Clones = {}
        for each in sorted(wanted):
            recipe = recipes[each]
            self._shared.pop(self._kernels.kernels[recipe.nodes[0]].op, None)
            for product in recipe.products:
                node = self._values[product]
                if node not in self._kept and node not in self._recomputed:
                    held = node is value or self._plan.limits[product] >= position
                    clones = self._recomputed if held else passing
                    clones[node] = self._clone(node, passing)
                    if held and is_mask(node):
                        clones[node] = self._in_bytes(clones[node])

    def _found(self, node: fx.Node, passing: Clones) -> fx.Node:
        """Return what stands for ``node`` in the backward; a value without memory is cloned where it is asked for first."""
        for clones in (passing, self._recomputed, self._shared):
            if node in clones:
                return clones[node]
        if node in self._as_bytes:
            self._shared[node] = self._saved_as_bytes(node)
            return self._shared[node]
        if node not in self._before or node.op == "get_attr" or node in self._kept:
            return self._copies[node]
        assert node not in self._index, f"{node} was not asked for"
        local = any(source in passing for source in self._kernels.sources[node])
        clones = passing if local else self._shared
        clones[node] = self._clone(node, passing)
        return clones[node]

    def _is_there(self, node: fx.Node, passing: Clones) -> bool:
        """Whether :meth:`_found` writes nothing for a node."""
        if any(node in clones for clones in (passing, self._recomputed, self._shared)):
            return True
        is_copied = node not in self._before or node.op == "get_attr" or node in self._kept
        return is_copied and node not in self._as_bytes

    def _clone(self, node: fx.Node, passing: Clones) -> fx.Node:
        """Copy ``node``, with what it needs, into the backward."""
        needed, waiting = list[fx.Node](), [iter(node.all_input_nodes)]  # no recursion: chains may be long
        while waiting:
            read = next((read for read in waiting[-1] if not self._is_there(read, passing)), None)
            if read is not None:
                needed.append(read)
                waiting.append(iter(() if read in self._as_bytes else read.all_input_nodes))
            elif waiting.pop() and needed:
                self._found(needed.pop(), passing)
        copy = self._graph.node_copy(node, lambda read: self._found(read, passing))
        copy.meta = {**node.meta, "partitioner_tag": "is_backward"}
        copy.meta.pop("recompute", None)
        return copy

    def _saved_as_bytes(self, node: fx.Node) -> fx.Node:
        """Return what the backward reads for a boolean that the forward saves as a byte."""
        with self._graph.inserting_after(self._copies[node]):
            number = self._converted(self._copies[node], torch.float32, "is_forward")
        with self._graph.inserting_after(number):
            saved = self._converted(number, torch.uint8, "is_forward")
        return self._differs(self._converted(saved, torch.float32))

    def _in_bytes(self, mask: fx.Node) -> fx.Node:
        """Return what reads a mask of the backward as bytes in memory."""
        if not _is_slow(mask):
            return self._strided(mask)
        written = self._converted(self._converted(mask, torch.float32), torch.uint8)
        return self._differs(self._converted(self._strided(written), torch.float32))

    def _converted(self, node: fx.Node, to: torch.dtype, part: str = "is_backward") -> fx.Node:
        return self._called(_CONVERT, node, to, part=part)

    def _differs(self, node: fx.Node) -> fx.Node:
        """Return whether elements are others than 0."""
        return self._called(_DIFFERS, node, 0)

    def _strided(self, node: fx.Node) -> fx.Node:
        val = node.meta["val"]
        return self._called(_STRIDED, node, list(val.shape), list(val.stride()))

    def _called(self, op: Any, node: fx.Node, *args: Any, part: str = "is_backward") -> fx.Node:
        found = self._graph.call_function(op, (node, *args))
        with without_modes():
            found.meta = {**node.meta, "partitioner_tag": part, "val": op(node.meta["val"], *args)}
        return found


def _is_slow(value: fx.Node) -> bool:
    """True for booleans of the CPU that a kernel of Inductor's computes."""
    val = value.meta.get("val")
    is_mask = isinstance(val, torch.Tensor) and val.dtype == torch.bool and val.device.type == "cpu"
    return is_mask and is_pointwise(value)


def _in_forward(joint: JointGraph, kept: set[fx.Node]) -> set[fx.Node]:
    """Return what is computed in the forward: its own nodes, and what kept values need of those that may be either."""
    found = set(joint.forward)
    either = set(joint.either)
    todo = [value for value in joint.either if value in kept]
    while todo:
        node = todo.pop()
        if node in either and node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found
