"""Steps that ran under opt-in choices: ``python -m benchmarks.below_the_floor --steps``.

On the CPU, small enough to run there, each model planned at a budget that recomputation alone cannot keep:

- *chunk*: gradients of language models with whole vocabularies, in fp64, beside eager's, and twice, bit by bit; CPU seconds
  of a step with its head in pieces beside one as it is, by turns; and roofline seconds of the full size on an H100;
- *optimizer_in_backward*: GPT-2 with AdamW, peaks measured and planned, and the weights after some steps;
- *microbatch*: a vision transformer under a budget below its floor; and how a model with BatchNorm is refused.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from benchmarks.keeping_seconds import keeping_seconds
from benchmarks.libraries import import_library
from fxmem.capture.export import capture
from fxmem.capture.graph import CaptureGraph, Inputs
from fxmem.fake.fake_tensors import FakeWorld
from fxmem.passes.choices import DEFAULT
from fxmem.passes.chunk import PIECES, in_pieces
from fxmem.passes.chunk_chains import heads_of
from fxmem.profiling.roofline import PRESETS
from fxmem.torch_patches import as_in_training, without_dynamo

BUDGET_SHARE = 0.6
"""Of the floor of recomputation alone: what runs in pieces is planned for this."""
NUM_STEPS = 20

Build = Callable[[], nn.Module]


# -- chunk -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients in pieces beside eager's, in fp64."""

    model: str
    floor_bytes: int
    """With recomputation alone."""
    peak_bytes: int
    """Planned, with pieces."""
    measured_bytes: int
    largest_relative_error: float
    """Of all parameters: the largest difference over the largest gradient."""
    same_bits_twice: bool
    note: str
    """Of the report."""


def gradients_of(name: str, build: Build, batch: tuple[int, int], vocabulary: int) -> Gradients:
    """Return how far gradients in pieces are from eager's."""
    torch.manual_seed(0)
    model, tokens = build().double().train(), torch.randint(0, vocabulary, batch)
    options: dict[str, Any] = {"optimizer": None, "cost": "cpu", "plan_seconds": 2}
    floor_bytes = fxmem.estimate(model, tokens, **options).floor_bytes
    module = fxmem.optimize(model, tokens, budget=int(BUDGET_SHARE * floor_bytes), allow=(*DEFAULT, "chunk"), **options)
    measured, ours = _gradients(module, model, tokens)
    _, again = _gradients(module, model, tokens)
    _, expected = _gradients(model, model, tokens)
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, expected, strict=True))
    report = module.fxmem.report
    return Gradients(
        model=name,
        floor_bytes=floor_bytes,
        peak_bytes=report.predicted_peak_bytes,
        measured_bytes=measured,
        largest_relative_error=error,
        same_bits_twice=all(map(torch.equal, ours, again)),
        note=next(note for note in report.notes if note.startswith("chunk")),
    )


def _peak_of_steps(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, ...],
    loss_of: Callable[..., Tensor],
    num_steps: int,
) -> int:
    """Train on ``batch``, an input and what the loss takes beside the output; return the peak of the last step."""
    x, *targets = batch
    for _ in range(num_steps):
        with fxmem.track(module, optimizer, batch) as measured:
            output = module(x)
            loss = loss_of(output, *targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del output, loss
    return measured.peak_bytes


def _gradients(module: nn.Module, model: nn.Module, tokens: Tensor) -> tuple[int, list[Tensor]]:
    """Return what a step took, and its gradients."""
    with fxmem.track(module, tokens) as measured:
        output = module(tokens)
        loss = output.sum()  # which is what is planned for where no loss is named
        loss.backward()
        del output, loss
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return measured.peak_bytes, gradients


@dataclass(frozen=True, slots=True)
class PiecesTime:
    """What a head in pieces costs a step that keeps all."""

    model: str
    where: str
    """"measured": CPU seconds of this process. "predicted": roofline of an H100, op by op, backward included."""
    num_pieces: int
    whole_seconds: float
    pieces_seconds: float
    ratio: float
    """Measured: the median of the pairs."""
    ratio_low: float
    ratio_high: float
    """Quartiles of the pairs."""


def measured_time(name: str, build: Build, batch: tuple[int, int], vocabulary: int, num_pairs: int) -> PiecesTime:
    """Return CPU seconds of steps as they are and with the head in the fewest pieces, by turns."""
    torch.manual_seed(0)
    model, tokens = build().train(), torch.randint(0, vocabulary, batch)
    whole = capture(model, Inputs.of((tokens,), {}))
    pieces = _with_heads_in(whole, PIECES[0])
    pairs = []
    for turn in range(num_pairs + 1):
        order = (whole, pieces) if turn % 2 else (pieces, whole)
        taken = {id(graph): _cpu_seconds(graph, model, tokens) for graph in order}
        pairs.append((taken[id(whole)], taken[id(pieces)]))
    ratios = [b / a for a, b in pairs[1:]]  # the first is slower: memory is new
    low, median, high = statistics.quantiles(ratios, n=4)
    whole_seconds, pieces_seconds = (statistics.median(column) for column in zip(*pairs[1:], strict=True))
    return PiecesTime(name, "measured", PIECES[0], whole_seconds, pieces_seconds, median, low, high)


def _cpu_seconds(graph: CaptureGraph, model: nn.Module, tokens: Tensor) -> float:
    model.zero_grad()
    start = time.process_time()
    graph.call(graph.graph_module, [tokens]).backward()
    return time.process_time() - start


def predicted_times(name: str, build: Build, batch: tuple[int, int]) -> list[PiecesTime]:
    """Return roofline seconds of the step of a full size on an H100, for each number of pieces."""
    with torch.device("meta"):
        model, tokens = build().train(), torch.zeros(batch, dtype=torch.int64)
    world, hardware = FakeWorld((tokens,), torch.device("cpu")), PRESETS["h100"]
    inputs = Inputs.of((world.fake_all(tokens),), {})
    found = []
    with as_in_training(), without_dynamo(), world.state_of(model):
        whole = capture(model, inputs)
        whole_seconds = keeping_seconds(whole, inputs, _itself, hardware)
        for k in PIECES:
            seconds = keeping_seconds(_with_heads_in(whole, k), inputs, _itself, hardware)
            ratio = seconds / whole_seconds
            found.append(PiecesTime(name, "predicted", k, whole_seconds, seconds, ratio, ratio, ratio))
    return found


def _itself(loss: Tensor) -> Tensor:
    return loss


def _with_heads_in(captured: CaptureGraph, k: int) -> CaptureGraph:
    heads, _ = heads_of(captured.graph_module.graph)
    assert heads, "its scores go into a loss"
    return in_pieces(captured, dict.fromkeys(heads, k))


# -- optimizer in the backward -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InBackward:
    """AdamW after the backward and within it."""

    model: str
    gradients_bytes: int
    largest_gradient_bytes: int
    after_bytes: int
    """Measured peak of a step whose optimizer steps after the backward."""
    within_bytes: int
    """The same, within the backward."""
    planned_bytes: int
    """Of that."""
    num_steps: int
    same_weights: bool
    """Bit by bit those of eager training."""


def in_backward(name: str, build: Build, batch: tuple[int, int], vocabulary: int) -> InBackward:
    """Return peaks of AdamW's step, and whether weights are eager's after :data:`NUM_STEPS` steps."""
    tokens = torch.randint(0, vocabulary, batch, generator=torch.Generator().manual_seed(0))

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)

    def trained(model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, list[Tensor]]:
        torch.manual_seed(1)
        peak_bytes = _peak_of_steps(module, optimizer, (tokens,), torch.sum, NUM_STEPS)
        return peak_bytes, [p.detach() for p in model.parameters()]

    eager = _seeded(build)
    after_bytes, expected = trained(eager, eager, adamw(eager.parameters()))
    model = _seeded(build)
    module = fxmem.optimize(
        model, tokens, optimizer=adamw, cost="cpu", allow=(*DEFAULT, "optimizer_in_backward"), plan_seconds=2
    )
    within_bytes, ours = trained(model, module, module.fxmem.optimizer)
    sizes = [p.nbytes for p in ours]
    return InBackward(
        model=name,
        gradients_bytes=sum(sizes),
        largest_gradient_bytes=max(sizes),
        after_bytes=after_bytes,
        within_bytes=within_bytes,
        planned_bytes=module.fxmem.report.predicted_peak_bytes,
        num_steps=NUM_STEPS,
        same_weights=all(map(torch.equal, expected, ours)),
    )


def _seeded(build: Build) -> nn.Module:
    torch.manual_seed(0)
    return build().train()


# -- micro-batches -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pieces:
    """A batch in pieces under a budget that no plan of the whole keeps."""

    model: str
    floor_bytes: int
    """Of the whole batch, with recomputation."""
    budget_bytes: int
    planned_bytes: int
    measured_bytes: int
    note: str
    """Of the report."""
    largest_relative_error: float
    """Of gradients, beside eager's of the whole batch, in fp32."""
    same_outputs: bool
    refused: str
    """What is said of a model with BatchNorm."""


def micro_batches() -> Pieces:
    """Train a vision transformer within a budget below its floor; ask the same of a ResNet-18."""
    timm, torchvision = import_library("timm"), import_library("torchvision")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=96, num_classes=10).train()
    x, y = torch.randn(128, 3, 96, 96), torch.randint(0, 10, (128,))
    options: dict[str, Any] = {"loss_fn": F.cross_entropy, "targets": y, "cost": "cpu", "plan_seconds": 2}
    floor_bytes = fxmem.estimate(model, x, **options).floor_bytes
    budget_bytes = int(0.8 * floor_bytes)
    module = fxmem.optimize(model, x, budget=budget_bytes, allow=(*DEFAULT, "microbatch"), **options)
    same_outputs, error = _beside_eager(model, module, x, y)
    optimizer = torch.optim.AdamW(model.parameters())
    measured_bytes = _peak_of_steps(module, optimizer, (x, y), F.cross_entropy, 3)
    report = module.fxmem.report
    return Pieces(
        model="ViT-Tiny, 128 images of 96 x 96",
        floor_bytes=floor_bytes,
        budget_bytes=budget_bytes,
        planned_bytes=report.predicted_peak_bytes,
        measured_bytes=measured_bytes,
        note=report.notes[-1],
        largest_relative_error=error,
        same_outputs=same_outputs,
        refused=_refusal(torchvision.models.resnet18(num_classes=10).train(), x, options),
    )


def _beside_eager(model: nn.Module, module: nn.Module, x: Tensor, y: Tensor) -> tuple[bool, float]:
    """Return whether outputs are eager's, and the largest relative error of a gradient."""
    outputs, gradients = [], []
    for each in (module, model):
        model.zero_grad()
        output = each(x)
        F.cross_entropy(output, y).backward()
        outputs.append(output.detach())
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*gradients, strict=True))
    return torch.equal(*outputs), error


def _refusal(model: nn.Module, x: Tensor, options: dict[str, Any]) -> str:
    floor_bytes = fxmem.estimate(model, x, **options).floor_bytes
    try:
        fxmem.optimize(model, x, budget=int(0.95 * floor_bytes), allow=(*DEFAULT, "microbatch"), **options)
    except fxmem.InputError as error:
        return str(error)
    raise AssertionError("BatchNorm takes its statistics over the whole batch")


def step_text(steps: dict[str, Sequence[dict[str, Any]]]) -> str:
    """Return what the steps showed, a line each."""
    lines = []
    for g in (Gradients(**row) for row in steps.get("gradients", ())):
        lines.append(
            f"{g.model}: floor {g.floor_bytes / 1e6:.1f} MB, in pieces {g.peak_bytes / 1e6:.1f} MB planned, "
            f"{g.measured_bytes / 1e6:.1f} measured; gradients within {g.largest_relative_error:.1e} of eager's, the same "
            f"bits twice: {g.same_bits_twice}; {g.note}"
        )
    for t in (PiecesTime(**row) for row in steps.get("times", ())):
        lines.append(
            f"{t.model}: {t.where}, {t.num_pieces} pieces {t.pieces_seconds:.4f} s, whole {t.whole_seconds:.4f} s: "
            f"{t.ratio - 1:+.1%} (quartiles {t.ratio_low - 1:+.1%} to {t.ratio_high - 1:+.1%})"
        )
    for i in (InBackward(**row) for row in steps.get("in_backward", ())):
        lines.append(
            f"{i.model}: peak {i.after_bytes:,} bytes, within the backward {i.within_bytes:,} "
            f"(planned {i.planned_bytes:,}), "
            f"{i.after_bytes - i.within_bytes:,} less, all gradients but the largest are "
            f"{i.gradients_bytes - i.largest_gradient_bytes:,}; weights after {i.num_steps} steps eager's: {i.same_weights}"
        )
    for m in (Pieces(**row) for row in steps.get("micro_batches", ())):
        lines.append(
            f"{m.model}: floor {m.floor_bytes / 1e6:.1f} MB, budget {m.budget_bytes / 1e6:.1f}, planned "
            f"{m.planned_bytes / 1e6:.1f}, measured {m.measured_bytes / 1e6:.1f}; outputs eager's: {m.same_outputs}, "
            f"gradients within {m.largest_relative_error:.1e}; {m.note}; refused: {m.refused}"
        )
    return "\n".join(lines)
