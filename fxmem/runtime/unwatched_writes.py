"""What torch writes in place where nothing watches, and not under a dispatch mode or on fakes.

Autograd adds a gradient into the one it has if nothing else holds that, and some formulas fill the zeros they have just
made; a mode or a tensor subclass makes both write a new tensor instead, so that what is tracked would be one gradient
too many (torch/csrc/autograd/input_buffer.cpp, ``can_accumulate_inplace``; FunctionsManual.cpp,
``areAnyTensorSubclassLike``). So does a linear layer with its bias, where its input has gaps (native/Linear.cpp).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from fxmem.op_facts.kinds import InPlaceInBackward, InPlaceInLinear
from fxmem.op_facts.lookup import by_op, resolved
from fxmem.torch_private import (
    ALONE_IN_DISPATCH,
    TorchDispatchMode,
    current_backward_node,
    graph_nodes,
    holders_of,
    sequence_of,
    storage_key,
    told_once,
    without_modes,
)

_ADD = torch.ops.aten.add.Tensor
_BY_OP = by_op(InPlaceInBackward)
_PRODUCTS = {resolved(name) for fact in by_op(InPlaceInLinear).values() for name in fact.products}
_fact_of: Callable[[Any], InPlaceInBackward | None] = told_once(_BY_OP.get)
_is_product: Callable[[Any], bool] = told_once(_PRODUCTS.__contains__)


class UnwatchedWrites:
    """Tells which ops of a backward are done in place where no mode is on. It is shown each graph that is run."""

    def __init__(self) -> None:
        self._applied: int | None = None
        """The node that has made its gradients: what runs until the next one adds them to those that were there."""
        self._product: int | None = None
        """The storage that the op before has made, if that may be the product of a linear layer."""
        self._references = _references_of_inner_result()

    def show(self, roots: Sequence[Any]) -> None:
        """Watch the nodes of the graph that a backward from ``roots`` runs."""
        for node in graph_nodes(roots):
            number = sequence_of(node)
            if number is not None:
                node.register_hook(lambda *_, number=number: self._note(number))

    def _note(self, number: int) -> None:
        self._applied = number

    def ran(self, func: Any, output: Any) -> None:
        """Note what the latest op was."""
        self._product = storage_key(output) if _is_product(func) else None

    def includes(self, func: Any, args: Any) -> bool:
        """True if ``func``, about to run on ``args``, is one: its first argument is written over."""
        if func is _ADD and self._product is not None and self._adds_bias(args):
            return True
        fact = _fact_of(func)
        if (func is not _ADD and fact is None) or torch.is_grad_enabled():
            return False
        node: Any = current_backward_node()
        if node is None or not isinstance(args[0], torch.Tensor):
            return False
        if fact is not None:
            return node.name() in fact.nodes and holders_of(args[0])[1] == ALONE_IN_DISPATCH[1]
        summed = sequence_of(node) == self._applied and args[0].layout is torch.strided
        return summed and holders_of(args[0]) == ALONE_IN_DISPATCH and _is_dense(args[0])

    def _adds_bias(self, args: Any) -> bool:
        product, bias = args
        if not isinstance(bias, torch.Tensor) or bias.dim() != 1 or storage_key(product) != self._product:
            return False
        return sys.getrefcount(product) - 1 <= self._references


@cache
def _references_of_inner_result() -> int:
    """How many references a mode sees to what one C++ call has made and hands on: no more where Python holds it too."""
    seen: list[int] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD:
                seen.append(sys.getrefcount(args[0]))
            return func(*args, **(kwargs or {}))

    with without_modes(), Counting():  # type: ignore[no-untyped-call]
        rows = torch.empty(2, 3, 4, device="meta").transpose(0, 1)
        torch.nn.functional.linear(rows, torch.empty(5, 4, device="meta"), torch.empty(5, device="meta"))
    return seen[0]


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if no element of its memory is left out or shared."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
