"""What autograd copies in the backward of a view that was written to, on real tensors and not on fakes.

After an in-place write autograd differentiates the views of what was written anew. On fakes it repeats the view's own op,
whose backward is a view too; on real tensors it takes ``as_strided``, whose backward fills a new storage as large as the
view's base (an activation in place after InstanceNorm, whose result is a view, for one). In: a forward on fakes. Out: its
backward allocates what the real one does. Not modelled: views of a part of their base, whose own backward fills such a
storage as well, and writes inside a loss.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fxmem.torch_private import DisableTorchFunction, is_view, leaves_of, version_of


class WrittenViews(TorchFunctionMode):
    """Lets the backward of each view that is written to in the body allocate what ``as_strided`` would."""

    def __init__(self) -> None:
        super().__init__()
        self._views: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """By id: views that carry gradient, with their version when last seen."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "__get__":
            with DisableTorchFunction():  # modes around are not to see how views are looked at
                self._note_writes()
                self._note_views(output)
        return output

    def _note_views(self, output: Any) -> None:
        for leaf in leaves_of(output) if isinstance(output, torch.Tensor | tuple | list) else ():
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self._views and _covers_its_base(leaf):
                self._views[id(leaf)] = weakref.ref(leaf), version_of(leaf)

    def _note_writes(self) -> None:
        for key, (reference, version) in list(self._views.items()):
            view = reference()
            if view is None:
                del self._views[key]
            elif version_of(view) != version:
                self._views[key] = reference, version_of(view)
                _copy_in_backward(view)


def _covers_its_base(tensor: torch.Tensor) -> bool:
    base = tensor._base if tensor.layout is torch.strided and is_view(tensor) else None
    return base is not None and base.requires_grad and base.numel() == tensor.numel()


def _copy_in_backward(view: torch.Tensor) -> None:
    base = view._base
    assert base is not None
    length = (
        1 + sum((n - 1) * stride for n, stride in zip(base.shape, base.stride(), strict=True)) if base.numel() else 0
    )
    shape, strides, offset = view.shape, view.stride(), int(view.storage_offset() - base.storage_offset())

    def copied(gradients: tuple[Any, ...]) -> tuple[Any, ...] | None:
        gradient, *others = gradients
        if gradient is None:
            return None
        copy = gradient.new_zeros(length).as_strided(shape, strides, offset)
        copy.copy_(gradient)
        return (copy, *others)

    with suppress(RuntimeError):  # a view that may not be written to: the model hears so where it uses it
        if view.grad_fn is not None:
            view.grad_fn.register_prehook(copied)
