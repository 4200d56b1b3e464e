"""Kernels for chains of elementwise calls: made by Inductor, proved against the calls, and timed beside them.

In: chains of :mod:`fxmem.runtime.programs.fused_calls`. Out: a kernel for each, if it has the same bits, makes nothing but
its results, and takes less time. Whether a step gains by all of them is tried in :mod:`fxmem.runtime.programs.trial`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch

from fxmem.errors import first_lines
from fxmem.profiling.op_benchmark import EVICTING_BYTES, made_up, median_seconds
from fxmem.runtime.allocations import num_allocations
from fxmem.runtime.programs.fused_calls import Chain, FusedCall, Lies, nbytes_at
from fxmem.torch_private import without_modes
from fxmem.user_frames import level_of_user

MOST_KERNELS = 12
"""Of a step: a compiler takes seconds for each."""


class Kernels:
    """Makes kernels for the chains of a step."""

    def __init__(self) -> None:
        self.told = ""
        """What came of it."""

    def __call__(self, chains: Sequence[Chain], most_bytes: int) -> dict[Chain, FusedCall]:
        """Return what runs ``chains``, each of which is as often in a step as in the list. ``most_bytes``: what may be
        taken to try them."""
        timed = (chain for chain in chains if chain.makes[0][1].type in EVICTING_BYTES)
        counts = Counter(chain for chain in timed if _tried_bytes(chain) <= most_bytes)
        most = sorted(counts, key=lambda chain: -chain.spared_bytes * counts[chain])[:MOST_KERNELS]
        found: dict[Chain, FusedCall] = {}
        for chain in most:
            try:
                kernel = _made(chain)
            except Exception as error:  # a compiler that is not there, or fails: steps run without
                self.told = f"none: the compiler of their kernels fails ({first_lines(error)})"
                warnings.warn(f'allow=(..., "fuse"): {self.told}', stacklevel=level_of_user())
                return {}
            if kernel is not None:
                found[chain] = kernel
        told = f"{sum(counts[chain] for chain in found)} of {len(chains)} chains of ops as one kernel each"
        self.told = told if found else f"none ({told})"
        return found


def _tried_bytes(chain: Chain) -> int:
    """Return the most that is there at once while a chain's kernel is tried: what both it and its calls make, and what is
    written between runs that are timed."""
    made = len(chain.calls) * nbytes_at(chain.makes[0])
    evicting = EVICTING_BYTES[chain.makes[0][1].type]
    return sum(map(nbytes_at, (*chain.reads, *chain.makes))) + made + evicting


def _made(chain: Chain) -> FusedCall | None:
    """Return what runs a chain; None if its kernel has other bits than its calls, makes more than they return, or is not
    quicker."""
    plain, device = chain.graph(), chain.makes[0][1]
    with without_modes(), torch.no_grad():
        inputs = [_input(lies) for lies in chain.reads]
        expected = plain(*inputs)
        kernel = _compiled(plain, inputs)
        if not all(map(_alike, expected, kernel(*inputs), chain.makes)):
            return None
        del expected
        if num_allocations(lambda: kernel(*inputs), device) != len(chain.makes):
            return None
        seconds = [median_seconds(partial(run, *inputs), device) for run in (plain, kernel)]
    return FusedCall(kernel, chain.makes) if seconds[1] < seconds[0] else None


def _compiled(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Sequence[torch.Tensor]]:
    from torch._inductor import compile, config  # which takes seconds

    with config.patch({"compile_threads": 1, "triton.cudagraphs": False, "cpp_wrapper": False}):
        kernel: Callable[..., Sequence[torch.Tensor]] = compile(graph, list(inputs))
        return kernel


def _input(lies: Lies) -> torch.Tensor:
    view, device = lies
    base = made_up(view, device)
    if view.dtype == torch.bool:
        base.random_(2)
    elif not view.dtype.is_floating_point:
        base.random_(1, 100)
    else:
        base.mul_(8).sub_(4)
        special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-40], device=device).to(view.dtype)
        base[: len(special)].copy_(special[: len(base)])
    return base.as_strided(view.size, view.stride, view.offset)


def _alike(expected: torch.Tensor, made: torch.Tensor, lies: Lies) -> bool:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    equal = (expected.view(whole) == made.view(whole)) | (expected.isnan() & made.isnan())
    return lies[0].same_layout(made) and bool(equal.all())
