"""What cuDNN takes for a workspace: measured on the GPU of this machine, else a bound by a stated rule.

In: an op and its arguments. Out: bytes. Which algorithm cuDNN takes is not known without the GPU. Where there is one, each
call is made twice on tensors of its geometry (:func:`measured_workspaces`), and what the allocator handed out the second
time, beside results and known copies, is the workspace. A geometry is measured once; the memory is given back. For
another GPU, that of a convolution is bounded by what the kernels take that cuDNN's heuristics choose among
(:func:`workspace_bound`; cuDNN developer guide, convolution algorithms), and that of a batch norm, less than a MB, is 0:

- tensor-core and implicit GEMM kernels that want channels last: a copy of input, weight and result, channels of a group
  padded to whole vectors of 16 bytes;
- Winograd's transform F(4x4, 3x3), not fused, in fp32, of 3x3 kernels of stride 1: 36 numbers for each 4x4 tile of input
  and result, and for each pair of channels (Lavin and Gray, 2016, section 4);
- beside either, sums over parts of the reduced dimension (split-K), in fp32: at most 16 of a result or an input's gradient,
  and 24 MiB; of a weight's gradient one for each image, 16 at least, and 64 MiB;
- the backward of a depthwise convolution in a kernel of grouped ones: its maps in fp32, each channel padded to 8.

The padding, the parts and their limits are what 8,442 calls of ten networks took on an H200, fp32 and bf16, both layouts
(torch 2.11; none took more). They were found on six of them; of the four others' calls one took more, whose batch is twice
as large, and of a weight's gradient as many parts. So other networks may take more again.
FFT kernels and the trials of ``torch.backends.cudnn.benchmark`` may take more: PyTorch lets them have whatever is free.
Beside published peaks the rule is in ``benchmarks/published_memory.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from fxmem.profiling.cuda_reduction import ITEM_BYTES, TensorRecord
from fxmem.profiling.cuda_scratch import in_depthwise_kernel
from fxmem.torch_private import leaves_of, without_modes

CONVOLUTIONS = ("convolution", "convolution_backward")
IN_CUDNN = (*CONVOLUTIONS, "cudnn_batch_norm", "cudnn_batch_norm_backward")
"""Ops that are measured."""

ALIGNING_BYTES = 512
"""Beside copies: on an H200 a convolution in bf16 took 16 more."""
TILE, TRANSFORMED = 4, 36
"""Side of a tile of Winograd's transform, and numbers that stand for it."""
VECTOR_BYTES = 16
"""Of channels that a kernel reads at once."""
PARTS, MOST_PARTS_BYTES = 16, 24 << 20
"""Of split-K, but for weights' gradients."""
MOST_IMAGES_BYTES = 64 << 20
"""Of parts of a weight's gradient, one for each image."""
PADDED_CHANNEL, PADDED_BYTES = 8, 1 << 20
"""Numbers that stand for one of a depthwise convolution's backward, and what is taken beside the padded maps."""


def workspace_bound(op: str, args: Mapping[str, Any]) -> int:
    """Return the bytes that one call of ``op`` ("convolution") is taken to need at most; 0 if it is no convolution.

    ``args``: by the names of the op's schema. A backward computes one gradient after the other: it needs what one does.
    """
    if op not in CONVOLUTIONS:
        return 0
    x: TensorRecord = args["input"]
    weight: TensorRecord = args["weight"]
    if in_depthwise_kernel(args):
        return 0
    backward = op == "convolution_backward"
    result: Sequence[int] = args["grad_output"].shape if backward else _result_shape(x, weight, args)
    item, groups = int(ITEM_BYTES[x.dtype]), int(args["groups"])
    if backward and groups == x.shape[1] > 1:
        return max(4, item) * (PADDED_CHANNEL * max(x.numel, prod(result)) + weight.numel) + PADDED_BYTES
    numbers = weight.numel + sum(_padded(shape, VECTOR_BYTES // item, groups) for shape in (x.shape, result))
    parts_bytes = min(4 * PARTS * (x.numel if backward else prod(result)), MOST_PARTS_BYTES)
    if backward:
        parts_bytes = max(parts_bytes, min(4 * max(PARTS, x.shape[0]) * weight.numel, MOST_IMAGES_BYTES))
    return max(item * numbers + ALIGNING_BYTES, _winograd_bytes(x, weight, result, args)) + parts_bytes


def _padded(shape: Sequence[int], multiple: int, groups: int) -> int:
    """Return the numbers of maps of ``shape`` with the channels of each group padded to a multiple."""
    channels = groups * multiple * -(-shape[1] // (groups * multiple))
    return shape[0] * channels * prod(shape[2:])


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


# -- on this machine's GPU ------------------------------------------------------------------------------------------------

_MEASURED: dict[str, tuple[int, ...] | None] = {}
"""What this process knows, by call and settings; None: it did not run."""
_HELD = [0]
"""How many of these there were when memory was given back."""


def measured_workspaces(
    func: Callable[..., Any], arguments: Mapping[str, Any], known_bytes: Callable[[Mapping[str, Any]], int]
) -> tuple[int, ...] | None:
    """Return what a call of ``func`` takes of its device beside its results and ``known_bytes``: one figure, or two of a
    convolution's backward, for the gradients of input and weight. None if it does not run, for want of memory say.
    ``arguments``: by the names of the op's schema, tensors of any kind on CUDA."""
    geometry = [_geometry(value) if isinstance(value, torch.Tensor) else value for value in arguments.values()]
    key = f"{func} {_settings()} {geometry}"
    if key not in _MEASURED:
        try:
            with without_modes(), torch.no_grad():
                _MEASURED[key] = tuple(_beside_results(func, call, known_bytes) for call in _calls(arguments))
        except torch.OutOfMemoryError:
            return None  # another time there may be room
        except Exception:  # whatever cuDNN and the allocator may say: the bound is reported instead
            _MEASURED[key] = None
    return _MEASURED[key]


def _settings() -> tuple[object, ...]:
    """Return what decides which algorithms cuDNN may take."""
    flags = torch.backends.cudnn
    try:
        precision: object = flags.allow_tf32
    except RuntimeError:  # precisions were set by newer names, which cannot be read
        precision = None
    deterministic = flags.deterministic, torch.are_deterministic_algorithms_enabled()
    return flags.enabled, flags.benchmark, *deterministic, precision


def give_back_measured() -> None:
    """Give the memory that measuring took back to the device, where anything was measured since the last time."""
    if len(_MEASURED) > _HELD[0]:
        _HELD[0] = len(_MEASURED)
        torch.cuda.empty_cache()


def _geometry(t: torch.Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.stride(), t.dtype, str(t.device)


def _calls(arguments: Mapping[str, Any]) -> list[dict[str, Any] | None]:
    """Return the same call on new tensors; of a convolution's backward one for each gradient that is made in cuDNN, None
    where it is not asked for."""
    real = {name: _like(value) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    if "output_mask" not in real:
        return [real]
    masks = ([True, False, False], [False, True, False])
    return [{**real, "output_mask": mask} if real["output_mask"][place] else None for place, mask in enumerate(masks)]


def _like(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device=t.device)


def _beside_results(
    func: Callable[..., Any], call: Mapping[str, Any] | None, known_bytes: Callable[[Mapping[str, Any]], int]
) -> int:
    if call is None:
        return 0
    taken, device = 0, next(value.device for value in call.values() if isinstance(value, torch.Tensor))
    for _ in range(2):  # in the first, cuDNN may try algorithms
        before = _handed_out(device)
        results = [t for t in leaves_of(func(**call)) if isinstance(t, torch.Tensor)]
        taken = _handed_out(device) - before - sum(t.untyped_storage().nbytes() for t in results)
        del results
    if taken < 0:
        raise RuntimeError("this allocator does not count requests")
    return max(0, taken - known_bytes(call))


def _handed_out(device: torch.device) -> int:
    """Return the bytes that this process ever asked CUDA's allocator for."""
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.allocated"])
