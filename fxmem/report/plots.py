"""Memory over one training step as a picture: the original model's and the plan's, phases shaded, the budget a line.

In: two timelines and the budget. Out: a matplotlib figure. Both share the step's own clock: one unit for each tick
of the profile, and what is recomputed lies between the ticks that ask for it. Nothing is drawn that was not simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from fxmem.ir import Phase, Timeline

EAGER_COLOUR, PLAN_COLOUR, RECOMPUTE_COLOUR, BUDGET_COLOUR = "#8d99ae", "#1d6fb8", "#f28e2b", "#c1121f"
PHASE_COLOURS = {Phase.FORWARD: "#e8f1fa", Phase.LOSS: "#fdf1d6", Phase.BACKWARD: "#eaf6ea", Phase.OPTIMIZER: "#f3eafa"}

Curve = list[tuple[float, int, bool]]
"""(time in ticks, live bytes, whether it is recomputed)."""


def curve_of(timeline: Timeline) -> Curve:
    """Return the points of ``timeline`` on the step's clock; recomputed nodes share out the unit before their tick."""
    points: Curve = []
    tick = 0
    for recompute, group in groupby(timeline.steps, key=lambda step: step.recompute):
        steps = list(group)
        for i, step in enumerate(steps):
            if recompute:
                points.append((tick - 1 + (i + 1) / (len(steps) + 1), step.live_bytes, True))
            else:
                points.append((float(tick), step.live_bytes, False))
                tick += 1
    return points


def phases_of(timeline: Timeline) -> Iterator[tuple[Phase, int, int]]:
    """Yield (phase, first tick, one past the last)."""
    phases = [step.phase for step in timeline.steps if not step.recompute]
    begin = 0
    for phase, group in groupby(phases):
        end = begin + len(list(group))
        yield phase, begin, end
        begin = end


def plot_memory(before: Timeline, after: Timeline, budget_bytes: int | None, axes: Any = None) -> Any:
    """Return a figure of live bytes over the step, before and after; ``axes``: matplotlib axes to draw on instead."""
    plt = pyplot()
    if axes is None:
        _, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    unit, scale = _unit(max(before.peak_bytes, after.peak_bytes))
    _shade_phases(axes, before)
    for timeline, colour, name in (
        (before, EAGER_COLOUR, "original"),
        (after, PLAN_COLOUR, "fxmem"),
    ):
        curve = curve_of(timeline)
        x, y = [p[0] for p in curve], [p[1] / scale for p in curve]
        label = f"{name}: peak {timeline.peak_bytes / scale:.{_digits(timeline.peak_bytes / scale)}f} {unit}"
        axes.plot(x, y, color=colour, linewidth=1.6, label=label)
        axes.fill_between(x, y, color=colour, alpha=0.12)
        highest = max(range(len(y)), key=y.__getitem__)
        axes.plot(x[highest], y[highest], marker="o", markersize=6, color=colour)
    again = [(x, y / scale) for x, y, recompute in curve_of(after) if recompute]
    if again:
        axes.plot(*zip(*again, strict=True), ".", color=RECOMPUTE_COLOUR, markersize=4, label="recomputing")
    if budget_bytes is not None:
        budget = budget_bytes / scale
        label = f"budget {budget:.{_digits(budget)}f} {unit}"
        axes.axhline(budget, color=BUDGET_COLOUR, linestyle="--", linewidth=1.2, label=label)
    axes.set_ylim(0, 1.12 * max(before.peak_bytes, after.peak_bytes) / scale)
    axes.set_ylabel(f"live memory, {unit}")
    axes.set_xlabel("the training step, op by op")
    axes.set_xticks([])
    axes.margins(x=0.01)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=4, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return _done(axes.figure)


def plot_frontier(rows: Sequence[tuple[int, float, float]], axes: Any = None) -> Any:
    """Return a figure of what every budget costs.

    ``rows``: peak bytes, overhead and how much less the best of all plans could cost, both over the eager step's time;
    peaks falling. ``axes``: matplotlib axes to draw on instead.
    """
    plt = pyplot()
    if axes is None:
        _, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    unit, scale = _unit(rows[0][0])
    x, y = [peak / scale for peak, _, _ in rows], [100 * overhead for _, overhead, _ in rows]
    least = [max(0.0, 100 * (overhead - gap)) for _, overhead, gap in rows]
    axes.fill_between(x, least, y, step="pre", color=PLAN_COLOUR, alpha=0.12, label="no plan is below")
    axes.step(x, y, where="pre", color=PLAN_COLOUR, linewidth=1.6, label="fxmem")
    axes.plot(x[0], y[0], marker="o", color=EAGER_COLOUR, label="keeping everything")
    axes.plot(x[-1], y[-1], marker="o", color=BUDGET_COLOUR, label="least peak")
    axes.set_xlabel(f"peak of the training step, {unit}")
    axes.set_ylabel("recomputation, % of the step")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return _done(axes.figure)


def _shade_phases(axes: Any, timeline: Timeline) -> None:
    """Shade each phase; name those that are wide enough for their name."""
    total = sum(1 for step in timeline.steps if not step.recompute)
    for phase, begin, end in phases_of(timeline):
        axes.axvspan(begin - 0.5, end - 0.5, color=PHASE_COLOURS[phase], zorder=0, linewidth=0)
        if (end - begin) / total > 0.06:
            middle = (begin + end - 1) / 2
            axes.text(middle, 0.99, phase.value, transform=axes.get_xaxis_transform(), ha="center", va="top", size=9)


def pyplot() -> Any:
    """Return ``matplotlib.pyplot``. Errors: ``ImportError`` that says how to get it."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install matplotlib (str(report) needs nothing)") from error
    return plt


def _done(figure: Any) -> Any:
    """Take ``figure`` off pyplot's list, so that a notebook shows it once and it does not outlive its last reference."""
    pyplot().close(figure)
    return figure


def _unit(nbytes: int) -> tuple[str, float]:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return unit, scale
    return "bytes", 1.0


def _digits(value: float) -> int:
    return 0 if value >= 100 or value == int(value) else 1 if value >= 10 else 2
