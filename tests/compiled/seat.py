"""The partitioner's seat, to look at joint graphs from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fxmem.compiled import lower


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
