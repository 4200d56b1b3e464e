"""Whether the steps of an emitted graph run as programs (:mod:`fxmem.runtime.programs.joint`).

NOTE [Which runtime]

``runtime="program"`` asks for programs, ``"tape"`` for the tape, where ops run under autograd. ``"auto"``, the default, is
programs where a step works on a CUDA device: there the host launches while the device works, and what the host must do for
a step may be all its time. On the CPU writing a step down takes the time of several, so with ``"auto"`` that waits until
the tape has cost as much: then it has paid at most twice what was best, however many steps are to come (ski rental;
Karlin et al., Algorithmica 3, 1988). A budget of what the allocator has reserved is for the tape: a program's allocations
are the plan's, but not the moments of their frees, on which fragments depend. ``FXMEM_RUNTIME`` in the environment says
what ``"auto"`` is. Whatever is asked for, a step runs on the tape where no program is right for it (NOTE [What stays on the
tape]), and ``module.fxmem.runtime`` says why.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxmem.capture.graph import CaptureGraph, Inputs, attribute_of
from fxmem.capture.written_state import written_by
from fxmem.errors import InputError
from fxmem.runtime import compressed_ops, frozen_batch_norm, inplace_ops, lean_backwards
from fxmem.runtime.programs.joint import JointSteps, Judge
from fxmem.runtime.programs.recording import Inside, nothing_inside
from fxmem.runtime.programs.trial import Fuse
from fxmem.runtime.scoped_ops import op_of, op_text, region_of
from fxmem.runtime.tape_table import HOOKED_SECONDS, RERUN_SECONDS
from fxmem.torch_private import OpOverload, tree_leaves

RUNTIMES = ("auto", "tape", "program")
CALL_SECONDS = 3e-3
"""Of writing down a step on the CPU, for each call that its forward makes, the step's own time left out."""
LEAST_WATCHED, MOST_WATCHED = 10, 1000
"""Calls on the CPU before a step is written down by itself. If it were more, the tape costs next to nothing."""
OWN = frozenset(module.__name__ for module in (compressed_ops, frozen_batch_norm, inplace_ops, lean_backwards))


def runtime_for(asked_for: str, budget_of: str, devices: Iterable[torch.device]) -> str:
    """Return how steps on ``devices`` run, "tape", "program", or "auto": as programs from some call on (NOTE [Which
    runtime]). Errors: ``InputError`` if the environment has a name that is none."""
    if asked_for == "auto":
        asked_for = os.environ.get("FXMEM_RUNTIME", "auto")
        if asked_for not in RUNTIMES:
            raise InputError(f"FXMEM_RUNTIME={asked_for!r} is none of {', '.join(RUNTIMES)}")
    if asked_for == "auto" and budget_of != "allocated":
        return "tape"
    if asked_for == "auto" and any(device.type == "cuda" for device in devices):
        return "program"
    return asked_for


def calls_before(graph_module: fx.GraphModule) -> int | None:
    """Return after how many calls of ``graph_module`` on the CPU the tape has cost what writing a step down does; None if
    it never does, or too late to matter."""
    opener = getattr(graph_module, "fxmem_tape", None)
    if opener is None:
        return None
    num_calls = sum(node.op == "call_function" for node in graph_module.graph.nodes)
    tape_seconds = HOOKED_SECONDS * len(opener.table.nodes) + RERUN_SECONDS * len(opener.table.recomputes)
    calls = math.ceil(CALL_SECONDS * num_calls / tape_seconds)
    return None if calls > MOST_WATCHED else max(LEAST_WATCHED, calls)


def joint_steps(
    captured: CaptureGraph,
    graph_module: fx.GraphModule,
    inputs: Inputs,
    room_bytes: int | None = None,
    num_watched: int = 1,
    asked_for: tuple[str, str] = ("auto", "allocated"),
    inside: Inside = nothing_inside,
    judge: Judge | None = None,
    clears_gradients: bool = False,
    fuse: Fuse | None = None,
) -> JointSteps | None:
    """Return what runs the steps of ``graph_module``, emitted from ``captured``, as programs; None if they run on the tape.

    ``room_bytes``: what a planned step leaves of its budget. ``num_watched``: calls before one is written down.
    ``asked_for``: the runtime, and what a budget bounds. ``inside``: what kernels take.
    ``judge``: says whether a program keeps the budget. ``clears_gradients``: the loop clears them before the backward.
    ``fuse``: makes kernels for chains of calls, for which programs are there at once.
    """
    devices = tuple(dict.fromkeys(t.device for t in (*captured.parameters, *inputs.tensors)))
    runs = runtime_for(*asked_for, devices)
    runs = "program" if fuse is not None and runs == "auto" else runs
    before = calls_before(graph_module) if runs == "auto" else num_watched
    if runs == "tape" or before is None:
        return None

    def run(graph: Callable[..., Any], leaves: Sequence[Any]) -> Sequence[Any]:
        return captured.leaves_of(graph, leaves)

    return JointSteps(
        graph_module,
        run,
        written_by(captured, inputs.leaves),
        devices,
        captured.autocast,
        room_bytes,
        _refusal(captured, graph_module),
        max(num_watched, before),
        has_regions=captured.autocast_device is not None,
        inside=inside,
        judge=judge,
        clears_gradients=clears_gradients,
        fuse=fuse,
    )


def _refusal(captured: CaptureGraph, graph_module: fx.GraphModule) -> str:
    """Say why steps of this graph stay on the tape; nothing if they need not."""
    if captured.effects.reads:
        return "it reads what the call before has left"
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
