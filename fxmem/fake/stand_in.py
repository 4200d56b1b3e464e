"""Fakes on a GPU that is not in this machine.

While :func:`standing_in` runs its body, fakes may lie on CUDA, and what code asks of a CUDA device (:func:`cuda_model`) is
answered for the GPU named. A :class:`fxmem.fake.fake_tensors.FakeWorld` moves a model's and a batch's fakes there.
Kernels, dtypes and what is saved are then CUDA's: fakes dispatch by their device. Only attention chooses its kernel by
asking the device, so its choice is made here (:mod:`fxmem.op_facts.attention`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fxmem.devices import DeviceModel, device_like
from fxmem.errors import InputError
from fxmem.fake.attention import attention_of
from fxmem.op_facts.kinds import OwnKernelOnCuda
from fxmem.op_facts.lookup import by_op
from fxmem.torch_patches import cuda_asked, cuda_for_fakes, kernels_on_cuda

_MODEL: ContextVar[DeviceModel | None] = ContextVar("fxmem_stand_in", default=None)


@contextmanager
def standing_in(device: DeviceModel | None) -> Iterator[None]:
    """Let fakes in the body lie on ``device``; None: where their tensors lie.

    Errors: ``InputError`` where this build of torch allows no fakes on CUDA without a device.
    """
    if device is None:
        yield
        return
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            try:
                stack.enter_context(cuda_for_fakes())
            except NotImplementedError as error:
                raise InputError(
                    f"a step on {device.name} cannot be counted here without a CUDA device ({error}); leave device= and "
                    "plan_for= out to count it as on the CPU"
                ) from error
            stack.enter_context(cuda_asked(device.name, device.capability))
            stack.enter_context(kernels_on_cuda(dict.fromkeys(_names_of_own_kernels(), _never_runs)))
        stack.enter_context(attention_of(device))
        token = _MODEL.set(device)
        try:
            yield
        finally:
            _MODEL.reset(token)


def _never_runs(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("fakes run no kernels")


def _names_of_own_kernels() -> list[str]:
    return [op.overloadpacket.__name__ for op in by_op(OwnKernelOnCuda)]


def stand_in() -> DeviceModel | None:
    """Return the GPU that stands in for CUDA, if one does."""
    return _MODEL.get()


_ORIGINALS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def stands_for(fake: torch.Tensor, original: torch.Tensor) -> None:
    """Note that ``fake`` is ``original`` on another device, of which its values and its optimizer are asked."""
    _ORIGINALS[fake] = original


def original_of(tensor: Any) -> Any:
    """Return what ``tensor`` stands for, or itself."""
    return _ORIGINALS.get(tensor, tensor) if isinstance(tensor, torch.Tensor) else tensor


def cuda_model(device: torch.device) -> DeviceModel:
    """Return the GPU that stands in for CUDA, else what the runtime says of ``device``."""
    model = _MODEL.get()
    if model is not None:
        return model
    seen = torch.cuda.get_device_properties(device)
    return device_like(
        seen.name,
        (seen.major, seen.minor),
        seen.multi_processor_count,
        seen.total_memory,
        seen.max_threads_per_multi_processor,
    )
