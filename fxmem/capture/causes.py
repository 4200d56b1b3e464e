"""Why torch.export failed, in a sentence with a remedy. In: its error and the model. Out: text."""

from __future__ import annotations

import torch

from fxmem.errors import chain_of, first_lines


def cause_of(error: Exception, model: torch.nn.Module) -> str:
    """Return why torch.export failed, and what to do."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # with sympy, which takes a second

    remedy = "move that part out of the model or optimize the parts around it."
    if any(isinstance(cause, GuardOnDataDependentSymNode) for cause in chain_of(error)):
        if _drops_layers(model):
            remedy = f"set the chance of skipping a layer (LayerDrop) to 0; else {remedy}"
        return f"its control flow depends on the values in tensors, which only a run can tell: {remedy}"
    if "fake tensor in the exported program constant" in str(error):
        return (
            "it computes with a tensor that a graph cannot follow: one that torch.autograd.grad returns inside forward, or "
            "one left by an earlier call. Take derivatives outside: optimize the network itself, and differentiate its "
            f"output in the training loop; else {remedy}"
        )
    return f"{first_lines(error)}. If its control flow depends on the values in tensors, {remedy}"


def _drops_layers(model: torch.nn.Module) -> bool:
    """True if some module, or its config, has a chance of skipping layers (LayerDrop)."""
    holders = [held for m in model.modules() for held in (m, getattr(m, "config", None)) if hasattr(held, "__dict__")]
    return any("layerdrop" in name.replace("_", "") and value for held in holders for name, value in vars(held).items())
