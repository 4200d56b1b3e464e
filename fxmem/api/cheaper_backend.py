"""``backend="auto"``: eager's bits or the compiler's, whichever is estimated to train faster within the budget.

In: what :func:`fxmem.optimize` takes. Out: a :class:`CompiledModule`, or None where the eager backend is to be used, and
why. Both steps are estimated by one roofline, so that they can be compared; what measuring would tell is not asked for.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fxmem.api.arguments import Options, check_optimizable, example_of, region_of_step, settings_of
from fxmem.api.budget import parse_budget
from fxmem.api.compiled import BudgetArguments, CompiledModule, Example, bounded_settings, compiled_module
from fxmem.capture.export import capture
from fxmem.errors import FxMemError, InfeasibleBudgetError, InputError, first_lines
from fxmem.frontiers import frontier_of
from fxmem.passes.context import CompileContext
from fxmem.pipeline import profile_for_short_memory
from fxmem.planners.pareto import cheapest_within
from fxmem.progress import CAPTURE_SECONDS, told
from fxmem.torch_patches import as_in_training


def compiled_if_cheaper(
    model: torch.nn.Module, example: Example, budget: BudgetArguments, options: Options
) -> tuple[CompiledModule | None, str]:
    """Return ``model`` compiled, or None where the eager backend is faster or alone keeps the budget; and why.

    Errors: ``InputError`` without an example, or for arguments that only the eager backend takes.
    """
    if all(given is None for given in example):
        raise InputError('backend="auto" compares two plans for one call: give it an example, or name a backend')
    check_optimizable(model)
    bounded_settings(model, example, budget, options)
    with told(f"planning {type(model).__name__}, compiled and eager", 2 * CAPTURE_SECONDS):
        try:
            module = compiled_module(model, example, budget, options)
        except FxMemError as error:
            return None, f"eager: the compiled step cannot be had ({first_lines(error)})"
        report = module.fxmem.report
        seconds = report.keep_all_seconds + report.overhead_seconds
        try:
            eager_seconds = _eager_seconds(model, example, budget, options)
        except FxMemError as error:
            return module, f"inductor: the eager step cannot be had ({first_lines(error)})"
    times = f"estimated {1e3 * seconds:.3g} ms a step compiled, {1e3 * eager_seconds:.3g} ms eager"
    if seconds <= eager_seconds:
        return module, f"inductor: {times}"
    return None, f"eager: {times}"


def _eager_seconds(model: torch.nn.Module, example: Example, budget: BudgetArguments, options: Options) -> float:
    """Return how long the eager step takes by the roofline under the cheapest plan. Errors: ``InfeasibleBudgetError``."""
    inputs, settings = example_of(model, *example), replace(settings_of(options), measure=False)
    budget_gb, given, budget_mb = budget
    bound = parse_budget(budget_gb, given, model, settings.step.optimizer, *example, budget_mb=budget_mb)
    context = CompileContext(model, inputs, settings, region_of_step(model, settings.step))
    with as_in_training():
        captured = capture(model, inputs, context.autocast)
        profile = profile_for_short_memory(captured, context).profile
    points = frontier_of(profile, context)
    point = points[0] if bound.nbytes is None else cheapest_within(points, bound.nbytes)
    if point is None:
        raise InfeasibleBudgetError(bound.nbytes or 0, points[-1].peak_bytes)
    return profile.step_seconds + point.recompute_seconds
