"""Rows for the lengths of a data set: what the step takes at p50, p95 and the longest, and in batches of like lengths.

In: lengths, or the batches of a data loader. Out: rows of the table of habits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fxmem.advice.habits import Disruption, Habit
from fxmem.advice.subject import NotApplicable, Subject, sized
from fxmem.api.prepare import QUANTILES
from fxmem.errors import InputError
from fxmem.runtime.recompute import generators_kept
from fxmem.torch_private import tree_leaves


def lengths_of(given: Iterable[Any]) -> list[int]:
    """Return the lengths of all samples, sorted. Errors: ``InputError``.

    ``given``: lengths, or batches: of each that has an ``attention_mask`` the tokens that it shows, of others the width of
    the first batch of sequences of integers.
    """
    with generators_kept():
        found = sorted(length for batch in given for length in _lengths(batch))
    if not found or found[0] < 1:
        raise InputError("lengths= are whole numbers above 0, or the batches of a data loader; there is none")
    return found


def _lengths(batch: Any) -> Iterator[int]:
    if isinstance(batch, int) and not isinstance(batch, bool):
        yield batch
        return
    mask = batch.get("attention_mask") if hasattr(batch, "get") else None
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        yield from map(int, mask.sum(1).tolist())
        return
    tokens = next((t for t in tree_leaves(batch) if isinstance(t, torch.Tensor) and _is_sequences(t)), None)
    if tokens is None:
        raise InputError(
            f"lengths= got a {type(batch).__name__} without a batch of sequences of integers; pass the lengths as numbers"
        )
    yield from [tokens.shape[1]] * tokens.shape[0]


def _is_sequences(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point()


def length_of(subject: Subject) -> int:
    """Return the length of the example's sequences. Errors: ``NotApplicable``."""
    length = next((t.shape[1] for t in subject.tensors if _is_sequences(t)), 0)
    if not length:
        raise NotApplicable("no argument is a batch of sequences of integers")
    return length


def with_length(subject: Subject, length: int, batch: int | None = None) -> Subject:
    """Return the subject with sequences of another length, and as many of them as ``batch`` says."""
    before, rows = length_of(subject), subject.batch

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() > 1 and tensor.shape[1] == before:
            tensor = sized(tensor, 1, length)
        if batch is not None and tensor.dim() and tensor.shape[0] == rows:
            tensor = sized(tensor, 0, batch)
        return tensor

    return subject.with_call(change)


def bucketed(subject: Subject, middle: int, longest: int) -> Subject:
    """Return the batch of the longest sequences, where no batch has more tokens than one of middle lengths has."""
    return with_length(subject, longest, max(1, subject.batch * middle // longest))


def habits_of(lengths: list[int]) -> tuple[Habit, ...]:
    """Return the rows for sorted lengths."""
    found = {name: lengths[round(share * (len(lengths) - 1))] for share, name in QUANTILES}
    rows = [
        Habit(
            f"length_{name}",
            f"sequences of {length} tokens, the {name} of the data",
            Disruption.METHOD,
            functools.partial(with_length, length=length),
            f"tokenizer(..., truncation=True, max_length={length})",
            "size",
        )
        for name, length in found.items()
    ]
    bucket = functools.partial(bucketed, middle=found["p50"], longest=found["max"])
    label = f"batches of like lengths, tokens as at {found['p50']} each"
    line = "DataLoader(..., batch_sampler=...)  # sorted by length, fewer sequences where they are long"
    return (*rows, Habit("bucketed", label, Disruption.METHOD, bucket, line, "size"))
