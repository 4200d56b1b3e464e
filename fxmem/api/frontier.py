"""``fxmem.frontier``: what every budget costs, for one model, before anything is emitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxmem.capture.export import as_in_training, capture
from fxmem.capture.graph import Inputs
from fxmem.errors import InputError
from fxmem.pipeline import Settings, frontier_of, profile_model
from fxmem.planners.bound import with_bounds
from fxmem.planners.policy import Rule, check_policy
from fxmem.planners.registry import PLANNERS
from fxmem.profiling.op_benchmark import may_measure
from fxmem.profiling.roofline import COSTS, preset_of
from fxmem.profiling.training_step import OptimizerLike, TrainingStep, check_step
from fxmem.report.plots import plot_frontier
from fxmem.runtime.autocast import Autocast


@dataclass(frozen=True, slots=True)
class BudgetPoint:
    """One budget and what it costs; between two points, the one with the lower budget is what one gets."""

    budget_bytes: int
    """The least budget for which this is the plan."""
    predicted_peak_bytes: int
    """Of the whole training step."""
    overhead_seconds: float
    """Estimated time of what is recomputed in one step."""
    overhead_ratio: float
    """``overhead_seconds`` over the estimated time of the eager step."""
    gap_ratio: float
    """At most so much of the eager step's time could the best of all plans save."""


class Frontier(tuple[BudgetPoint, ...]):
    """The budgets at which the plan changes, falling; a tuple that can be drawn."""

    __slots__ = ()

    def plot(self, axes: Any = None) -> Any:
        """Return a matplotlib figure of what every budget costs; ``axes``: axes to draw on instead."""
        return plot_frontier([(p.predicted_peak_bytes, p.overhead_ratio, p.gap_ratio) for p in self], axes)


def frontier(
    model: torch.nn.Module,
    example_args: Any = None,
    example_kwargs: dict[str, Any] | None = None,
    *,
    optimizer: OptimizerLike = "adamw",
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    autocast: torch.dtype | None = None,
    accumulate: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    planner: str = "auto",
    plan_seconds: float = 30.0,
    cost: str = "auto",
    policy: Sequence[Rule] = (),
    cache: bool = True,
) -> Frontier:
    """Return the budgets at which the plan changes, falling, down to the least peak reachable.

    The first keeps everything, each call saving as little as it may. Arguments are those of :func:`fxmem.optimize`;
    ``plan_seconds`` is the planner's CPU time. Peaks are planned, not yet verified on the emitted module. Errors:
    ``InputError``, ``CaptureError``.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    for what, name, known in (("planner", planner, PLANNERS), ("cost", cost, COSTS)):
        if name not in known:
            raise InputError(f"unknown {what} {name!r}; known: {', '.join(sorted(known))}")
    inputs = Inputs.of_example(example_args, example_kwargs, model)
    settings = Settings(
        budget_bytes=None,
        step=check_step(TrainingStep(loss_fn, optimizer, bool(accumulate), scaler)),
        planner=planner,
        plan_seconds=plan_seconds,
        hardware=preset_of(cost),
        measure=cost == "measure" or (cost == "auto" and may_measure()),
        policy=check_policy(policy),
        cache=cache,
    )
    device_type = next((p.device.type for p in model.parameters()), "cpu")
    with as_in_training():
        captured = capture(model, inputs, Autocast.of(device_type, autocast))
        profile = profile_model(model, captured, inputs, settings).profile
    step_seconds = profile.step_seconds or 1.0
    return Frontier(
        BudgetPoint(
            budget_bytes=point.peak_bytes,
            predicted_peak_bytes=point.peak_bytes,
            overhead_seconds=point.recompute_seconds,
            overhead_ratio=point.recompute_seconds / step_seconds,
            gap_ratio=point.gap_seconds / step_seconds,
        )
        for point in with_bounds(profile, frontier_of(profile, settings))
    )
