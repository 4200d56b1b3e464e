"""Canaries of the patches that hide from planning what is around a call."""

import threading
from contextlib import nullcontext

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize

from fxmem import torch_patches as patches
from fxmem.torch_private import sequence_of
from tests.torch_patches.canaries import canary


@canary(patched=(False, True, False, False), plain=(True, False, True, True))
def as_in_training(on: bool) -> object:
    """(inference mode, grad mode, anomaly mode, whether another thread may do the same meanwhile)"""
    entered = threading.Event()

    def other() -> None:
        with patches.as_in_training() if on else nullcontext():
            entered.set()

    thread = threading.Thread(target=other)
    with torch.inference_mode(), torch.autograd.set_detect_anomaly(True):
        with patches.as_in_training() if on else nullcontext():
            modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_anomaly_enabled()
            thread.start()
            meanwhile = entered.wait(0.3)
        thread.join()
    return (*modes, meanwhile)


@canary(patched=False, plain=True)
def outermost_in_autocast(on: bool) -> object:
    """Whether a region that lies in another one leaves its casts to that one."""

    def cast() -> int:
        product = torch.mm(weight, weight)
        assert product.grad_fn is not None
        return sequence_of(product.grad_fn.next_functions[0][0] or product.grad_fn)

    weight = nn.Parameter(torch.ones(2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        with patches.outermost_in_autocast() if on else nullcontext(), torch.autocast("cpu", torch.bfloat16):
            inside = cast()
        return cast() == inside


class _Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@canary(patched=False, plain=True)
def without_cached_parametrizations(on: bool) -> object:
    """Whether a weight computed meanwhile is found in the cache afterwards."""
    layer = nn.Linear(2, 2)
    parametrize.register_parametrization(layer, "weight", _Doubled())
    with parametrize.cached():
        with patches.without_cached_parametrizations() if on else nullcontext():
            computed = layer.weight
        return layer.weight is computed


@canary(patched=(0, 1), plain=(1, 2))
def without_hooks_on_saved_tensors(on: bool) -> object:
    """How often the hook packed after an op inside, and after one more outside."""
    packed: list[object] = []
    x = torch.ones(2, requires_grad=True)
    with saved_tensors_hooks(lambda t: packed.append(0) or t, lambda t: t):
        with patches.without_hooks_on_saved_tensors() if on else nullcontext():
            x.exp()
        inside = len(packed)
        x.exp()
    return inside, len(packed)
