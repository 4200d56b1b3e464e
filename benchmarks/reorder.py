"""Another order of independent ops: ``python -m benchmarks.reorder``.

The peak of a step without recomputation, in the model's order and in fxmem's, and what no order goes below: what is there
at the end of the forward, all that is saved for the backward included. Losses, no optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.libraries import import_library
from benchmarks.losses import cross_entropy, googlenet_loss
from benchmarks.results_file import RESULTS, machine
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.ir import GraphProfile, Phase
from fxmem.passes.context import CompileContext, Settings
from fxmem.passes.reorder import Reorder
from fxmem.planners.simulate import keep_all, simulate
from fxmem.profiling.training_step import TrainingStep

PATH = RESULTS / "reorder.json"


@dataclass(frozen=True)
class Reordered:
    """Peaks of one model's step, in bytes."""

    model: str
    num_ops: int
    own_bytes: int
    reordered_bytes: int
    least_bytes: int
    """What is there at the end of the forward, in any order."""


class Detector(nn.Module):
    """A backbone, a pyramid of two levels, heads for classes and boxes over both, and then their losses."""

    def __init__(self, width: int = 32, classes: int = 20, anchors: int = 9) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(3, width, 2), _conv(width, width))
        self.down = nn.Sequential(
            _conv(width, 2 * width, 2), _conv(2 * width, 2 * width), nn.Conv2d(2 * width, width, 1)
        )
        self.classes = _head(width, anchors * classes)
        self.boxes = _head(width, anchors * 4)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.stem(x)
        coarse = self.down(fine)
        levels = (fine + F.interpolate(coarse, scale_factor=2.0), coarse)
        classes, boxes = ([head(level) for level in levels] for head in (self.classes, self.boxes))
        losses = [F.binary_cross_entropy_with_logits(scores, torch.zeros_like(scores)) for scores in classes]
        losses += [F.smooth_l1_loss(deltas, torch.zeros_like(deltas)) for deltas in boxes]
        return torch.stack(losses).sum()


def _conv(num_in: int, num_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU())


def _head(width: int, num_out: int) -> nn.Sequential:
    return nn.Sequential(_conv(width, width), _conv(width, width), nn.Conv2d(width, num_out, 3, padding=1))


def _googlenet() -> nn.Module:
    model: nn.Module = import_library("torchvision").models.googlenet(num_classes=10, init_weights=False)
    return model


def _hrnet() -> nn.Module:
    model: nn.Module = import_library("timm").create_model("hrnet_w18", num_classes=10)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[Any], Tensor] | None]] = {
    "detector": (Detector, (4, 3, 128, 128), None),
    "googlenet": (_googlenet, (8, 3, 128, 128), googlenet_loss),
    "hrnet_w18": (_hrnet, (4, 3, 128, 128), cross_entropy),
}


def rows() -> Iterator[Reordered]:
    for name, (make, shape, loss) in MODELS.items():
        model, inputs = make().train(), Inputs.of((torch.randn(shape),), {})
        step = TrainingStep(loss_fn=loss, optimizer=None)
        settings = Settings(None, step, "auto", 1.0, None, allow=frozenset({"reorder"}))
        context = CompileContext(model, inputs, settings)
        before = capture(model, inputs)
        after = Reorder().apply(before, context)
        own, other = (context.profile_of(graph).profile for graph in (before, after))
        peaks = (simulate(profile, keep_all(profile)).peak_bytes for profile in (own, other))
        yield Reordered(name, len(own.nodes), *peaks, at_end_of_forward(own))


def at_end_of_forward(profile: GraphProfile) -> int:
    """Return the bytes that are there when the loss is taken of the outputs, if nothing is dropped."""
    steps = simulate(profile, keep_all(profile), with_steps=True).steps
    tick = next(t for t in profile.ticks if t.phase is Phase.LOSS)
    first = next(step.live_bytes for step in steps if step.phase is Phase.LOSS)
    return first - (tick.peak_bytes - tick.start_bytes)


def main() -> int:
    """Print the table and write its rows."""
    found = list(rows())
    headers = ("model", "ops", "peak MB", "reordered", "less", "no order brings more than")
    table = [
        (
            row.model,
            row.num_ops,
            f"{row.own_bytes / 1e6:.2f}",
            f"{row.reordered_bytes / 1e6:.2f}",
            f"{1 - row.reordered_bytes / row.own_bytes:.1%}",
            f"{1 - row.least_bytes / row.own_bytes:.1%}",
        )
        for row in found
    ]
    print(tabulate(table, headers, disable_numparse=True))
    text = {"machine": machine(), "rows": [asdict(row) for row in found]}
    PATH.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
