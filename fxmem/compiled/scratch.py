"""What an op takes inside while it runs, on the CPU, and how long: measured, once for each op and shape.

In: a call of an op on fakes. Out: the most bytes beside its inputs and results; seconds. oneDNN's convolutions lay weights
out anew inside of the op, and a copy to transposed memory goes through a block, also where a matrix product copies what it
adds to: neither fakes nor the code around it show that, and it depends on the machine. So the op is run on zeros of the
same layout, or where it refuses these on ones of the diagonal, and the CPU allocator's own events are read. But for
convolutions and products it is run on random numbers too, and the larger figure counts: a matrix exponential takes more
the larger its matrix is. How long a convolution takes depends on how its inputs lie, which no table tells. What was
measured is kept for the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from fxmem.op_facts.kinds import CompiledRole
from fxmem.op_facts.lookup import with_role
from fxmem.profiling.op_benchmark import cpu_seconds
from fxmem.runtime.allocations import allocated_on_cpu
from fxmem.torch_private import OpOverload, tree_map_only, without_modes

_MEASURED: dict[str, int] = {}
"""By op, layout of its arguments, and what is set in the process."""
_TIMED: dict[str, float] = {}
"""The same, seconds."""
LEAST_RUNS, MOST_RUNS, ENOUGH_SECONDS = 3, 20, 0.06
"""Of an op that is timed: so many, until they took so long. The quickest counts, as other work only makes it slower."""
_NAMESPACES = frozenset({"aten", "mkldnn", "onednn"})
_BY_SHAPE = with_role(CompiledRole, "laid out", "product")
"""Ops that take the same whatever the numbers are."""
_WITHOUT = frozenset({"fill_", "zero_"})
"""Ops that write where they are told to."""


def scratch_bytes(op: Any, args: Any, kwargs: Any) -> int:
    """Return the most that ``op`` holds beside arguments and results; 0 of ops that run elsewhere, or are views."""
    if not isinstance(op, OpOverload) or not _is_measured(op):
        return 0
    key = _key(op, args, kwargs)
    if "cuda" in key:
        return 0
    if key not in _MEASURED:
        with without_modes(), torch.no_grad():
            _MEASURED[key] = _measured_on_any(op, args, kwargs)
    return _MEASURED[key]


def op_seconds(op: OpOverload, args: Any, kwargs: Any) -> float:
    """Return how long ``op`` takes on the CPU, on zeros that lie as its arguments do."""

    def made() -> Callable[[], object]:
        given, named = tree_map_only(torch.Tensor, _zeros, (args, kwargs))
        return lambda: op(*given, **named)

    return _least_seconds(_key(op, args, kwargs), made)


def copy_seconds(target: torch.Tensor, source: torch.Tensor) -> float:
    """Return how long it takes to copy ``source`` to new memory that lies as ``target``."""

    def made() -> Callable[[], object]:
        given = _zeros(source)
        return lambda: _empty(target).copy_(given)

    return _least_seconds(f"copy {_layout(target)} {_layout(source)} {process_state()}", made)


def _least_seconds(key: str, made: Callable[[], Callable[[], object]]) -> float:
    """Return what is known under ``key``, or the seconds of the quickest run of what is ``made``."""
    if key not in _TIMED:
        found: list[float] = []
        with without_modes(), torch.no_grad():
            run = made()
            while len(found) < LEAST_RUNS or (len(found) < MOST_RUNS and sum(found) < ENOUGH_SECONDS):
                found.append(cpu_seconds(run))
        _TIMED[key] = min(found)
    return _TIMED[key]


def process_state() -> tuple[object, ...]:
    """Return what is set in the process and decides which kernels run, and what code is generated."""
    backends = torch.backends
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        _precision(),
        (backends.mkldnn.enabled, backends.mkldnn.deterministic),
        (backends.cudnn.enabled, backends.cudnn.deterministic, backends.cudnn.benchmark),
    )


def _precision() -> object:
    """Return the precision of products of float32."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # where it was set for a backend
        return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]


def _key(op: OpOverload, args: Any, kwargs: Any) -> str:
    return f"{op} {tree_map_only(torch.Tensor, _layout, (args, kwargs))} {process_state()}"


def _is_measured(op: OpOverload) -> bool:
    name = op.overloadpacket.__name__
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    return op.namespace in _NAMESPACES and not (op.is_view or is_random or name in _WITHOUT or "empty" in name)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return _empty(tensor).zero_()


def _ones(tensor: torch.Tensor) -> torch.Tensor:
    """Return matrices that have an inverse, or numbers that pivots can be."""
    made = _zeros(tensor)
    is_matrix = tensor.ndim > 1 and tensor.is_floating_point()
    (made.diagonal(dim1=-2, dim2=-1) if is_matrix else made).fill_(1)
    return made


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return random numbers, of integers zeros."""
    made = _zeros(tensor)
    is_float = tensor.is_floating_point() or tensor.is_complex()
    return made.normal_(generator=torch.Generator().manual_seed(0)) if is_float else made


def _measured_on_any(op: OpOverload, args: Any, kwargs: Any) -> int:
    try:
        most = _measured(op, *tree_map_only(torch.Tensor, _zeros, (args, kwargs)))
    except RuntimeError:  # of linear algebra that wants an inverse, or pivots
        most = _measured(op, *tree_map_only(torch.Tensor, _ones, (args, kwargs)))
    if op not in _BY_SHAPE:
        with contextlib.suppress(RuntimeError):  # of what wants other numbers
            most = max(most, _measured(op, *tree_map_only(torch.Tensor, _numbers, (args, kwargs))))
    return most


def _measured(op: OpOverload, args: Any, kwargs: Any) -> int:
    """Return the peak of what is allocated in one run, above what is left of it."""
    live = peak = 0
    for nbytes in allocated_on_cpu(lambda: op(*args, **kwargs)):
        live += nbytes
        peak = max(peak, live)
    return peak - live
