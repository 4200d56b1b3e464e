"""Forward and backward of a plan, interpreted op by op, without Inductor's kernels.

Random numbers come from a stand-in that is a function of the seed, as Inductor's own are, so that a mask that is computed
again is the same mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxmem.compiled.emit import Partitioned
from fxmem.compiled.joint import is_tangent


class Interpreter(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "inductor_random" in str(target):
            size, seed, mode = args[:3]
            generator = torch.Generator().manual_seed(int(seed))
            return getattr(torch, mode)(size, generator=generator)
        return super().call_function(target, args, kwargs)


def values_for(nodes: Sequence[fx.Node]) -> list[Any]:
    """Return random values for inputs: small positive numbers, indices 0 and 1."""
    found = []
    for i, node in enumerate(nodes):
        like, generator = node.meta["val"], torch.Generator().manual_seed(i)
        value = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        if like.dtype.is_floating_point:
            value.uniform_(0, 0.2, generator=generator)
        else:
            value.random_(0, 2, generator=generator)
        found.append(value)
    return found


def results_of(parts: Partitioned, num_outputs: int, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Return outputs and gradients, inputs unchanged."""
    forward, backward = parts
    torch.manual_seed(3)
    given = [value.clone() for value in inputs]
    results = Interpreter(forward).run(*given)
    outputs, saved = results[:num_outputs], results[num_outputs:]
    tangents = values_for([n for n in backward.graph.find_nodes(op="placeholder") if is_tangent(n)])
    gradients = Interpreter(backward).run(*saved, *tangents)
    return [r for r in (*outputs, *gradients) if isinstance(r, torch.Tensor)]
