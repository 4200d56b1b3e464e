"""The report of one planned signature, as numbers and as a table.

In: a profile, the plan chosen, its verified figures. Out: a :class:`Report`; ``str()`` of it is a table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import Any, Protocol

from tabulate import tabulate

from fxmem.errors import NotPlannedError, in_units, unit_of
from fxmem.ir import (
    FrontierPoint,
    GraphProfile,
    InplaceDecision,
    Launches,
    PlainData,
    Plan,
    StaticBytes,
    Timeline,
    Verification,
)
from fxmem.planners.offload.link import sent_bytes
from fxmem.planners.simulate import keep_all, simulate
from fxmem.profiling.allocator_state import AllocatorPeaks
from fxmem.report.graph import GraphNode, draw_graph, graph_nodes
from fxmem.report.html import report_html, timeline_svg
from fxmem.report.model_explorer import write_model_explorer
from fxmem.report.modules import ModuleRow, module_table
from fxmem.report.peak import place_of
from fxmem.report.plots import plot_memory


@dataclass(frozen=True, slots=True)
class Row(PlainData):
    """One storage that autograd saves: where it comes from, its bytes, and what the plan does with it."""

    name: str
    """Name of the node that creates it; hidden residuals carry a suffix (``dropout_1.internal0``)."""
    nbytes: int
    decision: str
    """``"keep"``, ``"drop"``, or ``"offload"``: it waits for the backward in host memory."""
    reason: str
    """Why it may not be dropped; empty if it may."""
    source: str
    """Module path and the user's ``file:line``."""


@dataclass(frozen=True, slots=True)
class PlanCost(PlainData):
    """One of the plans found: its peak and what it costs."""

    peak_bytes: int
    """Planned peak of the whole training step."""
    overhead_ratio: float
    """Estimated time of what is recomputed over that of the eager step."""


class Advised(Protocol):
    """What a page tells of advice (:class:`fxmem.Advice`)."""

    @property
    def verdict(self) -> str: ...

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, repr=False)
class Report(PlainData):
    """What was planned for one signature. All ``_bytes`` are of the whole training step, statics included."""

    planner: str
    budget_bytes: int | None
    """None: no bound was asked for."""
    predicted_peak_bytes: int
    """Peak of the emitted module, verified on fakes."""
    eager_peak_bytes: int
    """Peak of the original model's own step."""
    overhead_seconds: float
    """Estimated time of what is recomputed in one step."""
    overhead_ratio: float
    """``overhead_seconds`` over the estimated time of the eager step."""
    gap_ratio: float
    """Optimality gap: at most this share of the eager step's time could the best of all plans save (a lower bound proves
    it)."""
    plan_seconds: float
    """Time that capture, profiling, planning, emitting and verification took, by the clock."""
    static: StaticBytes
    peak_at: str
    """Node, module path and source line of the peak."""
    rows: tuple[Row, ...]
    """Every storage autograd saves, in order of creation."""
    notes: tuple[str, ...]
    inplace: tuple[InplaceDecision, ...]
    """What was decided of each op that has an in-place form."""
    cuda: AllocatorPeaks | None
    """On CUDA: what the caching allocator makes of the emitted module's step (:mod:`fxmem.profiling.caching_allocator`)."""
    launches: Launches | None
    """On CUDA, where times were needed: what host and device take for the eager step, of which the longer bounds it."""
    modules: tuple[ModuleRow, ...] = field(repr=False)
    """What each module holds, in the model's order; :meth:`module_table` writes it."""
    timeline: Timeline = field(repr=False)
    """Live bytes over the step under the plan."""
    eager_timeline: Timeline = field(repr=False)
    """The same if nothing is dropped."""
    graph: tuple[GraphNode, ...] = field(repr=False)
    """The captured graph with what the plan does, in order of execution."""
    frontier: tuple[PlanCost, ...] = field(repr=False)
    """What every budget costs, peaks falling; empty where this size was not planned for, as where all fits as it is."""
    _least_bytes: int | Callable[[], int] | None = field(repr=False, compare=False)

    @property
    def floor_bytes(self) -> int:
        """The least peak any plan found reaches. Where this size was not planned for, asking for it plans, once.

        Errors: ``NotPlannedError`` if it was not planned for and the report has been copied or pickled.
        """
        if self._least_bytes is None:
            raise NotPlannedError("the floor of this size was not planned for before the report was copied or pickled")
        return self._least_bytes if isinstance(self._least_bytes, int) else self._least_bytes()

    def to_dict(self) -> dict[str, Any]:
        """Return the report, ready for ``json.dumps``; ``floor_bytes`` is None where it was not planned for."""
        return {
            **PlainData.to_dict(self),
            "floor_bytes": self._least_bytes if isinstance(self._least_bytes, int) else None,
        }

    def to_json(self, indent: int | None = None) -> str:
        """Return :meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_markdown(self, depth: int | None = None) -> str:
        """Return the report for a document: its figures, and the table by module."""
        unit = unit_of(self.eager_peak_bytes)[0]
        head = ("memory of one training step", unit)
        figures = tabulate(_summary(self), headers=head, tablefmt="github", disable_numparse=True)
        notes = "".join(f"- {note}\n" for note in (f"peak at {self.peak_at}", *self.notes))
        return f"{figures}\n\n{notes}\n{self.module_table(depth, 'github')}"

    def module_table(self, depth: int | None = None, style: str = "simple") -> str:
        """Return a table by module: bytes of parameters, gradients, optimizer state, saved and recomputed, and time.

        Like layers are one row (``layers.0..31``). ``depth``: how many parts of a module path to tell apart; default: as
        many as stay readable. ``style``: a format of tabulate.
        """
        return module_table(self.modules, depth, style)

    def __getstate__(self) -> list[Any]:
        """What could plan for the floor holds the model, and stays."""
        state = [getattr(self, f.name) for f in fields(self)]
        return [*state[:-1], state[-1] if isinstance(state[-1], int) else None]

    def plot_memory(self, axes: Any = None) -> Any:
        """Return a matplotlib figure: memory over the step before and after, phases shaded, the budget a line."""
        return plot_memory(self.eager_timeline, self.timeline, self.budget_bytes, axes)

    def draw_graph(self, depth: int | None = None) -> Any:
        """Return a matplotlib figure of the graph by module, sized by saved bytes, coloured by kept and dropped.

        ``depth``: how many parts of a module path to tell apart; default: as many as stay readable.
        """
        return draw_graph(self.graph, depth)

    def save_html(
        self, path: str | PathLike[str], *, title: str = "Memory of one training step", advice: Advised | None = None
    ) -> None:
        """Write the report as a page for a browser: one file that loads nothing.

        It shows memory over the step before and after, bytes by module, the graph to be opened module by module, tables to
        sort and filter, what every budget costs where that is known, and ``advice``, as :func:`fxmem.advise` returns it.
        """
        from fxmem.report.page import page_data, page_html  # the page is one of reports

        with open(path, "w", encoding="utf-8") as file:
            file.write(page_html(page_data(self, title, advice)))

    def save_model_explorer(self, path: str | PathLike[str], data_path: str | PathLike[str] | None = None) -> None:
        """Write the graph as JSON that Google's Model Explorer opens, each node coloured by what the plan does with it.

        ``data_path``: a second file, the node data: bytes saved by node, to be loaded over the graph as a colour scale.
        """
        write_model_explorer(self.graph, self.inplace, path, data_path)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the storages autograd saves that the plan keeps."""
        return sum(row.nbytes for row in self.rows if row.decision == "keep")

    @property
    def dropped_bytes(self) -> int:
        """Bytes of the storages autograd saves that the plan drops and recomputes."""
        return sum(row.nbytes for row in self.rows if row.decision == "drop")

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the storages autograd saves that the plan copies to host memory."""
        return sum(row.nbytes for row in self.rows if row.decision == "offload")

    def __str__(self) -> str:
        return _render(self)

    def __repr__(self) -> str:
        budget = "no budget" if self.budget_bytes is None else f"budget {in_units(self.budget_bytes)}"
        peaks = f"peak {in_units(self.predicted_peak_bytes)} instead of {in_units(self.eager_peak_bytes)}"
        return f"Report({budget}, {peaks}, overhead {self.overhead_ratio:.1%})"

    def _repr_html_(self) -> str:
        saved_ratio = 1 - self.predicted_peak_bytes / self.eager_peak_bytes
        unit, scale = unit_of(self.eager_peak_bytes)
        headline = (
            f"{self.predicted_peak_bytes / scale:.4g} {unit} instead of {self.eager_peak_bytes / scale:.4g} {unit} "
            f"({saved_ratio:.0%} less), about {self.overhead_ratio:.1%} more time a step"
        )
        picture = timeline_svg(self.eager_timeline, self.timeline, self.budget_bytes)
        return report_html(headline, (f"peak at {self.peak_at}", *self.notes), _summary(self), unit, picture)


def build_report(
    profile: GraphProfile,
    point: FrontierPoint,
    verification: Verification,
    *,
    budget_bytes: int | None,
    eager_peak_bytes: int,
    least_bytes: int | Callable[[], int],
    peak_step: int,
    bound_seconds: float,
    plan_seconds: float,
    notes: tuple[str, ...],
    inplace: tuple[InplaceDecision, ...],
    cuda: AllocatorPeaks | None = None,
    modules: tuple[ModuleRow, ...] = (),
    points: Sequence[FrontierPoint] = (),
) -> Report:
    """Return the report of ``point``; no plan within the budget recomputes for less than ``bound_seconds``.

    ``least_bytes``: the least reachable peak; where it is not known, a function that is called when it is asked for, and
    it is not written out. ``points``: all that was planned, peaks falling; empty where nothing was.
    """
    decisions = _decisions(profile, point.plan)
    rows = tuple(
        Row(
            name=s.name,
            nbytes=s.nbytes,
            decision=decisions[s.index],
            reason=s.why_kept,
            source=str(profile.nodes[s.creator].source),
        )
        for s in profile.storages
        if s.num_saves
    )
    step_seconds = profile.step_seconds
    return Report(
        planner=point.plan.planner,
        budget_bytes=budget_bytes,
        predicted_peak_bytes=verification.verified_bytes,
        eager_peak_bytes=eager_peak_bytes,
        overhead_seconds=point.recompute_seconds,
        overhead_ratio=point.recompute_seconds / step_seconds if step_seconds else 0.0,
        gap_ratio=(point.recompute_seconds - bound_seconds) / step_seconds if step_seconds else 0.0,
        plan_seconds=plan_seconds,
        static=profile.static,
        peak_at=str(place_of(profile, peak_step)),
        rows=rows,
        notes=(*notes, *_inplace_note(inplace), *_offload_note(profile, point.plan)),
        inplace=inplace,
        cuda=cuda,
        launches=profile.launches,
        modules=modules,
        timeline=simulate(profile, point.plan, with_steps=True),
        eager_timeline=simulate(profile, keep_all(profile), with_steps=True),
        graph=graph_nodes(profile, point.plan),
        frontier=tuple(
            PlanCost(each.peak_bytes, each.recompute_seconds / step_seconds if step_seconds else 0.0) for each in points
        ),
        _least_bytes=least_bytes,
    )


def _decisions(profile: GraphProfile, plan: Plan) -> list[str]:
    """Return what ``plan`` does with each storage."""
    fetched, dropped = plan.fetched, set(plan.dropped)
    return [
        "keep" if s.index not in dropped else "offload" if s.recipe in fetched else "drop" for s in profile.storages
    ]


def _offload_note(profile: GraphProfile, plan: Plan) -> tuple[str, ...]:
    if not plan.offloads:
        return ()
    sent = sum(sent_bytes(profile, plan).values())
    ahead = sum(offload.after is not None for offload in plan.offloads)
    waits = sum(offload.stall_seconds for offload in plan.offloads)
    return (
        f"offload: what {len(plan.offloads)} ops make, {sent / 1e6:.3f} MB, waits for the backward in host memory, "
        f"{ahead} of them fetched ahead of their use; the step waits {waits * 1e3:.3f} ms for the link (estimate); no bit "
        "changes",
    )


def _inplace_note(decisions: tuple[InplaceDecision, ...]) -> tuple[str, ...]:
    done = [decision for decision in decisions if not decision.why_not]
    if not done:
        return ()
    largest = max(decision.nbytes for decision in done)
    return (f"{len(done)} ops write over their input; the largest so spares {largest / 1e6:.3f} MB while it runs",)


def figures(report: Report) -> list[tuple[str, int | None]]:
    """Return what a report sums up, in words and bytes; None: no budget."""
    rows: list[tuple[str, int | None]] = [
        ("budget", report.budget_bytes),
        ("predicted peak", report.predicted_peak_bytes),
        ("eager peak", report.eager_peak_bytes),
        *([("least reachable peak", report.floor_bytes)] if isinstance(report._least_bytes, int) else []),
        ("parameters", report.static.parameters_bytes),
        ("optimizer state", report.static.optimizer_state_bytes),
        ("buffers and batch", report.static.buffers_bytes + report.static.inputs_bytes),
        ("saved for backward, kept", report.kept_bytes),
        ("saved for backward, dropped", report.dropped_bytes),
        *([("saved for backward, offloaded", report.offloaded_bytes)] if report.offloaded_bytes else []),
    ]
    if report.cuda is not None:
        rows.append(("allocated by CUDA's allocator", report.cuda.allocated_bytes))
        rows.append(("reserved by CUDA's allocator", report.cuda.reserved_bytes))
        if report.cuda.most_allocated_bytes > report.cuda.allocated_bytes:
            rows.append(("allocated with cuDNN's workspace, upper bound", report.cuda.most_allocated_bytes))
    return rows


def _summary(report: Report) -> list[tuple[str, str]]:
    _, scale = unit_of(report.eager_peak_bytes)
    return [(name, "none" if nbytes is None else f"{nbytes / scale:.4f}") for name, nbytes in figures(report)]


def _bound(launches: Launches | None) -> str:
    if launches is None:
        return ""
    host, device = (f"{seconds * 1e3:.1f} ms" for seconds in (launches.host_seconds, launches.device_seconds))
    by = "host" if launches.bound_by_host else "device"
    return f"; the {by} bounds the step: {host} of launches, {device} of computing"


def _render(report: Report) -> str:
    largest = sorted(report.rows, key=lambda row: -row.nbytes)[:8]
    table = tabulate(
        _summary(report),
        headers=("memory of one training step", unit_of(report.eager_peak_bytes)[0]),
        disable_numparse=True,
    )
    detail = tabulate(
        [(row.name, f"{row.nbytes / 1e6:.3f}", row.decision, row.reason or row.source) for row in largest],
        headers=("largest saved tensors", "MB", "plan", "where, or why kept"),
        disable_numparse=True,
    )
    lines = [
        table,
        f"peak at {report.peak_at}",
        f"recompute {report.overhead_seconds * 1e3:.3f} ms a step, {report.overhead_ratio:.1%} of the eager step "
        f"(estimate{_bound(report.launches)}); planner {report.planner}, {report.plan_seconds:.1f} s",
        f"the best of all plans could save at most {report.gap_ratio:.2%} of the eager step beyond this one",
        "",
        detail,
        *(f"note: {note}" for note in report.notes),
    ]
    return "\n".join(lines)
