"""What a compiled step under a budget is not promised for: each refused by its name, with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxmem.compiled.lower import settings_now
from fxmem.errors import InputError
from fxmem.op_facts.kinds import CompiledRole
from fxmem.op_facts.lookup import with_role

REGIONS = with_role(CompiledRole, "region")

TESTED = ((2, 11), (2, 14))
"""The first and the last minor version of torch whose generated code is known to be read right."""


def check_settings(options: Mapping[str, Any]) -> None:
    """Errors: ``InputError`` for what torch.compile was given, or is set, that the prediction does not cover."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    settings = settings_now()
    values = ((getattr(settings, name), name, what) for name, what in _REFUSED.items())
    refused = [(name, what) for value, name, what in values if value is not None and value is not False]
    if not TESTED[0] <= version <= TESTED[1]:
        first, last = (".".join(map(str, each)) for each in TESTED)
        raise InputError(
            f'backend="inductor" is tested on torch {first} to {last}, not on {torch.__version__}: code that Inductor '
            "generates may be read wrongly, and a budget not be kept. Use one of these, or the eager backend"
        )
    for name, value in options.items():
        raise InputError(
            f"torch.compile(..., {name}={value!r}) changes what memory compiled code takes (reduce-overhead: private pools "
            "of CUDA graphs), which a budget cannot be promised for; leave it out beside backend=fxmem.backend(...)"
        )
    for name, what in refused:
        raise InputError(f"{what} (torch's {name} is {getattr(settings, name)!r})")


def check_graph(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Errors: ``InputError`` for graphs of symbolic sizes, of regions by themselves, or on devices that are not known."""
    if any(node.target in REGIONS for node in graph_module.graph.nodes):
        raise InputError(
            "a region of the model is compiled once for all its calls (torch.compiler.nested_compile_region), and "
            "partitioned by itself, so that no plan can be over the step; take that decorator away"
        )
    if any(isinstance(each, torch.SymInt) for each in inputs):
        raise InputError(
            "the graph has symbolic sizes, and its peak is one for each of them; pass torch.compile(..., dynamic=False), "
            "which compiles each size by itself"
        )
    devices = {t.device.type for t in inputs if isinstance(t, torch.Tensor)}
    unknown = devices - {"cpu", "cuda"}
    if unknown:
        raise InputError(f"a compiled step is planned on the CPU and on CUDA, not on {', '.join(sorted(unknown))}")


def check_one_graph(now: object | None, before: object | None) -> None:
    """Errors: ``InputError`` if one compilation makes several training graphs: each would be planned as if it were alone.

    ``now``, ``before``: what :func:`fxmem.compiled.lower.compilation_now` told of this graph and the one before; a graph
    that DistributedDataParallel cuts up shows as the same compilation once more.
    """
    if before is not None and now is before:
        raise InputError(
            "one graph is cut up into several (DistributedDataParallel's buckets), which are compiled before any of them "
            "is called, so that no budget can be over all; set torch._dynamo.config.optimize_ddp = False"
        )


_REFUSED: dict[str, str] = {
    "cudagraphs": "CUDA graphs keep memory in pools of their own, which no budget over a step covers; switch them off",
    "cpp_wrapper": "C++ wrappers cannot be run on fake tensors, so no peak is known before compiling; switch them off",
    "memory_planning": "Inductor's memory planning puts buffers into pools that are not followed; switch it off",
    "compiled_autograd": "compiled autograd compiles another backward than the one that was planned; switch it off",
    "custom_partitioner": "another partitioner is set, and there is one seat; unset it",
    "low_memory_budget": "torch's own activation_memory_budget would decide what is saved; leave it at 1",
}
