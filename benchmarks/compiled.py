"""Compiled steps under a budget: ``python -m benchmarks.compiled [--models NAMES] [--ways NAMES] [--seconds N]``.

In: small models, on one CPU thread. Out: one table, and benchmarks/results/compiled.json, written after every model. Each
model is trained by torch.compile with nothing recomputed (``activation_memory_budget`` 1), at that of torch's own budgets
whose step takes least, and by ``fxmem.optimize(backend="inductor")`` at given megabytes above parameters and batch, or at
shares of what keeping all takes above them, and at its own least reachable peak. Peaks are those of the CPU allocator's
events; gradients are compared with the first way's, bit by bit; times are CPU times in turns.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tabulate import tabulate
from torch import fx, nn

import fxmem
from benchmarks import models
from benchmarks.batches import images, speech, tokens
from benchmarks.libraries import import_library
from benchmarks.losses import cross_entropy
from benchmarks.measure import allocator_rise_bytes, largest_relative_error, turns
from benchmarks.models import BenchModel
from benchmarks.results_file import RESULTS, machine, where_measured
from benchmarks.ways import least_compiled_bytes
from fxmem.capture.graph import Inputs
from fxmem.profiling.storage_tracker import StorageTracker, tensors_of
from fxmem.profiling.training_step import run_step

PATH = RESULTS / "compiled.json"
SEED = 7
MOST_WAYS = 32
"""Ways that one model's code is compiled at most."""
LOWER_BUDGETS = (0.75, 0.5, 0.25)
"""``activation_memory_budget`` of which the one is measured whose step takes least; 0 takes more than all of them."""


@dataclass(frozen=True)
class Case:
    """A model, and the ways that it is trained beside torch.compile's own with nothing recomputed."""

    bench: BenchModel
    shares: tuple[float, ...] = (0.7,)
    """fxmem's budgets: shares of what keeping all takes above parameters, batch and optimizer state."""
    rises_mb: tuple[float, ...] = ()
    """fxmem's budgets in MB above these."""


@dataclass
class Row:
    """One model trained one way."""

    model: str
    way: str
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    fixed_bytes: int | None = None
    """Of the peak: parameters, buffers and batch."""
    time_ratio: float | None = None
    """Median over turns of the step's time over that of the first way."""
    gradients: str | None = None
    """``bitwise`` those of the first way, or the largest relative error."""
    prepare_seconds: float | None = None
    """CPU time of planning, compiling (compilers that were started included) and the first step."""
    plan_seconds: float | None = None
    """Of it, planning, with Dynamo's own work."""
    num_lowered: int | None = None
    estimated_ratio: float | None = None
    """Estimated time of the step over that of keeping all."""
    problem: str | None = None
    cpu: str | None = None
    date: str | None = None


def cases() -> dict[str, Case]:
    """Return the models of this benchmark: most have one or two layers, so that compiling does not take hours."""
    gpt2 = Case(models.get("gpt2_2l"), shares=(), rises_mb=(15.9, 13.6))
    deep = replace(models.get("gpt2"), name="gpt2_6l")
    found = (
        gpt2,
        Case(deep, shares=(), rises_mb=(36.8, 28.2, 26.1, 24.0)),
        *(Case(bench) for bench in _small_transformers()),
        Case(BenchModel("vit_2l", _vit, images((4, 64), (4, 64)), cross_entropy, ())),
        Case(BenchModel("swin_2l", _swin, images((4, 64), (4, 64)), cross_entropy, ())),
        Case(models.get("densenet121"), shares=(), rises_mb=(106.0, 74.0, 62.0)),
        Case(models.get("resnet18"), shares=(0.8,)),
        Case(models.get("unet"), shares=(0.8,)),
        Case(BenchModel("mobilenet_4b", _mobilenet, images((8, 64), (8, 64)), cross_entropy, ()), shares=(0.8,)),
        Case(BenchModel("densenet_4l", _densenet, images((4, 64), (4, 64)), cross_entropy, ()), shares=(0.8,)),
    )
    return {case.bench.name: case for case in found}


def _small_transformers() -> Iterator[BenchModel]:
    sizes, text = models._decoder_sizes, tokens((4, 64), (4, 64))
    t5 = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 1, "num_heads": 4}
    t5_rest = {"dropout_rate": 0.1, "decoder_start_token_id": 0, "use_cache": False}
    whisper = {
        "d_model": 128, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "max_source_positions": 64,
        "max_target_positions": 32, "dropout": 0.1, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 1,
    }  # fmt: skip
    experts = {**models._ROTARY, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    of = models._transformers
    yield of("bert_2l", "BertForMaskedLM", text, (), sizes(128, 2, 4, 64), {}, models._ENCODER)
    yield of("t5_1l", "T5ForConditionalGeneration", tokens((4, 32), (4, 32)), (), t5, {}, t5_rest)
    yield of("llama_2l", "LlamaForCausalLM", text, (), sizes(128, 2, 4, 64), {}, models._ROTARY)
    yield of("mixtral_1l", "MixtralForCausalLM", text, (), sizes(64, 1, 4, 64), {}, experts)
    speeches = speech((4, 128, 16), (4, 128, 16))
    yield of("whisper_1l", "WhisperForConditionalGeneration", speeches, (), whisper, {}, {})


def _swin(scale: str) -> nn.Module:
    transformer = import_library("torchvision.models.swin_transformer").SwinTransformer
    return transformer(
        patch_size=[4, 4], embed_dim=48, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], dropout=0.1,
        stochastic_depth_prob=0.1, num_classes=10,
    ).train()  # fmt: skip


def _vit(scale: str) -> nn.Module:
    transformer = import_library("torchvision.models.vision_transformer").VisionTransformer
    return transformer(
        image_size=64, patch_size=8, num_layers=2, num_heads=4, hidden_dim=128, mlp_dim=512, dropout=0.1,
        attention_dropout=0.1, num_classes=10,
    ).train()  # fmt: skip


def _mobilenet(scale: str) -> nn.Module:
    settings = [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 1, 2]]
    network = import_library("torchvision.models.mobilenetv2").MobileNetV2
    return network(num_classes=10, inverted_residual_setting=settings).train()


def _densenet(scale: str) -> nn.Module:
    network = import_library("torchvision.models.densenet").DenseNet
    return network(growth_rate=16, block_config=(2, 2), num_init_features=32, num_classes=10).train()


class Racer:
    """A copy of a model, trained one way."""

    def __init__(
        self, bench: BenchModel, initial: nn.Module, batch: models.Batch, compiled: Callable[..., Any]
    ) -> None:
        self.bench, self.batch, self.module = bench, batch, copy.deepcopy(initial)
        start = _cpu_seconds()
        self.forward = compiled(self.module)
        torch.manual_seed(SEED)
        self.step()
        self.gradients = {n: p.grad for n, p in self.module.named_parameters() if p.grad is not None}
        self.prepare_seconds = _cpu_seconds() - start

    def step(self) -> None:
        self.module.zero_grad(set_to_none=True)
        args, kwargs = self.batch
        run_step(lambda: self.forward(*args, **kwargs), self.bench.loss)

    def measured_peak_bytes(self) -> int:
        self.step()
        self.module.zero_grad(set_to_none=True)
        gc.collect()
        held = StorageTracker().hold(tensors_of((self.module, self.batch)))
        return held + allocator_rise_bytes(self.step)

    def seconds(self) -> float:
        self.module.zero_grad(set_to_none=True)
        start = time.process_time()
        self.step()
        return time.process_time() - start


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of the compilers that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def rows_of(case: Case, seconds: float, asked: Sequence[str]) -> Iterator[Row]:
    """Yield the row of each way whose name begins as one of ``asked``; times are filled in when the last has run."""
    bench = case.bench
    torch._dynamo.reset()
    torch.manual_seed(SEED)
    initial = bench.build("cpu")
    told_of_its_loss(initial)
    batch = bench.batch("cpu")
    racers: list[tuple[Row, Racer]] = []
    for row, compiled in _ways(case, initial, batch, asked):
        row.cpu, row.date = machine()["cpu"], machine()["date"]
        try:
            racer = Racer(bench, initial, batch, compiled)
        except Exception as error:
            row.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            yield row
            continue
        racers.append((row, racer))
        row.prepare_seconds = racer.prepare_seconds
        error = largest_relative_error(racers[0][1].gradients, racer.gradients)
        row.gradients = "bitwise" if error == 0 else f"{error:.1e}"
        row.measured_peak_bytes = racer.measured_peak_bytes()
        yield row
    _race(racers, seconds)


def told_of_its_loss(model: nn.Module) -> None:
    """Set what transformers else warns of in the forward, which breaks the graph."""
    if hasattr(model, "loss_function"):
        model.loss_type = "ForCausalLM"


def _race(racers: list[tuple[Row, Racer]], seconds: float) -> None:
    first = racers[0][1]
    taken_in = turns([racer for _, racer in racers], Racer.seconds, seconds)
    for row, racer in racers:
        row.time_ratio = statistics.median(taken[racer] / taken[first] for taken in taken_in)


def _ways(
    case: Case, initial: nn.Module, batch: models.Batch, asked: Sequence[str]
) -> Iterator[tuple[Row, Callable[[nn.Module], Callable[..., Any]]]]:
    """Yield what to measure: always torch.compile with nothing recomputed first."""
    bench = case.bench
    yield Row(bench.name, "torch 1"), lambda module: _torch(module, 1.0)
    if any(way.startswith("torch") for way in asked):
        lowest = _lowest_torch_budget(initial, batch, options_of(bench))
        yield Row(bench.name, f"torch {lowest:g}"), lambda module: _torch(module, lowest)
    budgets = {f"fxmem {mb:g} MB": int(mb * 1e6) for mb in case.rises_mb}
    if case.shares:
        found = fxmem.estimate(initial, *batch, **options_of(bench))
        budgets |= {f"fxmem {share:.0%}": int(share * (found.peak_bytes - found.fixed_bytes)) for share in case.shares}
    fixed = StorageTracker().hold(tensors_of((initial, batch)))
    rows = [Row(bench.name, way, budget_bytes=fixed + above) for way, above in budgets.items()]
    for row in (*rows, Row(bench.name, "fxmem least")):
        if row.way.startswith(tuple(asked)):
            yield row, lambda module, row=row: _fxmem(row, bench, batch, module)


def _lowest_torch_budget(module: nn.Module, batch: models.Batch, options: dict[str, Any]) -> float:
    """Return which of torch's budgets takes least, by the code generated for each: no kernel is compiled."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._functorch import config

    from fxmem.compiled.fakerun import GraphCall, LoweredGraph
    from fxmem.compiled.fakerun import run_step as run_on_fakes

    peaks: dict[float, int] = {}

    def look(planner: Any) -> None:
        joint = planner.kernels.joint
        for budget in LOWER_BUDGETS:
            graph_module = fx.GraphModule(joint.graph_module, copy.deepcopy(joint.graph_module.graph))
            with config.patch(activation_memory_budget=budget):
                parts = min_cut_rematerialization_partition(
                    graph_module, (), num_fwd_outputs=joint.num_outputs,
                    static_lifetime_input_indices=planner.static_inputs,
                )  # fmt: skip
            graph = LoweredGraph(parts, joint.num_outputs)
            peaks[budget] = run_on_fakes([graph], [GraphCall()], planner.around, planner.hardware).peak_bytes

    compiled: Any = fxmem.optimize(module, **options)
    args, kwargs = batch
    compiled.fxmem._only_planned(look, Inputs.of(args, kwargs or {}, module))
    return min(peaks, key=peaks.__getitem__)


def options_of(bench: BenchModel) -> dict[str, Any]:
    """Return how fxmem compiles a model of this benchmark."""
    return {"optimizer": None, "loss_fn": bench.loss, "cost": "measure", "backend": "inductor"}


def _torch(module: nn.Module, budget: float) -> Callable[..., Any]:
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: Any, inputs: Any) -> Any:
        """A backend of its own: one that two ways shared would hand out the first's code for the second."""
        return compile_fx(graph, inputs)

    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
            return compiled(*args, **kwargs)

    return forward


def _fxmem(row: Row, bench: BenchModel, batch: models.Batch, module: nn.Module) -> Callable[..., Any]:
    start = time.process_time()
    if row.budget_bytes is None:
        row.budget_bytes = least_compiled_bytes(module, batch, options_of(bench))
    compiled: Any = fxmem.optimize(module, *batch, budget=row.budget_bytes, **options_of(bench))
    row.plan_seconds = time.process_time() - start
    report = compiled.fxmem.report
    row.predicted_peak_bytes, row.fixed_bytes = report.predicted_peak_bytes, report.fixed_bytes
    row.num_lowered, row.estimated_ratio = report.num_lowered, 1 + report.overhead_ratio
    return compiled  # type: ignore[no-any-return]


def table(rows: list[Row], style: str = "simple") -> str:
    """Return the rows as a table; MB are of the whole step."""
    mb: Callable[[int | None], str] = lambda n: "" if n is None else f"{n / 1e6:.3f}"  # noqa: E731
    ratio: Callable[[float | None], str] = lambda x: "" if x is None else f"{x:.3f}"  # noqa: E731
    head = (
        "model",
        "way",
        "budget MB",
        "predicted MB",
        "measured MB",
        "time",
        "estimate",
        "gradients",
        "ready in s",
        "planned in s",
        "lowered",
    )
    lines = [
        (
            r.model, r.way, mb(r.budget_bytes), mb(r.predicted_peak_bytes), mb(r.measured_peak_bytes),
            ratio(r.time_ratio), ratio(r.estimated_ratio), (r.problem or "").partition(" (")[0] or r.gradients,
            "" if r.prepare_seconds is None else f"{r.prepare_seconds:.0f}",
            "" if r.plan_seconds is None else f"{r.plan_seconds:.0f}", r.num_lowered or "",
        )
        for r in rows
    ]  # fmt: skip
    return tabulate(lines, head, tablefmt=style, disable_numparse=True)


def told() -> str:
    """Return the committed results in words and as a table."""
    results = json.loads(PATH.read_text(encoding="utf-8"))
    rows = [Row(**row) for row in results["rows"]]
    budgeted = [row for row in rows if row.budget_bytes is not None and row.measured_peak_bytes]
    exact = sum(row.predicted_peak_bytes == row.measured_peak_bytes for row in budgeted)
    apart = max(abs((row.predicted_peak_bytes or 0) / (row.measured_peak_bytes or 1) - 1) for row in budgeted)
    over = sum((row.measured_peak_bytes or 0) > (row.budget_bytes or 0) for row in budgeted)
    bitwise = sum(row.gradients == "bitwise" for row in budgeted)
    return (
        f"One CPU thread, torch {results['machine']['torch']}, {where_measured(rows)}. MB in a way's name are what "
        "the step may rise above parameters and batch, a share is of what keeping all takes above them, `least` is the "
        "least peak that fxmem reaches; beside torch 1 stands that of torch's lower budgets whose step takes least. Times "
        f"and gradients are beside those of torch.compile with nothing recomputed, the first way. Of {len(budgeted)} "
        f"budgets {over} were exceeded; {exact} predicted peaks are the measured ones to the byte (at most {apart:.2%} "
        f"apart), {bitwise} times gradients are the compiler's bits.\n\n{table(rows, 'github')}"
    )


def on_one_thread() -> None:
    """Compute on one thread, without warnings, and let as many ways be compiled as there are."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = MOST_WAYS


def main() -> None:
    known = cases()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(known), help="names, separated by commas")
    parser.add_argument("--ways", default="torch,fxmem", help="beginnings of names, beside torch 1")
    parser.add_argument("--seconds", type=float, default=20.0, help="of timed steps for each model")
    options = parser.parse_args()
    on_one_thread()
    before = json.loads(PATH.read_text(encoding="utf-8"))["rows"] if PATH.exists() else []
    done = [Row(**row) for row in before]
    for name in options.models.split(","):
        found: list[Row] = []
        for row in rows_of(known[name], options.seconds, options.ways.split(",")):
            found.append(row)
            print(table([row]), flush=True)
        done = sorted(
            [row for row in done if (row.model, row.way) not in {(r.model, r.way) for r in found}] + found,
            key=lambda row: list(known).index(row.model),
        )
        body = {"machine": machine(), "rows": [asdict(row) for row in done]}
        PATH.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(table(done))


if __name__ == "__main__":
    main()
