"""The one definition of a training step, and its optimizer and loss on fakes.

NOTE [The training step]

1. ``output = model(batch)``; ``loss = loss_fn(output)``; ``loss.backward()``; ``optimizer.step()``;
   ``optimizer.zero_grad(set_to_none=True)``. Gradients are absent at the start.
2. Batch, output and loss are referred to until the step is over.
3. It is a step of the steady state: the optimizer's state exists from the start.
4. Under autocast, forward and loss run inside the region, backward and optimizer outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fxmem.errors import InputError
from fxmem.fake import ScalarReads
from fxmem.replay import Autocast
from fxmem.types import Phase

OptimizerLike = torch.optim.Optimizer | type[torch.optim.Optimizer] | str | None
LossFn = Callable[[Any], torch.Tensor]


def run_step(
    forward: Callable[[], Any],
    loss_fn: LossFn | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    autocast: Autocast | None = None,
    on_phase: Callable[[Phase], None] = lambda phase: None,
) -> None:
    """Run one training step (NOTE [The training step]). ``on_phase`` is told of each phase before it starts."""
    with autocast.enter() if autocast else nullcontext():
        on_phase(Phase.FORWARD)
        output = forward()
        on_phase(Phase.LOSS)
        loss = (loss_fn or default_loss)(output)
    on_phase(Phase.BACKWARD)
    loss.backward()
    on_phase(Phase.OPTIMIZER)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


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


def check_optimizer(optimizer: OptimizerLike) -> None:
    """Raise ``InputError`` if ``optimizer`` names none."""
    if isinstance(optimizer, str):
        _class_named(optimizer)
        return
    is_class = isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
    if optimizer is not None and not is_class and not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optimizer must be a torch.optim.Optimizer, its class, its name or None, not {optimizer!r}")


def warm_fake_optimizer(
    optimizer: OptimizerLike, parameters: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> torch.optim.Optimizer | None:
    """Return a like optimizer over fake parameters, its state as after a first step.

    ``parameters``: pairs (real, fake). Runs under the fakes' mode; parameters that require no grad are left out.
    """
    fakes = {id(real): fake for real, fake in parameters if fake.requires_grad}
    if optimizer is None or not fakes:
        return None
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": kept}
            for group in optimizer.param_groups
            if (kept := [fakes[id(p)] for p in group["params"] if id(p) in fakes])
        ]
        if not groups:
            raise InputError("the optimizer given holds none of the model's parameters that require grad")
        fake_optimizer = _rebuilt(optimizer, groups)
    else:
        cls = _class_named(optimizer) if isinstance(optimizer, str) else optimizer
        fake_optimizer = cls(list(fakes.values()))  # type: ignore[call-arg]
    held = [p for group in fake_optimizer.param_groups for p in group["params"]]
    for parameter in held:
        parameter.grad = torch.empty_like(parameter)
    with ScalarReads():
        fake_optimizer.step()
    fake_optimizer.zero_grad(set_to_none=True)
    return fake_optimizer


def _rebuilt(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    cls: Callable[..., torch.optim.Optimizer] = type(optimizer)
    try:
        return cls(groups)
    except TypeError:
        return cls(groups, **optimizer.defaults)


def _class_named(name: str) -> type[torch.optim.Optimizer]:
    known = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name.lower() not in known:
        raise InputError(f"unknown optimizer {name!r}; known: {', '.join(sorted(known))}; or pass an instance")
    return known[name.lower()]
