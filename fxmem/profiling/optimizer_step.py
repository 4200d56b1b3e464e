"""A training step's optimizer and scaler on fakes, in their steady state.

In: a step, pairs of real and fake parameters, the tracker that watches. Out: what
:func:`fxmem.profiling.training_step.run_step` takes. An optimizer's step depends on nothing but parameters, gradients
and state, so what one run saw of it is :class:`RecordedStep`, and later runs over gradients alike repeat its allocations
instead of its ops: of a step with Adam more than half are its.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fxmem.errors import InputError, first_lines
from fxmem.fake.fake_tensors import ScalarReads
from fxmem.fake.stand_in import original_of
from fxmem.profiling.allocator_state import AllocatorState, allocator_state
from fxmem.profiling.caching_allocator import Allocation
from fxmem.profiling.storage_tracker import StorageTracker, tensors_of
from fxmem.profiling.training_step import Gradients, OptimizerLike, TrainingStep, gradients_of, optimizer_class
from fxmem.runtime.layout import Geometry
from fxmem.runtime.step_in_backward import StepInBackward
from fxmem.torch_patches import steady_scaler
from fxmem.torch_private import without_modes


@dataclass(frozen=True, slots=True)
class SeenOptimizer:
    """An optimizer in its steady state, as seen in one run."""

    holds: tuple[int, ...]
    """Places of the parameters it holds, in its order."""
    state_nbytes: tuple[int, ...]
    """By storage of its state."""
    allocations: tuple[Allocation, ...]
    """Of one step; all are freed in it."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """What one run of a step tells of others of the same step of the same model."""

    gradients: Gradients
    """What its backward leaves."""
    optimizer: SeenOptimizer | None = None
    """None: there is none, or its step leaves something behind, or it was not run."""


class SteadyOptimizer(Protocol):
    """What a step on fakes ends with."""

    def hold(self) -> int:
        """Count its state as alive from now on; return the bytes."""

    def step(self) -> None: ...

    def zero_grad(self, set_to_none: bool) -> None: ...

    def left(self, parameters: Sequence[torch.Tensor]) -> Gradients | None:
        """Return what gradients the backward has made, as :func:`gradients_of` does."""

    def seen(self, parameters: Sequence[torch.Tensor]) -> SeenOptimizer | None:
        """Return what was seen of it; None if its step did not run, left something behind or freed what was there, or if it
        holds more than ``parameters``."""


class WatchedOptimizer:
    """An optimizer over fakes."""

    def __init__(self, optimizer: torch.optim.Optimizer, tracker: StorageTracker) -> None:
        self.optimizer, self._tracker = optimizer, tracker
        self._state: list[Allocation] = []
        self._step: list[Allocation] | None = None

    def hold(self) -> int:
        with self._tracker.noting() as self._state:
            return self._tracker.hold(tensors_of(self.optimizer))

    def step(self) -> None:
        with self._tracker.noting() as self._step:
            self.optimizer.step()

    def zero_grad(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none)

    def left(self, parameters: Sequence[torch.Tensor]) -> Gradients | None:
        return gradients_of(parameters)

    def seen(self, parameters: Sequence[torch.Tensor]) -> SeenOptimizer | None:
        events = [event for event in self._step or () if event[2]]
        made, freed = (sorted(serial for kind, serial, _ in events if kind == which) for which in ("alloc", "free"))
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        held = [id(p) for group in self.optimizer.param_groups for p in group["params"]]
        if self._step is None or made != freed or not places.keys() >= set(held):
            return None
        return SeenOptimizer(
            tuple(places[key] for key in held), tuple(nbytes for _, _, nbytes in self._state), tuple(events)
        )


class _Repeated:
    """Stands for an optimizer that was seen: allocates what that did."""

    def __init__(self, seen: SeenOptimizer, parameters: Sequence[torch.Tensor], tracker: StorageTracker) -> None:
        self._seen, self._tracker = seen, tracker
        self._held = [parameters[place] for place in seen.holds]

    def hold(self) -> int:
        return self._tracker.hold_bytes(self._seen.state_nbytes)

    def step(self) -> None:
        self._tracker.repeat(self._seen.allocations)

    def zero_grad(self, set_to_none: bool) -> None:
        for parameter in self._held:
            parameter.grad = None

    def left(self, parameters: Sequence[torch.Tensor]) -> Gradients | None:
        return gradients_of(parameters)

    def seen(self, parameters: Sequence[torch.Tensor]) -> SeenOptimizer:
        return self._seen


class _InBackward(WatchedOptimizer):
    """An optimizer over fakes that steps each within the backward."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, tracker: StorageTracker, parameters: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(optimizer, tracker)
        self._left: dict[int, Geometry | None] = {}
        self._is_known = True
        StepInBackward(optimizer, self._note).attach(parameters)

    def _note(self, parameter: torch.Tensor) -> None:
        left = gradients_of([parameter])
        self._is_known &= left is not None
        self._left[id(parameter)] = left[0] if left else None

    def step(self) -> None:
        """Nothing is left to step."""

    def left(self, parameters: Sequence[torch.Tensor]) -> Gradients | None:
        return tuple(self._left.get(id(p)) for p in parameters) if self._is_known else None

    def seen(self, parameters: Sequence[torch.Tensor]) -> None:
        return None


def allocator_before(
    step: TrainingStep, tensors: Iterable[torch.Tensor], parameters: Iterable[torch.Tensor]
) -> AllocatorState | None:
    """Return what CUDA's allocator holds now, before ``step`` over ``parameters``; None where the step does not run on a
    CUDA device that is here. ``tensors``: all that is there but state of optimizer and scaler, which are looked up."""
    given = step.optimizer if isinstance(step.optimizer, torch.optim.Optimizer) else None
    gradients = [original_of(p.grad) for p in parameters if p.is_leaf and p.grad is not None]
    with without_modes():
        plain = [t.detach() for t in (*map(original_of, tensors), *tensors_of([given, step.scaler]))]
    return allocator_state(plain, has_state=given is not None and bool(given.state), gradients=gradients)


def clears_all(step: TrainingStep, parameters: Sequence[torch.Tensor]) -> bool:
    """True if no gradient of ``parameters`` is left when the step is over."""
    if not isinstance(step.optimizer, torch.optim.Optimizer):
        return step.optimizer is not None
    held = {id(p) for group in step.optimizer.param_groups for p in group["params"]}
    return all(id(original_of(p)) in held for p in parameters if p.requires_grad)


def steady_state(
    step: TrainingStep,
    parameters: Sequence[tuple[torch.Tensor, torch.Tensor]],
    micro_batch: Callable[[], None],
    tracker: StorageTracker,
    seen: RecordedStep | None = None,
) -> tuple[SteadyOptimizer | None, torch.amp.GradScaler | None]:
    """Return optimizer and scaler of ``step`` over fake parameters in their steady state; leave earlier gradients.

    ``parameters``: pairs (real, fake). ``micro_batch`` runs forward, loss and backward of one micro-batch on these
    fakes; it is not run where ``seen`` tells what it would leave. What it gives a gradient, and what the optimizer given
    has state of already, has state. Runs under the fakes' mode. Errors: ``InputError`` if there is no steady state.
    """
    parameters = [(original_of(real), fake) for real, fake in parameters]
    fakes = {id(real): fake for real, fake in parameters if fake.requires_grad}
    device = next((fake.device for fake in fakes.values()), torch.device("cpu"))
    scaler = None if step.scaler is None else steady_scaler(step.scaler, device)
    again = None if seen is None or step.in_backward else seen.optimizer
    optimizer = optimizer_over(step.optimizer, fakes) if again is None else None
    with ScalarReads():
        if (step.optimizer is not None and fakes) or step.begins_with_gradients:
            if seen is None:
                micro_batch()
            else:
                cleared = again.holds if again is not None and not step.begins_with_gradients else ()
                _give_gradients([fake for _, fake in parameters], seen.gradients, cleared)
        if again is not None:
            return _Repeated(again, [fake for _, fake in parameters], tracker), scaler
        if optimizer is None:
            return None, scaler
        stepped = {id(fake) for group in optimizer.param_groups for fake in group["params"]}
        left = {key: fake.grad for key, fake in fakes.items()}
        _check_stay([grad for key, grad in left.items() if grad is not None and id(fakes[key]) not in stepped])
        known = step.optimizer.state if isinstance(step.optimizer, torch.optim.Optimizer) else {}
        for real, fake in parameters:
            if real in known and id(real) in fakes and fake.grad is None:
                fake.grad = torch.empty_like(fake)
        with _optimizing(optimizer):
            optimizer.step()
        _check_steady(optimizer)
        for key, fake in fakes.items():  # its zero_grad leaves what it does not hold
            fake.grad = left[key] if step.begins_with_gradients or id(fake) not in stepped else None
    if step.in_backward:
        return _InBackward(optimizer, tracker, list(fakes.values())), scaler
    return WatchedOptimizer(optimizer, tracker), scaler


@contextmanager
def _optimizing(optimizer: object) -> Iterator[None]:
    """Errors: ``InputError`` if the body, which makes or steps an optimizer on fakes, fails."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        name = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise InputError(
            f"{name} could not be made or stepped on fake tensors: {first_lines(error)}. Pass an optimizer that is like it "
            "in memory and whose step takes no arguments, or optimizer=None and leave room for its state"
        ) from error


def _check_stay(gradients: Sequence[torch.Tensor]) -> None:
    """Errors: ``InputError`` if one of the ``gradients`` that no optimizer clears grows from step to step."""
    for gradient in gradients:
        if gradient.layout != torch.strided:
            raise InputError(
                f"a sparse gradient of shape {tuple(gradient.shape)} is of a parameter that the optimizer does not hold: "
                "it is never cleared and grows from step to step, so no peak can be told or bounded; give the optimizer "
                "that parameter too, freeze it, or make its gradients dense (Embedding(sparse=False))"
            )


def _check_steady(optimizer: torch.optim.Optimizer) -> None:
    """Errors: ``InputError`` if the optimizer's state grows from step to step: it sums sparse gradients, which keep
    every entry of every step until they are coalesced."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.layout != torch.strided:
                raise InputError(
                    f"{name} of {type(optimizer).__name__} sums sparse gradients: it grows from step to step, so no peak "
                    "can be told or bounded; use an optimizer without momentum or SparseAdam, make the gradients dense "
                    "(Embedding(sparse=False)), or pass optimizer=None and leave room for it"
                )


def optimizer_over(optimizer: OptimizerLike, fakes: dict[int, torch.Tensor]) -> torch.optim.Optimizer | None:
    """Return a like optimizer without state over ``fakes``, by id of the real parameter; None for none."""
    if optimizer is None or not fakes:
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        cls = optimizer_class(optimizer) if isinstance(optimizer, str) else optimizer
        with _optimizing(cls):
            made = cls(list(fakes.values()))  # type: ignore[call-arg]
        if not isinstance(made, torch.optim.Optimizer):
            raise InputError(f"the function given as optimizer must make a torch.optim.Optimizer, not {made!r}")
        given = set(map(id, fakes.values()))
        if not isinstance(cls, type) and any(
            id(p) not in given for group in made.param_groups for p in group["params"]
        ):
            raise InputError(
                "the function given as optimizer must make one of the parameters that it is called with: what is planned "
                "is run on stand-ins for them. Pass the optimizer itself where it holds others too"
            )
        return made
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": kept}
        for group in optimizer.param_groups
        if (kept := [fakes[id(p)] for p in group["params"] if id(p) in fakes])
    ]
    if not groups:
        raise InputError("the optimizer given holds none of the model's parameters that require grad")
    with _optimizing(optimizer):
        return _rebuilt(optimizer, groups)


def _rebuilt(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    cls: Callable[..., torch.optim.Optimizer] = type(optimizer)
    try:
        return cls(groups)
    except TypeError:
        return cls(groups, **optimizer.defaults)


def _give_gradients(parameters: Sequence[torch.Tensor], gradients: Gradients, cleared: Sequence[int] = ()) -> None:
    """Leave on ``parameters`` what a backward left that :func:`gradients_of` looked at, but for those at these places."""
    without = set(cleared)
    for place, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        parameter.grad = None if gradient is None or place in without else gradient.blank()
