"""Patches of what fake tensors cannot do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, cast

import torch
from torch import _meta_registrations
from torch._subclasses import fake_impls
from torch.nn import functional

from fxmem.op_facts.kinds import MissingFake
from fxmem.op_facts.lookup import by_op
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


def ctc_loss(
    _mode: Any, _op: Any, log_probs: torch.Tensor, targets: torch.Tensor, _: Any, lengths: Any, *__: Any, **___: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses and the table that is saved."""
    num_steps, num_sequences = log_probs.shape[:2]
    most = targets.shape[-1] if isinstance(lengths, torch.Tensor) else max(lengths)
    return log_probs.new_empty(num_sequences), log_probs.new_empty((num_sequences, num_steps, 2 * most + 1))


def ctc_loss_backward(
    _mode: Any, _op: Any, grad: torch.Tensor, log_probs: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """Return the gradient of the probabilities."""
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _ctc_loss_of(
    original: Callable[..., torch.Tensor],
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Return what ``torch.ctc_loss`` returns, by its own ops."""
    if isinstance(input_lengths, torch.Tensor) or isinstance(target_lengths, torch.Tensor) or log_probs.is_cuda:
        return original(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    is_batched = log_probs.dim() == 3
    rows = log_probs if is_batched else log_probs.unsqueeze(1)
    losses: torch.Tensor = torch.ops.aten._ctc_loss(
        rows, targets.to(rows.device, torch.long), input_lengths, target_lengths, blank, zero_infinity
    )[0]
    if zero_infinity:
        losses = torch.where(losses == math.inf, losses.new_zeros(()), losses)
    if reduction == 1:
        lengths = torch.tensor(target_lengths, dtype=losses.dtype, device=losses.device)
        return (losses / lengths.clamp_min(1)).mean()
    if reduction == 2:
        return losses.sum()
    return losses if is_batched else losses.squeeze(0)


_KERNELS: dict[str, Callable[..., Any]] = {function.__name__: function for function in (ctc_loss, ctc_loss_backward)}


@patch
@contextmanager
def ctc_losses() -> Iterator[None]:
    """Give the CTC loss a fake, which it lacks.

    The table that it saves is as wide as the longest target. Where lengths are tensors that is taken to be the width of
    the targets, of targets in one row their number: an upper bound. Where they are numbers, torch puts them into a tensor
    by a way that fakes do not see; that is done here as it would be. torch 2.11 to 2.15.
    """

    fakes = {op: _KERNELS[fact.kernel] for op, fact in by_op(MissingFake).items()}
    fake_impls.op_implementations_dict.update(fakes)
    try:
        with replaced(torch, "ctc_loss", partial(_ctc_loss_of, torch.ctc_loss)):
            yield
    finally:
        for op in fakes:
            fake_impls.op_implementations_dict.pop(op, None)


def _unchecked(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the Gaussian loss as it is without asking whether any variance is below 0. It is looked into: where it is one
    call to a mode, torch.export loses its ``no_grad``."""

    @wraps(loss)
    def unchecked(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked = replaced(torch, "any", lambda _: False)
        with asked, replaced(functional, "has_torch_function_variadic", lambda *_: False):
            return loss(*args, **kwargs)

    return unchecked


@patch
@contextmanager
def no_value_checks() -> Iterator[None]:
    """Switch off those checks in ``torch.distributions`` that look at values: on fakes there are none.

    ``Normal(mean, std)`` asks whether all of ``std`` is above 0. torch 2.11 to 2.15.
    """
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        with replaced(functional, "gaussian_nll_loss", _unchecked(functional.gaussian_nll_loss)):
            yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)
