"""A Dynamo backend that keeps a budget: Inductor with fxmem's planner in the partitioner's seat.

In: graphs from ``torch.compile``. Out: compiled functions, and a :class:`CompiledReport` for each training graph, which
:mod:`fxmem.compiled.graph_planner` plans. Errors: ``InfeasibleBudgetError`` before any kernel is compiled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from fxmem.compiled.emit import Partitioned
from fxmem.compiled.graph_planner import GraphPlanner
from fxmem.compiled.lower import compilation_now, compiled, passing_dynamo, set_layouts
from fxmem.compiled.refusals import check_inputs, check_one_graph, check_settings
from fxmem.compiled.report import CompiledReport
from fxmem.compiled.surroundings import Surroundings, surroundings_of
from fxmem.errors import FxMemError
from fxmem.passes.context import Settings


class Planned(BaseException):
    """Ends a compilation that was for planning only."""


Around = Callable[[Sequence[torch.Tensor]], Surroundings]
"""Called with a graph's inputs."""


class Backend:
    """A backend for ``torch.compile`` under a budget. ``reports``: one for each training graph that was planned."""

    __name__ = "fxmem"

    def __init__(self, settings: Settings, around: Around | None = None) -> None:
        self.settings = settings
        self.only_plan: Callable[[GraphPlanner], object] | None = None
        """If set: called for a training graph instead of compiling it."""
        self.reports: list[CompiledReport] = []
        self._around = around or self._of_graph
        self._compilation: tuple[object, object] | None = None

    def __call__(self, graph_module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        try:
            check_settings(options)
            check_inputs(inputs)
            tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
            return compiled(graph_module, inputs, partial(self._partition, tensors))
        except FxMemError as error:
            raise passing_dynamo(error) from None

    def plan(self, planner: GraphPlanner) -> Partitioned:
        """Return forward and backward of the plan to take; it is told in ``reports``. Errors: ``InfeasibleBudgetError``."""
        parts, report = planner.within(self.settings.budget_bytes)
        self.reports.append(report)
        if report.layouts_left:
            set_layouts(optimized=False)
        return parts

    def _partition(
        self, tensors: Sequence[torch.Tensor], joint: fx.GraphModule, num_outputs: int, static: Sequence[int] | None
    ) -> Partitioned:
        compilation = compilation_now()
        check_one_graph(compilation, self._compilation)
        planner = GraphPlanner.of(joint, num_outputs, static, self._around(tensors), self.settings)
        if self.only_plan is not None:
            self.only_plan(planner)
            raise Planned
        parts = self.plan(planner)
        self._compilation = compilation
        return parts

    def _of_graph(self, tensors: Sequence[torch.Tensor]) -> Surroundings:
        """What is around a graph of which no more is known than its inputs: it holds its loss."""
        parameters = [t for t in tensors if isinstance(t, torch.nn.Parameter)]
        return surroundings_of(tensors, parameters, self.settings.step)


def held_weakly(backend: Backend) -> Callable[..., Any]:
    """Return ``backend`` for a caller who holds it: torch keeps the backends it was given for good, and would keep model
    and optimizer with them."""
    held = weakref.ref(backend)

    def fxmem(graph_module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        found = held()
        assert found is not None
        return found(graph_module, inputs, **options)

    return fxmem
