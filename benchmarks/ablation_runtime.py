"""``python -m benchmarks.ablation_runtime``: what parts of the runtime bring, as real training steps on the CPU.

Bindings (:mod:`fxmem.runtime.op_bindings`): models of small kernels, compiled once with each op called by its binding and
once by its overload, at no budget and at half of the way to the floor. Forms of saved-tensor compression
(:mod:`fxmem.passes.compress_saved`): models in which one applies, compiled with that form alone, which then keep
everything at their own peak; beside them the same models in the same memory with no form, recomputing instead, and
eager-like ones with no budget. In each row all ways take turns in one process. Ratios are medians over turns of CPU times,
with their quartiles. Results go to ``benchmarks/results/ablation_runtime.json``.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn

import fxmem
from benchmarks import models, overhead
from benchmarks.libraries import import_torchvision
from benchmarks.measure import quartiles
from benchmarks.results_file import RESULTS, machine
from fxmem import pipeline
from fxmem.capture.export import capture
from fxmem.capture.graph import CaptureGraph, Inputs
from fxmem.ir import GraphProfile, NodeProfile
from fxmem.passes import compress_saved, emit
from fxmem.passes.compressed_forms import Request
from fxmem.passes.context import CompileContext, Settings
from fxmem.passes.contract import run_passes, saved_bytes
from fxmem.planners.simulate import keep_all, simulate
from fxmem.profiling import profile as profiling
from fxmem.profiling.roofline import PRESETS
from fxmem.profiling.training_step import TrainingStep
from fxmem.torch_private import OpOverload

PATH = RESULTS / "ablation_runtime.json"
PARTS = ("bindings", "forms")
SHARE = 0.5
"""The budget of taped bindings, as a share of the way from the floor to eager's peak."""
SECONDS = 20.0
"""Of steps, for each row."""
MOST_TURNS, FEWEST_TURNS = 400, 15


@dataclass(frozen=True)
class Case:
    """A model, one call's arguments and what makes a loss of its output."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Ratio:
    """Of times: the median over the turns, and the quartiles."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class BindingRow:
    """What a step takes by overloads, over what it takes by bindings."""

    model: str
    budget: str
    num_bound: int
    """Calls that have a binding, ..."""
    num_calls: int
    """... of so many."""
    step_us: float
    overloads_over_bindings: Ratio
    bindings_over_themselves: Ratio
    """The same module compiled once more: what the spread is of two that do not differ."""
    num_turns: int


# -- cases ---------------------------------------------------------------------------------------------------------------


def small_cases() -> Iterator[Case]:
    """Yield models in which kernels take little beside their calls."""
    yield Case("MLP, 40 layers of 64", _mlp(), (torch.randn(16, 64),), {}, _mean_square)
    model, args, kwargs, loss = overhead.MODELS["GPT, 6 layers"]()
    yield Case("GPT-2, 6 layers of 16", model, args, kwargs, loss)
    yield case_of("gpt2_2l")
    resnet = import_torchvision().models.resnet18(num_classes=10)
    yield Case("ResNet-18, 2 images of 32x32", resnet, (torch.randn(2, 3, 32, 32),), {}, _mean_square)


def _mlp() -> nn.Module:
    layers = [layer for _ in range(40) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    return nn.Sequential(*layers)


def _mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def case_of(name: str) -> Case:
    """Return a model of the benchmarks at its CPU size."""
    bench = models.get(name)
    args, kwargs = bench.batch("cpu")
    return Case(name, bench.build("cpu"), args, kwargs, bench.loss)


# -- bindings ------------------------------------------------------------------------------------------------------------


def bindings(case: Case) -> Iterator[BindingRow]:
    """Yield a row with no budget and one within a budget."""
    free = optimized(case)
    low, high = free.report.floor_bytes, free.report.eager_peak_bytes
    for budget, budget_bytes in (("none", None), ("half", int(low + SHARE * (high - low)))):
        bound, again = optimized(case, budget_bytes), optimized(case, budget_bytes)
        with called_by_overloads():
            plain = optimized(case, budget_bytes)
        times = in_turns(case, (bound, plain, again))
        yield BindingRow(
            model=case.name,
            budget=budget,
            num_bound=_num_overloads(plain) - _num_overloads(bound),
            num_calls=_num_overloads(plain),
            step_us=1e6 * quartiles(turn[0] for turn in times)[1],
            overloads_over_bindings=_ratio(times, 1, 0),
            bindings_over_themselves=_ratio(times, 2, 0),
            num_turns=len(times),
        )


def _num_overloads(module: fxmem.OptimizedModule) -> int:
    targets = (
        getattr(node.target, "target", node.target)
        for node in module.graph_module.graph.nodes
        if node.op == "call_function"
    )
    return sum(isinstance(target, OpOverload) for target in targets)


@contextmanager
def called_by_overloads() -> Iterator[None]:
    """Compile without bindings."""

    def target_of(node: fx.Node) -> Any:
        return node.target

    with patch.object(emit, "callable_of", target_of), patch.object(profiling, "callable_of", target_of):
        yield


# -- forms of saved-tensor compression ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """One of the forms: the pass with what it may save no longer, in calls of these ops only."""

    title: str
    forms: Request
    ops: str
    models: tuple[str, ...]
    name: str = "compress_saved"

    def enabled(self, settings: Settings) -> bool:
        return settings.compress_saved

    def apply(self, graph: CaptureGraph, context: CompileContext) -> CaptureGraph:
        return compress_saved.with_compressed_saves(context.profile_of(graph), self._stays_as_is, 0.0, self.forms)

    def _stays_as_is(self, node: NodeProfile) -> bool:
        return self.ops not in node.op


FORMS = (
    Form("byte masks", Request(masks=True), "dropout", ("mlp_mixer", "bert", "vgg16")),
    Form("attentions taken apart", Request(masks=True), "scaled_dot_product", ("gpt2_2l", "vit", "bert", "llama")),
    Form("unread inputs", Request(input=True), "", ("googlenet", "densenet121", "diffusers_unet")),
)


@dataclass(frozen=True)
class FormRow:
    """What one form saves and costs on a model; bytes are those of a whole step."""

    form: str
    model: str
    saved_bytes: int
    """What autograd saves without the form."""
    form_saved_bytes: int
    peak_bytes: int
    """Keeping everything, without the form."""
    form_peak_bytes: int
    """Keeping everything, with it."""
    floor_bytes: int
    form_floor_bytes: int
    form_over_free: Ratio
    """Times: with the form, at ``form_peak_bytes``, over without, at ``peak_bytes``."""
    recompute_over_free: Ratio | None
    """Recomputing, at ``form_peak_bytes``, without the form; None where no plan reaches that."""
    num_turns: int

    @property
    def pays(self) -> bool:
        """Whether it takes less time than recomputing in the same memory, or reaches what that does not."""
        return self.recompute_over_free is None or self.form_over_free.median < self.recompute_over_free.median


def form_row(form: Form, case: Case) -> FormRow | None:
    """Return what ``form`` does on a model; None where it does not lower the peak of keeping everything."""
    inputs = Inputs.of(case.args, case.kwargs)
    settings = Settings(None, TrainingStep(loss_fn=case.loss, optimizer=None), "auto", 60.0, PRESETS["cpu"])
    context = CompileContext(case.model, inputs, settings)
    graph = run_passes(capture(case.model, inputs), pipeline.PASSES, context)
    lean = run_passes(graph, (form,), context)
    peak, form_peak = (_kept_peak(context.profile_of(g).profile) for g in (graph, lean))
    print(form.title, case.name, *(f"{b / 1e6:.3f}" for b in (peak, form_peak)), flush=True)
    if form_peak >= peak:
        return None
    with patch.object(pipeline, "PASSES_FOR_SHORT_MEMORY", (form,)):
        leaner = optimized(case, form_peak)
    assert not leaner.plan.dropped, "it keeps everything"
    ways: list[fxmem.OptimizedModule] = [optimized(case), leaner]
    try:
        ways.append(optimized(case, form_peak, compress_saved=False))
        floor_bytes = ways[-1].report.floor_bytes
    except fxmem.InfeasibleBudgetError as error:
        floor_bytes = error.least_bytes
    turns = in_turns(case, ways)
    return FormRow(
        form=form.title,
        model=case.name,
        saved_bytes=saved_bytes(graph, context),
        form_saved_bytes=saved_bytes(lean, context),
        peak_bytes=peak,
        form_peak_bytes=form_peak,
        floor_bytes=floor_bytes,
        form_floor_bytes=leaner.report.floor_bytes,
        form_over_free=_ratio(turns, 1, 0),
        recompute_over_free=_ratio(turns, 2, 0) if len(ways) > 2 else None,
        num_turns=len(turns),
    )


def _kept_peak(profile: GraphProfile) -> int:
    return simulate(profile, keep_all(profile)).peak_bytes


# -- measuring -----------------------------------------------------------------------------------------------------------


def optimized(case: Case, budget_bytes: int | None = None, **options: Any) -> fxmem.OptimizedModule:
    """Return a copy of the model, compiled with the roofline's times."""
    return fxmem.optimize(
        copy.deepcopy(case.model),
        case.args,
        case.kwargs,
        budget=budget_bytes,
        optimizer=None,
        loss_fn=case.loss,
        cost="cpu",
        cache=False,
        **options,
    )


def in_turns(case: Case, ways: Sequence[nn.Module]) -> list[tuple[float, ...]]:
    """Return the CPU seconds of a step of each of ``ways``, turn by turn, in alternating order."""
    once = sum(_step_seconds(case, way) for _ in range(3) for way in ways) / 3
    num_turns = int(min(MOST_TURNS, max(FEWEST_TURNS, SECONDS / once)))
    turns = []
    for number in range(num_turns):
        shift = number % len(ways)
        order = [*range(shift, len(ways)), *range(shift)]
        taken = {k: _step_seconds(case, ways[k]) for k in (order if number % 2 else order[::-1])}
        turns.append(tuple(taken[k] for k in range(len(ways))))
    return turns


def _step_seconds(case: Case, way: nn.Module) -> float:
    for parameter in way.parameters():
        parameter.grad = None
    start = time.process_time()
    case.loss(way(*case.args, **case.kwargs)).backward()
    return time.process_time() - start


def _ratio(turns: Sequence[tuple[float, ...]], one: int, other: int) -> Ratio:
    return Ratio(*quartiles(turn[one] / turn[other] for turn in turns))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, help="only this one; the other's rows stay")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    body: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    if options.part != "forms":
        body["bindings"] = [_shown(row) for case in small_cases() for row in bindings(case)]
    if options.part != "bindings":
        rows = (form_row(form, case_of(name)) for form in FORMS for name in form.models)
        body["forms"] = [_shown(row) for row in rows if row is not None]
    PATH.write_text(json.dumps({**body, "machine": machine()}, indent=1) + "\n", encoding="utf-8")
    return 0


@dataclass(frozen=True)
class Results:
    """The rows of the file."""

    bindings: tuple[BindingRow, ...]
    forms: tuple[FormRow, ...]
    removed_forms: tuple[FormRow, ...]
    """Of forms that went."""


def load() -> Results:
    """Return the committed rows."""
    body = json.loads(PATH.read_text(encoding="utf-8"))

    def rows(part: str) -> list[dict[str, Any]]:
        return [{name: _ratio_of(value) for name, value in row.items()} for row in body[part]]

    return Results(
        tuple(BindingRow(**row) for row in rows("bindings")),
        tuple(FormRow(**row) for row in rows("forms")),
        tuple(FormRow(**row) for row in rows("removed_forms")),
    )


def _ratio_of(value: Any) -> Any:
    return Ratio(**value) if isinstance(value, dict) else value


def text() -> str:
    """Return the committed figures as a sentence and a table in Markdown."""
    results = load()
    gains = [f"{_more(row.overloads_over_bindings)} on {row.model}" for row in results.bindings if row.budget == "none"]
    lines = [
        f"Without the bindings of ops, a step with no budget takes {', '.join(gains)} (`python -m "
        "benchmarks.ablation_runtime`).",
        "",
        "| form of compression | model | MB, keeping all | with it | its step time | recomputing to that peak instead |",
        "|---|---|---|---|---|---|",
    ]
    for row in (*results.forms, *results.removed_forms):
        title = f"{row.form} (gone)" if row in results.removed_forms else row.form
        instead = "not reached" if row.recompute_over_free is None else _more(row.recompute_over_free)
        megabytes = f"{row.peak_bytes / 1e6:.1f} | {row.form_peak_bytes / 1e6:.1f}"
        lines.append(f"| {title} | {row.model} | {megabytes} | {_more(row.form_over_free)} | {instead} |")
    return "\n".join(lines)


def _more(ratio: Ratio) -> str:
    return f"{ratio.median - 1:+.1%}"


def _shown(row: BindingRow | FormRow) -> dict[str, Any]:
    print(row, flush=True)
    return asdict(row)


if __name__ == "__main__":
    raise SystemExit(main())
