"""Would-be kernels of a joint graph: which values get memory of their own, and the profile that planners plan on.

In: a :class:`JointGraph`. Out: :class:`Kernels`, and a :class:`GraphProfile` whose nodes are kernels. Inductor fuses
pointwise ops into what reads them, so most values of a graph never are in memory; planning on those that are is both
truer and some four times smaller. Which these are is Inductor's choice, and told here by its rules:

1. An op that is not generated code (a matmul, a convolution, attention) writes memory, and reads memory.
2. A reduction writes memory.
3. Outputs of the graph are memory.
4. A pointwise value is memory where many read it, or where it is computed from more buffers than
   ``realize_reads_threshold``.
5. A mask of a dropout may be memory: as it is drawn slowly and takes a byte each, keeping it is a choice of its own.

What is not modelled: which kernels are merged, and the order that Inductor runs them in. The profile is to find plans with;
each plan that is tried is judged by the code that Inductor generates for it (:mod:`fxmem.compiled.fakerun`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from fxmem.capture.graph import source_of
from fxmem.compiled.joint import JointGraph, is_tangent, is_tuple, is_view, nbytes_of, why_not_again
from fxmem.compiled.op_kinds import is_generated, is_mask, is_pointwise, readers_of, seconds_of, work_of
from fxmem.compiled.surroundings import Surroundings
from fxmem.ir import GraphProfile, NodeProfile, Phase, Recipe, StaticBytes, Storage, Tick
from fxmem.profiling.roofline import Hardware

MOST_READS = 4
"""Inductor's ``realize_reads_threshold``: so many buffers may a value be computed from, and so many may read it."""
SMALL_BYTES = 4096
"""Values up to this size are not counted among these buffers: biases, scales, statistics."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """What runs at once: a node with memory of its own, or an op with several results."""

    op: fx.Node
    values: tuple[fx.Node, ...]
    """Those of its results that are in memory."""
    sources: tuple[fx.Node, ...]
    """Values in memory that it is computed from."""
    inner: tuple[fx.Node, ...]
    """What is computed inside of it, between these and its op."""
    why_not: str


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels before the backward, in order, and what the backward reads of them."""

    joint: JointGraph
    kernels: tuple[Kernel, ...]
    sources: dict[fx.Node, tuple[fx.Node, ...]]
    """By node before the backward: the values in memory that it is computed from; a value in memory is its own."""
    needs: tuple[tuple[fx.Node, ...], ...]
    """By node of the backward: the values in memory that it is computed from."""

    @staticmethod
    def of(joint: JointGraph) -> Kernels:
        before = [n for n in joint.before_backward() if n.op == "call_function"]
        outputs = {n for n in joint.outputs if isinstance(n, fx.Node)}
        inside = set(before)
        sources: dict[fx.Node, tuple[fx.Node, ...]] = {}
        reads: dict[fx.Node, tuple[fx.Node, ...]] = {}
        for node in before:
            reads[node] = _united(sources, node)
            in_memory = node in outputs or _in_memory(node, reads[node], inside)
            sources[node] = (node,) if in_memory and not is_tuple(node) and not is_view(node) else reads[node]
        groups: dict[fx.Node, list[fx.Node]] = {}
        for node in before:
            if sources[node] == (node,):
                groups.setdefault(node.args[0] if node.target is operator.getitem else node, []).append(node)  # type: ignore[arg-type]
        kernels = []
        for op, values in groups.items():
            is_output = "an output" if any(v in outputs or _is_viewed(v, outputs) for v in values) else ""
            inner = _inner(op, sources)
            kernels.append(Kernel(op, tuple(values), reads[values[0]], inner, why_not_again(op) or is_output))
        return Kernels(joint, tuple(kernels), sources, tuple(_united(sources, n) for n in joint.backward))

    @property
    def values(self) -> tuple[fx.Node, ...]:
        """The values in memory: the storages of the profile, in order."""
        return tuple(value for kernel in self.kernels for value in kernel.values)


def _united(sources: dict[fx.Node, tuple[fx.Node, ...]], node: fx.Node) -> tuple[fx.Node, ...]:
    return tuple(dict.fromkeys(s for a in node.all_input_nodes for s in sources.get(a, ())))


def _inner(op: fx.Node, sources: dict[fx.Node, tuple[fx.Node, ...]]) -> tuple[fx.Node, ...]:
    """Return the nodes without memory that ``op`` is computed from."""
    found: dict[fx.Node, None] = {}
    todo = list(op.all_input_nodes)
    while todo:
        node = todo.pop()
        if node in sources and sources[node] != (node,) and node not in found:
            found[node] = None
            todo += node.all_input_nodes
    return tuple(found)


def _is_viewed(value: fx.Node, outputs: set[fx.Node]) -> bool:
    return any(is_view(user) and (user in outputs or _is_viewed(user, outputs)) for user in value.users)


def _in_memory(node: fx.Node, reads: tuple[fx.Node, ...], inside: set[fx.Node]) -> bool:
    if is_view(node):
        return False
    if not is_pointwise(node) or why_not_again(node) or is_mask(node):
        return True
    readers = readers_of(node)
    if any(reader.op == "call_function" and not is_generated(reader) for reader in readers):
        return True
    num_readers = sum(user in inside and not is_view(user) for user in node.users)
    num_buffers = sum(nbytes_of(read) > SMALL_BYTES for read in reads)
    return num_readers > MOST_READS or num_buffers >= MOST_READS


# -- the profile -----------------------------------------------------------------------------------------------------------


def profile_of(kernels: Kernels, around: Surroundings, hardware: Hardware) -> GraphProfile:
    """Return the profile of the step: forward, what comes between, backward."""
    values, joint = kernels.values, kernels.joint
    index = {value: i for i, value in enumerate(values)}
    first, last = _uses_in_backward(kernels)
    nodes: list[NodeProfile] = []
    recipes: list[Recipe] = []
    recipe_of: dict[fx.Node, int] = {}
    for i, kernel in enumerate(kernels.kernels):
        reads, creates = tuple(index[s] for s in kernel.sources), tuple(index[v] for v in kernel.values)
        flops, moved_bytes, seconds = work_of(kernel.op, kernel.inner, kernel.sources, kernel.values, hardware)
        nodes.append(
            NodeProfile(
                i, kernel.op.name, str(kernel.op.target), reads, creates, (), (), seconds, flops, moved_bytes, False,
                kernel.why_not, source_of(kernel.op),
            )
        )  # fmt: skip
        if not kernel.why_not:
            nbytes = sum(nbytes_of(v) for v in kernel.values)
            recipe_of.update(dict.fromkeys(kernel.values, len(recipes)))
            recipes.append(Recipe(len(recipes), (i,), reads, creates, seconds, nbytes, nbytes))
    storages = [
        Storage(
            index[v], v.name, nbytes_of(v), i, False, recipe_of.get(v), kernel.why_not, 1 if v in first else 0
        )
        for i, kernel in enumerate(kernels.kernels)
        for v in kernel.values
    ]  # fmt: skip
    ticks = (*_forward_ticks(kernels, index, around), *_backward_ticks(kernels, index, first, last, around))
    backward_seconds = sum(seconds_of(n, hardware) for n in joint.backward)
    static = StaticBytes(inputs_bytes=around.fixed_bytes)
    return GraphProfile(tuple(nodes), tuple(storages), tuple(recipes), ticks, static, backward_seconds)


def _uses_in_backward(kernels: Kernels) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
    """Return by value the place in the backward of its first and its last use."""
    first: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}
    for place, needs in enumerate(kernels.needs):
        for value in needs:
            first.setdefault(value, place)
            last[value] = place
    end = max(0, len(kernels.needs) - 1)
    for gradient in kernels.joint.gradients:
        for value in kernels.sources.get(gradient, ()):
            first.setdefault(value, end)
            last[value] = end
    return first, last


def _forward_ticks(kernels: Kernels, index: dict[fx.Node, int], around: Surroundings) -> list[Tick]:
    last: dict[fx.Node, int] = {value: i for i, k in enumerate(kernels.kernels) for value in k.values}
    for i, kernel in enumerate(kernels.kernels):
        last.update(dict.fromkeys(kernel.sources, i))
    outputs = [v for k in kernels.kernels if k.why_not == "an output" for v in k.values]
    fixed, ticks = around.fixed_bytes, []
    for i, kernel in enumerate(kernels.kernels):
        creates = tuple(index[v] for v in kernel.values)
        gone = tuple(index[v] for v, place in last.items() if place == i and v not in outputs)
        made = sum(nbytes_of(v) for v in kernel.values)
        ticks.append(Tick(Phase.FORWARD, i, (), fixed, fixed + made, creates, gone, ()))
    between = around.loss_peak_bytes
    gone = tuple(index[v] for v in outputs)
    return [*ticks, Tick(Phase.LOSS, None, (), fixed, fixed + between, (), gone, (), loss_bytes=between)]


def _backward_ticks(
    kernels: Kernels,
    index: dict[fx.Node, int],
    first: dict[fx.Node, int],
    last: dict[fx.Node, int],
    around: Surroundings,
) -> list[Tick]:
    """A tick begins where a value is asked for, or where one before it was let go of."""
    asked: dict[int, list[int]] = {}
    gone: dict[int, list[int]] = {}
    for value, place in first.items():
        asked.setdefault(place, []).append(index[value])
    for value, place in last.items():
        gone.setdefault(place, []).append(index[value])
    tangents = sum(nbytes_of(n) for n in kernels.joint.inputs if is_tangent(n))
    base = around.fixed_bytes + around.held_in_backward_bytes + tangents
    made, freed = _backward_bytes(kernels)
    live, ticks = base, []
    start, peak, unpacks = live, live, tuple(sorted(asked.get(0, ())))
    for place in range(len(kernels.needs)):
        if place in asked and place > 0:
            ticks.append(Tick(Phase.BACKWARD, None, unpacks, start, peak, (), (), ()))
            start, peak, unpacks = live, live, tuple(sorted(asked[place]))
        live += made[place]
        peak = max(peak, live)
        live -= freed[place]
        if place in gone:
            released = tuple(sorted(gone[place]))
            ticks.append(Tick(Phase.BACKWARD, None, unpacks, start, peak, (), (), released))
            start, peak, unpacks = live, live, ()
    return [*ticks, Tick(Phase.BACKWARD, None, unpacks, start, peak, (), (), ())]


def _backward_bytes(kernels: Kernels) -> tuple[list[int], list[int]]:
    """Return, by place in the backward, the bytes of values in memory that it makes and that go after it."""
    joint = kernels.joint
    place = {node: i for i, node in enumerate(joint.backward)}
    inside = set(joint.backward)
    bases: dict[fx.Node, tuple[fx.Node, ...]] = {}
    end = len(joint.backward)
    last: dict[fx.Node, int] = {}
    for node, needs in zip(joint.backward, kernels.needs, strict=True):
        read = _united(bases, node)
        last.update(dict.fromkeys(read, place[node]))
        is_output = any(reader.op == "output" for reader in readers_of(node))
        in_memory = not is_view(node) and (is_output or _in_memory(node, (*needs, *read), inside))
        bases[node] = (node,) if in_memory and not is_tuple(node) else read
    for gradient in joint.gradients:
        if isinstance(gradient, fx.Node):
            last.update(dict.fromkeys(bases.get(gradient, ()), end))
    made, freed = [0] * end, [0] * (end + 1)
    for node in joint.backward:
        if bases[node] == (node,):
            made[place[node]] += nbytes_of(node)
            freed[last.get(node, place[node])] += nbytes_of(node)
    return made, freed
