"""Running an emitted module's whole training step on fakes: the last word on its peak before a real kernel runs.

In: a callable of fake leaves, the modules whose state it uses, loss and optimizer. Out: the tracked peak in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import fx

from fxmem.capture.advice import kind_of_call
from fxmem.capture.graph import CaptureGraph, Inputs, state_as_moved
from fxmem.capture.value_guards import seeing_values
from fxmem.capture.ways import Masks, OtherWayError, Way, ways_of
from fxmem.errors import InputError, VerificationError
from fxmem.fake.fake_tensors import FakeWorld, ScalarReads
from fxmem.fake.python_state import tensors_restored
from fxmem.ir import Phase, Timeline, Verification
from fxmem.profiling.cudnn_workspace import give_back_measured
from fxmem.profiling.device_memory import DeviceMemory
from fxmem.profiling.optimizer_step import RecordedStep, steady_state
from fxmem.profiling.peak_watch import PeakWatch, WatchedStep
from fxmem.profiling.step_events import StepEvents, StepLog
from fxmem.profiling.storage_tracker import FakesTracker, tensors_of
from fxmem.profiling.training_step import (
    BARE,
    Gradients,
    LossFn,
    TrainingStep,
    clear_before_backward,
    gradients_of,
    run_step,
)
from fxmem.profiling.written_views import WrittenViews
from fxmem.runtime.autocast import Autocast
from fxmem.torch_patches import calls_run_by
from fxmem.torch_private import device_behind, tree_leaves


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
    ran = emitted_step(emitted, captured, inputs, step, seen)
    return Verification(timeline.peak_bytes, ran.peak_bytes), ran.events


def emitted_step(
    emitted: fx.GraphModule,
    captured: CaptureGraph,
    inputs: Inputs,
    step: TrainingStep = BARE,
    seen: RecordedStep | None = None,
    call: Callable[[Sequence[Any]], Any] | None = None,
) -> FakeStep:
    """Return what the training step of ``emitted`` takes. ``call``: what runs a call of it, if that is not its forward.
    Errors: ``VerificationError`` if it cannot run."""
    try:
        forward = call or (lambda leaves: captured.call(emitted, leaves))
        subject = _Subject(forward, emitted, captured.graph_module)
        with captured.effects.undone():
            return _ran(subject, captured, inputs, step, seen)
    except InputError:  # of the loss or the optimizer
        raise
    except Exception as error:
        overwritten = "modified by an inplace operation" in str(error)
        remedy = (
            " Where the forward writes through .data to what a backward reads, write to a clone." if overwritten else ""
        )
        raise VerificationError(f"the emitted module does not run on fake tensors: {error}{remedy}") from error


class Call(Protocol):
    """What a step needs to know of the call that it starts with; a :class:`CaptureGraph` knows it."""

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """The model's parameters in its own order."""

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """Parameters and buffers in the order in which they came to the device, where it is not that of what runs."""

    @property
    def autocast(self) -> Autocast | None:
        """The region that the call is in."""


@dataclass(frozen=True, slots=True)
class EagerCall:
    """A call of a model that was not captured."""

    parameters: tuple[torch.Tensor, ...]
    autocast: Autocast | None
    state: tuple[torch.Tensor, ...] = ()


def eager_step(
    model: torch.nn.Module,
    captured: Call,
    inputs: Inputs,
    step: TrainingStep,
    seen: RecordedStep | None = None,
    watching: bool = False,
) -> FakeStep:
    """Return what the original model's own training step takes, its optimizer stepping after the backward. ``seen``: what
    an earlier run of the same step tells of it. ``watching``: note what is alive at the peak, too."""
    step = replace(step, in_backward=False)

    def forward(leaves: list[Any]) -> Any:
        args, kwargs = Inputs(tuple(leaves), inputs.spec).call()
        with seeing_values(inputs.leaves, leaves), WrittenViews():
            return model(*args, **kwargs)

    with tensors_restored(model):
        return _ran(_Subject(forward, model, model), captured, inputs, step, seen, watching)


@dataclass(frozen=True, slots=True)
class EmittedPart:
    """A submodule, and the graph that its calls with arguments like ``inputs`` run."""

    module: torch.nn.Module
    inputs: Inputs
    captured: CaptureGraph
    graph_module: fx.GraphModule


def _run_as_emitted(
    module: torch.nn.Module, parts: Sequence[EmittedPart], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return what a call of ``module`` on fakes returns; of a kind that no graph was emitted for, as it is."""
    given = Inputs.of(args, kwargs, module)
    kind = kind_of_call(given)
    for part in parts:
        if part.module is module and kind_of_call(part.inputs) == kind:
            return part.captured.call(part.graph_module, given.leaves)
    return module(*args, **kwargs)


def step_in_parts(
    model: torch.nn.Module,
    parts: Sequence[EmittedPart],
    inputs: Inputs,
    step: TrainingStep,
    autocast: Autocast | None,
    way: Way,
) -> FakeStep:
    """Return what a training step of ``model`` takes whose ``parts`` run the graphs emitted for them, and all else as it
    is. Where the model looks at values it goes this ``way``, or, if it now looks elsewhere, as each forward leaves another
    state, that of this call. Errors: ``OtherWayError`` where it can go neither."""
    with suppress(OtherWayError):
        return _step_along(way, model, parts, inputs, step, autocast)
    return _step_along(ways_of(model, inputs, autocast)[0], model, parts, inputs, step, autocast)


def _step_along(
    way: Way,
    model: torch.nn.Module,
    parts: Sequence[EmittedPart],
    inputs: Inputs,
    step: TrainingStep,
    autocast: Autocast | None,
) -> FakeStep:
    modules, masks = list(dict.fromkeys(part.module for part in parts)), Masks()

    def forward(leaves: list[Any]) -> Any:
        args, kwargs = Inputs(tuple(leaves), inputs.spec).call()
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(calls_run_by(module, partial(_run_as_emitted, module, parts)))
            for mode in (way.taken(inputs.leaves, leaves, modules, masks), WrittenViews()):
                stack.enter_context(mode)
            return model(*args, **kwargs)

    return step_run_by(forward, model, [part.graph_module for part in parts], inputs, step, autocast, masks)


def step_run_by(
    forward: Callable[[list[Any]], Any],
    model: torch.nn.Module,
    others: Sequence[torch.nn.Module],
    inputs: Inputs,
    step: TrainingStep,
    autocast: Autocast | None,
    around: AbstractContextManager[Any] | None = None,
) -> FakeStep:
    """Return what a training step of ``model`` takes whose forward is another one. ``others``: modules that run it;
    ``around``: on while anything runs on fakes."""
    whole, like = torch.nn.ModuleList([model, *others]), EagerCall(tuple(model.parameters()), autocast)
    with tensors_restored(model):
        return _ran(_Subject(forward, whole, model, around or nullcontext()), like, inputs, step, None)


@dataclass(frozen=True, slots=True)
class FakeStep:
    """A training step that ran on fakes."""

    peak_bytes: int
    gradients: Gradients | None
    """What its backward left on parameters."""
    events: StepEvents
    optimizer_state_bytes: int = 0
    libraries_bytes: int = 0
    """Of ``peak_bytes``: workspaces of libraries."""
    watched: WatchedStep | None = None
    """What is alive at the peak, if it was watched."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """What runs: ``forward(fake leaves)``, whose state lies in ``module``. All parameters and buffers of ``owner`` count,
    whether ``forward`` uses them or not."""

    forward: Callable[[list[Any]], Any]
    module: torch.nn.Module
    owner: torch.nn.Module
    around: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """On while anything runs on fakes."""


def _ran(
    subject: _Subject,
    captured: Call,
    inputs: Inputs,
    step: TrainingStep,
    seen: RecordedStep | None,
    watching: bool = False,
) -> FakeStep:
    """Run a training step. Where the backward leaves other gradients than were ``seen``, it is run again after a
    micro-batch that tells."""
    try:
        if seen is not None:
            ran = _fake_step(subject, captured, inputs, step, seen, watching)
            if ran.gradients == seen.gradients:
                return ran
        return _fake_step(subject, captured, inputs, step, None, watching)
    finally:
        give_back_measured()


def _fake_step(
    subject: _Subject,
    captured: Call,
    inputs: Inputs,
    step: TrainingStep,
    seen: RecordedStep | None,
    watching: bool,
) -> FakeStep:
    """Run a step. Earlier gradients and the optimizer's state are as ``seen`` says; if None, as a micro-batch run before
    says."""
    world = FakeWorld(inputs.leaves)
    leaves = [world.fake_all(leaf) for leaf in inputs.leaves]
    fakes: list[torch.Tensor] = []
    parameters = [world.fake(p) for p in captured.parameters]
    memory, log = DeviceMemory.of(map(device_behind, parameters)), StepLog()
    watch = PeakWatch(subject.owner) if watching else None
    tracker = _tracker(memory, log, watch)
    state = [world.fake(t) for t in (*captured.state, *state_as_moved(subject.owner))]
    buffers = list(subject.owner.buffers())
    left: Gradients | None = None

    def on_phase(phase: Phase) -> None:
        nonlocal left
        clear_before_backward(step, phase, optimizer, parameters)
        if phase is Phase.OPTIMIZER:
            left = gradients_of(parameters) if optimizer is None else optimizer.left(parameters)
            if step.loop.zero_grad_before_backward:
                log.note_left(map(tracker.serial, _gradients_on(parameters)))
        log.phase_starts(phase)
        if watch is not None:
            watch.note_phase(phase, _gradients_on((*parameters, *fakes)))

    def forward(batch: list[Any]) -> Any:
        output = subject.forward(batch)
        return output if watch is None else watch.note_output(output)

    with world.active(), subject.around:
        pairs = list(zip(captured.parameters, parameters, strict=True))
        targets = step.targets.blank((*parameters, *leaves))
        micro_batch = partial(_micro_batch, subject, world, leaves, step.loss_on(targets), captured.autocast)
        optimizer, scaler = steady_state(step, pairs, micro_batch, tracker, seen)
        tracker.hold(tensors_of(state))
        batches = [leaves, *([_another(leaf) for leaf in leaves] for _ in range(step.loop.forwards - 1))]
        fakes = [t for t in (*tree_leaves(batches), *targets) if isinstance(t, torch.Tensor)]
        tracker.hold(fakes)
        log.state_starts()
        state_bytes = 0 if optimizer is None else optimizer.hold()
        log.scaler_starts()
        tracker.hold(tensors_of([scaler]))
        log.step_starts()
        if watch is not None:
            watch.begin(tracker, parameters, _gradients_on(parameters), map(world.fake, buffers), fakes)
        with world.state_of(subject.module), tracker, watch or ScalarReads():
            if subject.owner in list(subject.module.modules()):  # which hold what is there: a replaced buffer goes
                state.clear()
                world.forget(buffers)
            _run_steps(forward, batches, step, step.loss_on(targets), optimizer, captured.autocast, on_phase, scaler)
    libraries = tuple(tracker.workspaces.values())
    peak_bytes, watched = tracker.peak_bytes + sum(libraries), None if watch is None else watch.watched()
    return FakeStep(peak_bytes, left, log.events(libraries), state_bytes, sum(libraries), watched)


def _gradients_on(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


def _micro_batch(
    subject: _Subject, world: FakeWorld, leaves: list[Any], loss_fn: LossFn | None, region: Autocast | None
) -> None:
    """Run forward, loss and backward on inputs like ``leaves``."""
    other = FakeWorld(leaves).fake_all(leaves)
    with world.state_of(subject.module):
        run_step(lambda: subject.forward(other), loss_fn, autocast=region, keep_casts=False)


def _tracker(memory: DeviceMemory, log: StepLog, watch: PeakWatch | None) -> FakesTracker:
    return FakesTracker(
        log.note if watch is None else watch.beside(log.note),
        None if watch is None else watch.note_op,
        memory,
        on_library=log.note_library,
        on_workspace=log.note_workspace,
    )


def _run_steps(
    forward: Callable[[list[Any]], Any],
    batches: Sequence[list[Any]],
    step: TrainingStep,
    loss_fn: LossFn | None,
    optimizer: Any,
    region: Autocast | None,
    on_phase: Callable[[Phase], None],
    scaler: torch.amp.GradScaler | None,
) -> None:
    """Run the step, or two where the first leaves something to the second."""
    names: list[Any] = [None, None]
    for _ in range(1 + step.loop.carried):
        calls = partial(next, iter(batches))
        run_step(
            lambda calls=calls: forward(calls()),  # type: ignore[misc]
            loss_fn,
            optimizer,
            region,
            on_phase,
            scaler,
            loop=step.loop,
            carried=names,
        )


def _another(leaf: Any) -> Any:
    """Return a tensor like the fake ``leaf``, on memory of its own."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)
