"""A report as HTML for notebooks: the table, what the plan does, and memory over the step as inline SVG.

No library is needed and no script runs, so it shows wherever HTML does.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from fxmem.ir import Timeline
from fxmem.report.plots import BUDGET_COLOUR, EAGER_COLOUR, PHASE_COLOURS, PLAN_COLOUR, curve_of, phases_of

WIDTH, HEIGHT, TOP = 560, 190, 16


def report_html(headline: str, notes: Iterable[str], rows: Iterable[tuple[str, str]], unit: str, picture: str) -> str:
    """Return the HTML of a report: a line in bold, small notes, a table of (what, size) pairs, a picture beside it."""
    cells = "".join(
        f"<tr><td style='text-align:left'>{escape(what)}</td><td style='text-align:right'>{escape(value)}</td></tr>"
        for what, value in rows
    )
    small = "".join(f"<br><small>{escape(note)}</small>" for note in notes)
    return (
        f"<div><p style='margin:4px 0'><b>{escape(headline)}</b>{small}</p>"
        "<div style='display:flex;flex-wrap:wrap;gap:24px;align-items:flex-start'>"
        f"<table><tr><th style='text-align:left'>one training step</th><th>{unit}</th></tr>{cells}</table>"
        f"{picture}</div></div>"
    )


def timeline_svg(before: Timeline, after: Timeline, budget_bytes: int | None) -> str:
    """Return memory over the step, before and after, as SVG."""
    top_bytes = max(before.peak_bytes, after.peak_bytes, budget_bytes or 0)
    top_bytes = min(top_bytes, 2 * before.peak_bytes) or 1
    num_ticks = sum(1 for step in before.steps if not step.recompute) or 1

    def x(tick: float) -> float:
        return WIDTH * tick / num_ticks

    def y(nbytes: int) -> float:
        return HEIGHT - (HEIGHT - TOP) * nbytes / top_bytes

    def line(timeline: Timeline, colour: str) -> str:
        points = " ".join(f"{x(t + 0.5):.1f},{y(b):.1f}" for t, b, _ in curve_of(timeline))
        return f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='1.5'/>"

    shades = "".join(
        f"<rect x='{x(begin):.1f}' y='0' width='{x(end) - x(begin):.1f}' height='{HEIGHT}' fill='{PHASE_COLOURS[phase]}'/>"
        + (f"<text x='{x(begin) + 4:.1f}' y='12' font-size='11' fill='#555'>{phase.value}</text>" if wide else "")
        for phase, begin, end in phases_of(before)
        for wide in ((end - begin) > 0.12 * num_ticks,)
    )
    budget = ""
    if budget_bytes is not None and budget_bytes <= top_bytes:
        at = y(budget_bytes)
        budget = (
            f"<line x1='0' x2='{WIDTH}' y1='{at:.1f}' y2='{at:.1f}' stroke='{BUDGET_COLOUR}' stroke-dasharray='5 4'/>"
        )
    key = "".join(
        f"<tspan fill='{colour}'>&#9632; {name}&#160;&#160;</tspan>"
        for colour, name in ((EAGER_COLOUR, "original"), (PLAN_COLOUR, "fxmem"), (BUDGET_COLOUR, "budget"))
        if name != "budget" or budget
    )
    curves = line(before, EAGER_COLOUR) + line(after, PLAN_COLOUR)
    return (
        f"<svg width='{WIDTH}' height='{HEIGHT + 20}' viewBox='0 0 {WIDTH} {HEIGHT + 20}' font-family='sans-serif'>"
        f"{shades}{curves}{budget}<text x='0' y='{HEIGHT + 15}' font-size='12'>{key}</text></svg>"
    )
