"""Patches of functions that a model calls: its calls go to what is given, with the original at hand."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.modules.module as _modules
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import BackwardHook

from fxmem.torch_patches.replacing import patch, replaced, replaced_here

Instead = Callable[..., Any]


@patch
@contextmanager
def function_applies_by(instead: Instead) -> Iterator[None]:
    """Call ``instead(cls, args, apply)`` for each ``cls.apply(*args)`` of an autograd.Function; ``apply()`` is the call.

    torch.export looks through it and keeps the forward's ops only: the custom backward is lost. torch 2.11 to 2.15, where
    ``Function.apply`` ends in that of its base.
    """
    base, thread = torch.autograd.function._SingleLevelFunction, threading.get_ident()

    def apply(cls: Any, *args: Any) -> Any:
        original = functools.partial(super(base, cls).apply, *args)
        return instead(cls, args, original) if threading.get_ident() == thread else original()

    with replaced(base, "apply", classmethod(apply)):
        yield


@patch
@contextmanager
def tensor_hooks_set_by(instead: Instead) -> Iterator[None]:
    """Call ``instead(tensor, hook, original)`` for each ``tensor.register_hook(hook)``.

    torch.export sets the hook on a fake and forgets it. torch 2.11 to 2.15.
    """
    original = torch.Tensor.register_hook
    with replaced_here(torch.Tensor, "register_hook", lambda tensor, hook: instead(tensor, hook, original)):
        yield


@patch
@contextmanager
def batch_norms_by(instead: Instead) -> Iterator[None]:
    """Call ``instead(module, x, original)`` for the forward of each BatchNorm.

    One with ``momentum=None`` reads its counter as a number, which export takes for a constant: the average over all
    batches would be that of one. torch 2.11 to 2.15.
    """
    original = vars(_BatchNorm)["forward"]
    with replaced_here(_BatchNorm, "forward", lambda module, x: instead(module, x, original)):
        yield


@patch
@contextmanager
def backward_hooks_made_by(inputs: Instead, outputs: Instead) -> Iterator[None]:
    """Call ``inputs(hook, args, original)`` and ``outputs(hook, args, original)`` where a module's full backward hook puts
    its nodes around what the module takes and returns.

    torch.export runs both on fakes, and the hook is in no graph. torch 2.11 to 2.15.
    """
    on_inputs, on_outputs = BackwardHook.setup_input_hook, BackwardHook.setup_output_hook
    with (
        replaced_here(BackwardHook, "setup_input_hook", lambda hook, args: inputs(hook, args, on_inputs)),
        replaced_here(BackwardHook, "setup_output_hook", lambda hook, args: outputs(hook, args, on_outputs)),
    ):
        yield


@patch
@contextmanager
def forward_hooks_exchanged(model: torch.nn.Module, instead: Instead) -> Iterator[None]:
    """Put ``instead(hook)`` in the place of each forward hook and forward pre hook of ``model`` and of all modules.

    torch.export traces a hook once, whatever it does besides: one that counts its calls would count no more. torch 2.11
    to 2.15.
    """
    registries: list[Any] = [_modules._global_forward_pre_hooks, _modules._global_forward_hooks]
    registries += [hooks for m in model.modules() for hooks in (m._forward_pre_hooks, m._forward_hooks)]
    saved = [dict(registry) for registry in registries]
    try:
        for registry, before in zip(registries, saved, strict=True):
            registry.update((key, instead(hook)) for key, hook in before.items())
        yield
    finally:
        for registry, before in zip(registries, saved, strict=True):
            registry.update(before)


@patch
@contextmanager
def calls_run_by(module: torch.nn.Module, instead: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Call ``instead(args, kwargs)`` for each call of ``module``, hooks included; a call from there is the module's own.

    A hook could not give a result in place of the forward's. torch 2.11 to 2.15, where ``nn.Module.__call__`` asks the
    module for ``_call_impl``.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        del own["_call_impl"]
        try:
            return instead(args, kwargs)
        finally:
            own["_call_impl"] = call

    own = vars(module)
    own["_call_impl"] = call
    try:
        yield
    finally:
        del own["_call_impl"]


@patch
@contextmanager
def calls_told_to(told: Callable[[str], None]) -> Iterator[None]:
    """Tell ``told`` the name of each call of a function that no graph keeps, then make the call.

    These functions are not overridable, so a mode does not see them. torch 2.11 to 2.15.
    """

    def telling(owner: Any, attribute: str, name: str) -> Any:
        original = getattr(owner, attribute)

        def call(*args: Any, **kwargs: Any) -> Any:
            told(name)
            return original(*args, **kwargs)

        return replaced_here(owner, attribute, call)

    with ExitStack() as stack:
        for owner, attribute, name in _TOLD:
            stack.enter_context(telling(owner, attribute, name))
        yield


_TOLD: tuple[tuple[Any, str, str], ...] = (
    *((torch.Tensor, name, f"Tensor.{name}") for name in ("register_hook", "register_post_accumulate_grad_hook")),
    (torch.random, "fork_rng", "torch.random.fork_rng"),
    *((owner, name, f"torch.{name}") for owner in (torch, torch.random) for name in ("manual_seed", "set_rng_state")),
    *((torch, name, f"torch.{name}") for name in ("clear_autocast_cache", "set_autocast_cache_enabled")),
    (torch.inference_mode, "__enter__", "torch.inference_mode"),
)
