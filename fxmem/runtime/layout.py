"""Where tensors lie on their storages, and what is wrong when they lie otherwise than planned."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fxmem.errors import PlanMismatchError
from fxmem.torch_private import device_behind


class Geometry(NamedTuple):
    """A tensor that lies alone on its storage: what a gradient is like, or all that a backward looks at of an input."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: torch.Tensor) -> Geometry:
        return Geometry(x.size(), x.stride(), x.dtype, device_behind(x))

    def blank(self) -> torch.Tensor:
        """Return a tensor of this geometry, with anything in it."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


class View(NamedTuple):
    """Where a tensor lies. ``storage``: a managed storage's index, or ``~j`` for the graph's j-th static tensor."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool = False
    conj: bool = False
    neg: bool = False

    @staticmethod
    def of(tensor: torch.Tensor, storage: int) -> View:
        """Return the geometry of ``tensor``, which lies on ``storage``."""
        return View(
            storage,
            tensor.dtype,
            tuple(tensor.size()),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def on(self, base: torch.Tensor) -> torch.Tensor:
        """Return the tensor of this geometry on ``base``'s storage, cut off from autograd."""
        plain = base.dtype is self.dtype and not (self.conj or self.neg or base.is_conj() or base.is_neg())
        if plain and self.lies_as(base):
            return base.detach()  # cheaper than as_strided
        base = base.detach() if base.requires_grad else base
        if plain:
            return torch.as_strided(base, self.size, self.stride, self.offset)
        tensor = torch.as_strided(elements(base, self.dtype), self.size, self.stride, self.offset)
        tensor = tensor.conj() if self.conj else tensor
        return torch.ops.aten._neg_view.default(tensor) if self.neg else tensor

    def lies_as(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` has this very size, stride and offset."""
        return tensor.size() == self.size and tensor.stride() == self.stride and tensor.storage_offset() == self.offset

    def is_of(self, tensor: torch.Tensor) -> bool:
        """True if this is ``View.of(tensor)``, whatever storage that is."""
        return self.lies_as(tensor) and self.is_alike(tensor)

    def is_alike(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` is like this but perhaps for stride and offset."""
        same = tensor.dtype is self.dtype and tensor.size() == self.size
        return same and tensor.is_conj() == self.conj and tensor.is_neg() == self.neg

    def fills_as(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor``, of the same size, begins and ends where this does."""
        end, own_end = (
            sum((n - 1) * k for n, k in zip(self.size, s, strict=True)) for s in (tensor.stride(), self.stride)
        )
        return tensor.storage_offset() == self.offset and end == own_end

    def same_layout(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` is alike, with this offset and, where a dimension is longer than 1, stride."""
        if not self.is_alike(tensor) or tensor.storage_offset() != self.offset:
            return False
        stride = tensor.stride()
        return stride == self.stride or all(
            n <= 1 or a == b for n, a, b in zip(self.size, stride, self.stride, strict=True)
        )


Views = dict[int, View]
"""By place among a call's leaves; by ``~place`` among its output's."""


def elements(base: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``base``'s whole storage as a vector of ``dtype``, neither conjugate nor negative."""
    base = base.conj() if base.is_conj() else base
    base = torch.ops.aten._neg_view.default(base) if base.is_neg() else base
    nbytes = base.untyped_storage().nbytes()
    count = nbytes - nbytes % max(base.itemsize, dtype.itemsize)
    return torch.as_strided(base, (count // base.itemsize,), (1,), 0).view(dtype)


def layout_message(name: str, view: View, tensor: torch.Tensor) -> str:
    return (
        f"{name} was planned as {view.dtype} {view.size} with strides {view.stride}, but gave {tensor.dtype} "
        f"{tuple(tensor.size())} with strides {tuple(tensor.stride())}"
    )


def layout_error(name: str, view: View, tensor: torch.Tensor) -> PlanMismatchError:
    """Return the error to raise where no re-run could follow."""
    return PlanMismatchError(
        f"{layout_message(name, view, tensor)}; plan again on this device, or optimize the parts around"
    )


def memory_error(name: str) -> PlanMismatchError:
    """Return the error to raise where what was planned as a view turned out a copy, or the other way round."""
    return PlanMismatchError(
        f"{name} works on other memory than planned: since a kernel before it lays out otherwise than its fake says, a "
        "view turned out a copy, or a copy a view; mend the op's fake, or optimize the parts around"
    )
