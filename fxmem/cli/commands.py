"""What each command answers. In: parsed arguments. Out: an :class:`Answer`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace

import fxmem
from fxmem.cli.output import DOES_NOT_FIT, FITS, Answer, Table, bytes_table, sized
from fxmem.cli.session import Session
from fxmem.cli.watch import watch
from fxmem.devices import DEVICES, GIB
from fxmem.errors import InfeasibleBudgetError, InputError, unit_of
from fxmem.report.modules import table_cells

Command = Callable[[argparse.Namespace], Answer]
DRAWN = ("timeline", "eager_timeline", "graph", "frontier")
"""Fields of a report that are for pictures."""


def estimate(arguments: argparse.Namespace) -> Answer:
    """Return the peak of a step, what holds it, and whether it fits."""
    session = Session(arguments)
    found = session.estimate()
    verdict, status = _verdict(session, found.bound_bytes)
    notes = []
    if arguments.floor:
        notes.append(f"least reachable peak with recomputation: {sized(found.floor_bytes)}")
    data = {
        **_without_steps(found),
        "limit_bytes": session.limit and session.limit[0],
        "fits": None if session.limit is None else status == FITS,
    }
    if arguments.max_batch:
        limit = _needed_limit(session)
        data["largest_batch"] = found.max_batch_size(limit)
        notes.append(f"largest batch in {sized(limit)}: {data['largest_batch']}")
    if found.cuda is not None:
        notes.append(
            f"CUDA's allocator: allocated {sized(found.cuda.allocated_bytes)}, reserved {sized(found.cuda.reserved_bytes)}"
        )
    if status == DOES_NOT_FIT and session.limit is not None:
        notes.append(
            f"what fits: fxmem plan {arguments.model} ... --budget {session.limit[0]}; fxmem advise names habits"
        )
    held = [pair for pair in found.breakdown.rows() if pair[1]]
    table = bytes_table("at the peak", held, found.peak_bytes)
    headline = f"peak {sized(found.bound_bytes)} at {found.peak_at}{verdict}"
    return _of(session, Answer("estimate", headline, data, (table,), tuple(notes), status))


def plan(arguments: argparse.Namespace) -> Answer:
    """Return the cheapest plan within a budget."""
    session = Session(arguments)
    found = session.estimate()
    limit = _needed_limit(session)
    try:
        report = found.report(limit)
    except InfeasibleBudgetError as error:
        data = {"budget_bytes": limit, "fits": False, "least_bytes": error.least_bytes}
        notes = _page(session, found)
        return _of(session, Answer("plan", str(error), data, notes=notes, status=DOES_NOT_FIT))
    peak = report.predicted_peak_bytes if report.cuda is None else report.cuda.allocated_bytes
    headline = (
        f"peak {sized(peak)} within {sized(limit)}: {sized(report.eager_peak_bytes)} as it is, "
        f"{report.overhead_ratio:.1%} more time a step (estimate)"
    )
    data = {k: v for k, v in report.to_dict().items() if k not in (*DRAWN, "rows")}
    data |= {"fits": True, "kept_bytes": report.kept_bytes, "dropped_bytes": report.dropped_bytes}
    pairs = [
        ("peak under the plan", report.predicted_peak_bytes),
        ("peak as it is", report.eager_peak_bytes),
        ("saved for backward, kept", report.kept_bytes),
        ("saved for backward, dropped", report.dropped_bytes),
        ("parameters", report.static.parameters_bytes),
        ("optimizer state", report.static.optimizer_state_bytes),
    ]
    script = f"in the training script: model = fxmem.optimize(model, budget={limit}, ...)"
    notes = (*report.notes, script, *_page(session, found, report))
    table = bytes_table("memory of one training step", pairs, report.eager_peak_bytes)
    return _of(session, Answer("plan", headline, data, (table,), notes))


def report(arguments: argparse.Namespace) -> Answer:
    """Return what each module holds under the plan for a budget, or as it is."""
    session = Session(arguments)
    found = session.estimate()
    try:
        made = found.report(session.limit and session.limit[0])
    except InfeasibleBudgetError as error:
        data = {"fits": False, "least_bytes": error.least_bytes}
        notes = _page(session, found)
        return _of(session, Answer("report", str(error), data, notes=notes, status=DOES_NOT_FIT))
    unit, cells = table_cells(made.modules, arguments.depth)
    heads = ("module", "class", f"parameters, {unit}", "gradients", "optimizer", "saved", "recomputed", "ms")
    table = Table(heads, tuple(cells), "by module")
    budget = "as it is" if session.limit is None else f"within {sized(session.limit[0])}"
    headline = f"peak {sized(made.predicted_peak_bytes)} {budget}, at {made.peak_at}"
    data = {k: v for k, v in made.to_dict().items() if k not in DRAWN}
    return _of(session, Answer("report", headline, data, (table,), (*made.notes, *_page(session, found, made))))


def frontier(arguments: argparse.Namespace) -> Answer:
    """Return what every budget costs."""
    session = Session(arguments)
    found = session.estimate()
    points = found.frontier()
    unit, scale = unit_of(points[0].budget_bytes)
    some = _spread(points, arguments.points)
    rows = tuple(
        (f"{p.budget_bytes / scale:.4f}", f"{p.overhead_seconds * 1e3:.2f}", f"{p.overhead_ratio:.1%}") for p in some
    )
    table = Table((f"budget, {unit}", "ms more a step", "more time"), rows, "what every budget costs")
    least = points[-1]
    headline = (
        f"budgets from {sized(points[0].budget_bytes)} down to {sized(least.budget_bytes)}, "
        f"which costs {least.overhead_ratio:.1%} more time a step (estimate)"
    )
    shown = f"{len(some)} of {len(points)} points; --points 0 shows all"
    status = DOES_NOT_FIT if session.limit is not None and least.budget_bytes > session.limit[0] else FITS
    notes = (shown,) if len(some) < len(points) else ()
    return _of(session, Answer("frontier", headline, fxmem.Frontier(points).to_dict(), (table,), notes, status))


def advise(arguments: argparse.Namespace) -> Answer:
    """Return what each habit brings, and the smallest stack that fits."""
    session = Session(arguments)
    advice = session.advise()
    unit, scale = unit_of(advice.peak_bytes)
    rows = tuple(
        (
            row.label,
            "-" if row.peak_bytes is None else f"{row.peak_bytes / scale:.4f}",
            "-" if row.saved_bytes is None else f"{row.saved_bytes / scale:.4f}",
            row.disruption,
            {True: "yes", False: "no", None: "-"}[row.fits],
        )
        for row in advice.rows
    )
    table = Table(("habit", f"peak, {unit}", f"saves, {unit}", "disruption", "fits"), rows, "habits")
    todo = [f"write: {line}" for line in advice.lines()]
    of_note: dict[str, list[str]] = {}
    for row in advice.rows:
        of_note.setdefault(row.note, []).append(row.label)
    why = [f"{', '.join(labels)}: {note}" for note, labels in of_note.items() if note]
    fits = advice.limit_bytes is None or advice.peak_bytes <= advice.limit_bytes
    status = FITS if fits or (advice.stack is not None and advice.stack.fits) else DOES_NOT_FIT
    notes = (*todo, *why, *(_page(session, session.estimate(), advice=advice) if arguments.html else ()))
    return _of(session, Answer("advise", advice.verdict, advice.to_dict(), (table,), notes, status))


def devices(arguments: argparse.Namespace) -> Answer:
    """Return the GPUs that are known by name."""
    known = list(DEVICES.values())
    rows = tuple(
        (
            d.name,
            f"{d.memory_bytes / GIB:.1f}",
            f"{d.bytes_per_second / 1e9:.0f}",
            f"{d.half_flops_per_second / 1e12:.0f}",
        )
        for d in known
    )
    table = Table(("name", "GiB", "GB/s", "TFLOP/s in bf16"), rows, "GPUs known by name")
    data = {"devices": [asdict(device) for device in known]}
    return Answer("devices", f"{len(rows)} GPUs are known; none of them needs to be here", data, (table,))


def _page(
    session: Session, found: fxmem.Estimate, made: fxmem.Report | None = None, advice: fxmem.Advice | None = None
) -> tuple[str, ...]:
    """Write the page that ``--html`` asks for, of what is made or else planned for the limit; return what to note."""
    path, name = session.arguments.html, "" if session.model is None else session.model.name
    if path is None:
        return ()
    said = ""
    try:
        made = made or found.report(session.limit and session.limit[0])
    except InfeasibleBudgetError:
        made = replace(found.report(None), budget_bytes=session.limit and session.limit[0])
        said = ": of the step as it is, for no plan keeps the budget"
    try:
        made.save_html(path, title=f"Memory of one training step: {name}", advice=advice)
    except OSError as error:
        raise InputError(f"the page cannot be written to {path}: {error.strerror}") from error
    return (f"page written to {path}{said}",)


def _verdict(session: Session, nbytes: int) -> tuple[str, int]:
    if session.limit is None:
        return "", FITS
    limit, source = session.limit
    if nbytes <= limit:
        return f"; fits in {sized(limit)} ({source})", FITS
    return f"; does not fit in {sized(limit)} ({source}): {sized(nbytes - limit)} too much", DOES_NOT_FIT


def _needed_limit(session: Session) -> int:
    if session.limit is None:
        raise InputError("say what the step may take: --budget 8GB, --memory 24GiB or --device a100-80gb")
    return session.limit[0]


def _without_steps(found: fxmem.Estimate) -> dict[str, object]:
    return {k: v for k, v in found.to_dict().items() if k != "timeline"}


def _spread(points: fxmem.Frontier, most: int) -> tuple[fxmem.BudgetPoint, ...]:
    """Return at most so many of the points, evenly spread over budgets, both ends included; 0: all."""
    if not most or len(points) <= most:
        return tuple(points)
    high, low = points[0].budget_bytes, points[-1].budget_bytes
    wanted = [high - (high - low) * i / (most - 1) for i in range(most)]
    nearest = [min(points, key=lambda p: abs(p.budget_bytes - each)) for each in wanted]
    return tuple(dict.fromkeys(nearest))


def _of(session: Session, answer: Answer) -> Answer:
    model = "" if session.model is None else session.model.name
    return replace(answer, model=model, assumed=tuple(dict.fromkeys(session.assumed)))


COMMANDS: dict[str, Command] = {
    "estimate": estimate,
    "plan": plan,
    "frontier": frontier,
    "report": report,
    "advise": advise,
    "watch": watch,
    "devices": devices,
}
