"""The ways to train that are compared: eager, what PyTorch offers to save memory, and fxmem.

In: a model and a :class:`Way`. Out: a :class:`Contender`, a callable with the model's own arguments. Each way changes
the module it is given, so callers pass a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch._dynamo
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import fxmem
from benchmarks.models import Batch, BenchModel

aten = torch.ops.aten

COMPILE_BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)
LEAST = 0
"""The amount that stands for fxmem's own least reachable peak."""
SHARES = (0.75, 0.5, 0.35, 0.25)
"""fxmem's ladder: budgets as shares of the span from the least reachable peak to eager's."""


@dataclass(frozen=True)
class Way:
    """One way to train a model. ``kind`` selects the function below, ``amount`` its knob."""

    name: str
    kind: str
    amount: float | None = None

    @property
    def compiled(self) -> bool:
        return self.kind in ("aot", "partitioner", "inductor", "fxmem inductor")

    @property
    def of_inductor(self) -> bool:
        """Whether inductor's kernels run, which bypass the dispatcher."""
        return self.kind in ("inductor", "fxmem inductor")

    @property
    def is_fxmem(self) -> bool:
        return self.kind == "fxmem"


@dataclass
class Contender:
    """A way applied to one model: call ``forward`` as the model; ``module`` owns the parameters."""

    module: nn.Module
    forward: Callable[..., Any]
    told_peak_bytes: Callable[[], int] | None = None
    """The predicted peak of the step as it runs now."""
    estimated_ratio: float | None = None
    """Time of the step over eager's as fxmem estimates it."""
    num_first_steps: int = 0
    """Steps in which something is compiled or written down."""


class NotApplicable(Exception):
    """The way has no meaning for the model; the table says why."""


EAGER = Way("eager", "eager")
NO_RECOMPUTE = Way("torch.compile no recompute", "aot")
"""What the partitioner's ways are measured against: the same decomposed ops, everything saved."""
FUSED = Way("torch.compile inductor 1", "inductor", 1.0)
"""The same for inductor's."""
NOT_INSTALLABLE = {
    "Rockmate": "not installable: the PyPI wheel of rkgb lacks modules",
}
"""Peers that do not run, with the reason; they keep their rows."""


def without_recompute(way: Way) -> Way | None:
    """Return the way of the same compiler that recomputes nothing; None of others and of that way itself."""
    if way.kind == "partitioner":
        return NO_RECOMPUTE
    if way.kind == "fxmem inductor":
        return FUSED
    return replace(way, amount=1.0) if way.kind == "inductor" and way.amount != 1.0 else None


def peers(*, inductor: bool = False, quick: bool = False) -> list[Way]:
    """Return the ways other than fxmem and eager."""
    ways = [
        Way("checkpoint per block", "checkpoint"),
        Way("checkpoint_sequential sqrt(n)", "sequential"),
        Way("selective checkpoint", "selective"),
    ]
    if not quick:
        ways += [Way("in-place activations", "inplace"), Way("autocast bf16", "autocast"), NO_RECOMPUTE]
        ways += [Way(f"torch.compile partitioner {b:g}", "partitioner", b) for b in COMPILE_BUDGETS]
    if inductor:
        ways += [Way(f"torch.compile inductor {b:g}", "inductor", b) for b in COMPILE_BUDGETS]
    return ways


def apply(way: Way, model: nn.Module, bench: BenchModel, batch: Batch, optimizer: Any) -> Contender:
    """Return ``model``, which is changed, trained the way ``way``. Errors: :class:`NotApplicable`."""
    return _APPLY[way.kind](way, model, bench, batch, optimizer)


def _eager(way: Way, model: nn.Module, bench: BenchModel, batch: Batch, optimizer: Any) -> Contender:
    return Contender(model, model)


def _checkpoint(way: Way, model: nn.Module, bench: BenchModel, batch: Batch, optimizer: Any) -> Contender:
    _wrap_blocks(model, bench, partial(checkpoint, use_reentrant=False))
    return Contender(model, model)


def _selective(way: Way, model: nn.Module, bench: BenchModel, batch: Batch, optimizer: Any) -> Contender:
    contexts = partial(create_selective_checkpoint_contexts, _save_matmuls)
    _wrap_blocks(model, bench, partial(checkpoint, use_reentrant=False, context_fn=contexts))
    return Contender(model, model)


def _wrap_blocks(model: nn.Module, bench: BenchModel, run: Callable[..., Any]) -> None:
    names = bench.block_names(model)
    if not names:
        raise NotApplicable("the architecture has no blocks beside its single layers")
    for name in names:
        block = model.get_submodule(name)
        block.forward = partial(run, block.forward)  # type: ignore[method-assign]


MATMULS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
    }
)


def _save_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what is costly to compute (matrix products, convolutions, attention), recompute all else."""
    return CheckpointPolicy.MUST_SAVE if op in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


def _sequential(way: Way, model: nn.Module, bench: BenchModel, batch: Batch, optimizer: Any) -> Contender:
    if bench.chain is None:
        raise NotApplicable("the model is no chain of modules")
    chain = bench.chain(model)
    segments = round(math.sqrt(len(chain))) if way.amount is None else int(way.amount)

    def forward(x: Tensor) -> Tensor:
        return checkpoint_sequential(chain, segments, x, use_reentrant=False)

    return Contender(model, forward)


def _inplace(way: Way, model: nn.Module, bench: BenchModel, batch: Batch, optimizer: Any) -> Contender:
    """Switch on every module's ``inplace`` flag, as advice on the web has it."""
    changed = [m for m in model.modules() if getattr(m, "inplace", None) is False]
    if not changed:
        raise NotApplicable("no module with an inplace flag that is off")
    for module in changed:
        module.inplace = True  # type: ignore[assignment]
    return Contender(model, model)


def _autocast(way: Way, model: nn.Module, bench: BenchModel, batch: Batch, optimizer: Any) -> Contender:
    device = next(model.parameters()).device.type

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            return model(*args, **kwargs)

    return Contender(model, forward)


def _compiled(way: Way, model: nn.Module, bench: BenchModel, batch: Batch, optimizer: Any) -> Contender:
    compiler = {"inductor": "inductor", "partitioner": "aot_eager_decomp_partition", "aot": _saving_backend}[way.kind]

    def backend(graph_module: Any, example_inputs: Any) -> Any:
        """Compile as the way says; each contender has a function of its own, as dynamo re-uses a backend's code."""
        return torch._dynamo.lookup_backend(compiler)(graph_module, example_inputs)

    compiled = torch.compile(model, backend=backend)
    count = torch._dynamo.utils.counters["stats"]
    num_before = count["unique_graphs"]

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _activation_memory_budget(
            1.0 if way.amount is None else way.amount
        ):  # read at the first call, which compiles
            output = compiled(*args, **kwargs)
        assert count["unique_graphs"] > num_before, "code compiled for another budget was re-used"
        return output

    return Contender(model, forward, num_first_steps=1)


def _saving_backend(graph_module: Any, example_inputs: Any, **_: Any) -> Any:
    """``aot_eager_decomp_partition`` with the partitioner that saves all the backward needs and recomputes nothing."""
    from functorch.compile import default_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.compile_fx import select_decomp_table

    def as_it_is(graph_module: Any, example_inputs: Any) -> Any:
        return make_boxed_func(graph_module.forward)

    compile_graph = aot_autograd(
        fw_compiler=as_it_is,
        bw_compiler=as_it_is,
        decompositions=select_decomp_table(),
        partition_fn=default_partition,
    )
    return compile_graph(graph_module, example_inputs)


@contextmanager
def _activation_memory_budget(budget: float) -> Iterator[None]:
    from torch._functorch import config

    with config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
        yield


def _fxmem(way: Way, model: nn.Module, bench: BenchModel, batch: Batch, optimizer: Any) -> Contender:
    """fxmem with op times measured on this machine; plans and times are kept for one model's ways, not for longer. Steps
    run as they do in a long training, as programs, but these are written down in the second step and not in a later one."""
    budget = None if way.amount is None else int(way.amount)
    options: dict[str, Any] = {"optimizer": optimizer, "loss_fn": bench.loss, "cost": "measure"}
    if budget == LEAST:
        budget = fxmem.optimize(model, *batch, **options).report.floor_bytes
    optimized = fxmem.optimize(model, *batch, budget=budget, runtime="program", **options)

    def told() -> int:
        report = optimized.report
        return int(report.cuda.allocated_bytes if report.cuda else report.predicted_peak_bytes)

    return Contender(optimized, optimized, told, 1 + optimized.report.overhead_ratio, num_first_steps=2)


def _fxmem_inductor(way: Way, model: nn.Module, bench: BenchModel, batch: Batch, optimizer: Any) -> Contender:
    """fxmem's planner in inductor's seat. What was planned for one budget is known for the next."""
    options: dict[str, Any] = {"optimizer": optimizer, "loss_fn": bench.loss, "cost": "measure", "backend": "inductor"}
    assert way.amount is not None
    budget = int(way.amount)
    if budget == LEAST:
        budget = least_compiled_bytes(model, batch, options)
    compiled: Any = fxmem.optimize(model, *batch, budget=budget, **options)
    return Contender(compiled, compiled, lambda: compiled.fxmem.report.predicted_peak_bytes, num_first_steps=1)


def least_compiled_bytes(model: nn.Module, batch: Batch, options: dict[str, Any]) -> int:
    """Return the least peak that a compiled step under fxmem's plans reaches."""
    try:
        fxmem.optimize(model, *batch, budget="1KB", **options)
    except fxmem.InfeasibleBudgetError as error:
        return error.least_bytes
    raise AssertionError("a step took no memory")


_APPLY: dict[str, Callable[..., Contender]] = {
    "eager": _eager,
    "checkpoint": _checkpoint,
    "sequential": _sequential,
    "selective": _selective,
    "inplace": _inplace,
    "autocast": _autocast,
    "aot": _compiled,
    "partitioner": _compiled,
    "inductor": _compiled,
    "fxmem": _fxmem,
    "fxmem inductor": _fxmem_inductor,
}
