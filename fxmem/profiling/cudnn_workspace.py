"""The most that cuDNN's convolutions are taken to need for a workspace: a bound by a stated rule, not a count.

In: an op's name and its arguments as plain data. Out: bytes. Which algorithm cuDNN takes is not known without the GPU, so
the largest of the two kinds that its heuristics choose among is taken (cuDNN developer guide, convolution algorithms):

- tensor-core and implicit GEMM kernels that want channels last: a copy of input, weight and result;
- Winograd's transform F(4x4, 3x3), not fused, in fp32, of 3x3 kernels of stride 1: 36 numbers for each 4x4 tile of input
  and result, and for each pair of channels (Lavin and Gray, 2016, section 4).

FFT kernels and ``torch.backends.cudnn.benchmark`` may take more: PyTorch lets them have whatever is free. Beside published
peaks the rule is in ``benchmarks/published_memory.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from fxmem.profiling.cuda_reduction import ITEM_BYTES, TensorRecord

TILE, TRANSFORMED = 4, 36
"""Side of a tile of Winograd's transform, and numbers that stand for it."""


def workspace_bound(op: str, args: Mapping[str, Any]) -> int:
    """Return the bytes that one call of ``op`` ("convolution") is taken to need at most; 0 if it is no convolution.

    ``args``: by the names of the op's schema. A backward computes one gradient after the other: it needs what one does.
    """
    if op not in ("convolution", "convolution_backward"):
        return 0
    x, weight = args["input"], args["weight"]
    if args["groups"] == x.shape[1] > 1:
        return 0  # depthwise: PyTorch's own kernel
    result = args["grad_output"].shape if op == "convolution_backward" else _result_shape(x, weight, args)
    item = ITEM_BYTES[x.dtype]
    copied = int(item * (x.numel + weight.numel + prod(result)))
    return max(copied, _winograd_bytes(x, weight, result, args))


def _winograd_bytes(x: TensorRecord, weight: TensorRecord, result: Sequence[int], args: Mapping[str, Any]) -> int:
    ones = all(n == 1 for name in ("stride", "dilation") for n in args[name])
    if x.dtype != "float32" or tuple(weight.shape[2:]) != (3, 3) or not ones or args["groups"] != 1:
        return 0
    tiles = x.shape[0] * prod(-(-side // TILE) for side in result[2:])
    pairs = weight.shape[0] * weight.shape[1]
    return 4 * TRANSFORMED * (tiles * sum(weight.shape[:2]) + pairs)


def _result_shape(x: TensorRecord, weight: TensorRecord, args: Mapping[str, Any]) -> tuple[int, ...]:
    def side(d: int) -> int:
        stride, padding, dilation = (_at(args[name], d) for name in ("stride", "padding", "dilation"))
        kernel = dilation * (weight.shape[2 + d] - 1) + 1
        if args["transposed"]:
            return int((x.shape[2 + d] - 1) * stride - 2 * padding + kernel + _at(args["output_padding"], d))
        return int((x.shape[2 + d] + 2 * padding - kernel) // stride + 1)

    channels = weight.shape[1] * args["groups"] if args["transposed"] else weight.shape[0]
    return (x.shape[0], channels, *(side(d) for d in range(len(x.shape) - 2)))


def _at(values: Sequence[int], d: int) -> int:
    return values[d] if len(values) > 1 else values[0]
