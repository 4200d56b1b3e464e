"""What a user hears where a model is planned for again and again: what would spare that.

In: calls that were planned for. Out: a warning for each kind of repetition, once it comes to so many.
"""

from __future__ import annotations

import warnings
from typing import Any

from fxmem.capture.graph import Inputs
from fxmem.capture.guards import constants_of
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
