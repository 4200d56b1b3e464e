"""The one definition of a training step.

NOTE [The training step]

1. ``output = model(batch)``; ``loss = loss_fn(output)``; ``loss.backward()``; ``optimizer.step()``;
   ``optimizer.zero_grad(set_to_none=True)``. Gradients are absent at the start.
2. With *gradient accumulation* it is the last micro-batch: those before it have left gradients on every parameter their
   backward reaches, this one's are added to them. ``zero_grad(set_to_none=False)`` makes every step such a step. The
   batch is new each time: a batch that requires grad has no gradient at the start. Where ``zero_grad()`` stands between
   loss and backward, the gradients of the step before are there until then, and those of this step stay.
3. With a *scaler*: ``scaler.scale(loss).backward()``; ``scaler.step(optimizer)``; ``scaler.update()``. The scaler finds
   no infinities, so the optimizer does step.
4. Batch, output and loss are referred to until the step is over.
5. With *in_backward*, each parameter is stepped within the backward, as soon as its gradient is complete, which then goes
   (NOTE [Steps in the backward] in :mod:`fxmem.runtime.step_in_backward`).
6. It is a step of the steady state: the optimizer's and the scaler's state exists from the start. A parameter that the
   backward does not reach has no gradient, and no state unless the optimizer given has some already.
7. Under autocast, forward and loss run inside the region, scaling, backward and optimizer outside, unless the loop has
   them inside too: the region keeps the casts of weights until it ends.
8. A :class:`Loop` says what else a step of a training loop may be: several forwards before the backward, several backwards
   through one graph, names that still refer to the step before. It changes no gradient, only the peak, and is looked at
   where a step is verified, not where it is profiled, but for when gradients are cleared: plans are made for one forward,
   and judged in their loop.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from fxmem.errors import InputError, first_lines
from fxmem.ir import Phase
from fxmem.profiling.seen_loss import OtherSizeError
from fxmem.profiling.targets import Targets
from fxmem.runtime.autocast import Autocast, casts_kept
from fxmem.runtime.layout import Geometry
from fxmem.torch_private import storage_key, tree_leaves, tree_unflatten

OptimizerLike = (
    torch.optim.Optimizer
    | type[torch.optim.Optimizer]
    | Callable[[list[torch.Tensor]], torch.optim.Optimizer]
    | str
    | None
)
LossFn = Callable[..., torch.Tensor]


class Steps(Protocol):
    """What a training step needs of an optimizer."""

    def step(self) -> Any: ...

    def zero_grad(self, set_to_none: bool) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """How a step of a training loop uses the model, where that is not one forward, one backward, and all let go.

    Errors: ``InputError`` if a number is not above 0.
    """

    forwards: int = 1
    """Calls of the model before the backward, each with a batch like the example: siamese networks, DPO, contrastive
    losses. The loss is the sum of theirs."""
    backwards: int = 1
    """Backwards through that graph: several losses, or one loss twice. All but the last retain it."""
    lets_go: bool = True
    """Whether the last backward lets go of the graph (``retain_graph=False``)."""
    carried: bool = False
    """Whether output and loss of the step before are referred to until those of this step take their names."""

    keeps_output: bool = True
    """Whether the output is referred to until the step is over; not so where only its loss is: ``model(x).loss``."""

    within_autocast: bool = False
    """Whether the backward runs inside of the region of autocast, which keeps casts of weights until it ends."""

    zero_grad_before_backward: bool = False
    """Whether ``optimizer.zero_grad()`` comes between forward and backward, so that the gradients of the step before are
    there through the forward."""

    def __post_init__(self) -> None:
        for name in ("forwards", "backwards"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} of a loop must be a number above 0, not {value!r}")

    def as_profiled(self) -> Loop:
        """Return what a profile shows of it (NOTE [The training step], rule 8)."""
        return Loop(zero_grad_before_backward=self.zero_grad_before_backward)


ONCE = Loop()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """What a training step is beside the model and its batch (NOTE [The training step]).

    Errors: ``InputError`` if a part of it is not what it must be.
    """

    loss_fn: LossFn | None = None
    """``loss_fn(output, *targets)`` returns the loss. None: ``output.loss``, else the sum of the floating outputs."""
    optimizer: OptimizerLike = "adamw"
    """An optimizer, its class, its name in ``torch.optim``, or a function that makes one for the parameters that require
    grad, which it is to hold all of (``lambda p: SGD(p, lr=0.1, momentum=0.9)``); None: the step ends with the backward."""
    accumulate: bool = False
    """Whether gradients are there when the step starts: of earlier micro-batches, or zeros that
    ``zero_grad(set_to_none=False)`` left."""
    scaler: torch.amp.GradScaler | None = None
    """The scaler of the step, if there is one."""
    autocast: torch.dtype | None = None
    """The dtype of the autocast region around forward and loss, where a step is planned from an example. A training call
    is planned for the region that it is in."""
    targets: Any = field(default=(), compare=False)
    """What ``loss_fn`` takes beside the output, by example: a tensor, or a tuple of arguments. Only shapes are kept; their
    batch follows that of the model's inputs."""
    loop: Loop = ONCE
    """How the training loop uses the model."""
    in_backward: bool = False
    """Whether each parameter is stepped within the backward, and its gradient let go of."""

    def __post_init__(self) -> None:
        optimizer, scaler = self.optimizer, self.scaler
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise InputError(f"scaler must be a torch.amp.GradScaler or None, not {scaler!r}")
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise InputError(f"loss_fn must be a function of the model's output, or None, not {self.loss_fn!r}")
        if self.autocast is not None and not isinstance(self.autocast, torch.dtype):
            raise InputError(f"autocast must be a dtype such as torch.bfloat16, or None, not {self.autocast!r}")
        makes_one = issubclass(optimizer, torch.optim.Optimizer) if isinstance(optimizer, type) else callable(optimizer)
        if isinstance(optimizer, str):
            optimizer_class(optimizer)
        if not isinstance(self.loop, Loop):
            raise InputError(f"loop must be a fxmem.Loop, not {self.loop!r}")
        if self.accumulate and self.loop.zero_grad_before_backward:
            raise InputError("gradients that accumulate are not cleared before the backward: pass one of the two")
        object.__setattr__(self, "targets", Targets.of(self.targets))
        self._check_in_backward()
        if self.targets.leaves and self.loss_fn is None:
            raise InputError("targets= are arguments of loss_fn=, which is missing; pass for example F.cross_entropy")
        if optimizer is not None and not isinstance(optimizer, str | torch.optim.Optimizer) and not makes_one:
            raise InputError(
                "optimizer must be a torch.optim.Optimizer, its class, its name, a function of the parameters that makes "
                f"one, or None, not {optimizer!r}"
            )

    def _check_in_backward(self) -> None:
        """Errors: ``InputError`` for what needs all gradients at once."""
        if not self.in_backward:
            return
        reasons = {
            "a GradScaler may skip a step once all gradients are there; bfloat16 autocast needs none": self.scaler,
            "gradients cannot accumulate over micro-batches; train on the whole batch in one call": self.accumulate,
            "a second backward through one graph would meet parameters that are stepped already": self.loop.backwards
            > 1,
            "there is no optimizer; pass optimizer=": self.optimizer is None,
        }
        if why := next((reason for reason, given in reasons.items() if given), None):
            raise InputError(f'{why}; or take "optimizer_in_backward" out of allow=')

    def __setstate__(self, state: list[Any]) -> None:
        """Earlier versions pickled the first fields."""
        defaults = [None, "adamw", False, None, None, Targets.of(()), ONCE, False]
        for name, value in zip(self.__slots__, [*state, *defaults[len(state) :]], strict=True):
            object.__setattr__(self, name, value)

    @property
    def begins_with_gradients(self) -> bool:
        """True if gradients of earlier backwards are there as the forward begins."""
        return self.accumulate or self.loop.zero_grad_before_backward

    def for_inputs(self, leaves: Sequence[Any]) -> TrainingStep:
        """Return the step with targets that are as large as a call with these leaves needs them."""
        return replace(self, targets=self.targets.for_inputs(leaves)) if self.targets.leaves else self

    def loss_on(self, targets: Sequence[Any]) -> LossFn | None:
        """Return the loss as a function of the output alone. ``targets``: leaves."""
        if self.loss_fn is None or not self.targets.leaves:
            return self.loss_fn
        return BoundLoss(self.loss_fn, tuple(tree_unflatten(list(targets), self.targets.spec)))

    def without_state(self) -> TrainingStep:
        """Return the step with an optimizer like its own before the first step: what copies and pickles keep."""
        return replace(self, optimizer=without_state(self.optimizer))


@dataclass(frozen=True, slots=True, eq=False)
class BoundLoss:
    """A loss with its targets."""

    loss_fn: LossFn
    targets: tuple[Any, ...]

    @property
    def num_outputs(self) -> int:
        return outputs_of(self.loss_fn)

    def __call__(self, *outputs: Any) -> torch.Tensor:
        return self.loss_fn(*outputs, *self.targets)


def outputs_of(loss_fn: LossFn | None) -> int:
    """Return how many outputs of the model a loss is made of at once: one, but for a loss that was seen to take more."""
    return int(getattr(loss_fn, "num_outputs", 1))


BARE = TrainingStep(optimizer=None)
"""Forward, default loss and backward."""


Gradients = tuple[Geometry | None, ...]
"""What a backward leaves on each parameter, in the model's order; None where it does not reach."""


def gradients_of(parameters: Sequence[torch.Tensor]) -> Gradients | None:
    """Return what gradients there are; None if one of them is sparse, or shares or does not fill its storage."""
    gradients = [p.grad for p in parameters]
    if not all(grad is None or grad.layout == torch.strided for grad in gradients):
        return None
    storages = [grad.untyped_storage() for grad in gradients if grad is not None]
    alone = len({storage_key(grad) for grad in gradients if grad is not None}) == len(storages)
    full = sum(storage.nbytes() for storage in storages) == sum(g.nbytes for g in gradients if g is not None)
    if not (alone and full):
        return None
    return tuple(None if g is None else Geometry.of(g) for g in gradients)


def usual_gradients(parameters: Sequence[torch.Tensor]) -> Gradients:
    """Return what most models' backward leaves: on each parameter that requires grad a gradient like itself."""
    return tuple(Geometry.of(p) if p.requires_grad else None for p in parameters)


def run_step(
    forward: Callable[[], Any],
    loss_fn: LossFn | None = None,
    optimizer: Steps | None = None,
    autocast: Autocast | None = None,
    on_phase: Callable[[Phase], None] = lambda phase: None,
    scaler: torch.amp.GradScaler | None = None,
    keep_casts: bool = True,
    loop: Loop = ONCE,
    carried: list[Any] | None = None,
) -> None:
    """Run one training step (NOTE [The training step]). ``on_phase`` is told of each phase before it starts.

    ``keep_casts=False``: autocast's cache is off, so that no cast is at hand for the next step in a region around.
    ``carried``: output and loss of the step before; those of this step take their places, and stay.
    """
    names: list[Any] = [None, None] if carried is None else carried
    with ExitStack() as whole, ExitStack() as region:
        if not keep_casts:
            region.enter_context(casts_kept(False))
        if autocast:
            region.enter_context(autocast.enter())
        on_phase(Phase.FORWARD)
        names[0] = [forward() for _ in range(loop.forwards)]
        on_phase(Phase.LOSS)
        names[1] = loss_of(names[0], loss_fn)
        if not loop.keeps_output:
            names[0] = None
        if loop.within_autocast:
            whole.enter_context(region.pop_all())
        region.close()
        if loop.zero_grad_before_backward and optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
        on_phase(Phase.BACKWARD)
        loss = names[1] if scaler is None else scaler.scale(names[1])
        for number in range(1, loop.backwards + 1):
            loss.backward(retain_graph=number < loop.backwards or not loop.lets_go)
        del loss
        on_phase(Phase.OPTIMIZER)
        if optimizer is None:
            return
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)  # type: ignore[arg-type]
            scaler.update()
        if not loop.zero_grad_before_backward:
            optimizer.zero_grad(set_to_none=True)


def clear_before_backward(
    step: TrainingStep, phase: Phase, optimizer: Steps | None, parameters: Sequence[torch.Tensor]
) -> None:
    """Clear gradients as ``phase`` starts, where the loop does so and no optimizer stands for what does."""
    if phase is Phase.BACKWARD and optimizer is None and step.loop.zero_grad_before_backward:
        for parameter in parameters:
            parameter.grad = None


def loss_of(outputs: Sequence[Any], loss_fn: LossFn | None) -> torch.Tensor:
    """Return the loss of a step with these outputs: the sum of that of each, or of each group that ``loss_fn`` takes; one
    output stands for all where there are too few. Errors: ``InputError``."""
    size = outputs_of(loss_fn)
    enough = [*outputs, *[outputs[-1]] * (-len(outputs) % size)]
    losses = [_loss_of_group(enough[i : i + size], loss_fn) for i in range(0, len(enough), size)]
    return functools.reduce(operator.add, losses)


def _loss_of_group(outputs: Sequence[Any], loss_fn: LossFn | None) -> torch.Tensor:
    if loss_fn is None:
        return default_loss(outputs[0])
    try:
        loss = loss_fn(*outputs)
    except OtherSizeError:
        raise
    except Exception as error:
        raise InputError(
            f"loss_fn failed on fake tensors: {first_lines(error)}. It is called with the model's output and targets= "
            "and may not look at values (item, boolean indices, numpy); where the real one does, pass one that is like it "
            "in memory"
        ) from error
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise InputError(f"loss_fn must return a tensor of one element, not {shape}")
    return loss


def default_loss(output: Any) -> torch.Tensor:
    """Return ``output.loss`` if there is one, else the sum of all floating tensors in ``output``."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    floating = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    if not floating:
        raise InputError("the model's output holds no floating tensor to take a loss of; pass loss_fn=")
    total = floating[0].sum()
    for tensor in floating[1:]:
        total = total + tensor.sum()
    return total


def without_state(optimizer: OptimizerLike) -> OptimizerLike:
    """Return an optimizer like the one given, over the same parameters, before its first step, with what pickling keeps."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    fresh = copy(optimizer)
    fresh.state = defaultdict(dict)
    return fresh


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class in ``torch.optim`` of that name, in any case. Errors: ``InputError`` if there is none."""
    known = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name.lower() not in known:
        raise InputError(f"unknown optimizer {name!r}; known: {', '.join(sorted(known))}; or pass an instance")
    return known[name.lower()]
