"""What a compiled graph's step holds beside what the graph itself makes: parameters, batch, optimizer, a loss outside.

In: the graph's inputs, a :class:`TrainingStep`, for a loss outside of the graph a function that gives the model's output on
fakes. Out: :class:`Surroundings`. Loss and optimizer run while torch.compile does, but are not compiled: they are told so.
The step is that of NOTE [The training step] in :mod:`fxmem.profiling.training_step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from fxmem.profiling.training_step import TrainingStep, default_loss, usual_gradients
from fxmem.torch_patches import compiler_says_eager
from fxmem.torch_private import device_behind, storage_key, tree_leaves, tree_map_only


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is allocated around a compiled forward and backward, as ``memory`` weighs it."""

    present: tuple[int, ...] = ()
    """Bytes of each storage that is there before the first step: parameters, buffers, batch, gradients of earlier
    micro-batches."""
    state: tuple[int, ...] = ()
    """The same of the optimizer's state."""
    loss: tuple[Allocation, ...] = ()
    """Of a loss outside of the graph and its backward, above the forward's outputs, until their gradients are there."""
    loss_left: tuple[int, ...] = ()
    """Bytes of what of these is referred to until the step is over: the loss itself."""
    optimizer: tuple[Allocation, ...] = ()
    """Of the optimizer's step, above its state and the gradients."""
    libraries: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Workspaces that loss and optimizer have libraries keep, as :attr:`StorageTracker.workspaces`."""
    memory: DeviceMemory = EVERYWHERE
    now: AllocatorState | None = None
    """Of the device's allocator, as the step finds it."""

    @property
    def fixed_bytes(self) -> int:
        """There for the whole step."""
        return sum(self.present) + sum(self.state)

    @property
    def loss_peak_bytes(self) -> int:
        """The most that a loss outside of the graph holds while it and its backward run, above the forward's outputs."""
        return _repeated(self.loss).peak_bytes

    @property
    def held_in_backward_bytes(self) -> int:
        """Of that, what is there while the compiled backward runs, beside gradients of the forward's outputs."""
        return _repeated(self.loss).live_bytes


def _repeated(events: Iterable[Allocation]) -> StorageTracker:
    tracker = StorageTracker()
    tracker.repeat(events)
    return tracker


def surroundings_of(
    tensors: Iterable[torch.Tensor], parameters: Sequence[torch.Tensor], step: TrainingStep
) -> Surroundings:
    """Return what is around a graph that holds its loss. ``tensors``: all that is there before the step."""
    there = tuple({storage_key(t): t for t in (*tensors, *parameters)}.values())
    memory = DeviceMemory.of(t.device for t in there)
    learning = [p for p in parameters if p.requires_grad]
    present = [_weight(t, memory) for t in there]
    if step.accumulate:
        present += (memory.weight(p.device.type, p.nbytes) for p in learning)
    now = None if memory.model is None else allocator_before(step, there, parameters)
    around = Surroundings(tuple(filter(None, present)), memory=memory, now=now)
    return _with_optimizer(around, step, parameters) if learning else around


def _weight(tensor: torch.Tensor, memory: DeviceMemory) -> int:
    return memory.weight(device_behind(tensor).type, tensor.untyped_storage().nbytes())


def _with_optimizer(around: Surroundings, step: TrainingStep, parameters: Sequence[torch.Tensor]) -> Surroundings:
    """Return ``around`` with the optimizer's state and its step."""
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
    return replace(around, state=nbytes, optimizer=_of_blocks(stepped), libraries=dict(tracker.workspaces))


def _of_blocks(events: Sequence[Allocation]) -> tuple[Allocation, ...]:
    """Return those of ``events`` that make a block, or free one that they made."""
    made = {key for kind, key, nbytes in events if kind == "alloc" and nbytes}
    return tuple(event for event in events if event[1] in made)


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
        with tracker.noting() as noted, tracker:
            loss = default_loss(output) if loss_fn is None else loss_fn(output)
            root = torch.ones_like(loss)  # which a backward holds to its end
            gradients = torch.autograd.grad(loss, learning, root, allow_unused=True)
        with tracker.noting() as freed:
            del gradients
    given = {storage_key(t): t for t in targets if isinstance(t, torch.Tensor)}.values()
    return replace(
        around,
        present=(*around.present, *filter(None, (_weight(t, around.memory) for t in given))),
        loss=_of_blocks((*noted, *freed)),
        loss_left=() if storage_key(loss) in given_by_model else (_weight(loss, around.memory),),
        libraries={**around.libraries, **tracker.workspaces},
    )


def as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())
