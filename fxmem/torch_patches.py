"""Every place where fxmem replaces or sets something of torch's, each a named context manager."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch._meta_registrations

_meta: Any = torch._meta_registrations


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give ``owner`` another attribute ``name`` while the body runs."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def grouped_matmuls() -> Iterator[None]:
    """Let the fake grouped matmul, which insists on bfloat16, take the dtypes that the real one takes."""
    original = _meta._meta_grouped_mm_common

    def of_any_dtype(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if a.dtype == torch.bfloat16 or a.itemsize == 1:
            return cast(torch.Tensor, original(a, b, *args, **kwargs))
        as_bfloat16 = [torch.empty_like(t, dtype=torch.bfloat16) for t in (a, b)]
        dtype = kwargs.pop("out_dtype", None) or a.dtype
        return torch.empty_like(original(*as_bfloat16, *args, **kwargs), dtype=dtype)

    with replaced(_meta, "_meta_grouped_mm_common", of_any_dtype):
        yield
