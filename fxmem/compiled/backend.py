"""A Dynamo backend that keeps a budget: Inductor with fxmem's planner in the partitioner's seat.

In: graphs from ``torch.compile``. Out: compiled functions, and a :class:`CompiledReport` for each training graph, which
:mod:`fxmem.compiled.graph_planner` plans. Errors: ``InfeasibleBudgetError`` before any kernel is compiled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxmem.compiled.calls import Calls
from fxmem.compiled.emit import Partitioned
from fxmem.compiled.graph_call import CompiledGraph
from fxmem.compiled.graph_planner import GraphPlanner
from fxmem.compiled.levers import NO_LEVERS, Levers
from fxmem.compiled.lower import breaks_off, compilation_now, compiled, passing_dynamo
from fxmem.compiled.refusals import check_graph, check_one_graph, check_settings
from fxmem.compiled.report import CompiledReport
from fxmem.compiled.step_planner import PlannedGraph
from fxmem.compiled.surroundings import Surroundings, surroundings_of, trained_places, weights_in
from fxmem.errors import FxMemError
from fxmem.passes.context import Settings


class Planned(BaseException):
    """Ends a compilation that was for planning only."""


Around = Callable[[Sequence[torch.Tensor]], Surroundings]
"""Called with a graph's inputs."""


class Backend:
    """A backend for ``torch.compile`` under a budget. ``reports``: one for each graph that was planned by itself, and for
    each step of several calls."""

    __name__ = "fxmem"

    def __init__(self, settings: Settings, around: Around | None = None) -> None:
        self.settings = settings
        self.only_plan: Callable[[GraphPlanner], object] | None = None
        """If set: called for a training graph instead of compiling it."""
        self.explain: Callable[[BaseException], None] | None = None
        """If set: given each error of memory of the compiled code."""
        self.reports: list[CompiledReport] = []
        self._around = around or self._of_graph
        self._calls = Calls(settings, self._tell, self._compiled)
        self._foretold: CompiledReport | None = None
        """What the latest call of :meth:`plan_only` told."""
        self._compilation: Callable[[], object | None] = lambda: None
        """That of the latest training graph, while there is it."""

    def __call__(self, graph_module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        try:
            check_settings(options)
            check_graph(graph_module, inputs)
            graph = CompiledGraph(graph_module, breaks_off(graph_module))
            made = self._compiled(graph, graph_module, inputs)
        except FxMemError as error:
            raise passing_dynamo(error) from None
        if graph.planned is None:  # no training graph
            if self.only_plan is not None:
                raise Planned
            return made
        graph.keep(made)
        caller = partial(_called, graph, weakref.ref(self._calls))
        graph.caller = weakref.ref(caller)
        return caller

    def plan_only(self, planner: GraphPlanner) -> None:
        """Tell of the plan that a step of one call takes. Errors: ``InfeasibleBudgetError``."""
        self._foretold = planner.within(self.settings.budget_bytes)[1]
        self.reports.append(self._foretold)

    def _tell(self, report: CompiledReport) -> None:
        """Keep a report, but for one of what was told by :meth:`plan_only`."""
        told, self._foretold = self._foretold, None
        if told is None or replace(report, num_lowered=told.num_lowered, plan_seconds=told.plan_seconds) != told:
            self.reports.append(report)

    def _compiled(
        self, graph: CompiledGraph, graph_module: fx.GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        def levers() -> Levers:
            return NO_LEVERS if graph.wanted is None else graph.wanted.levers

        explain = partial(_explain, weakref.ref(self))
        return compiled(graph_module, inputs, partial(self._partition, graph, inputs), levers, explain)

    def _partition(
        self,
        graph: CompiledGraph,
        inputs: Sequence[Any],
        joint: fx.GraphModule,
        num_outputs: int,
        static: Sequence[int] | None,
    ) -> Partitioned:
        if graph.planned is None:
            self._check_compilation()
            around = self._around([t for t in inputs if isinstance(t, torch.Tensor)])
            planner = GraphPlanner.of(joint, num_outputs, static, around, self.settings, trained_places(inputs))
            if self.only_plan is not None:
                self.only_plan(planner)
                raise Planned
            graph.planned = PlannedGraph(planner)
            graph.wanted = self._calls.first_variant(graph, inputs)
        else:
            planner = graph.planned.planner.again(joint, static)
        assert graph.wanted is not None
        return planner.parts(planner.candidates.points[graph.wanted.place].plan)

    def _check_compilation(self) -> None:
        compilation = compilation_now()
        check_one_graph(compilation, self._compilation())
        if compilation is not None:
            self._compilation = weakref.ref(compilation)

    def _of_graph(self, tensors: Sequence[torch.Tensor]) -> Surroundings:
        """What is around a graph of which no more is known than its inputs: it holds its loss."""
        return surroundings_of(tensors, weights_in(tensors), self.settings.step)


def _called(graph: CompiledGraph, calls: weakref.ref[Calls], *inputs: Any) -> Any:
    """Call a graph. Torch keeps this for good, and is not to keep the backend with it."""
    found = calls()
    return graph.any_compiled(*inputs) if found is None else found.call(graph, inputs)


def _explain(backend: weakref.ref[Backend], error: BaseException) -> None:
    found = backend()
    if found is not None and found.explain is not None:
        found.explain(error)


def held_weakly(backend: Backend) -> Callable[..., Any]:
    """Return ``backend`` for a caller who holds it: torch keeps the backends it was given for good, and would keep model
    and optimizer with them."""
    held = weakref.ref(backend)

    def fxmem(graph_module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        found = held()
        assert found is not None
        return found(graph_module, inputs, **options)

    return fxmem
