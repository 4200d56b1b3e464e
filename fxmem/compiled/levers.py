"""Inductor's own levers: what decides how a graph is compiled, beside the plan.

In: :class:`Levers`. Out: a context in which Inductor compiles so.

NOTE [Tight backwards]

Inductor fuses kernels that read the same, up to 64 apart in its order (horizontal fusion). Where what is recomputed for two
layers reads one mask, both are made at once, and one is there long before it is read. Fused vertically only, with what
reads their results, the backward's kernels take less there, in as much time, and more elsewhere. Inductor also holds a
buffer that a later one can take over, for layers on end, where it guesses that the peak is elsewhere. Its C++ puts all
kernels between two other ops into one function, whose buffers are all there at once. And Inductor fuses a kernel with one
that it reads also where something else reads that one earlier: all that the kernel reads is then made earlier too. A layer
that is recomputed on the way to another, and once more for itself, is so made twice at once, where it reads one mask. A
tight backward does none of these, and takes care of what convolutions take inside (below). Where code takes much more than
planned it is tried too (:func:`fxmem.compiled.step_run.least_of`), and of the deepest plan always.

NOTE [What is written when]

Inductor computes what a single op reads when it comes to that op. Where a layer is run again just before the convolution's
backward that reads its result and a gradient, that gradient is not there yet meanwhile, but all that it is computed from.
What two ops read, it computes for each. And what reads five values, such as a batch norm, it writes once for all readers,
where another one may be much later. A backward in order writes what ops read before the next op runs, once, and computes
the others anew for each reader. Deep plans of convolutions then take what was planned (MobileNet-V2's deepest 41.9 MB, and
57.8 with a tight backward alone); of attention, some take more.

NOTE [What convolutions read]

Where Inductor has convolutions in channels last, it lays out each input of a graph that one reads as soon as the graph
begins, and what the forward saves of that input for the backward is the copy: a step holds two of each weight. Here such
inputs are saved as they are: convolutions lay them out when they run, the copy goes after it, and a convolution's backward
takes weights as they are. A step takes as long.

NOTE [What convolutions take inside]

oneDNN's backward of a depthwise convolution that is given channels last lays the weights out in blocks of 16 x 16, 256
times their bytes: 30 MB beside activations of 0.3 MB, at the end of EfficientNet. Given plain layouts it takes 0.5 MB, and
half as long again. Which layout takes less depends on shapes, and is measured. In a tight backward a convolution that takes
less than half as much beside plain copies of what it reads gets these.

NOTE [Layouts of both halves]

Inductor has a graph's convolutions in channels last where it finds one in it, and counts none of a backward's (on the CPU;
before torch 2.13 these are given what they are in eager). So a backward that recomputes no convolution is laid out
otherwise than its forward: what convolutions read is copied to the order that the weight's gradient has, for depthwise ones
neither plain nor channels last, which oneDNN lays out once more. That takes a third of MobileNet-V2's step. Here a backward
is laid out as its forward, whatever it recomputes.

NOTE [Scatters before convolutions]

Where a convolution asks for channels last, Inductor on one CPU thread (torch 2.13; with more it leaves a scatter to the op)
may run what reads a gradient that is scattered, as that of a nearest upsampling, before the scatter: the gradients of all
that lies before are zeros or what was in memory. Its code then writes a buffer that nothing reads, and whose memory
another may take over. Such a plan is lowered with convolutions laid out as they are.

NOTE [Local buffers under tiles]

Inductor's C++ runs loops over the same rows as one, and hands on what only they read in a local buffer of one row. Up to
torch 2.13 it does so too where that loop takes several rows at once (tiles, where one of them reads a transposed matrix):
all read what was left of the last row. Here loops in tiles share no local buffer, as from torch 2.14 on.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor import graph as inductor_graph
from torch._inductor.codegen.cpp import CppScheduling, OuterLoopFusedSchedulerNode
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import TensorBox
from torch._inductor.lowering import maybe_layout_constraints, require_contiguous
from torch._inductor.virtualized import V

from fxmem.compiled.op_kinds import is_generated
from fxmem.compiled.scratch import scratch_bytes
from fxmem.compiled.step_run import IN_ORDER
from fxmem.fake.attention import torch_release
from fxmem.op_facts.kinds import CompiledRole
from fxmem.op_facts.lookup import with_role
from fxmem.torch_patches.replacing import replaced_here
from fxmem.torch_private import without_modes

LAID_OUT = with_role(CompiledRole, "laid out")

MOST_READS_IN_ORDER = 8
"""Of a value that is computed again for each reader (NOTE [What is written when]): twice as many as Inductor's default."""

MUCH_MORE = 2
"""Times what a convolution takes in plain layouts (NOTE [What convolutions take inside])."""


class Levers(NamedTuple):
    """How a graph is compiled beside its plan."""

    layouts_left: bool = False  # convolutions are laid out as they are
    tightness: int = 0  # of the backward: one of TIGHTNESSES, or 0

    @contextlib.contextmanager
    def pulled(self, *, is_backward: bool) -> Iterator[None]:
        """Have Inductor compile the forward or the backward so in the body."""
        settings: dict[str, Any] = {"layout_optimization": False} if self.layouts_left else {}
        with contextlib.ExitStack() as stack:
            pull = stack.enter_context
            pull(replaced_here(GraphLowering, "find_nodes_prefer_channels_last", _laid_out_at_once))
            pull(replaced_here(OuterLoopFusedSchedulerNode, "check_outer_fusion_loop_level_attr", _run_as_one))
            if is_backward and torch_release() >= (2, 13):
                pull(replaced_here(GraphLowering, "decide_layout_opt", _laid_out_in_both))
            if is_backward and self.tightness:
                settings |= {"score_fusion_memory_threshold": sys.maxsize, "allow_buffer_reuse": False}
                pull(replaced_here(CppScheduling, "_get_scheduled_num_args", _full_with_one))
                pull(replaced_here(inductor_graph, "maybe_layout_constraints", _lean_in_plain_layouts))
                pull(V.set_choices_handler(_fusing_in_time()))
            if is_backward and self.tightness == IN_ORDER:
                settings["realize_reads_threshold"] = MOST_READS_IN_ORDER
                pull(replaced_here(GraphLowering, "run_node", _writing_in_order()))
            pull(inductor_config.patch(settings))
            yield


NO_LEVERS = Levers()


def _laid_out_in_both(
    graph_module: fx.GraphModule, decide: Callable[..., bool] = GraphLowering.decide_layout_opt, **kwargs: Any
) -> bool:
    """Stands for ``GraphLowering.decide_layout_opt`` (NOTE [Layouts of both halves])."""
    return decide(graph_module, **kwargs) or lays_out(graph_module)


def _laid_out_at_once(
    self: GraphLowering, found_by: Callable[[GraphLowering], Any] = GraphLowering.find_nodes_prefer_channels_last
) -> Any:
    """Stands for ``GraphLowering.find_nodes_prefer_channels_last`` (NOTE [What convolutions read])."""
    found = found_by(self)
    is_saved = (n for n in found if n.op == "placeholder" and any(user.op == "output" for user in n.users))
    return found - type(found)(is_saved)


def _run_as_one(
    self: OuterLoopFusedSchedulerNode,
    kernels: Sequence[Any],
    depth: int,
    check: Callable[..., bool] = OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr,
) -> bool:
    """Stands for ``OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr`` (NOTE [Local buffers under tiles])."""
    in_tiles = any(loop.steps != 1 for kernel in kernels for loop in kernel.loop_nest.loops[:depth])
    return not (in_tiles and V.local_buffer_context.local_buffers) and check(self, kernels, depth)


def _full_with_one(
    self: CppScheduling, count: Callable[[CppScheduling], int] = CppScheduling._get_scheduled_num_args
) -> int:
    """Stands for ``CppScheduling._get_scheduled_num_args``: no further kernel joins a function that has too many arguments
    (NOTE [Tight backwards])."""
    return sys.maxsize if count(self) else 0


def _fusing_in_time() -> Any:
    """Return the choices in force, without fusion that has something made early (NOTE [Tight backwards])."""
    choices: Any = copy.copy(V.choices)
    may_fuse = choices.can_fuse_vertical
    choices.can_fuse_vertical = lambda *args: may_fuse(*args) and _is_in_time(*args)
    return choices


def _is_in_time(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
    """False where something else reads what ``node1`` makes before all that ``node2`` reads is made."""
    inside, made = {*node1.get_nodes(), *node2.get_nodes()}, node1.get_outputs()
    others = {user.node for buffer in made for user in buffer.users} - inside
    first = min((node.min_order for node in others if hasattr(node, "min_order")), default=sys.maxsize)
    names = {dep.name for dep in node2.read_writes.reads} - {buffer.get_name() for buffer in made}
    makers = [scheduler.name_to_buf[name].defining_op for name in names if name in scheduler.name_to_buf]
    return all(maker is None or maker.max_order < first for maker in makers)


def _writing_in_order() -> Callable[..., Any]:
    """Return what stands for ``GraphLowering.run_node`` (NOTE [What is written when])."""
    waiting: dict[GraphLowering, deque[fx.Node]] = {}
    """Values that ops read, in the graph's order, without those that were written."""

    def run_node(self: GraphLowering, node: fx.Node, run: Callable[..., Any] = GraphLowering.run_node) -> Any:
        if _is_op(node):
            if self not in waiting:
                waiting[self] = deque(value for value in node.graph.nodes if any(map(_is_op, value.users)))
            while waiting[self] and waiting[self][0] in self.env:
                box = self.env[waiting[self].popleft()]
                if isinstance(box, TensorBox):
                    box.realize()
        return run(self, node)

    return run_node


def _is_op(node: fx.Node) -> bool:
    """True for what is neither generated nor a part of a result."""
    return node.op == "call_function" and node.target is not operator.getitem and not is_generated(node)


def _lean_in_plain_layouts(
    op: Any, found_by: Callable[[Any], Any] = maybe_layout_constraints
) -> Callable[..., tuple[Any, Any]] | None:
    """Stands for ``maybe_layout_constraints``, which returns what lays an op's inputs out, or None (NOTE [What convolutions
    take inside])."""
    usual = found_by(op)
    if op not in LAID_OUT:
        return usual  # type: ignore[no-any-return]

    def lay_out(node: fx.Node, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if _is_lean_in_plain_layouts(node):
            node.meta["should_fallback"] = True  # else Inductor lays out anew what it is given
            return require_contiguous(node, *args, **kwargs)  # type: ignore[no-any-return]
        return (args, kwargs) if usual is None else usual(node, *args, **kwargs)

    return lay_out


def _is_lean_in_plain_layouts(node: fx.Node) -> bool:
    """True if a convolution of images takes much less inside where it is not given channels last."""
    given: list[Any] = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args]
    images = [i for i, arg in enumerate(given) if isinstance(arg, torch.Tensor) and arg.ndim == 4][:-1]  # and a weight
    if not images:
        return False
    plain_bytes, usual_bytes = (
        scratch_bytes(node.target, _laid_out(given, images, layout), node.kwargs)
        for layout in (torch.contiguous_format, torch.channels_last)
    )
    return bool(MUCH_MORE * (plain_bytes + sum(given[i].nbytes for i in images)) < usual_bytes)


def _laid_out(given: Sequence[Any], images: Sequence[int], layout: torch.memory_format) -> tuple[Any, ...]:
    """Return the arguments of an op with those at ``images`` laid out anew."""
    with without_modes():
        return tuple(torch.empty_like(a, memory_format=layout) if i in images else a for i, a in enumerate(given))


def lays_out(graph_module: fx.GraphModule) -> bool:
    """True if Inductor would have a graph's convolutions in channels last, on the CPU, where one lays out what it is given
    by itself."""
    found = [node for node in graph_module.graph.nodes if node.target in LAID_OUT]
    by_itself = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    is_default = inductor_config.layout_optimization and not inductor_config.force_layout_optimization
    on_cpu = all(n.args[1].meta["val"].device.type == "cpu" for n in found)
    return bool(found) and on_cpu and by_itself and is_default
