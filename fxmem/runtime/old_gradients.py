"""Gradients that are there as a training call begins: the backward adds to them, or ``zero_grad()`` clears them before it.

In: the trained parameters, as calls and backwards begin. Out: which of the two is to come. What a backward has found
there once tells; before that, gradients that an optimizer has stepped with are those of a step that is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from fxmem.torch_private import version_of

NUM_LOOKED_AT = 4
"""Parameters that are asked whether the optimizer has stepped."""


def have_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    """True if one of the ``parameters`` has a gradient."""
    return any(parameter.grad is not None for parameter in parameters)


def _versions_of(parameters: Sequence[torch.Tensor]) -> int:
    """Return a number that the optimizer's step changes."""
    return sum(map(version_of, parameters[:: max(1, len(parameters) // NUM_LOOKED_AT)]))


class OldGradients:
    """What becomes, in one training loop, of gradients that are there as a call begins."""

    def __init__(self) -> None:
        self._are_added_to = self._are_cleared = False
        self._look_over: bool | None = None
        """Whether those that were there for the first time were of a step that was over."""
        self._versions: int | None = None
        """Of some parameters together, in the call before."""

    def note_call(self, parameters: Sequence[torch.Tensor]) -> None:
        """A call has run."""
        if self._look_over is None:
            self._versions = _versions_of(parameters)

    def note_backward(self, parameters: Iterable[torch.Tensor], *, were_there: bool) -> None:
        """The first backward of a step begins. ``were_there``: as its call began."""
        are_there = have_gradients(parameters)
        self._are_added_to |= are_there
        self._are_cleared |= were_there and not are_there

    def will_be_cleared(self, parameters: Sequence[torch.Tensor], *, is_said: bool = False) -> bool:
        """True if the gradients that are there now will be cleared before the backward. ``is_said``: the user says so."""
        return not self._are_added_to and (self._are_cleared or is_said or self._are_of_a_step_before(parameters))

    def _are_of_a_step_before(self, parameters: Sequence[torch.Tensor]) -> bool:
        """True if the optimizer has stepped since the call before, and gradients are no zeros: then ``zero_grad()`` is
        still to come. Looked at once, as it waits for the device, and not where a CUDA graph captures the step."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        if self._look_over is None:
            stepped = self._versions is not None and _versions_of(parameters) != self._versions
            gradients = [p.grad for p in parameters if p.grad is not None]
            plain = all(type(g) is torch.Tensor and g.layout == torch.strided for g in gradients)
            self._look_over = stepped and plain and any(bool(g.any()) for g in gradients)
        return self._look_over
