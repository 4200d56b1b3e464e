"""Seconds per node: a roofline over FLOPs and bytes moved, for hardware that need not be present, and what launching adds.

NOTE [Launches]

1. A GPU works behind the host: a step takes the longer of what the device computes, D seconds, and what the host launches,
   H seconds: so many ops at so many seconds each, in the backward in the same proportion as on the device.
2. What an op adds when it is run again is therefore its device time where the device bounds the step, and its launch where
   the host does. The one that does not bound it counts in proportion to how near it comes: an op costs the larger of
   ``device * min(1, D / H)`` and ``launch * min(1, H / D)``. The sum over ops is no less than what they add, as long as
   that is less than a step.
3. An op that moves no bytes, a view, is dispatched and launches nothing: a share of a launch.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from fxmem.ir import GraphProfile, Launches
from fxmem.op_facts.kinds import Flops
from fxmem.op_facts.lookup import by_op
from fxmem.torch_private import OpOverload


def flops_of(op: OpOverload, args: Any, kwargs: Any, output: Any) -> int:
    """Return the FLOPs of one dispatched op by torch's formulas; 0 for ops that have none, elementwise ones above all."""
    own = _WITHOUT_FORMULA.get(op)
    if own is not None:
        return _FORMULAS[own.formula](args, output)
    count = flop_registry.get(op.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=output))


def grouped_matmul_flops(args: Any, output: torch.Tensor) -> int:
    """Return the FLOPs of matmuls, one for each group; of two matrices each has a part of the inner dimension."""
    a, b, *_ = args
    num_parts = output.shape[0] if a.dim() == b.dim() == 2 else 1
    return int(2 * output.numel() * a.shape[-1] // max(1, num_parts))


_WITHOUT_FORMULA = by_op(Flops)
_FORMULAS = {function.__name__: function for function in (grouped_matmul_flops,)}


LAUNCH_SECONDS = 10e-6
"""Of one op in a training step of eager PyTorch, autograd and the module's Python included: `docs/host_time.md`."""
VIEW_SHARE = 0.4
"""Of a launch, for an op that launches nothing."""
LAUNCHED_LAYERS, NUM_STEPS = 16, 9
"""By which launches are measured."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the roofline knows of a device: peak rates (per second) and the fixed costs of one op (seconds)."""

    name: str
    flops_per_second: float
    bytes_per_second: float
    op_seconds: float
    """On the device."""
    launch_seconds: float = LAUNCH_SECONDS
    """On the host; 0 where the host itself computes."""

    def seconds(self, flops: int, moved_bytes: int) -> float:
        """Return the roofline time of one op (Williams et al. 2009): the slower of arithmetic and memory traffic."""
        if not flops and not moved_bytes:
            return 0.0
        return max(flops / self.flops_per_second, moved_bytes / self.bytes_per_second) + self.op_seconds


PRESETS = {
    hardware.name: hardware
    for hardware in (
        Hardware("a100", 78e12, 1.3e12, 5e-6),
        Hardware("h100", 250e12, 2.6e12, 4e-6),
        Hardware("h200", 250e12, 3.8e12, 4e-6),
        Hardware("gh200", 250e12, 2.6e12, 4e-6),
        Hardware("v100", 13e12, 0.75e12, 6e-6),
        Hardware("rtx4090", 60e12, 0.85e12, 5e-6),
        Hardware("t4", 6e12, 0.25e12, 7e-6),
        Hardware("cpu", 6e10, 1e10, 3e-6, launch_seconds=0.0),
    )
}
"""Sustained rates, about 80 % of the vendors' dense peak figures for fp32/TF32 work and of their memory bandwidth."""


def hardware_for(device_type: str, device_name: str = "") -> Hardware:
    """Return the preset whose name occurs in ``device_name``, else the one for ``device_type``."""
    lowered = device_name.lower().replace(" ", "")
    for name, hardware in PRESETS.items():
        if name in lowered:
            return hardware
    return PRESETS["cpu" if device_type == "cpu" else "a100"]


COSTS = frozenset({"auto", "measure", *PRESETS})
"""What a user may ask for: the preset of the model's device, times measured on it, or another preset."""


def preset_of(cost: str) -> Hardware | None:
    """Return the preset called ``cost``; None where the model's device decides."""
    return PRESETS.get(cost)


def priced_by_bound(graph: GraphProfile, launch_seconds: float) -> GraphProfile:
    """Return ``graph``, whose times are the device's, with each op at what it adds to the step (NOTE [Launches]).

    ``launch_seconds``: of one op on the host; 0 returns the graph as it is.
    """
    forward_seconds, device_seconds = graph.forward_seconds, graph.step_seconds
    if not launch_seconds or not forward_seconds:
        return graph
    launches = [launch_seconds * (1.0 if n.flops or n.moved_bytes else VIEW_SHARE) for n in graph.nodes]
    host_seconds = sum(launches) * device_seconds / forward_seconds
    device_share, host_share = min(1.0, device_seconds / host_seconds), min(1.0, host_seconds / device_seconds)
    nodes = tuple(
        replace(node, seconds=max(device_share * node.seconds, host_share * launch))
        for node, launch in zip(graph.nodes, launches, strict=True)
    )
    recipes = tuple(replace(r, seconds=sum(nodes[k].seconds for k in r.nodes)) for r in graph.recipes)
    backward_seconds = max(host_seconds, device_seconds) - sum(node.seconds for node in nodes)
    return replace(
        graph,
        nodes=nodes,
        recipes=recipes,
        backward_seconds=max(0.0, backward_seconds),
        launches=Launches(host_seconds, device_seconds),
    )


@functools.cache
def measured_launch_seconds(device: torch.device) -> float:
    """Return the seconds in which the host launches an op of a training step on a CUDA device, measured once in a process
    by steps of small layers, which the device computes faster than they are launched."""
    layers = [module for _ in range(LAUNCHED_LAYERS) for module in (torch.nn.Linear(8, 8), torch.nn.GELU())]
    with torch.random.fork_rng([device]), torch.enable_grad(), torch.autocast("cuda", enabled=False):
        model, x = torch.nn.Sequential(*layers).to(device), torch.ones(8, 8, device=device)
        seconds = []
        for _ in range(NUM_STEPS):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            model(x).sum().backward()
            seconds.append(time.perf_counter() - start)
    return min(seconds) / (3 * len(layers))  # a backward counts as two forwards
