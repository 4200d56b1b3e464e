"""The pictures of README and docs, from committed results only: ``make plots``.

In: the JSON files under ``benchmarks/results``. Out: PNGs under ``docs/images``: for each model peak against time with all
ways on it; predicted against measured peaks; planning time against the size of the graph.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.measure import Row
from benchmarks.results_file import RESULTS, ROOT, load_rows
from benchmarks.verdicts import is_wrong

IMAGES = ROOT.parent / "docs" / "images"
STYLE = {
    "checkpoint": ("s", "#c1121f", "checkpoint per block"),
    "sequential": ("D", "#9a031e", "checkpoint_sequential"),
    "selective": ("^", "#e07a5f", "selective checkpoint"),
    "inplace": ("v", "#6c757d", "in-place activations"),
    "aot": ("P", "#7b2cbf", "torch.compile without recompute (no fusion)"),
    "partitioner": ("X", "#9d6bce", "torch.compile memory budget (no fusion)"),
    "inductor": ("X", "#3c096c", "torch.compile memory budget (inductor)"),
}
BLUE = "#1d6fb8"
OURS = {
    "fxmem": ("o", BLUE, "fxmem (eager's bits)"),
    "fxmem inductor": ("*", "#2a9d4a", 'fxmem, backend="inductor" (other bits: the compiler\'s)'),
}
"""The two backends of fxmem."""


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what the results hold; say what was written."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS / "compare_cpu.json")
    parser.add_argument("--images", type=Path, default=IMAGES)
    given = parser.parse_args(argv)
    rows = load_rows(given.results)
    if not rows:
        parser.error(f"{given.results} holds no results; run python -m benchmarks first")
    given.images.mkdir(parents=True, exist_ok=True)
    pictures = {f"peak_time_{name}": partial(peak_time, name, rows) for name in complete_models(rows)}
    pictures |= {"prediction": partial(prediction, rows), "planning": partial(planning)}
    for name, draw in pictures.items():
        figure = draw()
        path = given.images / f"{name}.png"
        figure.savefig(path, dpi=110)
        plt.close(figure)
        print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return 0


def complete_models(rows: list[Row]) -> list[str]:
    """Return the models with at least three budgets of fxmem measured."""
    measured = [row.model for row in rows if row.kind == "fxmem" and row.time_ratio is not None]
    return [name for name in dict.fromkeys(measured) if measured.count(name) >= 3]


def _axes(width: float = 7.0, height: float = 4.2) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


# -- peak against time -------------------------------------------------------------------------------------------------


def peak_time(name: str, rows: list[Row]) -> Any:
    """Return a figure of every way on one model: peak as a share of eager's, time over eager's; lower left is better."""
    measured = [row for row in rows if row.model == name and row.time_ratio is not None and row.peak_bytes is not None]
    of_model = [row for row in measured if row.kind in OURS or row.kind in STYLE]
    figure, axes = _axes(7.0, 5.0)
    axes.plot(1, 1, "o", color="#222", markersize=9, label="eager")
    named: set[str] = set()
    for row in of_model:
        if row.kind not in STYLE:
            continue
        marker, colour, label = STYLE[row.kind]
        wrong = _wrong(row)
        _point(axes, row, marker=marker, color=colour, markerfacecolor="white" if wrong else colour, markersize=8,
               linestyle="none", label=None if label in named else label)  # fmt: skip
        named.add(label)
    for kind in OURS:
        _our_curve(axes, kind, [row for row in of_model if row.kind == kind])
    if any(_wrong(row) for row in of_model):
        axes.plot([], [], "s", color="#777", markerfacecolor="white", label="hollow: wrong gradients or BatchNorm")
    axes.set_xlabel("peak memory of the training step, share of eager")
    axes.set_ylabel("time of the step, ratio to eager")
    eager_mb = of_model[0].eager_peak_bytes / 1e6  # type: ignore[operator]
    axes.set_title(f"{name}, CPU: eager peaks at {eager_mb:.0f} MB; lower left is better", size=10, loc="left")
    _limit(axes, of_model)
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    return figure


def _point(axes: Any, row: Row, **style: Any) -> None:
    share = row.peak_bytes / row.eager_peak_bytes  # type: ignore[operator]
    error = [[row.time_ratio - row.time_ratio_low], [row.time_ratio_high - row.time_ratio]]  # type: ignore[operator]
    axes.errorbar(share, row.time_ratio, yerr=error, elinewidth=1, capsize=2, zorder=3, **style)


def _our_curve(axes: Any, kind: str, ours: list[Row]) -> None:
    """Draw a backend's plans from most to least memory; a point beaten by another one of them is noise of the clock."""
    marker, colour, label = OURS[kind]
    ordered = sorted(ours, key=lambda row: -(row.peak_bytes or 0))
    share = [row.peak_bytes / row.eager_peak_bytes for row in ordered]  # type: ignore[operator]
    axes.plot(share, [row.time_ratio for row in ordered], color=colour, linewidth=1.2, alpha=0.5, zorder=2)
    for i, row in enumerate(ordered):
        _point(axes, row, marker=marker, color=colour, markersize=5, linestyle="none", label=None if i else label)


def _limit(axes: Any, rows: list[Row]) -> None:
    """Cut off the lowest budgets' steep rise where it would flatten all else, and say so."""
    peers = [row.time_ratio for row in rows if row.kind not in OURS]
    most = max(1.6, 1.25 * max((r for r in peers if r is not None), default=1.5))
    beyond = [row for row in rows if (row.time_ratio or 0) > most]
    highest = max((row.time_ratio or 0) for row in rows)
    lowest = min((row.time_ratio or 1) for row in rows)
    axes.set_ylim(min(0.9, 0.95 * lowest), most if beyond else max(1.3, 1.08 * highest))
    for row in beyond:
        share = row.peak_bytes / row.eager_peak_bytes  # type: ignore[operator]
        axes.annotate(f"×{row.time_ratio:.1f}", (share, most), ha="center", va="top", size=8, color=OURS[row.kind][1],
                      xytext=(0, -2), textcoords="offset points")  # fmt: skip


def _wrong(row: Row) -> bool:
    return is_wrong(row) or row.buffers not in (None, "equal")


# -- prediction and planning -------------------------------------------------------------------------------------------


def prediction(rows: list[Row]) -> Any:
    """Return a figure of fxmem's measured peaks over the predicted ones."""
    ours = [row for row in rows if row.predicted_peak_bytes is not None and row.peak_bytes is not None]
    figure, axes = _axes(5.2, 4.6)
    x = [row.predicted_peak_bytes / 1e6 for row in ours]  # type: ignore[operator]
    y = [row.peak_bytes / 1e6 for row in ours]  # type: ignore[operator]
    low, high = 0.9 * min(x), 1.1 * max(x)
    axes.plot([low, high], [low, high], color="#999", linewidth=1, zorder=1)
    axes.plot(x, y, "o", color=BLUE, alpha=0.6, markersize=5, zorder=2)
    exact = sum(row.peak_bytes == row.predicted_peak_bytes for row in ours)
    num_models = len({row.model for row in ours})
    axes.set_title(f"{exact} of {len(ours)} plans of {num_models} models exact to the byte", size=10, loc="left")
    axes.set(xscale="log", yscale="log", xlabel="peak predicted before the first step, MB", ylabel="peak measured, MB")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        axis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    return figure


def planning() -> Any:
    """Return a figure of the CPU seconds that planning for all budgets takes, over the length of the graph."""
    body = json.loads((RESULTS / "planner_scaling.json").read_text(encoding="utf-8"))
    sizes = [row["recipes"] for row in body["rows"]]
    seconds = [row["cpu_seconds"] for row in body["rows"]]
    figure, axes = _axes(6.0, 3.6)
    axes.plot(sizes, seconds, "o-", color=BLUE)
    for size, value in zip(sizes, seconds, strict=True):
        axes.annotate(f"{value:.1f} s", (size, value), xytext=(-4, 7), textcoords="offset points", size=8, ha="right")
    axes.set(xscale="log", yscale="log", xlabel="recomputable ops of the graph", ylabel="CPU seconds, one core")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axes.set_title(
        f"Planning for all budgets at once: seconds grow as length^{body['growth_exponent']:.2f}", size=10, loc="left"
    )
    axes.margins(0.12)
    return figure


if __name__ == "__main__":
    raise SystemExit(main())
