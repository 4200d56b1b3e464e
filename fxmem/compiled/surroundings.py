"""What a compiled graph's step holds beside what the graph itself makes: parameters, batch, optimizer, a loss outside.

In: the graph's inputs, a :class:`TrainingStep`, for a loss outside of the graph a function that gives the model's output on
fakes. Out: :class:`Surroundings`. The step is that of NOTE [The training step] in :mod:`fxmem.profiling.training_step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxmem.fake.fake_tensors import FakeWorld, ScalarReads
from fxmem.profiling.optimizer_on_meta import usual_step
from fxmem.profiling.optimizer_step import RecordedStep, steady_state
from fxmem.profiling.storage_tracker import StorageTracker
from fxmem.profiling.training_step import TrainingStep, default_loss, usual_gradients
from fxmem.torch_private import storage_key, tree_leaves, tree_map_only


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Bytes around a compiled forward and backward, all sums over storages."""

    fixed_bytes: int = 0
    """There for the whole step: parameters, buffers, batch, optimizer state, gradients of earlier micro-batches."""
    loss_peak_bytes: int = 0
    """The most that a loss outside of the graph holds while it and its backward run, above the forward's outputs."""
    held_in_backward_bytes: int = 0
    """Beside gradients of the forward's outputs, while the compiled backward runs."""
    optimizer_bytes: int = 0
    """The most that the optimizer's step takes above gradients and ``fixed_bytes``."""


def surroundings_of(
    tensors: Iterable[torch.Tensor], parameters: Sequence[torch.Tensor], step: TrainingStep
) -> Surroundings:
    """Return what is around a graph that holds its loss. ``tensors``: all that is there before the step."""
    fixed_bytes = _storage_bytes((*tensors, *parameters))
    learning = [p for p in parameters if p.requires_grad]
    if step.accumulate:
        fixed_bytes += sum(p.nbytes for p in learning)
    state_bytes, step_bytes = _optimizer_bytes(step, parameters) if learning else (0, 0)
    return Surroundings(fixed_bytes + state_bytes, optimizer_bytes=step_bytes)


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())


def _optimizer_bytes(step: TrainingStep, parameters: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Return the bytes of the optimizer's state, and the most that its step takes beside state and gradients."""
    world, tracker = FakeWorld(), StorageTracker()
    seen = usual_step(step, parameters) or RecordedStep(usual_gradients(parameters))
    with world.active(), ScalarReads():
        pairs = [(p, world.fake(p)) for p in parameters]
        optimizer, _ = steady_state(step, pairs, lambda: None, tracker, seen)
        if optimizer is None:
            return 0, 0
        state_bytes = optimizer.hold()
        for _, fake in pairs:
            if fake.requires_grad and fake.grad is None:
                fake.grad = torch.empty_like(fake)
        tracker.peak_bytes = before = tracker.live_bytes
        with tracker:
            optimizer.step()
        return state_bytes, tracker.peak_bytes - before


def with_loss(around: Surroundings, output: Any, step: TrainingStep) -> Surroundings:
    """Return ``around`` with the loss of ``step``, outside of the graph. ``output``: the model's, of fake tensors."""
    tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
    tracker, world = StorageTracker(), FakeWorld(tensors)
    with world.active(), ScalarReads(), torch.enable_grad():
        output = tree_map_only(torch.Tensor, _as_leaf, output)
        targets = step.targets.blank(tensors)
        loss_fn = step.loss_on(targets)
        learning = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        with tracker:
            loss = default_loss(output) if loss_fn is None else loss_fn(output)
            root = torch.ones_like(loss)  # which a backward holds to its end
            gradients = torch.autograd.grad(loss, learning, root, allow_unused=True)
        gradient_bytes = _storage_bytes(g for g in gradients if g is not None)
    fixed_bytes = around.fixed_bytes + _storage_bytes(t for t in targets if isinstance(t, torch.Tensor))
    held_bytes = tracker.live_bytes - gradient_bytes
    return replace(
        around, fixed_bytes=fixed_bytes, loss_peak_bytes=tracker.peak_bytes, held_in_backward_bytes=held_bytes
    )


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())
