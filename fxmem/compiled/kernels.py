"""Would-be kernels of a joint graph: which values get memory of their own.

In: a :class:`JointGraph`. Out: :class:`Kernels`, the nodes of the profile that is planned on
(:mod:`fxmem.compiled.profile`). Inductor fuses pointwise ops into what reads them, so most values of a graph never are in
memory; planning on those that are is both truer and some four times smaller. Which these are is Inductor's choice, and
told here by its rules:

1. An op that is not generated code (a matmul, a convolution, attention) writes memory, and reads memory.
2. A reduction writes memory.
3. Outputs of the graph are memory.
4. A pointwise value is memory where many read it, or where it is computed from more buffers than
   ``realize_reads_threshold``.
5. What is computed from an input that the forward writes over, and the backward needs, is memory, and never computed again.
6. A mask of a dropout may be memory: as it is drawn slowly and takes a byte each, keeping it is a choice of its own.

What is not modelled: which kernels are merged. The profile is to find plans with; each plan that is tried is judged by the
code that Inductor generates for it (:mod:`fxmem.compiled.fakerun`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from fxmem.compiled.joint import JointGraph, is_tuple, is_view, nbytes_of, why_not_again
from fxmem.compiled.op_kinds import is_mask, is_pointwise, is_read_by_op

MOST_READS = 4
"""Inductor's ``realize_reads_threshold``: so many buffers may a value be computed from, and so many may read it."""
SMALL_BYTES = 4096
"""Values up to this size are not counted among these buffers: biases, scales, statistics."""

Sources = dict[fx.Node, tuple[fx.Node, ...]]
"""By node: the values in memory that it is computed from; a value in memory is its own."""


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
    sources: Sources
    """Of nodes before the backward."""
    needs: tuple[tuple[fx.Node, ...], ...]
    """By node of the backward: the values in memory that it is computed from."""

    @staticmethod
    def of(joint: JointGraph) -> Kernels:
        before = [n for n in joint.before_backward() if n.op == "call_function"]
        outputs = {n for n in joint.outputs if isinstance(n, fx.Node)}
        inside = set(before)
        sources: Sources = {}
        reads: Sources = {}
        for node in before:
            reads[node] = united(sources, node)
            in_memory = node in outputs or node in joint.read_once or _in_memory(node, reads[node], inside)
            sources[node] = (node,) if in_memory and not is_tuple(node) and not is_view(node) else reads[node]
        groups: dict[fx.Node, list[fx.Node]] = {}
        for node in before:
            if sources[node] == (node,):
                groups.setdefault(node.args[0] if node.target is operator.getitem else node, []).append(node)  # type: ignore[arg-type]
        kernels = []
        for op, values in groups.items():
            is_output = "an output" if any(v in outputs or _is_viewed(v, outputs) for v in values) else ""
            inner = _inner(op, sources)
            is_lost = "what it reads is written over" if op in joint.read_once else ""
            kernels.append(
                Kernel(op, tuple(values), reads[values[0]], inner, why_not_again(op) or is_output or is_lost)
            )
        return Kernels(joint, tuple(kernels), sources, tuple(united(sources, n) for n in joint.backward))

    @property
    def values(self) -> tuple[fx.Node, ...]:
        """The values in memory: the storages of the profile, in order."""
        return tuple(value for kernel in self.kernels for value in kernel.values)


def united(sources: Sources, node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the sources of all that a node reads."""
    return tuple(dict.fromkeys(s for a in node.all_input_nodes for s in sources.get(a, ())))


def _inner(op: fx.Node, sources: Sources) -> tuple[fx.Node, ...]:
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
    if is_read_by_op(node):
        return True
    num_readers = sum(user in inside and not is_view(user) for user in node.users)
    num_buffers = sum(nbytes_of(read) > SMALL_BYTES for read in reads)
    return num_readers > MOST_READS or num_buffers >= MOST_READS
