"""How tensors of a compiled step lie in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


def transposed(args: Sequence[Any], changed: Sequence[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what a kernel writes in another layout than that in which it reads the same shape, each with what it reads."""
    written = {id(t) for t in changed}
    read = [a for a in args if isinstance(a, torch.Tensor) and id(a) not in written]
    for target in changed:
        alike = (t for t in read if t.shape == target.shape and t.dtype == target.dtype)
        source = next((t for t in alike if not lies_as(t, target.stride())), None)
        if source is not None:
            read = [t for t in read if t is not source]
            yield target, source


def laid_out_as(parameter: Any, gradient: Any) -> Any:
    """Return the gradient as autograd keeps it: a new one where it is not laid out as its parameter is."""
    if not isinstance(gradient, torch.Tensor) or not isinstance(parameter, torch.Tensor):
        return gradient
    is_alike = lies_as(gradient, parameter.stride())
    return gradient if is_alike else torch.empty_like(parameter, dtype=gradient.dtype)


def lies_as(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    return all(a == b for size, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True) if size != 1)


def lies_alike(tensor: Any, like: Any) -> bool:
    return (tensor.shape, tensor.stride(), tensor.dtype) == (like.shape, like.stride(), like.dtype)
