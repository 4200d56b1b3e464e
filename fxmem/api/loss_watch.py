"""Sees the loss that a training loop computes outside of its model, in one step.

In: training calls. Out, once a backward has reached their outputs: the loss as a function for steps on fakes
(:mod:`fxmem.profiling.seen_loss`), or why it cannot be told. It costs some microseconds for each call of a torch function
between the model and the backward, in that step alone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from fxmem.api.step_watch import CALL, Call
from fxmem.capture.side_effects import NONE, SideEffects
from fxmem.profiling.seen_loss import LossNotSeenError, LossRecorder, SeenLoss
from fxmem.profiling.targets import Sizes, Targets, sizes_of
from fxmem.torch_patches import calls_of_backward_shown_to, calls_shown_to
from fxmem.torch_private import graph_nodes

MOST_NODES = 100_000
"""Of a graph in which outputs are looked for."""


@dataclass(frozen=True, slots=True, eq=False)
class FoundLoss:
    """A loss and its targets."""

    loss_fn: SeenLoss
    targets: Targets

    @property
    def is_plain(self) -> bool:
        """True if there is nothing to count beyond the losses that the model returns."""
        return self.loss_fn.is_plain


class LossWatch:
    """Looks at one step of a loop at a time, until it has seen a loss."""

    def __init__(self) -> None:
        self.found: FoundLoss | None = None
        self.refused = ""
        """Why it cannot be told."""
        self._recorder: LossRecorder | None = None
        self._calls: list[weakref.ref[Call]] = []
        """Those that are looked at."""
        self._sizes: Sizes = ()
        """Of the inputs of the first call that is looked at."""
        self._on = ExitStack()
        weakref.finalize(self, self._on.close)
        self._thread = 0

    def stop(self) -> None:
        """See nothing more, or not while the model itself runs."""
        if self._thread == threading.get_ident():  # modes are those of a thread
            self._on.close()

    def begin_step(self) -> None:
        """Forget the calls before: another step begins."""
        self._recorder, self._calls = None, []

    def note_call(
        self,
        call: Call,
        parameters: Sequence[torch.Tensor],
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        effects: SideEffects = NONE,
    ) -> None:
        """Look from here on at what is made of ``outputs``, the leaves of a training call with ``inputs``, and of what the
        call left in attributes."""
        if self._recorder is None:
            self._recorder, self._sizes = LossRecorder(parameters, inputs), sizes_of(inputs)
        self._recorder.note_output(outputs, effects)
        self._calls.append(weakref.ref(call))
        watch = weakref.ref(self)

        def show(roots: Sequence[Any]) -> None:
            here = watch()
            if here is not None:
                here._backward(roots)

        self._thread = threading.get_ident()
        self._on.enter_context(calls_shown_to(self._recorder))
        self._on.enter_context(calls_of_backward_shown_to(show))

    def _backward(self, roots: Sequence[Any]) -> None:
        recorder = self._recorder
        if recorder is None or not self._reached_from(roots):
            return
        self.stop()
        self._recorder = None
        try:
            loss_fn, targets = recorder.loss_of(roots)
            self.found = FoundLoss(loss_fn, replace(Targets.of(targets), inputs=self._sizes))
        except LossNotSeenError as error:
            self.refused = str(error)

    def _reached_from(self, roots: Sequence[Any]) -> bool:
        """True if the graph of ``roots`` goes to outputs of the calls that are looked at."""
        calls = [call for reference in self._calls if (call := reference()) is not None]
        return any(node.metadata.get(CALL) in calls for node in islice(graph_nodes(roots), MOST_NODES))
