"""What writing in place and dropping BatchNorm+activation pairs bring: ``python -m benchmarks.inplace``.

Three tables, in bytes of PyTorch's own storages. First: the measured peak of a CPU step of the same model with activations
built with ``inplace=False`` and ``inplace=True``, and of the former under fxmem at no budget, which finds the in-place ops
by itself and recomputes nothing. Where all is trained the peak lies in the backward, which holds a gradient more than
the forward holds values: in-place ops change nothing about it, built in or found. Second: what autograd saves, and what
is left of it if the outputs of BatchNorms and of the activations behind them are dropped and recomputed from the
convolutions' outputs, beside the promise of InPlace-ABN (Rota Bulò et al. 2018, arXiv:1712.02616: up to 50 % of the
activations); time is the roofline estimate for a V100. Third: a ResNet-50 that trains with all its BatchNorms frozen, at
the batch of 64 images of 224 x 224, eager and under fxmem with nothing recomputed, beside the published figure of folding
frozen BatchNorms by hand (5.18 -> 2.88 GB, its batch is not told).
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import fxmem
from benchmarks import models
from benchmarks.results_file import RESULTS, machine
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.ir import KEEP, GraphProfile, Plan
from fxmem.passes.context import CompileContext, Settings
from fxmem.passes.contract import run_passes
from fxmem.pipeline import PASSES
from fxmem.planners.simulate import keep_all, simulate
from fxmem.profiling.roofline import PRESETS
from fxmem.profiling.storage_tracker import StorageTracker
from fxmem.profiling.training_step import TrainingStep, run_step

PATH = RESULTS / "inplace.json"
TRANSIENT = ("vgg16", "resnet18", "unet")
PAIRS = ("resnet18", "resnet50", "densenet121", "mobilenet_v2", "unet")
NORMS = ("batch_norm",)
ACTIVATIONS = ("relu", "relu_", "hardtanh", "hardtanh_", "leaky_relu", "leaky_relu_", "relu6", "relu6_")


@dataclass(frozen=True)
class Transient:
    """Measured peaks of one step, in bytes."""

    model: str
    trained: str
    """``all`` parameters, or those of the ``last`` module only: then the forward through the rest is the peak."""
    eager_bytes: int
    eager_inplace_bytes: int
    fxmem_bytes: int
    num_in_place: int


@dataclass(frozen=True)
class Pairs:
    """What autograd saves of a model's storages, in bytes, and what dropping its BatchNorm+activation pairs costs."""

    model: str
    saved_bytes: int
    kept_bytes: int
    share_saved: float
    peak_bytes: int
    peak_dropped_bytes: int
    time_ratio: float
    """Extra time over that of the eager step."""


@dataclass(frozen=True)
class Frozen:
    """Peaks of a step whose BatchNorms are all frozen, in bytes; the published ones in GB."""

    model: str
    batch_size: int
    eager_bytes: int
    fxmem_bytes: int
    published_eager_gb: float
    published_folded_gb: float


def with_inplace(model: nn.Module, inplace: bool) -> nn.Module:
    """Return a copy of ``model`` whose activations are all built with ``inplace``."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "inplace") and not isinstance(module, nn.Dropout):
            module.inplace = inplace  # type: ignore[assignment]
    return model


def measured_peak(forward: Any, model: nn.Module, args: tuple[Any, ...], loss: Any) -> int:
    """Return the peak of a real step in bytes."""
    tracker = StorageTracker()
    tracker.hold([*model.parameters(), *model.buffers(), *(a for a in args if isinstance(a, torch.Tensor))])
    with tracker:
        run_step(lambda: forward(*args), loss, None)
    return tracker.peak_bytes


def transient(name: str, trained: str) -> Transient:
    """Measure one model three ways."""
    bench = models.get(name)
    original, (args, _) = bench.build("cpu"), bench.batch("cpu")
    if trained == "last":
        *_, last = (m for m in original.modules() if list(m.parameters(recurse=False)))
        original.requires_grad_(False)
        last.requires_grad_()
    plain, inplace = with_inplace(original, False), with_inplace(original, True)
    optimized = fxmem.optimize(with_inplace(original, False), args, optimizer=None, loss_fn=bench.loss)
    assert not optimized.plan.dropped
    return Transient(
        name,
        trained,
        measured_peak(plain, plain, args, bench.loss),
        measured_peak(inplace, inplace, args, bench.loss),
        measured_peak(optimized, optimized, args, bench.loss),
        sum(not decision.why_not for decision in optimized.report.inplace),
    )


def pair_plan(profile: GraphProfile) -> Plan:
    """Return the plan that drops what BatchNorms and the activations right behind them make, late refill, nothing else."""
    made_by_norm: set[int] = set()
    dropped: set[int] = set()
    for node in profile.nodes:
        name = node.op.removeprefix("aten.").partition(".")[0]
        outputs = [s for s in node.creates if not profile.storages[s].internal]
        if name in NORMS:
            made_by_norm.update(outputs)
            dropped.update(outputs)
        elif name in ACTIVATIONS and made_by_norm.intersection(node.reads):
            dropped.update(outputs)
    limits = [s.recipe if s.index in dropped and s.recipe is not None else KEEP for s in profile.storages]
    return Plan("norm and activation pairs", tuple(limits))


def pairs(name: str) -> Pairs:
    """Return the figures of one model at the benchmarks' GPU size; nothing is run."""
    bench = models.get(name)
    with torch.device("meta"):
        model, (args, kwargs) = bench.build("gpu"), bench.batch("gpu")
    inputs = Inputs.of(args, kwargs)
    settings = Settings(None, TrainingStep(loss_fn=bench.loss, optimizer=None), "auto", 1.0, PRESETS["v100"])
    context = CompileContext(model, inputs, settings)
    profile = context.profile_of(run_passes(capture(model, inputs), PASSES, context)).profile
    plan = pair_plan(profile)
    saved_bytes = sum(s.nbytes for s in profile.storages if s.num_saves)
    kept_bytes = sum(s.nbytes for s in profile.storages if s.num_saves and plan.limits[s.index] == KEEP)
    timeline = simulate(profile, plan)
    return Pairs(
        name,
        saved_bytes,
        kept_bytes,
        1 - kept_bytes / saved_bytes,
        simulate(profile, keep_all(profile)).peak_bytes,
        timeline.peak_bytes,
        timeline.recompute_seconds / profile.step_seconds,
    )


def frozen() -> Frozen:
    """Return the peaks of the ResNet-50 with frozen BatchNorms; nothing is run."""
    bench, batch_size = models.get("resnet50"), 64
    with torch.device("meta"):
        model, x = bench.build("gpu"), torch.empty(batch_size, 3, 224, 224)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval().requires_grad_(False)
    inputs = Inputs.of((x,), {})
    settings = Settings(None, TrainingStep(optimizer=None), "auto", 1.0, PRESETS["v100"])
    context = CompileContext(model, inputs, settings)
    profile = context.profile_of(run_passes(capture(model, inputs), PASSES, context)).profile
    eager_bytes = fxmem.estimate(model, x, optimizer=None).peak_bytes
    return Frozen("resnet50", batch_size, eager_bytes, simulate(profile, keep_all(profile)).peak_bytes, 5.18, 2.88)


def main() -> int:
    """Print and save the tables."""
    torch.set_num_threads(1)
    first, second = [], []
    for name in TRANSIENT:
        for trained in ("all", "last"):
            first.append(transient(name, trained))
            print(first[-1], flush=True)
    for name in PAIRS:
        second.append(pairs(name))
        print(second[-1], flush=True)
    third = frozen()
    print(third)
    rows = {
        "transient": [asdict(row) for row in first],
        "pairs": [asdict(row) for row in second],
        "frozen": asdict(third),
    }
    PATH.write_text(json.dumps({"machine": machine(), **rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
