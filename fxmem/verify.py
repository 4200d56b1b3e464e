"""Running an emitted module's whole training step on fakes: the last word on its peak before a real kernel runs.

In: a callable of fake leaves, the modules whose state it uses, loss and optimizer. Out: the tracked peak in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxmem.capture import Captured, Inputs
from fxmem.errors import VerificationError
from fxmem.fake import FakeWorld, ScalarReads
from fxmem.step import BARE, TrainingStep, run_step, warm_fake_step
from fxmem.track import Listener, StorageTracker, tensors_of
from fxmem.types import Timeline, Verification
from fxmem.values import seeing_values


def verify(
    emitted: fx.GraphModule,
    captured: Captured,
    inputs: Inputs,
    timeline: Timeline,
    step: TrainingStep = BARE,
) -> Verification:
    """Run ``emitted`` on fakes and compare its peak with the plan's ``timeline``.

    Errors: ``VerificationError`` if it cannot run; a differing peak is returned, not raised.
    """
    try:
        peak_bytes = fake_peak_bytes(
            lambda leaves: captured.call(emitted, leaves),
            emitted,
            captured.graph_module,
            captured,
            inputs,
            step,
        )
    except Exception as error:
        raise VerificationError(f"the emitted module does not run on fake tensors: {error}") from error
    return Verification(timeline.peak_bytes, peak_bytes)


def eager_peak_bytes(
    model: torch.nn.Module, captured: Captured, inputs: Inputs, step: TrainingStep, listener: Listener | None = None
) -> int:
    """Return the peak of the original model's own training step, in bytes.

    ``listener`` is told of every allocation and free, first of those that are there at the start.
    """

    def forward(leaves: list[Any]) -> Any:
        args, kwargs = Inputs(tuple(leaves), inputs.spec).call()
        with seeing_values(inputs.leaves, leaves):
            return model(*args, **kwargs)

    return fake_peak_bytes(forward, model, model, captured, inputs, step, listener)


def fake_peak_bytes(
    forward: Callable[[list[Any]], Any],
    module: torch.nn.Module,
    owner: torch.nn.Module,
    captured: Captured,
    inputs: Inputs,
    step: TrainingStep,
    listener: Listener | None = None,
) -> int:
    """Return the tracked peak of a training step of ``forward(fake leaves)``, whose state lies in ``module``.

    All parameters and buffers of ``owner`` count, whether ``forward`` uses them or not.
    """
    world = FakeWorld(inputs.leaves)
    leaves = [world.fake_all(leaf) for leaf in inputs.leaves]
    tracker = StorageTracker(listener)
    pairs = [(p, world.fake(p)) for p in captured.parameters]
    state = [world.fake(t) for t in (*owner.parameters(), *owner.buffers())]

    def micro_batch() -> None:
        other = FakeWorld(leaves).fake_all(leaves)
        run_step(lambda: forward(other), step.loss_fn, autocast=captured.autocast)

    with world.active(), world.state_of(module):
        optimizer, scaler = warm_fake_step(step, captured.graph_module.graph, pairs, micro_batch)
        tracker.hold(tensors_of(state))
        tracker.hold(t for t in leaves if isinstance(t, torch.Tensor))
        tracker.hold(tensors_of((optimizer, scaler)))
        with tracker, ScalarReads():
            run_step(lambda: forward(leaves), step.loss_fn, optimizer, captured.autocast, scaler=scaler)
    return tracker.peak_bytes
