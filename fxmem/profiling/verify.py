"""Running an emitted module's whole training step on fakes: the last word on its peak before a real kernel runs.

In: a callable of fake leaves, the modules whose state it uses, loss and optimizer. Out: the tracked peak in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxmem.capture.graph import CaptureGraph, Inputs
from fxmem.capture.value_guards import seeing_values
from fxmem.errors import VerificationError
from fxmem.fake.fake_tensors import FakeWorld, ScalarReads
from fxmem.fake.python_state import tensors_restored
from fxmem.ir import Phase, Timeline, Verification
from fxmem.profiling.caching_allocator import StepEvents, StepLog
from fxmem.profiling.device_memory import DeviceMemory
from fxmem.profiling.optimizer_step import RecordedStep, steady_state
from fxmem.profiling.storage_tracker import StorageTracker, tensors_of
from fxmem.profiling.training_step import BARE, Gradients, TrainingStep, gradients_of, run_step
from fxmem.torch_private import tree_leaves


def verify(
    emitted: fx.GraphModule,
    captured: CaptureGraph,
    inputs: Inputs,
    timeline: Timeline,
    step: TrainingStep = BARE,
    seen: RecordedStep | None = None,
) -> tuple[Verification, StepEvents]:
    """Run ``emitted`` on fakes; return its peak beside that of the plan's ``timeline``, and what it allocated.

    ``seen``: what an earlier run of the same step tells of it. Errors: ``VerificationError`` if it cannot run; a differing
    peak is returned, not raised.
    """
    try:
        subject = _Subject(lambda leaves: captured.call(emitted, leaves), emitted, captured.graph_module)
        ran = _ran(subject, captured, inputs, step, seen)
    except Exception as error:
        overwritten = "modified by an inplace operation" in str(error)
        remedy = (
            " Where the forward writes through .data to what a backward reads, write to a clone." if overwritten else ""
        )
        raise VerificationError(f"the emitted module does not run on fake tensors: {error}{remedy}") from error
    return Verification(timeline.peak_bytes, ran.peak_bytes), ran.events


def eager_step(
    model: torch.nn.Module,
    captured: CaptureGraph,
    inputs: Inputs,
    step: TrainingStep,
    seen: RecordedStep | None = None,
) -> FakeStep:
    """Return what the original model's own training step takes. ``seen``: what an earlier run of the same step tells of
    it."""

    def forward(leaves: list[Any]) -> Any:
        args, kwargs = Inputs(tuple(leaves), inputs.spec).call()
        with seeing_values(inputs.leaves, leaves):
            return model(*args, **kwargs)

    with tensors_restored(model):
        return _ran(_Subject(forward, model, model), captured, inputs, step, seen)


@dataclass(frozen=True, slots=True)
class FakeStep:
    """A training step that ran on fakes."""

    peak_bytes: int
    gradients: Gradients | None
    """What its backward left on parameters."""
    events: StepEvents


@dataclass(frozen=True, slots=True)
class _Subject:
    """What runs: ``forward(fake leaves)``, whose state lies in ``module``. All parameters and buffers of ``owner`` count,
    whether ``forward`` uses them or not."""

    forward: Callable[[list[Any]], Any]
    module: torch.nn.Module
    owner: torch.nn.Module


def _ran(
    subject: _Subject, captured: CaptureGraph, inputs: Inputs, step: TrainingStep, seen: RecordedStep | None
) -> FakeStep:
    """Run a training step. Where the backward leaves other gradients than were ``seen``, it is run again after a
    micro-batch that tells."""
    if seen is not None:
        ran = _fake_step(subject, captured, inputs, step, seen)
        if ran.gradients == seen.gradients:
            return ran
    return _fake_step(subject, captured, inputs, step, None)


def _fake_step(
    subject: _Subject, captured: CaptureGraph, inputs: Inputs, step: TrainingStep, seen: RecordedStep | None
) -> FakeStep:
    """Run a step. Earlier gradients and the optimizer's state are as ``seen`` says; if None, as a micro-batch run before
    says."""
    world = FakeWorld(inputs.leaves)
    leaves = [world.fake_all(leaf) for leaf in inputs.leaves]
    parameters = [world.fake(p) for p in captured.parameters]
    memory, log = DeviceMemory.of(p.device for p in parameters), StepLog()
    tracker = StorageTracker(log.note, memory=memory, on_library=log.note_library)
    state = [world.fake(t) for t in _as_moved(subject.owner)]
    left: Gradients | None = None

    def micro_batch() -> None:
        other = FakeWorld(leaves).fake_all(leaves)
        loss_fn = step.loss_on(step.targets.blank(parameters[0].device))
        with world.state_of(subject.module):
            run_step(lambda: subject.forward(other), loss_fn, autocast=captured.autocast, keep_casts=False)

    def on_phase(phase: Phase) -> None:
        nonlocal left
        if phase is Phase.OPTIMIZER:
            left = gradients_of(parameters)
            log.optimizer_starts()

    with world.active():
        pairs = list(zip(captured.parameters, parameters, strict=True))
        optimizer, scaler = steady_state(step, pairs, micro_batch, tracker, seen)
        tracker.hold(tensors_of(state))
        targets = step.targets.blank(parameters[0].device)
        batches = [leaves, *([_another(leaf) for leaf in leaves] for _ in range(step.loop.forwards - 1))]
        tracker.hold(t for t in (*tree_leaves(batches), *targets) if isinstance(t, torch.Tensor))
        log.state_starts()
        if optimizer is not None:
            optimizer.hold()
        tracker.hold(tensors_of([scaler]))
        log.step_starts()
        names: list[Any] = [None, None]
        with world.state_of(subject.module), tracker, ScalarReads():
            for _ in range(1 + step.loop.carried):
                calls = iter(batches)
                run_step(
                    lambda calls=calls: subject.forward(next(calls)),  # type: ignore[misc]
                    step.loss_on(targets),
                    optimizer,
                    captured.autocast,
                    on_phase,
                    scaler,
                    loop=step.loop,
                    carried=names,
                )
    libraries_bytes = memory.workspaces(len(tracker.library_threads))
    return FakeStep(tracker.peak_bytes + sum(libraries_bytes), left, log.events(libraries_bytes))


def _another(leaf: Any) -> Any:
    """Return a tensor like the fake ``leaf``, on memory of its own."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _as_moved(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters and buffers in the order in which ``module.to(device)`` moves them: children first."""
    for child in module.children():
        yield from _as_moved(child)
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor
