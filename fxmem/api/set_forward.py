"""A forward that is set on a model after it was optimized, as trainers do.

One that calls the planned forward goes on around the plan. One that trains submodules by itself (TRL's, which computes the
loss in pieces) has gone around it: that shows in its first call, and from the next one on it is planned in place of the
forward. One warning tells the peak of the first step, if that was above the budget.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from fxmem.api.arguments import is_optimized
from fxmem.api.bypass import planned_call, submodules_told_to
from fxmem.api.namespace import Namespace
from fxmem.api.twins import with_forward
from fxmem.compiled.report import CompiledReport
from fxmem.errors import InfeasibleBudgetError, in_units
from fxmem.report.text import Report
from fxmem.user_frames import level_of_user

Forward = Callable[..., Any]


def as_set(module: torch.nn.Module, forward: Any) -> Any:
    """Return what is to be kept of a ``forward`` that is set on the optimized ``module``."""
    function = getattr(forward, "__func__", None)
    if function is None or forward.__self__ is not module:
        return forward  # nobody could call it on another object
    return MethodType(_watched(function), module)


def _watched(function: Forward) -> Forward:
    @functools.wraps(function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        trains = is_optimized(self) and self.training and torch.is_grad_enabled()
        if not trains or torch.compiler.is_compiling():
            return function(self, *args, **kwargs)
        planned: Namespace = self.fxmem
        if function in planned.set_forwards:
            return _call_planned(self, function, args, kwargs)
        with submodules_told_to(id(self), functools.partial(_plan, planned, function)):
            return function(self, *args, **kwargs)

    return forward


def _plan(planned: Namespace, function: Forward, path: str) -> None:
    """Plan ``function`` from its next call on: it has called the submodule at ``path``."""
    model = with_forward(planned.original, function.__name__, function)
    planned.set_forwards[function] = type(planned)(model, planned.settings)
    planned.said_of[function] = path


@torch.compiler.disable(reason="planning and recomputation run outside of torch.compile")  # type: ignore[untyped-decorator]
def _call_planned(module: Any, function: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    planned = module.fxmem
    own, path = planned.set_forwards[function], planned.said_of.pop(function, None)
    with planned_call(id(module)):
        try:
            output, least = own.call(args, kwargs), None
        except InfeasibleBudgetError as error:
            if path is None:
                raise
            least = error  # the step before ran all the same
            own.raise_budget(error.least_bytes)
            output = own.call(args, kwargs)
    if path is not None:
        name = getattr(getattr(function, "__code__", None), "co_name", "forward")  # what it wraps has another
        _tell(type(planned.original).__name__, name, path, own.report, least)
    return output


def _tell(
    kind: str, name: str, path: str, report: Report | CompiledReport, least: InfeasibleBudgetError | None
) -> None:
    """Tell of the step before, which ran around the plan, if that was above the budget, or its peak is not known."""
    budget_bytes = least.budget_bytes if least else report.budget_bytes
    eager_bytes = report.eager_peak_bytes if isinstance(report, Report) else None
    if budget_bytes is None or (eager_bytes is not None and eager_bytes <= budget_bytes):
        return
    peak = f"which is not known; the budget is {budget_bytes} bytes"
    if eager_bytes is not None:
        peak = f"{eager_bytes} bytes ({in_units(eager_bytes)}), above the budget of {budget_bytes} bytes"
    rest = f"from now on {name} is planned, with a peak of {in_units(report.predicted_peak_bytes)}"
    if least is not None:
        rest += f", the least that a plan reaches. Raise the budget to {least.least_bytes} bytes to keep it"
    warnings.warn(
        f"{kind}.forward was replaced after the model was optimized: {name} trains {path} around the plan, so the step's "
        f"peak is that of eager PyTorch, {peak}: {rest}. To plan for it from the first step on, optimize the model after "
        "its forward is set.",
        stacklevel=level_of_user(),
    )
