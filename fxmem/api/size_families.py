"""Calls that differ in sizes only: their graphs, their plans, and which plan serves which size.

In: the inputs of a call. Out: a graph that is for their sizes, or what is compiled for larger ones and serves them too
(NOTE [One plan, many sizes] in :mod:`fxmem.runtime.other_sizes`). A graph of a second size has the sizes that varied
symbolic, and batch dimensions; what the model's code ties to one size is remembered, and so is what cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from fxmem.capture.dynamic_batch import (
    Shapes,
    batch_dims,
    differing_dims,
    is_within,
    largest_of,
    reshaped,
    shapes_of,
)
from fxmem.capture.export import capture
from fxmem.capture.graph import CaptureGraph, Dims, Inputs
from fxmem.errors import CaptureError, InputError
from fxmem.passes.context import CompileContext
from fxmem.pipeline import Compiled, UnplannedFloor, report_at, room_in, with_programs
from fxmem.planners.plan_transfer import Planned
from fxmem.profiling.verify import emitted_step
from fxmem.report.text import Report
from fxmem.runtime.autocast import Autocast

NUM_WATCHED = 8
"""Calls of a size that runs under the plan for another one, before a step of it is written down: it may come but seldom."""


@dataclass(frozen=True, slots=True)
class SizedGraph:
    """A graph and the shapes that it was captured at."""

    captured: CaptureGraph
    shapes: Shapes

    def is_for(self, inputs: Inputs, shapes: Shapes) -> bool:
        """True if this is the model's graph for a call of these inputs."""
        captured = self.captured
        if not differing_dims(self.shapes, shapes) <= captured.dynamic:
            return False
        return captured.serves(inputs) and captured.fits(inputs)


@dataclass(frozen=True, slots=True)
class SizedPlan:
    """What is compiled, and the shapes that it was planned for."""

    compiled: Compiled
    shapes: Shapes

    def serves(self, inputs: Inputs, shapes: Shapes, bounded: bool) -> bool:
        """True if a call of these inputs may run under this plan; ``bounded``: it must not take more memory."""
        if bounded and not is_within(shapes, self.shapes):
            return False
        return SizedGraph(self.compiled.captured, self.shapes).is_for(inputs, shapes)


@dataclass(slots=True)
class Family:
    """Signatures that differ in sizes only."""

    graphs: list[SizedGraph] = field(default_factory=list)
    """The latest first."""
    plans: list[SizedPlan] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)
    """Frontiers of sizes that were planned for."""
    largest: Shapes | None = None
    """In each dimension the longest that came, or is said to come."""
    varying: Dims = frozenset()
    """Dimensions that came in several sizes, or are said to."""
    tied: Dims = frozenset()
    """Those of them that the model's code ties to one size."""
    not_captured: set[Dims] = field(default_factory=set)
    """Sets of dimensions with which no graph could be captured."""

    def expect(self, shapes: Iterable[Shapes]) -> None:
        """Note sizes that came or will come."""
        for each in dict.fromkeys(shapes):
            if self.largest is not None:
                self.varying |= differing_dims(self.largest, each)
            self.largest = each if self.largest is None else largest_of((self.largest, each))

    def without_plans(self) -> Family:
        """Return what is known of sizes and graphs, for plans of another step."""
        return replace(self, graphs=list(self.graphs), plans=[], planned=[], not_captured=set(self.not_captured))

    def larger(self, inputs: Inputs, captured: CaptureGraph) -> Inputs | None:
        """Return ``inputs`` in the largest sizes that came or will, to plan for in place of their own; None if these are
        the largest, or ``captured`` is not for such sizes."""
        shapes = shapes_of(inputs)
        assert self.largest is not None, "it came"
        wanted = list(shapes)
        for i, d in captured.dynamic:
            own, most = wanted[i], self.largest[i]
            if own is not None and most is not None:
                wanted[i] = torch.Size((*own[:d], max(own[d], most[d]), *own[d + 1 :]))
        if tuple(wanted) == shapes:
            return None
        larger = reshaped(inputs, tuple(wanted))
        return larger if captured.serves(larger) and captured.fits(larger) else None

    def plan_for(self, inputs: Inputs, bounded: bool) -> SizedPlan | None:
        """Return the plan of the smallest of the sizes whose plans serve ``inputs``; None if none does."""
        shapes = shapes_of(inputs)
        serving = [plan for plan in self.plans if plan.serves(inputs, shapes, bounded)]
        return min(serving, key=lambda plan: _num_elements(plan.shapes), default=None)

    def graph_for(self, model: torch.nn.Module, inputs: Inputs, autocast: Autocast | None) -> CaptureGraph:
        """Return the graph for the sizes of ``inputs``, captured if there is none yet. Errors: as :func:`capture`."""
        shapes = shapes_of(inputs)
        self.expect([shapes])
        known = next((graph for graph in self.graphs if graph.is_for(inputs, shapes)), None)
        if known is not None:
            return known.captured
        captured = self._captured_dynamic(model, inputs, autocast) or capture(model, inputs, autocast)
        self.graphs.insert(0, SizedGraph(captured, shapes))
        return captured

    def _captured_dynamic(
        self, model: torch.nn.Module, inputs: Inputs, autocast: Autocast | None
    ) -> CaptureGraph | None:
        """Return a graph that serves other sizes too; None where nothing varies, or the model's code is tied to all."""
        varying = frozenset((i, d) for i, d in self.varying - self.tied if inputs.leaves[i].shape[d] > 1)
        if not varying:
            return None
        batch: Dims = frozenset()
        with suppress(InputError):  # no batch, or one of 1
            batch = batch_dims(inputs) - self.tied
        for dims in dict.fromkeys((varying | batch, varying)):
            if any(dims >= failed for failed in self.not_captured):
                continue
            try:
                captured = capture(model, inputs, autocast, dims, partly=True)
            except CaptureError:
                self.not_captured.add(dims)
                continue
            self.tied |= dims - captured.dynamic
            return captured
        return None

    def exchange(self, old: Compiled, new: Compiled) -> None:
        """Put what is compiled anew in the place of ``old``."""
        self.plans = [replace(plan, compiled=new) if plan.compiled is old else plan for plan in self.plans]

    def outlives(self, keep: Callable[[CaptureGraph], bool]) -> bool:
        """Forget what ``keep`` is not true of; tell if anything is left of what was there."""
        was_empty = not self.graphs
        self.graphs = [graph for graph in self.graphs if keep(graph.captured)]
        self.plans = [plan for plan in self.plans if keep(plan.compiled.captured)]
        return was_empty or bool(self.graphs)


def is_of_own_size(compiled: Compiled) -> bool:
    """True if ``compiled`` was planned for the size that it serves, not for a larger one."""
    return not isinstance(compiled._report, LazyReport)


def report_planned_for(compiled: Compiled) -> Report:
    """Return the report of the size that ``compiled`` was planned for, which a smaller one does not exceed."""
    report = compiled._report
    return report.compiled.planned_report if isinstance(report, LazyReport) else compiled.planned_report


def _num_elements(shapes: Shapes) -> int:
    return sum(shape.numel() for shape in shapes if shape is not None)


class LazyReport:
    """The report of what runs under a plan for something else: made on fakes when it is asked for, once."""

    def __init__(self, context: CompileContext, compiled: Compiled, origin: str) -> None:
        self._context, self.compiled = context.without_values(), compiled
        self._scope = context.scope_around(compiled.captured)
        self._known: Report | None = None
        self._origin = origin

    def __call__(self) -> Report:
        if self._known is None:
            with self._scope.entered():
                floor = UnplannedFloor(self.compiled.captured, self._context, self._scope)
                self._known = report_at(self._context, self.compiled, floor, self._origin)
        return self._known

    def peak_bytes(self) -> int:
        """Return the peak of the step, which takes less time than the report."""
        compiled, context = self.compiled, self._context
        with self._scope.entered():
            step = context.step
            return emitted_step(
                compiled.graph_module, compiled.captured, context.inputs, step, compiled.seen
            ).peak_bytes


def taken_over(context: CompileContext, compiled: Compiled, origin: str) -> Compiled:
    """Return ``compiled`` as it serves the call and step of ``context``. ``origin``: what it was planned for."""
    room = room_in(report_planned_for(compiled), context.step)
    taken = replace(compiled, _report=LazyReport(context, compiled, origin), planned=None, later=None)
    return with_programs(taken, context, room, NUM_WATCHED)
