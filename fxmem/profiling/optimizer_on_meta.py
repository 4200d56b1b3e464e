"""What an optimizer's step allocates, seen on meta tensors: some ten times faster than on fakes.

In: a step, its parameters, and what the backward leaves. Out: a :class:`RecordedStep` for the runs of the step, or None.
Only for optimizers of ``torch.optim`` on the CPU: what they do depends on sizes and dtypes of what they are given, and of
the device only on whether it has multi-tensor kernels, which the CPU and the meta device have not.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from fxmem.fake.op_memo import run_or_recall
from fxmem.fake.stand_in import original_of
from fxmem.profiling.optimizer_step import (
    RecordedStep,
    SeenOptimizer,
    WatchedOptimizer,
    clears_all,
    optimizer_over,
)
from fxmem.profiling.storage_tracker import FakesTracker, tensors_of
from fxmem.profiling.training_step import Gradients, TrainingStep, optimizer_class, usual_gradients
from fxmem.runtime.layout import Geometry
from fxmem.torch_patches import without_optimizer_hooks
from fxmem.torch_private import TorchDispatchMode


def usual_step(step: TrainingStep, parameters: Sequence[torch.Tensor]) -> RecordedStep | None:
    """Return what a step of most models leaves and allocates: a gradient like itself on each parameter that requires grad.

    Runs that are told of it find out whether it holds. None where gradients stay from step to step, which may be any.
    """
    if step.accumulate or not clears_all(step, parameters):
        return None
    gradients = usual_gradients(parameters)
    return RecordedStep(gradients, None if step.scaler or step.in_backward else _seen(step, parameters, gradients))


def _seen(step: TrainingStep, parameters: Sequence[torch.Tensor], gradients: Gradients) -> SeenOptimizer | None:
    given = optimizer_class(step.optimizer) if isinstance(step.optimizer, str) else step.optimizer
    cls = given if isinstance(given, type) else type(given)
    if not cls.__module__.startswith("torch.optim.") or any(p.device.type != "cpu" for p in parameters):
        return None
    around = (
        nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    )  # a mode slows each call
    with around:
        try:
            return _two_steps(step, parameters, gradients)
        except Exception:  # fused kernels, or a step that reads values: to be seen on fakes
            return None


@without_optimizer_hooks()
def state_bytes(step: TrainingStep, parameters: Sequence[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of the optimizer's state of each parameter, by its id; empty where they cannot be seen one by one.

    Parameters that are alike have like state, unless an optimizer that was given has groups of them.
    """
    grouped = isinstance(step.optimizer, torch.optim.Optimizer)
    learning = {id(p): (id(p) if grouped else 0, Geometry.of(p)) for p in parameters if p.requires_grad}
    twins = {key: _on_meta(key[1]).requires_grad_() for key in learning.values()}
    try:
        of_parameter = {id(original_of(p)): twins[learning[id(p)]] for p in parameters if id(p) in learning}
        optimizer = optimizer_over(step.optimizer, of_parameter if grouped else {id(t): t for t in twins.values()})
        if optimizer is None:
            return dict.fromkeys(learning, 0)
        for twin in twins.values():
            twin.grad = torch.empty_like(twin)
        optimizer.step()
    except Exception:  # it reads values, or takes no such gradients
        return {}
    held = {key: tensors_of(tuple(optimizer.state[twin].values())) for key, twin in twins.items()}
    nbytes = {key: sum(t.untyped_storage().nbytes() for t in tensors) for key, tensors in held.items()}
    return {parameter: nbytes[key] for parameter, key in learning.items()}


@without_optimizer_hooks()
def _two_steps(step: TrainingStep, parameters: Sequence[torch.Tensor], gradients: Gradients) -> SeenOptimizer | None:
    """Step once, which makes the state, and once more watched."""
    twins = [_on_meta(Geometry.of(p)).requires_grad_(p.requires_grad) for p in parameters]
    learning = {id(original_of(p)): twin for p, twin in zip(parameters, twins, strict=True) if p.requires_grad}
    optimizer = optimizer_over(step.optimizer, learning)
    if optimizer is None or any(group.get("foreach") for group in optimizer.param_groups):
        return None  # asked for, multi-tensor kernels take other temporaries on meta tensors
    tracker = FakesTracker()
    watched = WatchedOptimizer(optimizer, tracker)
    tracker.hold(twins)
    _first_step(optimizer, twins, gradients)
    watched.hold()
    _give(twins, gradients)
    tracker.hold(twin.grad for twin in twins if twin.grad is not None)
    with _Recalled(), tracker:  # type: ignore[no-untyped-call]
        watched.step()
    return watched.seen(twins)


class _Recalled(TorchDispatchMode):
    """Runs an op on meta tensors once of those that lie alike."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_or_recall(func, args, kwargs or {})


def _first_step(optimizer: torch.optim.Optimizer, twins: Sequence[torch.Tensor], gradients: Gradients) -> None:
    """Make the state. Of parameters that are alike and in one group, the first one's; the others get copies of it."""
    groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    alike: dict[object, list[torch.Tensor]] = {}
    for twin, gradient in zip(twins, gradients, strict=True):
        if id(twin) in groups:
            alike.setdefault((groups[id(twin)], Geometry.of(twin), gradient), []).append(twin)
    first = {id(members[0]) for members in alike.values()}
    _give(twins, [g if id(t) in first else None for t, g in zip(twins, gradients, strict=True)])
    optimizer.step()
    _give(twins, [None] * len(twins))  # which are not its state
    for members in alike.values():
        state = optimizer.state.get(members[0], {})
        for other in members[1:]:
            optimizer.state[other] = {name: _copy(value) for name, value in state.items()}
    in_order = {
        p: optimizer.state[p] for group in optimizer.param_groups for p in group["params"] if p in optimizer.state
    }
    optimizer.state.clear()
    optimizer.state.update(in_order)


def _copy(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _give(twins: Sequence[torch.Tensor], gradients: Sequence[Geometry | None]) -> None:
    for twin, gradient in zip(twins, gradients, strict=True):
        twin.grad = None if gradient is None else _on_meta(gradient)


def _on_meta(like: Geometry) -> torch.Tensor:
    return like._replace(device=torch.device("meta")).blank()
