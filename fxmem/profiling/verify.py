"""Running an emitted module's whole training step on fakes: the last word on its peak before a real kernel runs.

In: a callable of fake leaves, the modules whose state it uses, loss and optimizer. Out: the tracked peak in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxmem.capture.graph import CaptureGraph, Inputs
from fxmem.capture.value_guards import seeing_values
from fxmem.errors import VerificationError
from fxmem.fake.fake_tensors import FakeWorld, ScalarReads
from fxmem.fake.python_state import tensors_restored
from fxmem.ir import Phase, Timeline, Verification
from fxmem.profiling.caching_allocator import Allocation, AllocatorPeaks, allocator_peaks
from fxmem.profiling.device_memory import DeviceMemory
from fxmem.profiling.optimizer_step import RecordedStep, steady_state
from fxmem.profiling.storage_tracker import Listener, StorageTracker, tensors_of
from fxmem.profiling.training_step import BARE, Gradients, TrainingStep, gradients_of, run_step


def verify(
    emitted: fx.GraphModule,
    captured: CaptureGraph,
    inputs: Inputs,
    timeline: Timeline,
    step: TrainingStep = BARE,
    listener: Listener | None = None,
    seen: RecordedStep | None = None,
) -> Verification:
    """Run ``emitted`` on fakes and compare its peak with the plan's ``timeline``.

    ``listener`` is told of every allocation and free, first of those that are there at the start. ``seen``: what an
    earlier run of the same step tells of it. Errors: ``VerificationError`` if it cannot run; a differing peak is returned,
    not raised.
    """
    try:
        subject = _Subject(lambda leaves: captured.call(emitted, leaves), emitted, captured.graph_module)
        peak_bytes = _peak_bytes(subject, captured, inputs, step, listener, seen)
    except Exception as error:
        overwritten = "modified by an inplace operation" in str(error)
        remedy = (
            " Where the forward writes through .data to what a backward reads, write to a clone." if overwritten else ""
        )
        raise VerificationError(f"the emitted module does not run on fake tensors: {error}{remedy}") from error
    return Verification(timeline.peak_bytes, peak_bytes)


def eager_peak_bytes(
    model: torch.nn.Module,
    captured: CaptureGraph,
    inputs: Inputs,
    step: TrainingStep,
    listener: Listener | None = None,
    seen: RecordedStep | None = None,
) -> int:
    """Return the peak of the original model's own training step, in bytes.

    ``listener`` is told of every allocation and free, first of those that are there at the start. ``seen``: what an
    earlier run of the same step tells of it.
    """

    def forward(leaves: list[Any]) -> Any:
        args, kwargs = Inputs(tuple(leaves), inputs.spec).call()
        with seeing_values(inputs.leaves, leaves):
            return model(*args, **kwargs)

    with tensors_restored(model):
        return _peak_bytes(_Subject(forward, model, model), captured, inputs, step, listener, seen)


@dataclass(frozen=True, slots=True)
class _Subject:
    """What runs: ``forward(fake leaves)``, whose state lies in ``module``. All parameters and buffers of ``owner`` count,
    whether ``forward`` uses them or not."""

    forward: Callable[[list[Any]], Any]
    module: torch.nn.Module
    owner: torch.nn.Module


def _peak_bytes(
    subject: _Subject,
    captured: CaptureGraph,
    inputs: Inputs,
    step: TrainingStep,
    listener: Listener | None,
    seen: RecordedStep | None,
) -> int:
    """Return the tracked peak of a training step.

    Where the backward leaves other gradients than were ``seen``, the step is run again after a micro-batch that tells.
    """
    if seen is not None:
        events: list[Allocation] = []
        peak_bytes, left = _fake_step(subject, captured, inputs, step, lambda *event: events.append(event), seen)
        if left == seen.gradients:
            if listener is not None:
                for event in events:
                    listener(*event)
            return peak_bytes
    return _fake_step(subject, captured, inputs, step, listener, None)[0]


def _fake_step(
    subject: _Subject,
    captured: CaptureGraph,
    inputs: Inputs,
    step: TrainingStep,
    listener: Listener | None,
    seen: RecordedStep | None,
) -> tuple[int, Gradients | None]:
    """Return the tracked peak of a step, and what gradients its backward leaves on parameters.

    Earlier gradients and the optimizer's state are as ``seen`` says; if None, as a micro-batch run before says.
    """
    world = FakeWorld(inputs.leaves)
    leaves = [world.fake_all(leaf) for leaf in inputs.leaves]
    parameters = [world.fake(p) for p in captured.parameters]
    memory = DeviceMemory.of(p.device for p in parameters)
    events: list[Allocation] = []
    tracker = StorageTracker(lambda *event: events.append(event), memory=memory)
    state = [world.fake(t) for t in (*subject.owner.parameters(), *subject.owner.buffers())]
    left: Gradients | None = None

    def micro_batch() -> None:
        other = FakeWorld(leaves).fake_all(leaves)
        with world.state_of(subject.module):
            run_step(lambda: subject.forward(other), step.loss_fn, autocast=captured.autocast, keep_casts=False)

    def on_phase(phase: Phase) -> None:
        nonlocal left
        if phase is Phase.OPTIMIZER:
            left = gradients_of(parameters)

    with world.active():
        pairs = list(zip(captured.parameters, parameters, strict=True))
        optimizer, scaler = steady_state(step, pairs, micro_batch, tracker, seen)
        tracker.hold(tensors_of(state))
        tracker.hold(t for t in leaves if isinstance(t, torch.Tensor))
        if optimizer is not None:
            optimizer.hold()
        tracker.hold(tensors_of([scaler]))
        with world.state_of(subject.module), tracker, ScalarReads():
            run_step(lambda: subject.forward(leaves), step.loss_fn, optimizer, captured.autocast, on_phase, scaler)
    peak_bytes = tracker.peak_bytes
    libraries_bytes = memory.workspaces(len(tracker.library_threads))
    if listener is not None:
        for number, nbytes in enumerate(libraries_bytes):  # as an earlier step has left them
            listener("alloc", ~number, nbytes)
        for event in events:
            listener(*event)
    return peak_bytes + sum(libraries_bytes), left


def cuda_peaks(events: Sequence[Allocation]) -> AllocatorPeaks:
    """Return what CUDA's caching allocator makes of a step's ``events``, those of libraries' workspaces first."""
    workspace_bytes = sum(nbytes for kind, key, nbytes in events if kind == "alloc" and key < 0)
    return replace(allocator_peaks(events), workspace_bytes=workspace_bytes)
