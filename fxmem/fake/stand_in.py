"""Fakes on a GPU that is not in this machine.

While :func:`standing_in` runs its body, fakes of the CPU's tensors lie on CUDA, and what code asks of a CUDA device
(:func:`cuda_model`) is answered for the GPU named. Kernels, dtypes and what is saved are then CUDA's: fakes dispatch by
their device. Only attention chooses its kernel by asking the device, so its choice is made here
(:mod:`fxmem.op_facts.attention`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

import torch

from fxmem.devices import DeviceModel, device_like
from fxmem.errors import InputError
from fxmem.fake.attention import attention_of
from fxmem.torch_patches import autocast_on_cuda, cuda_for_fakes

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
            stack.enter_context(autocast_on_cuda(has_bfloat16=device.capability >= (8, 0)))
        stack.enter_context(attention_of(device))
        token = _MODEL.set(device)
        try:
            yield
        finally:
            _MODEL.reset(token)


def stand_in() -> DeviceModel | None:
    """Return the GPU that fakes lie on though it may not be here, if there is one."""
    return _MODEL.get()


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
