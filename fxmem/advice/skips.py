"""What long connections hold: the same forward, in which values that were made earlier are not added or joined again.

In: a subject. Out: one whose forward puts zeros without bytes where ``x + block(x)`` and ``cat((skip, x))`` bring back a
value from before. Shapes stay, so parameters do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fxmem.advice.subject import Subject
from fxmem.torch_private import tree_leaves

LEAST_CALLS = 2
"""Calls of torch between a value and the one that it is added to."""
_ADDING = {"add", "radd"}
_ADDING_IN_PLACE = {"iadd", "add_"}
_JOINING = {"cat", "concat", "concatenate"}


def without_skips(subject: Subject) -> Subject:
    """Let no value be brought back from before."""
    changed = subject.with_model()
    model = changed.model
    forward = model.forward

    def without(*args: Any, **kwargs: Any) -> Any:
        with _WithoutSkips():
            return forward(*args, **kwargs)

    model.forward = without
    return changed


class _WithoutSkips(TorchFunctionMode):
    """Replaces the older operand."""

    def __init__(self) -> None:
        super().__init__()
        self._made = WeakTensorKeyDictionary()
        """By tensor: the number of the call that returned it."""
        self._calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        name = name.strip("_") if name.startswith("__") else name
        if name in _ADDING | _ADDING_IN_PLACE and len(args) == 2:
            args = self._replaced(args, int(name in _ADDING_IN_PLACE))
        elif name in _JOINING and args and isinstance(args[0], list | tuple):
            args = (self._replaced(args[0], 0), *args[1:])
        output = func(*args, **(kwargs or {}))
        self._calls += 1
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self._made[leaf] = self._calls
        return output

    def _replaced(self, operands: Any, first: int) -> tuple[Any, ...]:
        """Return the operands, those from ``first`` on that are older than the newest as zeros."""
        known = [isinstance(each, torch.Tensor) and each in self._made for each in operands]
        if not all(known):
            return tuple(operands)
        newest = max(self._made[each] for each in operands)
        return tuple(
            each.new_zeros(()).expand(each.shape)
            if place >= first and newest - self._made[each] > LEAST_CALLS
            else each
            for place, each in enumerate(operands)
        )
