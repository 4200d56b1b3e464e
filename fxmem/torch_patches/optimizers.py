"""Patches of optimizers and scalers, so that on fakes they do what they do on real parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import _foreach_supported_types, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fxmem.torch_patches.replacing import patch, replaced_here
from fxmem.torch_private import FakeTensor


@patch
@contextmanager
def fakes_for_each() -> Iterator[None]:
    """Let the body's optimizers choose multi-tensor kernels for fakes where they do for real parameters.

    They choose by the class of a parameter, and a fake's is not on their list: Adam on CUDA would seem to need one
    parameter's temporaries where it needs those of all. torch 2.11 to 2.15.
    """
    types: list[Any] = _foreach_supported_types
    types.append(FakeTensor)
    try:
        yield
    finally:
        types.remove(FakeTensor)


@patch
@contextmanager
def without_optimizer_hooks() -> Iterator[None]:
    """Let the body's optimizers step unseen by hooks that are on all optimizers.

    Who counts the steps of a training run by such a hook, or reads values in it, would meet the fakes of planning. torch
    2.11 to 2.15.
    """
    all_hooks: tuple[Any, ...] = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    before = [dict(hooks) for hooks in all_hooks]
    for hooks in all_hooks:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, earlier in zip(all_hooks, before, strict=True):
            hooks.update(earlier)


@patch
def steady_scaler(scaler: torch.amp.GradScaler, device: torch.device) -> torch.amp.GradScaler:
    """Return a copy of ``scaler`` with tensors of its own, made in the modes there are: it finds no infinities and steps
    ``.optimizer`` of what it is given.

    A scaler reads whether a gradient is infinite, and skips the step if so: fakes read as 1, which is yes. It is a copy,
    not a context, as it lives as long as the step on fakes. torch 2.11 to 2.15.
    """
    copy = object.__new__(type(scaler))
    vars(copy).update(vars(scaler))
    if scaler.is_enabled():
        torch.amp.GradScaler.__init__(copy, device.type)
        copy._lazy_init_scale_growth_tracker(device)
    copy.step = lambda watched: type(scaler).step(copy, watched.optimizer)  # type: ignore[method-assign, misc]
    copy._maybe_opt_step = lambda optimizer, _, *args, **kwargs: optimizer.step(*args, **kwargs)  # type: ignore[method-assign]
    return copy


@patch
@contextmanager
def clipping_refused(check: Callable[[Sequence[torch.Tensor]], None]) -> Iterator[None]:
    """Let ``check`` see, and refuse by an error, the parameters whose gradients are to be clipped by norm.

    Of parameters without a gradient ``clip_grad_norm_`` finds a norm of zero and says nothing. torch 2.11 to 2.15.
    """
    clip = clip_grad._clip_grads_with_norm_

    def checked(parameters: Any, *args: Any, **kwargs: Any) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        check(parameters)
        clip(parameters, *args, **kwargs)

    with replaced_here(clip_grad, "_clip_grads_with_norm_", checked):
        yield
