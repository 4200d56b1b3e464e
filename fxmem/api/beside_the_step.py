"""What is asked of a model beside its training step, on fakes: evaluation, and what reference cycles keep.

In: a model, one call's inputs and its step, as :func:`fxmem.profiling.verify.eager_step` takes them. Out: bytes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from fxmem.capture.graph import Inputs
from fxmem.capture.value_guards import seeing_values
from fxmem.fake.fake_tensors import FakeWorld, ScalarReads
from fxmem.fake.python_state import tensors_restored
from fxmem.profiling.device_memory import DeviceMemory
from fxmem.profiling.storage_tracker import StorageTracker, tensors_of
from fxmem.profiling.training_step import TrainingStep, loss_of, run_step
from fxmem.profiling.verify import Call


def evaluation_peak_bytes(
    model: torch.nn.Module, call: Call, inputs: Inputs, step: TrainingStep, state_bytes: int, no_grad: bool
) -> int:
    """Return the peak of a forward and loss of ``model`` in eval mode; ``state_bytes``: of the optimizer, which is there.

    Batch, output and loss are referred to until it is over.
    """
    with _on_fakes(model, call, inputs, step) as (tracker, forward, targets):
        tracker.hold_bytes([state_bytes])
        with _in_eval_mode(model), tracker, torch.set_grad_enabled(not no_grad), _region(call):
            output = forward()
            _loss = loss_of([output], step.loss_on(targets))
        return tracker.peak_bytes + sum(tracker.workspaces.values())


def cyclic_bytes(model: torch.nn.Module, call: Call, inputs: Inputs, step: TrainingStep) -> int:
    """Return what is alive after forward, loss and backward of ``model`` for no reason but a cycle of references."""
    was_on = gc.isenabled()
    with _on_fakes(model, call, inputs, step) as (tracker, forward, targets):
        gc.collect()
        gc.disable()
        try:
            with tracker:
                run_step(forward, step.loss_on(targets), autocast=call.autocast, keep_casts=False)
                before = tracker.live_bytes
                gc.collect()
                return before - tracker.live_bytes
        finally:
            if was_on:
                gc.enable()


class _Scene(NamedTuple):
    """What a question is answered with."""

    tracker: StorageTracker
    """It holds the model's state and the batch."""
    forward: Callable[[], Any]
    """Calls the model."""
    targets: list[Any]


@contextmanager
def _on_fakes(model: torch.nn.Module, call: Call, inputs: Inputs, step: TrainingStep) -> Iterator[_Scene]:
    """Run the body on fakes."""
    world = FakeWorld(inputs.leaves)
    leaves = [world.fake_all(leaf) for leaf in inputs.leaves]
    parameters = [world.fake(p) for p in call.parameters]
    tracker = StorageTracker(memory=DeviceMemory.of(p.device for p in parameters))
    state = [world.fake(t) for t in (*model.parameters(), *model.buffers())]

    def forward() -> Any:
        args, kwargs = Inputs(tuple(leaves), inputs.spec).call()
        with seeing_values(inputs.leaves, leaves):
            return model(*args, **kwargs)

    with tensors_restored(model), world.active():
        targets = step.targets.blank((*parameters, *leaves))
        tracker.hold(tensors_of((state, leaves, targets)))
        with world.state_of(model), ScalarReads():
            yield _Scene(tracker, forward, targets)


@contextmanager
def _in_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _region(call: Call) -> Any:
    return call.autocast.enter() if call.autocast else nullcontext()
