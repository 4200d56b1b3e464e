"""The one contract of all passes, and what runs them.

NOTE [Passes]

1. A pass is ``apply(graph, context) -> graph``: it returns the graph that it was given, or a new one; it never changes the
   one that it was given.
2. The graph is valid before and after a pass (``fx.Graph.lint``), not necessarily midway.
3. What a pass needs to know of the graph, it asks of ``context.profile_of(graph)``.
4. Each has a name, under which it is logged, and a setting that switches it on or off.
5. ``FXMEM_LOG=passes`` logs what each did: nodes, bytes that autograd saves, and the difference of the graphs' code.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from typing import Protocol

from fxmem.capture.graph import CaptureGraph
from fxmem.passes.context import CompileContext, Settings

log = logging.getLogger("fxmem.passes")


class Pass(Protocol):
    """A step from graph to graph (NOTE [Passes])."""

    @property
    def name(self) -> str:
        """What it is called in logs."""

    def enabled(self, settings: Settings) -> bool:
        """Whether the user wants it."""

    def apply(self, graph: CaptureGraph, context: CompileContext) -> CaptureGraph:
        """Return the graph rewritten, or the same object where there is nothing to do."""


def run_passes(graph: CaptureGraph, passes: Iterable[Pass], context: CompileContext) -> CaptureGraph:
    """Return ``graph`` after ``passes``, one after the other."""
    for each in passes:
        if not each.enabled(context.settings):
            log.debug("%s: switched off", each.name)
            continue
        before, graph = graph, each.apply(graph, context)
        graph.graph_module.graph.lint()
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", difference(each.name, before, graph, context))
    return graph


def difference(name: str, before: CaptureGraph, after: CaptureGraph, context: CompileContext) -> str:
    """Say in words and lines of code what a pass did."""
    if after is before:
        return f"{name}: nothing to do"
    sizes = " -> ".join(str(len(graph.graph_module.graph.nodes)) for graph in (before, after))
    saved = " -> ".join(f"{saved_bytes(graph, context) / 1e6:.3f}" for graph in (before, after))
    old, new = (graph.graph_module.code.splitlines() for graph in (before, after))
    changed = difflib.unified_diff(old, new, "before", "after", lineterm="", n=1)
    return "\n".join([f"{name}: {sizes} nodes, {saved} MB saved for backward", *changed])


def saved_bytes(graph: CaptureGraph, context: CompileContext) -> int:
    """Return the bytes of what autograd saves, if nothing is dropped; of an emitted graph, those of what it came from."""
    return sum(s.nbytes for s in context.profile_of(graph.made_from or graph).profile.storages if s.num_saves)
