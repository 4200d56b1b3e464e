"""Whether the steps of an emitted graph may run as programs (:mod:`fxmem.runtime.programs.joint`).

They do where a program is right, if ``FXMEM_RUNTIME=graph`` in the environment asks for that; ``FXMEM_RUNTIME=tape``, the
default, asks for the tape.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxmem.capture.graph import CaptureGraph, Inputs, attribute_of
from fxmem.capture.written_state import written_by
from fxmem.errors import InputError
from fxmem.runtime import compressed_ops, frozen_batch_norm, inplace_ops, lean_backwards
from fxmem.runtime.programs.joint import JointSteps
from fxmem.runtime.scoped_ops import op_of, op_text, region_of
from fxmem.torch_private import OpOverload, tree_leaves

OWN = frozenset(module.__name__ for module in (compressed_ops, frozen_batch_norm, inplace_ops, lean_backwards))
RUNTIMES = ("tape", "graph")


def runtime_asked_for() -> str:
    """Return how steps are to run. Errors: ``InputError`` of a name that is none."""
    name = os.environ.get("FXMEM_RUNTIME", RUNTIMES[0])
    if name not in RUNTIMES:
        raise InputError(f"FXMEM_RUNTIME={name!r} is none of {', '.join(RUNTIMES)}")
    return name


def joint_steps(
    captured: CaptureGraph,
    graph_module: fx.GraphModule,
    inputs: Inputs,
    room_bytes: int | None = None,
    num_watched: int = 1,
) -> JointSteps | None:
    """Return what runs the steps of ``graph_module``, emitted from ``captured``, as programs; None if the tape is asked
    for. ``room_bytes``: what a planned step leaves of its budget. ``num_watched``: calls before one is written down."""
    if runtime_asked_for() == "tape":
        return None

    def run(graph: Callable[..., Any], leaves: Sequence[Any]) -> Sequence[Any]:
        return captured.leaves_of(graph, leaves)

    devices = dict.fromkeys(t.device for t in (*captured.parameters, *inputs.tensors))
    return JointSteps(
        graph_module,
        run,
        written_by(captured, inputs.leaves),
        tuple(devices),
        captured.autocast,
        room_bytes,
        _refusal(captured, graph_module),
        num_watched,
        has_regions=captured.autocast_device is not None,
    )


def _refusal(captured: CaptureGraph, graph_module: fx.GraphModule) -> str:
    """Say why steps of this graph stay on the tape; nothing if they need not."""
    targets = [node.target for node in captured.graph_module.graph.nodes if node.op == "call_function"]
    for scoped in targets:
        target = op_of(scoped)
        if region_of(scoped).switches is not None:
            return f"it switches kernels for {op_text(scoped)}"
        if not (isinstance(target, OpOverload) or target is operator.getitem or _is_own(target)):
            return f"it calls {getattr(target, '__name__', target)}, which is no operator"
    if any(isinstance(value, torch.Generator) for value in _values(captured.graph_module)):
        return "it draws from a generator of its own, which a step that is written down would draw from too"
    opener = getattr(graph_module, "fxmem_tape", None)
    if opener is not None and opener.counters:
        return "a frozen BatchNorm may be updated unseen"
    return "it copies to host memory and back" if opener is not None and opener.table.fetched else ""


def _values(graph_module: fx.GraphModule) -> Iterator[object]:
    """Yield what the calls of a graph are given that none of them has made."""
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            yield attribute_of(graph_module, str(node.target))
        else:
            yield from tree_leaves((node.args, node.kwargs))


def _is_own(target: object) -> bool:
    """True of a function of fxmem's that stands for an operator: what it calls is written down in its place."""
    return getattr(target, "__module__", None) in OWN
