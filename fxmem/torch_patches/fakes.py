"""Patches of what fake tensors cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import _meta_registrations
from torch._subclasses import fake_impls

from fxmem.torch_patches.replacing import patch, replaced


@patch
@contextmanager
def grouped_matmuls() -> Iterator[None]:
    """Let the fake grouped matmul, which insists on bfloat16, take the dtypes that the real one takes.

    A mixture of experts in float32 trains on the CPU, and on fakes raises "Expected inputs of BF16 type". torch 2.11 to
    2.15.
    """
    original = vars(_meta_registrations)["_meta_grouped_mm_common"]

    def of_any_dtype(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if a.dtype == torch.bfloat16 or a.itemsize == 1:
            return cast(torch.Tensor, original(a, b, *args, **kwargs))
        as_bfloat16 = [torch.empty_like(t, dtype=torch.bfloat16) for t in (a, b)]
        dtype = kwargs.pop("out_dtype", None) or a.dtype
        return torch.empty_like(original(*as_bfloat16, *args, **kwargs), dtype=dtype)

    with replaced(_meta_registrations, "_meta_grouped_mm_common", of_any_dtype):
        yield


@patch
@contextmanager
def ctc_losses() -> Iterator[None]:
    """Give the CTC loss a fake, which it lacks.

    The table that it saves is as wide as the longest target. Where lengths are tensors that is taken to be the width of
    the targets, of targets in one row their number: an upper bound. torch 2.11 to 2.15.
    """

    def forward(
        _mode: Any, _op: Any, log_probs: torch.Tensor, targets: torch.Tensor, _: Any, lengths: Any, *__: Any, **___: Any
    ) -> Any:
        num_steps, num_sequences = log_probs.shape[:2]
        most = targets.shape[-1] if isinstance(lengths, torch.Tensor) else max(lengths)
        return log_probs.new_empty(num_sequences), log_probs.new_empty((num_sequences, num_steps, 2 * most + 1))

    def backward(_mode: Any, _op: Any, grad: torch.Tensor, log_probs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.empty_like(log_probs, memory_format=torch.contiguous_format)

    aten: Any = torch.ops.aten
    both = ((aten._ctc_loss, forward), (aten._ctc_loss_backward, backward))
    fakes = {op: kernel for packet, kernel in both for op in (packet.default, packet.Tensor)}
    known = vars(fake_impls)["op_implementations_dict"]
    known.update(fakes)
    try:
        yield
    finally:
        for op in fakes:
            known.pop(op, None)


@patch
@contextmanager
def no_value_checks() -> Iterator[None]:
    """Switch off those checks in ``torch.distributions`` that look at values: on fakes there are none.

    ``Normal(mean, std)`` asks whether all of ``std`` is above 0. torch 2.11 to 2.15.
    """
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)
