"""What a compiled graph's step holds beside what the graph itself makes: parameters, batch, optimizer, a loss outside.

In: the graph's inputs, a :class:`TrainingStep`, for a loss outside of the graph a function that gives the model's output on
fakes. Out: :class:`Surroundings`. Loss and optimizer run while torch.compile does, but are not compiled: they are told so.
The step is that of NOTE [The training step] in :mod:`fxmem.profiling.training_step`.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fxmem.fake.fake_tensors import FakeWorld, ScalarReads
from fxmem.profiling.allocator_state import AllocatorState
from fxmem.profiling.caching_allocator import Allocation
from fxmem.profiling.device_memory import EVERYWHERE, DeviceMemory
from fxmem.profiling.optimizer_on_meta import usual_step
from fxmem.profiling.optimizer_step import RecordedStep, allocator_before, steady_state
from fxmem.profiling.storage_tracker import StorageTracker
from fxmem.profiling.training_step import TrainingStep, loss_of, usual_gradients
from fxmem.torch_patches import compiler_says_eager
from fxmem.torch_private import device_behind, storage_key, tree_leaves, tree_map_only


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is allocated around a compiled forward and backward, as ``memory`` weighs it."""

    present: tuple[int, ...] = ()
    """Bytes of each storage that is there before the first step: parameters, buffers, batch, gradients of earlier
    micro-batches."""
    in_forwards: tuple[int, ...] = ()
    """The same of what is there too while forwards run, and goes before the backward: gradients that are still to be
    cleared, outputs of the step before."""
    state: tuple[int, ...] = ()
    """The same of the optimizer's state."""
    loss: tuple[Allocation, ...] = ()
    """Of a loss outside of the graph, above the forward's outputs."""
    loss_backward: tuple[Allocation, ...] = ()
    """Of its backward, until the outputs' gradients are there."""
    targets: tuple[int, ...] = ()
    """Bytes of what that loss is given beside the output, which are in ``present`` too."""
    loss_left: tuple[int, ...] = ()
    """Bytes of what of these is referred to until the step is over: the loss itself."""
    optimizer: tuple[Allocation, ...] = ()
    """Of the optimizer's step, above its state and the gradients."""
    libraries: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Workspaces that loss and optimizer have libraries keep, as :attr:`StorageTracker.workspaces`."""
    memory: DeviceMemory = EVERYWHERE
    now: AllocatorState | None = None
    """Of the device's allocator, as the step finds it."""
    there: tuple[weakref.ref[torch.Tensor], ...] = field(default=(), repr=False)
    """The tensors that ``present`` weighs, while anybody holds them."""
    parameters: tuple[weakref.ref[torch.Tensor], ...] = field(default=(), repr=False)
    others: tuple[int, ...] = ()
    """Bytes of the gradients of parameters that the optimizer given has beside those."""
    unread: tuple[int, ...] = ()
    """Bytes of what a call is given and its graph does not read, which are in ``present`` too."""
    added_to: tuple[int, ...] = ()
    """The same of gradients that are there, and the backward adds to: what it makes for these is freed."""

    def with_others(self) -> Surroundings:
        """Return the same where these gradients are there for the whole step, as what computes them is not known."""
        return replace(self, present=(*self.present, *self.others), others=())

    @property
    def fixed_bytes(self) -> int:
        """There for the whole step."""
        return sum(self.present) + sum(self.state)

    def storages_there(self) -> set[int]:
        """Return the storages that ``present`` weighs and somebody still holds."""
        return {storage_key(t) for t in _alive(self.there)}

    @property
    def loss_peak_bytes(self) -> int:
        """The most that a loss outside of the graph holds while it and its backward run, above the forward's outputs."""
        return _repeated((*self.loss, *self.loss_backward)).peak_bytes

    @property
    def held_in_backward_bytes(self) -> int:
        """Of that, what is there while the compiled backward runs, beside gradients of the forward's outputs."""
        return _repeated((*self.loss, *self.loss_backward)).live_bytes


def _repeated(events: Iterable[Allocation]) -> StorageTracker:
    tracker = StorageTracker()
    tracker.repeat(events)
    return tracker


def is_trained(tensor: object) -> bool:
    """True for what a backward gives a gradient to keep."""
    return isinstance(tensor, torch.Tensor) and tensor.is_leaf and tensor.requires_grad


def trained_places(inputs: Iterable[object]) -> frozenset[int]:
    """Return the places of inputs that a backward gives a gradient to keep."""
    return frozenset(place for place, t in enumerate(inputs) if is_trained(t))


def weights_in(inputs: Iterable[Any]) -> list[torch.Tensor]:
    """Return a graph's parameters, and other tensors that are trained."""
    return [t for t in inputs if isinstance(t, torch.nn.Parameter) or is_trained(t)]


def surroundings_of(
    tensors: Iterable[torch.Tensor], parameters: Sequence[torch.Tensor], step: TrainingStep
) -> Surroundings:
    """Return what is around a graph that holds its loss. ``tensors``: all that is there before the step."""
    there = tuple({storage_key(t): t for t in (*tensors, *parameters)}.values())
    memory = DeviceMemory.of(t.device for t in there)
    now = None if memory.model is None else allocator_before(step, there, parameters)
    refs = tuple(map(weakref.ref, there)), tuple(map(weakref.ref, parameters))
    present = tuple(weight_of(t, memory) for t in there)
    around = Surroundings(present, memory=memory, now=now, there=refs[0], parameters=refs[1])
    return _with_parameters(around, step, parameters)


def joined(
    arounds: Sequence[Surroundings],
    inputs: Mapping[int, int],
    parameters: Iterable[torch.Tensor],
    made: Container[int],
    step: TrainingStep,
) -> Surroundings:
    """Return what is around several graphs in one step: what is around one of them, each tensor once.

    ``inputs``: bytes by storage of what they are called with, of which some are ``parameters``; ``made``: storages that the
    graphs themselves make.
    """
    first, memory = arounds[0], arounds[0].memory
    there = {storage_key(t): weight_of(t, memory) for each in arounds for t in _alive(each.there)}
    known = [p for each in arounds for p in _alive(each.parameters)]
    unread = (nbytes for each in arounds for nbytes in each.unread)
    present = (*(nbytes for key, nbytes in {**there, **inputs}.items() if key not in made), *unread, *first.targets)
    every = tuple({id(p): p for p in (*known, *parameters)}.values())
    return _with_parameters(replace(first, present=present, state=(), optimizer=()), step, every)


def _with_parameters(around: Surroundings, step: TrainingStep, parameters: Sequence[torch.Tensor]) -> Surroundings:
    """Return ``around``, in which ``parameters`` are present, with what is there for them, and for those that the optimizer
    given has beside."""
    seen = {id(p) for p in parameters}
    groups = step.optimizer.param_groups if isinstance(step.optimizer, torch.optim.Optimizer) else []
    others = [p for group in groups for p in group["params"] if id(p) not in seen]
    weights = [weight_of(p, around.memory) for p in others]
    old = [_gradient_bytes(p, around.memory) for p in parameters if step.begins_with_gradients]
    added_to, cleared = (tuple(filter(None, old)) if step.accumulate == kept else () for kept in (True, False))
    gradients = tuple(filter(None, (_gradient_bytes(p, around.memory) for p in others)))
    present = tuple(filter(None, (*around.present, *weights, *added_to)))
    around = replace(around, present=present, in_forwards=cleared, others=gradients, added_to=added_to)
    every = (*parameters, *others)
    return _with_optimizer(around, step, every) if any(p.requires_grad for p in every) else around


def _gradient_bytes(parameter: torch.Tensor, memory: DeviceMemory) -> int:
    return memory.weight(device_behind(parameter).type, parameter.nbytes) if parameter.requires_grad else 0


def _alive(refs: Iterable[weakref.ref[torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for ref in refs if (tensor := ref()) is not None]


def weight_of(tensor: torch.Tensor, memory: DeviceMemory) -> int:
    return memory.weight(device_behind(tensor).type, tensor.untyped_storage().nbytes())


def _with_optimizer(around: Surroundings, step: TrainingStep, parameters: Sequence[torch.Tensor]) -> Surroundings:
    """Return ``around`` with the optimizer's state and its step. Gradients are none of it."""
    step = replace(step, accumulate=False, loop=replace(step.loop, zero_grad_before_backward=False))
    world, tracker = FakeWorld(), StorageTracker(memory=around.memory)
    seen = usual_step(step, parameters) or RecordedStep(usual_gradients(parameters))
    with world.active(), ScalarReads(), compiler_says_eager():
        pairs = [(p, world.fake(p)) for p in parameters]
        optimizer, _ = steady_state(step, pairs, lambda: None, tracker, seen)
        if optimizer is None:
            return around
        tracker.hold(fake for _, fake in pairs)
        with tracker.noting() as state:
            optimizer.hold()
        for _, fake in pairs:
            if fake.requires_grad and fake.grad is None:
                fake.grad = torch.empty_like(fake)
        with tracker.noting() as stepped, tracker:
            optimizer.step()
    nbytes = tuple(nbytes for kind, _, nbytes in state if kind == "alloc" and nbytes)
    return replace(
        around, state=nbytes, optimizer=_of_blocks(stepped), libraries={**around.libraries, **tracker.workspaces}
    )


def _of_blocks(events: Sequence[Allocation]) -> tuple[Allocation, ...]:
    """Return those of ``events`` that make a block, or free one that they made."""
    made = {key for kind, key, nbytes in events if kind == "alloc" and nbytes}
    return tuple(event for event in events if event[1] in made)


def with_unread(around: Surroundings, given: Iterable[torch.Tensor], read: Iterable[torch.Tensor]) -> Surroundings:
    """Return ``around`` with what a call is ``given`` and its graph does not read."""
    known = {storage_key(t) for t in read}
    others = {storage_key(t): t for t in given if storage_key(t) not in known}.values()
    weights = tuple(filter(None, (weight_of(t, around.memory) for t in others)))
    return replace(around, present=(*around.present, *weights), unread=weights)


def with_loss(around: Surroundings, output: Any, step: TrainingStep) -> Surroundings:
    """Return ``around`` with the loss of ``step``, outside of the graph. ``output``: the model's, of fake tensors."""
    tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
    tracker, world = StorageTracker(memory=around.memory), FakeWorld(tensors)
    with world.active(), ScalarReads(), compiler_says_eager(), torch.enable_grad():
        output = tree_map_only(torch.Tensor, as_leaf, output)
        targets = step.targets.blank(tensors)
        loss_fn = step.loss_on(targets)
        learning = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        given_by_model = {storage_key(t) for t in tree_leaves(output) if isinstance(t, torch.Tensor)}
        with tracker.noting() as forward, tracker:
            loss = loss_of([output], loss_fn)
        with tracker.noting() as backward, tracker:
            root = torch.ones_like(loss)  # which a backward holds to its end
            gradients = torch.autograd.grad(loss, learning, root, allow_unused=True)
        with tracker.noting() as freed:
            del gradients
    made = {serial for _, serial, _ in _of_blocks((*forward, *backward, *freed))}
    forward, backward = ([e for e in each if e[1] in made] for each in (forward, [*backward, *freed]))
    given = {storage_key(t): t for t in targets if isinstance(t, torch.Tensor)}.values()
    weights = tuple(filter(None, (weight_of(t, around.memory) for t in given)))
    return replace(
        around,
        present=(*around.present, *weights),
        targets=weights,
        loss=tuple(forward),
        loss_backward=tuple(backward),
        loss_left=() if storage_key(loss) in given_by_model else (weight_of(loss, around.memory),),
        libraries={**around.libraries, **tracker.workspaces},
    )


def as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())
