"""GPU peaks that others have measured and published, beside what fxmem predicts of the same steps.

``python -m benchmarks.published_memory``. No GPU is needed and nothing is downloaded: models lie on the meta device. Every
point has its source in ``benchmarks/data/published_memory.json``, with what was measured and how it was read; what a source
leaves open is said there. Like is compared with like: ``allocated`` and ``reserved`` with the same of PyTorch's allocator,
``process`` (what the driver counts) with reserved bytes and a CUDA context of the size given with the source, ``fits`` with
the memory of the card. A point that cannot be predicted is listed with the reason.

Convolutions' workspaces are not in a prediction; beside it stands what it would be with them at their upper bound
(:mod:`fxmem.profiling.cudnn_workspace`). Not modelled: what versions of torch and libraries before today's did otherwise,
where the data file does not say so.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import fxmem
from benchmarks.published_memory_models import AdamOfTorch20, build
from benchmarks.results_file import RESULTS, ROOT, machine
from fxmem.devices import device_named
from fxmem.profiling.allocator_state import AllocatorPeaks
from fxmem.profiling.training_step import TrainingStep

DATA = ROOT / "data" / "published_memory.json"
PATH = RESULTS / "published_memory.json"
MIB = 1 << 20
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Point:
    """One published figure and the step it belongs to. Fields are described in the data file."""

    name: str
    source: str
    where: str
    measured: str
    device: str
    family: str
    model: str
    batch: int
    published_bytes: int | None = None
    fits: bool | None = None
    image: int | None = None
    length: int | None = None
    classes: int = 1000
    dtype: str = "fp32"
    autocast: str | None = None
    scaler: bool = False
    optimizer: str = "sgd"
    accumulate: bool = False
    checkpointing: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    context_bytes: int = 0
    notes: str = ""
    explained: str = ""
    """Why prediction and figure differ, where they do."""
    not_predicted: str = ""
    calibrates: bool = False
    """The context's size was read off this point."""


@dataclass(frozen=True)
class Outcome:
    """What is predicted of a point. ``difference``: a share of the published figure; None for brackets."""

    point: Point
    peaks: AllocatorPeaks | None
    seconds: float
    error: str = ""

    @property
    def predicted_bytes(self) -> int | None:
        """What compares with the published figure."""
        if self.peaks is None:
            return None
        if self.point.measured == "allocated":
            return self.peaks.allocated_bytes
        return self.peaks.reserved_bytes + self.point.context_bytes

    @property
    def bounded(self) -> bool | None:
        """Whether the published figure is at most the prediction with cuDNN's workspaces at their upper bound."""
        if self.peaks is None or self.point.published_bytes is None or self.point.measured == "allocated":
            return None
        return self.point.published_bytes <= self.peaks.most_reserved_bytes + self.point.context_bytes

    @property
    def difference(self) -> float | None:
        if self.predicted_bytes is None or self.point.published_bytes is None:
            return None
        return self.predicted_bytes / self.point.published_bytes - 1

    @property
    def verdict(self) -> str:
        """Of a bracket: a step fits for certain if its reserved bytes do, and cannot if its allocated bytes do not;
        between the two the allocator gives memory back and tries again."""
        if self.point.fits is None or self.peaks is None:
            return ""
        free = device_named(self.point.device).memory_bytes - self.point.context_bytes
        can, must = self.peaks.allocated_bytes <= free, self.peaks.reserved_bytes <= free
        if can != must:
            return "consistent (between)"
        return "consistent" if can == self.point.fits else "differs"


def load() -> tuple[dict[str, Any], list[Point]]:
    """Return the sources by name, and all points."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    return data["sources"], [Point(**point) for point in data["points"]]


# -- one point ------------------------------------------------------------------------------------------------------------


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer called ``name``; with "one by one", as it was before steps were fused over parameters."""
    kind, _, manner = name.partition(", ")
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": lambda p, **how: torch.optim.SGD(p, lr=0.1, **how),
        "sgd momentum": lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, **how),
        "adam": torch.optim.Adam,
        "adam of torch 2.0": AdamOfTorch20,
        "adamw": torch.optim.AdamW,
        "adafactor": torch.optim.Adafactor,
    }
    how: dict[str, Any] = {"": {}, "one by one": {"foreach": False}, "fused": {"fused": True}}[manner]
    return makers[kind]([p for p in model.parameters() if p.requires_grad], **how)


def batch_of(point: Point) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch and its targets."""
    if point.image is not None:
        targets = torch.zeros(point.batch, dtype=torch.long)
        return torch.zeros(point.batch, 3, point.image, point.image), targets
    assert point.length is not None
    ids = torch.zeros(point.batch, point.length, dtype=torch.long)
    return ids, torch.zeros(point.batch, dtype=torch.long) if point.model.endswith("bert-large") else ids.clone()


def predict(point: Point) -> Outcome:
    """Return what is predicted of ``point``."""
    if point.not_predicted:
        return Outcome(point, None, 0.0)
    start = time.perf_counter()
    try:
        with torch.device("meta"):
            model = build(point.model, point.options | _checkpointing(point), DTYPES[point.dtype])
            batch = batch_of(point)
        step = TrainingStep(
            loss_fn=lambda output: output[0] if isinstance(output, tuple) else output,
            optimizer=optimizer_of(point.optimizer, model),
            autocast=DTYPES[point.autocast] if point.autocast else None,
            accumulate=point.accumulate,
            scaler=torch.amp.GradScaler("cuda") if point.scaler else None,
        )
        peaks = fxmem.estimate(model, batch, device=f"cuda:{point.device}", step=step).cuda
    except Exception as error:
        return Outcome(point, None, time.perf_counter() - start, f"{type(error).__name__}: {error}"[:300])
    return Outcome(point, peaks, time.perf_counter() - start)


def _checkpointing(point: Point) -> dict[str, Any]:
    return {"checkpointing": True} if point.checkpointing else {}


# -- all points -----------------------------------------------------------------------------------------------------------


def outcomes(points: Sequence[Point]) -> Iterator[Outcome]:
    """Yield each point's outcome."""
    yield from map(predict, points)


def line(outcome: Outcome) -> tuple[str, ...]:
    """Return one line of the table: MiB, and the difference or the verdict."""
    point = outcome.point
    predicted = "" if outcome.predicted_bytes is None else f"{outcome.predicted_bytes / MIB:,.0f}"
    if point.fits is not None:
        published = "fits" if point.fits else "does not fit"
    else:
        published = f"{(point.published_bytes or 0) / MIB:,.0f}"
    if outcome.difference is not None:
        judged = f"{100 * outcome.difference:+.1f} %" + (" (calibrates)" if point.calibrates else "")
    else:
        judged = outcome.verdict or "not predicted"
    reason = point.not_predicted or outcome.error or point.explained
    return point.name, point.measured, point.device, predicted, published, judged, reason


def table(results: Sequence[Outcome], style: str = "simple") -> str:
    """Return one line a point."""
    headers = ("point", "measured", "device", "predicted MiB", "published MiB", "difference", "why")
    return str(tabulate([line(r) for r in results], headers=headers, tablefmt=style, disable_numparse=True))


def summary(results: Sequence[Outcome]) -> dict[str, Any]:
    """Return, for each family, how many points there are, the median and the largest difference, and the brackets."""
    told: dict[str, Any] = {"points": len(results), "not predicted": sum(r.peaks is None for r in results)}
    for family in ("transformer", "convnet"):
        for measured in ("allocated", "reserved", "process"):
            rows = [r for r in results if r.point.family == family and r.point.measured == measured]
            shares = {r.point.name: r.difference for r in rows if r.difference is not None and not r.point.calibrates}
            if shares:
                told[f"{family}, {measured}"] = _spread(shares)
        rows = [r for r in results if r.point.family == family]
        shares = {r.point.name: r.difference for r in rows if r.difference is not None and not r.point.calibrates}
        told[family] = _spread(shares) if shares else {"points": 0}
    convnets = [r for r in results if r.point.family == "convnet" and not r.point.calibrates]
    if "convnet" in told:
        told["convnet"]["within the bound"] = sum(bool(r.bounded) for r in convnets)
    brackets = [r for r in results if r.verdict]
    told["brackets"] = {
        "points": len(brackets),
        "consistent": sum(r.verdict != "differs" for r in brackets),
        "of these between": sum("between" in r.verdict for r in brackets),
        "explained": sum(r.verdict == "differs" and bool(r.point.explained) for r in brackets),
    }
    return told


def _spread(shares: dict[str, float]) -> dict[str, Any]:
    worst = max(shares, key=lambda name: abs(shares[name]))
    return {
        "points": len(shares),
        "median %": round(100 * median(shares.values()), 2),
        "median of sizes %": round(100 * median(abs(s) for s in shares.values()), 2),
        "within 3 %": sum(abs(s) <= 0.03 for s in shares.values()),
        "worst %": round(100 * shares[worst], 2),
        "worst at": worst,
    }


def save(results: Sequence[Outcome], path: Path) -> None:
    """Write machine, versions, summary and one row a point."""
    versions = {name: version(name) for name in ("timm", "torchvision", "transformers")}
    rows = [
        {
            "point": r.point.name,
            "source": r.point.source,
            "measured": r.point.measured,
            "published_bytes": r.point.published_bytes,
            "fits": r.point.fits,
            "allocated_bytes": r.peaks and r.peaks.allocated_bytes,
            "reserved_bytes": r.peaks and r.peaks.reserved_bytes,
            "most_reserved_bytes": r.peaks and r.peaks.most_reserved_bytes,
            "context_bytes": r.point.context_bytes,
            "difference": None if r.difference is None else round(r.difference, 5),
            "verdict": r.verdict,
            "seconds": round(r.seconds, 1),
            "reason": r.point.not_predicted or r.error,
        }
        for r in results
    ]
    body = ",\n".join("  " + json.dumps({k: v for k, v in row.items() if v not in (None, "")}) for row in rows)
    head = json.dumps(machine() | versions)
    text = f'{{"machine": {head},\n "summary": {json.dumps(summary(results))},\n "rows": [\n{body}\n]}}\n'
    path.write_text(text, encoding="utf-8")


def told(path: Path = PATH) -> str:
    """Return what the last run found, in a paragraph."""
    results = json.loads(path.read_text(encoding="utf-8"))
    found, facts = results["summary"], results["machine"]
    brackets = found["brackets"]

    def spread(family: str) -> str:
        row = found[family]
        return (
            f"{row['points']} figures of {family}s: {row['median of sizes %']:.1f} % in the median, {row['within 3 %']} "
            f"within 3 %, at worst {row['worst %']:+.1f} % ({row['worst at']})"
        )

    return (
        f"GPU peaks that others measured and published, beside what fxmem predicts without a GPU "
        f"(`python -m benchmarks.published_memory`, torch {facts['torch']}, {facts['date']}): {found['points']} points "
        f"from {len(load()[0])} sources, {found['not predicted']} of them not predicted (8-bit optimizers, torch.compile). "
        f"{spread('transformer')}. {spread('convnet')}: without cuDNN's workspaces; with their upper bound "
        f"{found['convnet']['within the bound']} are at or below the prediction. Of {brackets['points']} "
        f"batches that fit a card or do not, {brackets['consistent']} agree; at {brackets['of these between']} of them the "
        "card lies between allocated and reserved bytes, which says neither. Sources, readings and "
        "assumptions: `benchmarks/data/published_memory.json`."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Predict every point, print the table and the summary, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published_memory", description=__doc__.split("\n")[0])
    parser.add_argument("--points", default="", help="only those whose name contains this; writes nothing")
    parser.add_argument("--results", type=Path, default=PATH)
    given = parser.parse_args(argv)
    _, points = load()
    results: list[Outcome] = []
    for outcome in outcomes([p for p in points if given.points in p.name]):
        results.append(outcome)
        print(f"{outcome.seconds:5.1f} s  " + "  ".join(cell for cell in line(outcome) if cell), flush=True)
    print("\n" + table(results) + "\n")
    for key, value in summary(results).items():
        print(f"{key}: {value}")
    if not given.points:
        save(results, given.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
