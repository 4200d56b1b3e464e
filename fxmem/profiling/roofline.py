"""Seconds per node: a roofline over FLOPs and bytes moved, for hardware that need not be present."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

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


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the roofline knows of a device: peak rates (per second) and the fixed cost of one op (seconds)."""

    name: str
    flops_per_second: float
    bytes_per_second: float
    op_seconds: float

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
        Hardware("cpu", 6e10, 1e10, 3e-6),
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
