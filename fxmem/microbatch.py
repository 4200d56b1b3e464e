"""Batches that run in pieces, where no plan of the whole batch keeps the budget (``allow=(..., "microbatch")``).

In: a context, and why the whole was infeasible. Out: a :class:`Compiled` whose one call runs the least number of pieces
that fits, each under a plan of its own, and returns the whole batch's outputs (NOTE [Micro-batches] in
:mod:`fxmem.runtime.microbatch_ops`). The whole step is run on fakes, so its peak is verified. All pieces are alike: their
number divides the batch. Not modelled: the time of the forward that runs twice is an estimate.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx

from fxmem.capture.dynamic_batch import batch_dims, resized
from fxmem.capture.export import capture, fitting
from fxmem.capture.graph import CaptureGraph, Dims, Inputs, device_of
from fxmem.capture.sample_coupling import check_samples_apart
from fxmem.capture.side_effects import NONE, SideEffects
from fxmem.emitted import bound_bytes
from fxmem.errors import CaptureError, InfeasibleBudgetError, InputError
from fxmem.ir import ChoiceMade
from fxmem.passes.context import CompileContext
from fxmem.pipeline import Compiled, compile_model
from fxmem.profiling.training_step import ONCE
from fxmem.profiling.verify import FakeStep, eager_step, step_run_by
from fxmem.report.text import Report
from fxmem.runtime.autocast import Autocast
from fxmem.runtime.microbatch_ops import InPieces

MOST_TRIED = 3
"""Budgets of one piece that are tried for one number of pieces."""


@dataclass(frozen=True, slots=True)
class PiecesGraph:
    """Stands for the graph of a model that runs in pieces (as :class:`CaptureGraph` does for one that was captured)."""

    piece: CaptureGraph
    in_pieces: InPieces
    autocast: Autocast | None
    parameters: tuple[torch.Tensor, ...]
    dynamic: Dims = frozenset()
    effects: SideEffects = NONE

    def run(self, graph_module: fx.GraphModule, leaves: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """Return the output of the whole batch and its leaves."""
        tensors = iter(self.in_pieces(leaves))
        (output,) = (node for node in self.piece.graph_module.graph.nodes if node.op == "output")
        outputs = [next(tensors) if isinstance(leaf, fx.Node) else leaf for leaf in output.args[0]]
        return self.piece.unflatten(outputs), outputs

    run_in_training = run  # what earlier calls left is not read: models that leave something are refused

    def serves(self, inputs: Inputs) -> bool:
        """True: models that look at values are refused."""
        return True


def compile_in_pieces(
    context: CompileContext, refused: InfeasibleBudgetError, most_pieces: int | None = None
) -> Compiled:
    """Return ``context``'s model, compiled to run its batch in the least number of pieces that keeps the budget.
    ``most_pieces``: no more are tried.

    Errors: ``InputError`` where samples of a batch depend on each other, or something else keeps the batch whole, by name;
    ``InfeasibleBudgetError`` where not even the smallest pieces fit.
    """
    start, model, inputs = time.perf_counter(), context.model, context.inputs
    if context.step.in_backward:
        raise InputError(
            'micro-batches: with "optimizer_in_backward" each piece would step parameters; take one of both out of allow='
        ) from refused
    try:
        dims = batch_dims(inputs)
        symbolic = capture(model, inputs, context.autocast, dims)
    except (CaptureError, InputError) as error:
        raise InputError(f"micro-batches: the model is tied to the size of its batch: {error}") from refused
    check_samples_apart(symbolic)
    if symbolic.effects:
        raise InputError(
            "micro-batches: the model leaves tensors in attributes or arguments, where pieces would overwrite each other's"
        ) from refused
    if symbolic.reads:
        raise InputError(
            "micro-batches: the model looks at values of its inputs, which pieces may have others of"
        ) from refused
    size = next(inputs.leaves[i].shape[d] for i, d in dims)
    least_bytes = refused.least_bytes
    for k in _divisors(size, most_pieces or size):
        piece = resized(inputs, dims, size // k)
        graph = fitting(symbolic, model, piece)
        for compiled, ran, pieces in _tried(context, refused.budget_bytes, graph, piece, dims, k):
            nbytes = _bound(ran, context)
            if nbytes <= refused.budget_bytes:
                report = _report(compiled, ran, context, refused, k, time.perf_counter() - start)
                return Compiled(compiled.graph_module, cast(CaptureGraph, pieces), compiled.plan, report)
            least_bytes = min(least_bytes, nbytes)
    pieces_of = "pieces of one sample" if most_pieces is None else f"at most {most_pieces} pieces"
    place = f"the step of {type(model).__name__}, its batch in {pieces_of}"
    raise InfeasibleBudgetError(refused.budget_bytes, least_bytes, (), place) from refused


def _divisors(size: int, most: int) -> Iterator[int]:
    return (k for k in range(2, min(size, most) + 1) if size % k == 0)


def _tried(
    context: CompileContext, budget_bytes: int, graph: CaptureGraph, piece: Inputs, dims: Dims, k: int
) -> Iterator[tuple[Compiled, FakeStep, PiecesGraph]]:
    """Yield the whole step in ``k`` pieces, each piece within a budget that leaves room for what is beside it."""
    step = replace(context.step, accumulate=True, scaler=None, loss_fn=None, targets=(), loop=ONCE)
    settings = replace(context.settings, step=step, budget_share=None)
    room_bytes = budget_bytes
    for _ in range(MOST_TRIED):
        own = replace(
            context, inputs=piece, base=None, _profiles={}, settings=replace(settings, budget_bytes=room_bytes)
        )
        try:
            compiled = compile_model(own, graph)
        except InfeasibleBudgetError:
            return
        pieces = _graph_of(compiled, context, frozenset(i for i, _ in dims), k)
        ran = step_run_by(
            lambda leaves: pieces.run(compiled.graph_module, leaves)[0],  # noqa: B023
            context.model,
            (compiled.graph_module, compiled.captured.graph_module),
            context.inputs,
            context.step,
            context.autocast,
        )
        yield compiled, ran, pieces
        room_bytes -= max(0, _bound(ran, context) - budget_bytes)


def _graph_of(compiled: Compiled, context: CompileContext, batched: frozenset[int], k: int) -> PiecesGraph:
    captured = compiled.captured

    def run(module: fx.GraphModule, leaves: Sequence[Any]) -> list[torch.Tensor]:
        return [leaf for leaf in captured.run(module, leaves)[1] if isinstance(leaf, torch.Tensor)]

    in_pieces = InPieces(
        k,
        batched,
        forward=lambda leaves: run(captured.graph_module, leaves),
        again=lambda leaves: run(compiled.graph_module, leaves),
        devices=tuple({device_of(context.model), *(t.device for t in context.inputs.tensors)}),
        autocast=context.autocast,
        parameters=captured.parameters,
    )
    return PiecesGraph(captured, in_pieces, context.autocast, captured.parameters)


def _bound(ran: FakeStep, context: CompileContext) -> int:
    cuda = ran.events.peaks() if device_of(context.model).type == "cuda" else None
    return bound_bytes(ran.peak_bytes, cuda, context.settings)


def _report(
    compiled: Compiled,
    ran: FakeStep,
    context: CompileContext,
    refused: InfeasibleBudgetError,
    k: int,
    plan_seconds: float,
) -> Report:
    """Return the report of the whole: its own peaks; rows and timelines of one piece, whose forward runs twice."""
    report, captured = compiled.report, compiled.captured
    eager = eager_step(context.model, captured, context.inputs, context.step)
    made = ChoiceMade(
        "microbatch",
        f"the batch runs in {k} pieces, each of them once more in the backward, which changes the order of sums over the "
        "batch; rows, timelines and times are those of one piece",
        refused.least_bytes - ran.peak_bytes,
    )
    return replace(
        report,
        budget_bytes=refused.budget_bytes,
        predicted_peak_bytes=ran.peak_bytes,
        eager_peak_bytes=eager.peak_bytes,
        plan_seconds=plan_seconds,
        static=replace(report.static, inputs_bytes=sum(t.nbytes for t in context.inputs.tensors), gradients_bytes=0),
        peak_at=f"the step as a whole, its batch in {k} pieces",
        notes=(*report.notes, str(made)),
        _least_bytes=ran.peak_bytes,
    )
