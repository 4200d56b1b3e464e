"""What a user hears of planning: where a model is planned for again and again, and of steps that nobody asked to plan for.

In: calls that were planned for, steps. Out: a warning for each kind of repetition, once it comes to so many, with what
would spare it; of a step, what of it was not asked for, and the option that asks for it.
"""

from __future__ import annotations

import warnings
from typing import Any

from fxmem.capture.graph import Inputs
from fxmem.capture.guards import constants_of
from fxmem.errors import InfeasibleBudgetError
from fxmem.profiling.seen_loss import SeenLoss
from fxmem.profiling.training_step import Loop, TrainingStep
from fxmem.user_frames import level_of_user

MANY_SPECIALIZATIONS = MANY_STATES = MANY_CONSTANTS = MANY_SIZES = 8
"""Of one signature, by the values of inputs, of a model, by its attributes, of its arguments that are no tensors, or of
these by size: here the user hears that planning each takes time."""


class PlanningHints:
    """What was planned for of the model called ``name``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._constants: set[Any] = set()

    def note(self, inputs: Inputs, num_specializations: int, num_states: int) -> None:
        """Note a call that was planned for, and in how many ways and states its signature was."""
        if num_specializations == 1 and num_states == MANY_STATES:
            warnings.warn(
                f"{self._name} was called with its attributes in {MANY_STATES} different states (the values of a counter "
                "or of a schedule, perhaps); each is captured and planned anew. Keep counters out of the model, and what "
                "changes from step to step in a buffer or an argument that is a tensor.",
                stacklevel=level_of_user(),
            )
        constants = constants_of(inputs)
        if constants not in self._constants:
            self._constants.add(constants)
            if len(self._constants) == MANY_CONSTANTS:
                warnings.warn(
                    f"{self._name} was called with {MANY_CONSTANTS} different values of arguments that are no tensors; "
                    "each is captured and planned anew. Pass what changes from step to step as a tensor.",
                    stacklevel=level_of_user(),
                )
        if num_specializations == MANY_SPECIALIZATIONS:
            warnings.warn(
                f"{self._name} looks at values of its inputs and took {MANY_SPECIALIZATIONS} different ways for calls of "
                "one signature; each is planned anew. Move what looks at values out of the model.",
                stacklevel=level_of_user(),
            )

    def note_sizes(self, num_planned: int) -> None:
        """Note how many sizes of one kind of call were planned for."""
        if num_planned == MANY_SIZES:
            warnings.warn(
                f"{self._name} came in {MANY_SIZES} sizes, each larger somewhere than those before, and was planned for "
                "each. Plan for the largest at once, and all smaller ones run under that plan: "
                "fxmem.prepare(model, dataloader).",
                stacklevel=level_of_user(),
            )


def said_of(asked: TrainingStep, step: TrainingStep) -> list[str]:
    """Say what ``step`` has that was not asked for."""
    parts = []
    if step.accumulate and not asked.accumulate:
        parts.append("gradients are there as the forward begins (micro-batches, or zero_grad(set_to_none=False))")
    if step.loop.zero_grad_before_backward and not asked.loop.zero_grad_before_backward:
        parts.append("gradients are there as the forward begins (zero_grad() comes after it, before the backward)")
    if isinstance(step.loss_fn, SeenLoss) and not isinstance(asked.loss_fn, SeenLoss):
        parts.append("the loss is computed outside of the model")
    loop, known = step.loop, asked.loop
    if loop.forwards != known.forwards:
        parts.append(f"{loop.forwards} forwards are alive before a backward")
    if (loop.backwards, loop.lets_go) != (known.backwards, known.lets_go):
        parts.append("a backward retains its graph (retain_graph=True)")
    if loop.carried and not known.carried:
        parts.append("the output of the step before is still referred to while the next forward runs")
    if loop.within_autocast and not known.within_autocast:
        parts.append("the backward runs inside of the autocast region, which keeps its casts until it ends")
    return parts or ["the step is another one than planned for"]


def option_for(asked: TrainingStep, step: TrainingStep) -> str:
    """Return the arguments of :func:`fxmem.optimize` that ask for what ``step`` has beyond ``asked``."""
    parts = ["accumulate=True"] if step.accumulate and not asked.accumulate else []
    parts += ["loss_fn=..., targets=..."] if isinstance(step.loss_fn, SeenLoss) else []
    if step.loop != asked.loop:
        default = Loop()
        changed = {n: getattr(step.loop, n) for n in default.__slots__ if getattr(step.loop, n) != getattr(default, n)}
        parts.append(f"loop=fxmem.Loop({', '.join(f'{name}={value}' for name, value in changed.items())})")
    return ", ".join(parts) or "step=fxmem.TrainingStep(...)"


def least_said(error: InfeasibleBudgetError) -> str:
    """Say which budget would be kept."""
    least = error.least_bytes
    return f"the least that a plan reaches is {in_mb(least)}. Raise the budget to {least} bytes to keep it"


def in_mb(nbytes: int) -> str:
    """Return ``nbytes`` as text."""
    return f"{nbytes / 1e6:.3f} MB"
