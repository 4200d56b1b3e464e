"""``fxmem.frontier``: what every budget costs, for one model, before anything is emitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch

from fxmem.api.arguments import (
    Options,
    check_backend,
    check_model,
    example_of,
    region_of_step,
    settings_of,
    with_options,
)
from fxmem.capture.export import capture
from fxmem.compiled.report import CompiledCost
from fxmem.errors import in_units
from fxmem.frontiers import frontier_of
from fxmem.ir import FrontierPoint, GraphProfile, PlainData
from fxmem.passes.context import CompileContext
from fxmem.pipeline import profile_for_short_memory
from fxmem.planners.bound import with_bounds
from fxmem.progress import CAPTURE_SECONDS, told
from fxmem.report.plots import plot_frontier
from fxmem.torch_patches import as_in_training


@dataclass(frozen=True, slots=True, repr=False)
class BudgetPoint(PlainData):
    """One budget and what it costs; between two points, the one with the lower budget is what one gets."""

    budget_bytes: int
    """The least budget for which this is the plan with ``runtime="tape"``. Else room to write a step down comes on top:
    copies of buffers that the model writes, and on CUDA what the allocator adds."""
    predicted_peak_bytes: int
    """Of the whole training step."""
    overhead_seconds: float
    """Estimated time of what is recomputed in one step."""
    overhead_ratio: float
    """``overhead_seconds`` over the estimated time of the eager step."""
    gap_ratio: float
    """Optimality gap: at most this share of the eager step's time could the best of all plans save."""

    def __repr__(self) -> str:
        return f"BudgetPoint({in_units(self.budget_bytes)}, overhead {self.overhead_ratio:.1%})"


class Frontier(tuple[BudgetPoint, ...]):
    """The budgets at which the plan changes, falling; a tuple that can be drawn."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the points, ready for ``json.dumps``."""
        return {"points": [point.to_dict() for point in self]}

    def plot(self, axes: Any = None) -> Any:
        """Return a matplotlib figure of what every budget costs; ``axes``: axes to draw on instead."""
        return plot_frontier([(p.predicted_peak_bytes, p.overhead_ratio, p.gap_ratio) for p in self], axes)


@with_options
def frontier(
    model: torch.nn.Module,
    example_args: Any = None,
    example_kwargs: dict[str, Any] | None = None,
    *,
    backend: str = "eager",
    **options: Unpack[Options],
) -> Frontier:
    """Return the budgets at which the plan changes, falling, down to the minimum feasible peak.

    The first point keeps all that the policy lets. ``example_args`` (a tensor or a tuple) and ``example_kwargs``: one
    call's arguments. Peaks are planned, not yet verified on an emitted module, in bytes; times are estimates, in
    seconds. Errors: ``InputError``, ``CaptureError``, ``ProfileError``.

    - ``backend``: ``"inductor"`` returns what :func:`fxmem.optimize` with this backend has to offer: up to 32 plans, and
      twice as many where convolutions can be laid out in two ways. Their peaks are those of the code that Inductor
      generates for them; no kernel is compiled. Times are over the compiled step's with nothing recomputed, and all of a
      plan's overhead is its gap: no lower bound is known.
    """
    if check_backend(backend) == "inductor":
        from fxmem.api.compiled import compiled_frontier  # which imports Dynamo

        return _compiled(compiled_frontier(model, (example_args, example_kwargs), options))
    check_model(model)
    inputs, settings = example_of(model, example_args, example_kwargs), settings_of(options)
    context = CompileContext(model, inputs, settings, region_of_step(model, settings.step))
    with told(f"planning {type(model).__name__} for every budget", CAPTURE_SECONDS + settings.plan_seconds):
        with as_in_training():
            captured = capture(model, inputs, context.autocast)
            profile = profile_for_short_memory(captured, context).profile
        return frontier_from(profile, frontier_of(profile, context))


def frontier_from(profile: GraphProfile, points: Sequence[FrontierPoint]) -> Frontier:
    """Return what ``points``, plans made on ``profile``, cost."""
    step_seconds = profile.step_seconds or 1.0
    return Frontier(
        BudgetPoint(
            budget_bytes=point.peak_bytes,
            predicted_peak_bytes=point.peak_bytes,
            overhead_seconds=point.recompute_seconds,
            overhead_ratio=point.recompute_seconds / step_seconds,
            gap_ratio=point.gap_seconds / step_seconds,
        )
        for point in (points if any(p.plan.offloads for p in points) else with_bounds(profile, points))
    )


def _compiled(costs: Sequence[CompiledCost]) -> Frontier:
    return Frontier(
        BudgetPoint(c.budget_bytes, c.peak_bytes, c.overhead_seconds, c.overhead_ratio, c.overhead_ratio) for c in costs
    )
