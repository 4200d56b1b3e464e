"""Which calls of a program write their result over an argument (NOTE [Liveness] in program.py, rule 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fxmem.runtime.layout import View
from fxmem.runtime.programs.instructions import IN_PLACE, SUM, Instruction, Recording, Ref
from fxmem.torch_private import tree_leaves


class InPlace:
    """The values of a function that is being written, and when they end."""

    def __init__(
        self,
        recording: Recording,
        last: dict[int, int],
        kept: set[int],
        given: Sequence[int],
        arguments: dict[int, int],
    ) -> None:
        """``last``: by value, where it is read last. What is not among the others is made here."""
        self._views = recording.views
        self._others = {self._views[v].storage for v in (*given, *arguments, *recording.constants)}
        self._ends: dict[int, float] = {}
        for value in {*last, *kept}:
            storage, end = self._views[value].storage, math.inf if value in kept else last[value]
            self._ends[storage] = max(self._ends.get(storage, -1), end)

    def changed(self, instruction: Instruction, place: int) -> Instruction:
        """Return the instruction at ``place`` as it is run."""
        target, args, result = instruction.target, instruction.args, instruction.outputs[0]
        writing = IN_PLACE.get(target)
        if writing is None or result is None or not isinstance(args[0], Ref):
            return instruction
        orders = [args]
        if target is SUM and len(args) == 2 and isinstance(args[1], Ref) and not instruction.kwargs:
            orders.append(args[::-1])  # a sum has the same bits
        for order in orders:
            others = [leaf.value for leaf in tree_leaves((order[1:], instruction.kwargs)) if isinstance(leaf, Ref)]
            if self._may_be_written(order[0].value, others, result, place):
                return replace(instruction, target=writing, args=order)
        return instruction

    def _may_be_written(self, value: int, others: list[int], result: int, place: int) -> bool:
        view, sum_ = self._views[value], self._views[result]
        alone = view.storage not in self._others and self._ends[view.storage] == place
        alike = view._replace(storage=0) == sum_._replace(storage=0) and _fills(view)
        return alone and alike and all(self._views[other].storage != view.storage for other in others)


def _fills(view: View) -> bool:
    """True if no two elements lie on each other."""
    dims = sorted((k, n) for n, k in zip(view.size, view.stride, strict=True) if n > 1)
    below = 1
    for stride, size in dims:
        if stride < below:
            return False
        below = stride * size
    return True
