"""What the backward of a compiled step makes itself: which of its values are in memory, and from when to when.

In: :class:`Kernels`. Out: bytes by place in the backward. No plan changes them; they are told by Inductor's rules:

1. An op that is no generated code writes memory and reads memory, a reduction writes it; outputs are memory, and so is what
   is added to a matrix product.
2. A pointwise value is memory where several read it and it is computed from more than :data:`MOST_READS` buffers, or where
   one does and it is computed from more than :data:`MOST_READS_AT_ONCE` (on the CPU more), small buffers too. What the
   forward computes inside of kernels counts as what it is computed from: sums of many gradients keep all of these there.
3. A pointwise value is computed just before the first op that asks for it and is no generated code, not at its own place:
   what it is computed from stays until then.
"""

from __future__ import annotations

from torch import fx

from fxmem.compiled.joint import JointGraph, is_tuple, is_view, nbytes_of, why_not_again
from fxmem.compiled.kernels import MOST_READS, Kernels, Sources, united
from fxmem.compiled.op_kinds import is_generated, is_pointwise, is_read_by_op, is_sum_of_product, readers_of

MOST_READS_AT_ONCE, MOST_READS_AT_ONCE_ON_CPU = 8, 12
"""Inductor's ``realize_acc_reads_threshold`` by device: so many buffers may a value be computed from that one reads."""

Places = dict[fx.Node, int]
"""By node or value: a place in the order of the backward."""


def bytes_in_backward(kernels: Kernels, runs_at: Places) -> tuple[list[int], list[int]]:
    """Return, by place in the backward, the bytes of values in memory that it makes and that go after it. ``runs_at``: as
    :func:`places_in_backward`."""
    joint = kernels.joint
    end, device_type = len(joint.backward), joint.device_type
    buffers = _buffers_before(kernels)
    bases: Sources = {}
    last: Places = {}
    for node in joint.backward:
        read, buffers[node] = united(bases, node), united(buffers, node)
        last.update({base: max(last.get(base, 0), runs_at[node]) for base in read})
        bases[node] = read
        if not is_tuple(node) and _is_written(node, len(buffers[node]), device_type):
            bases[node] = buffers[node] = (node,)
    for gradient in joint.gradients:
        if isinstance(gradient, fx.Node):
            last.update(dict.fromkeys(bases.get(gradient, ()), end))
    made, freed = [0] * end, [0] * (end + 1)
    for node in joint.backward:
        if bases[node] == (node,):
            made[runs_at[node]] += nbytes_of(node)
            freed[last.get(node, runs_at[node])] += nbytes_of(node)
    return made, freed


def places_in_backward(joint: JointGraph) -> Places:
    """Return by node of the backward the place where it runs: a pointwise one just before the first op that asks for it and
    is no generated code."""
    own = {node: place for place, node in enumerate(joint.backward)}

    def place_of(node: fx.Node) -> int:
        asking = [own[r] for r in readers_of(node) if r in own and not is_generated(r)] if is_pointwise(node) else []
        return max(own[node], min(asking, default=0) - 1)

    return {node: place_of(node) for node in joint.backward}


def _buffers_before(kernels: Kernels) -> Sources:
    """Return the buffers that inputs and values before the backward are, or are computed from where the backward computes
    them again inside of its kernels."""
    buffers: Sources = {node: (node,) for node in kernels.joint.inputs}
    joint, device_type = kernels.joint, kernels.joint.device_type
    for node in joint.before_backward():
        read = united(buffers, node)
        num_readers = sum(is_generated(reader) for reader in readers_of(node))
        may_fuse = is_pointwise(node) and not why_not_again(node) and node not in joint.read_once
        is_fused = may_fuse and not _is_much(len(read), num_readers, device_type)
        buffers[node] = read if is_fused or kernels.sources.get(node) != (node,) else (node,)
    return buffers


def _is_written(node: fx.Node, num_buffers: int, device_type: str) -> bool:
    """True for a value of the backward that Inductor writes to memory."""
    if is_view(node):
        return False
    if not is_pointwise(node) or why_not_again(node) or is_sum_of_product(node) or is_read_by_op(node):
        return True
    is_output = any(reader.op == "output" for reader in readers_of(node))
    return is_output or _is_much(num_buffers, len(node.users), device_type)


def _is_much(num_buffers: int, num_readers: int, device_type: str) -> bool:
    """True where Inductor writes a value rather than have each reader compute it from so many buffers."""
    if num_readers > 1:
        return num_buffers > MOST_READS
    return num_buffers > (MOST_READS_AT_ONCE_ON_CPU if device_type == "cpu" else MOST_READS_AT_ONCE)
