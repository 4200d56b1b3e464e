"""The roofline time of a whole step that keeps all, op by op, its backward included: what forms of ops change of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxmem.capture.graph import CaptureGraph, Inputs
from fxmem.profiling.op_effects import work_of
from fxmem.profiling.roofline import Hardware

aten = torch.ops.aten
ALLOCATIONS = frozenset({aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided})
"""They move nothing."""
WRITTEN = frozenset({"out", "grad_input"})
"""Arguments that are the result."""


class _Clock(TorchDispatchMode):
    """Adds up the roofline times of all ops."""

    def __init__(self, hardware: Hardware) -> None:
        super().__init__()
        self.hardware, self.seconds = hardware, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket not in ALLOCATIONS:
            read = {name: value for name, value in (kwargs or {}).items() if name not in WRITTEN}
            for given, made in _kernels(func, args, output):
                self.seconds += self.hardware.seconds(*work_of(func, given, read, made))
        return output


def _kernels(func: Any, args: Any, output: Any) -> Iterator[tuple[Any, Any]]:
    """Yield arguments and results of the kernels that an op runs: a convolution's backward has one for the gradient of its
    input, which does not read that input, and one for those of weight and bias."""
    if func is not aten.convolution_backward.default or not (args[-1][0] and args[-1][1]):
        yield args, output
        return
    grad, x, *rest, (_, _, of_bias) = args
    yield (grad, x.new_empty(1).expand(x.shape), *rest, [True, False, False]), (output[0], None, None)
    yield (grad, x, *rest, [False, True, of_bias]), (None, *output[1:])


def keeping_seconds(captured: CaptureGraph, inputs: Inputs, loss: Callable[[Any], Tensor], hardware: Hardware) -> float:
    """Return the roofline time of forward, loss and backward, op by op, if all is kept."""
    with _Clock(hardware) as clock:
        output = captured.call(captured.graph_module, list(inputs.leaves))
        torch.autograd.grad(loss(output), captured.parameters)
    return clock.seconds
