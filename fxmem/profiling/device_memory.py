"""What a step's storages weigh on the device that it runs on, and what its ops take inside.

On the CPU a storage weighs its bytes. On CUDA it weighs what PyTorch's caching allocator counts as allocated, storages on
other devices weigh nothing (an optimizer's step counters lie on the CPU), and ops take scratch and libraries
workspaces that no fake tensor shows (:mod:`fxmem.profiling.cuda_scratch`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxmem.devices import DeviceModel, rounded
from fxmem.fake.attention import torch_release
from fxmem.fake.stand_in import cuda_model, stand_in
from fxmem.op_facts.kinds import MadeFirst
from fxmem.op_facts.lookup import by_op
from fxmem.profiling import cuda_scratch_libraries  # noqa: F401  (its rules)
from fxmem.profiling.cuda_reduction import TensorRecord
from fxmem.profiling.cuda_scratch import (
    Scratch,
    channels_vary_fastest,
    has_rule,
    in_depthwise_kernel,
    scratch_of,
    uses_cublas,
    uses_cublaslt,
)
from fxmem.profiling.cudnn_workspace import IN_CUDNN, measured_workspaces, workspace_bound
from fxmem.torch_private import arguments_by_name


@dataclass(frozen=True, slots=True)
class Inside:
    """What one call of an op takes beside its inputs and results while it runs."""

    scratch: Scratch
    """As blocks of the allocator."""
    libraries: Mapping[str, int]
    """Bytes of the workspace that each library it runs in keeps for each thread that ever used it: cuBLAS's, cuBLASLt's."""
    workspace_bound: int
    """The most that cuDNN is taken to need while it runs, beside the scratch; 0 of what does not run in cuDNN."""


def _in_blocks(scratch: Scratch) -> Scratch:
    """Return what CUDA's allocator counts: each allocation is rounded up."""
    given = scratch.blocks, scratch.first, scratch.whole, scratch.between, scratch.after, *scratch.phases
    blocks, first, whole, between, after, *phases = (tuple(n and rounded(n) for n in each) for each in given)
    return replace(scratch, blocks=blocks, first=first, whole=whole, between=between, after=after, phases=tuple(phases))


_NOTHING = Inside(Scratch(), libraries={}, workspace_bound=0)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The rules of one device; ``model`` is None for storages that weigh their bytes wherever they are."""

    model: DeviceModel | None = None

    @staticmethod
    def of(devices: Iterable[torch.device]) -> DeviceMemory:
        """Return the rules for a step on ``devices``: those of CUDA if one of them is CUDA."""
        device = next((d for d in devices if d.type == "cuda"), None)
        return EVERYWHERE if device is None else DeviceMemory(cuda_model(device))

    def weight(self, device_type: str, nbytes: int) -> int:
        """Return what a storage of ``nbytes`` counts."""
        if self.model is None:
            return nbytes
        return rounded(nbytes) if nbytes and device_type == "cuda" else 0

    def inside(self, func: Any, args: Any, kwargs: Any) -> Inside:
        """Return what a dispatched op takes inside."""
        name = func.overloadpacket.__name__
        if self.model is None or not (has_rule(name) or name in IN_CUDNN) or not _is_on_cuda(args):
            return _NOTHING
        given = arguments_by_name(func, args, kwargs)
        arguments = _plain_by_name(given)
        scratch, bound = scratch_of(name, arguments, self.model), 0
        if name in IN_CUDNN:
            measured = self._measured(name, func, given)
            scratch = scratch if measured is None else _with_workspaces(scratch, measured)
            bound = workspace_bound(name, arguments) if measured is None else 0
        return Inside(_in_blocks(scratch), self._libraries(name, arguments), rounded(bound) if bound else 0)

    def _libraries(self, name: str, arguments: Mapping[str, Any]) -> dict[str, int]:
        if self.model is None or not uses_cublas(name):
            return {}
        libraries = {"cuBLAS": cublas_workspace_bytes(self.model.capability)}
        return {**libraries, "cuBLASLt": cublaslt_workspace_bytes()} if uses_cublaslt(name, arguments) else libraries

    def _measured(self, name: str, func: Any, arguments: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Return the workspaces that an op in cuDNN takes on this machine's GPU; None if another stands in for it."""
        if stand_in() is not None or not torch.cuda.is_available():
            return None
        model = self.model
        assert model is not None

        def known_bytes(call: Mapping[str, Any]) -> int:
            scratch = scratch_of(name, _plain_by_name(call), model)
            return sum(map(sum, (scratch.blocks, scratch.first, scratch.whole)))

        return measured_workspaces(func, arguments, known_bytes)

    def most_inside(self, func: Any, args: Any, kwargs: Any) -> int:
        """Return the most bytes that a dispatched op takes beside its inputs and results."""
        inside = self.inside(func, args, kwargs)
        return replace(inside.scratch, blocks=(*inside.scratch.blocks, inside.workspace_bound)).transient_bytes

    def made_first(self, func: Any, args: Any, kwargs: Any, output: Any) -> list[Any]:
        """Return those results of a dispatched op that its kernel on CUDA allocates before the others."""
        fact = _MADE_FIRST.get(func)
        if fact is None or not _IS_THERE[fact.where](_plain_by_name(arguments_by_name(func, args, kwargs))):
            return []
        return [output[place] for place in fact.places]


EVERYWHERE = DeviceMemory()
_MADE_FIRST = by_op(MadeFirst, "cuda")
_IS_THERE: dict[str, Callable[[dict[str, Any]], bool]] = {
    "always": lambda args: True,
    "depthwise": in_depthwise_kernel,
    "channels last": lambda args: channels_vary_fastest(args["input"]),
}


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Return PyTorch's default cuBLAS workspace of one handle and stream: 32 MiB on Hopper, else 8.125 MiB.

    Handles belong to threads, so a training step has two: the caller's and autograd's. The environment
    may say otherwise: ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` is eight times 4096 KiB.
    """
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(kib) * int(count) << 10 for kib, count in pairs)
    return 4096 * 8 * 1024 if compute_capability[0] == 9 else 4096 * 1024 * 2 + 16 * 1024 * 8


def cublaslt_workspace_bytes() -> int:
    """Return what cuBLASLt keeps of its own for each thread that adds a bias to a product in it; since torch 2.12 it shares
    cuBLAS's. Source: cuda/CUDABlas.cpp, ``_parseChosenWorkspaceSize``; cuda/Blas.cpp, ``isInputCompliesAddmmCudaLt``."""
    unified = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", str(int(torch_release() >= (2, 12))))
    size = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    return 0 if unified == "1" else int(size if size.isdigit() else "1024") << 10


def _is_on_cuda(args: Any) -> bool:
    return any(isinstance(a, torch.Tensor) and a.device.type == "cuda" for a in args)


def _with_workspaces(scratch: Scratch, workspaces: tuple[int, ...]) -> Scratch:
    """Return ``scratch`` and workspaces beside it: one for each gradient that a backward makes, or one at the end."""
    if not any(workspaces):
        return scratch
    if len(workspaces) > 1:
        return replace(scratch, after=workspaces)
    return replace(scratch, phases=(*scratch.phases, workspaces))


def _plain_by_name(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in given.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorRecord(tuple(value.shape), tuple(value.stride()), str(value.dtype).removeprefix("torch."))
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
