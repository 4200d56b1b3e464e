"""The partitioner's seat, to look at joint graphs from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fxmem.compiled import lower
from fxmem.compiled.joint import JointGraph
from fxmem.compiled.kernels import Kernels
from fxmem.compiled.profile import profile_of
from fxmem.compiled.surroundings import Surroundings
from fxmem.ir import GraphProfile
from fxmem.profiling.roofline import PRESETS


class Stop(BaseException):
    """Ends a compilation before any kernel is compiled."""


def in_the_seat(look: Callable[[fx.GraphModule, int, Any], None], function: Callable[..., Any], *args: Any) -> None:
    """Have ``look`` called with the joint graph of ``function``; nothing is compiled."""

    def partition(joint: fx.GraphModule, num_outputs: int, static: Any) -> Any:
        look(joint, num_outputs, static)
        raise Stop

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        return lower.compiled(graph_module, inputs, partition)

    with pytest.raises(Stop):
        torch.compile(function, backend=backend)(*args)


def profile_for(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> GraphProfile:
    """Return the profile of a function of ``tensors``, by default two matrices of 1,024 elements."""
    found: list[GraphProfile] = []

    def look(joint: fx.GraphModule, num_outputs: int, static: Any) -> None:
        kernels = Kernels.of(JointGraph.of(lower.without_duplicates(joint), num_outputs))
        found.append(profile_of(kernels, Surroundings(), PRESETS["cpu"]))

    given = tensors or (torch.randn(32, 32), torch.randn(32, 32))
    in_the_seat(look, function, *(t.requires_grad_() for t in given))
    return found[0]
