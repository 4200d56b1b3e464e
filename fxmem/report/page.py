"""A report as one page for a browser, which loads nothing.

In: a :class:`Report`, and advice if there is any. Out: the page's data (:func:`page_data`), and the page
(:func:`page_html`): the template of ``assets/``, the libraries of ``vendor/`` with their licences, the data as JSON.

NOTE [The page's data]

``_bytes`` are whole bytes of the whole step, ``_seconds`` seconds. Tables are ``columns`` and ``rows``, each row a list.

1. ``schema``: 1. ``title``, ``sentence`` (the answer in words), ``peak_at``, ``notes``: texts.
2. ``budget_bytes`` (or None), ``eager_peak_bytes``, ``planned_peak_bytes``, ``overhead_ratio``; ``figures``: pairs of a
   text and bytes.
3. ``timeline``: lists of one length. ``x`` counts ticks of the step; what is recomputed lies between two. ``after_bytes``
   is under the plan, ``before_bytes`` as it is: None where something is recomputed, which ``recompute`` marks with 1.
   ``label`` is a place in ``labels``. ``phases``: (name, first tick, one past the last).
4. ``modules``, ``nodes``, ``storages``: tables, in order of execution or of the model. Of nodes, ``module`` and ``line``
   are places in ``texts``, ``reads`` is a list of places in ``rows``.
5. ``frontier``: a table, empty where it is not known. ``advice``: None, or ``verdict`` and a table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from fxmem.errors import in_units
from fxmem.report.graph import DROPPED_COLOUR, INPLACE_COLOUR, KEPT_COLOUR
from fxmem.report.plots import BUDGET_COLOUR, EAGER_COLOUR, PLAN_COLOUR, RECOMPUTE_COLOUR, curve_of, phases_of
from fxmem.report.text import Advised, Report, figures

SCHEMA = 1
VENDORED = (
    ("uPlot.iife.min.js", "uPlot.LICENSE"),
    ("d3-hierarchy.min.js", "d3-hierarchy.LICENSE"),
    ("dagre.min.js", "dagre.LICENSE"),
)
SCRIPTS = ("elements.js", "memory.js", "modules.js", "graph_tree.js", "graph.js", "tables.js", "frontier.js", "page.js")
COLOURS = {
    "eager": EAGER_COLOUR,
    "plan": PLAN_COLOUR,
    "budget": BUDGET_COLOUR,
    "recompute": RECOMPUTE_COLOUR,
    "kept": KEPT_COLOUR,
    "recomputed": DROPPED_COLOUR,
    "inplace": INPLACE_COLOUR,
}
MODULE_COLUMNS = (
    "path",
    "kind",
    "parameters_bytes",
    "gradients_bytes",
    "optimizer_state_bytes",
    "saved_bytes",
    "recomputed_bytes",
    "seconds",
)
ADVICE_COLUMNS = ("label", "peak_bytes", "saved_bytes", "disruption", "fits", "line", "note")
Table = dict[str, Any]


def page_data(report: Report, title: str, advice: Advised | None = None) -> dict[str, Any]:
    """Return what the page shows (NOTE [The page's data]), ready for ``json.dumps``."""
    return {
        "schema": SCHEMA,
        "title": title,
        "sentence": sentence(report),
        "peak_at": report.peak_at,
        "notes": list(report.notes),
        "budget_bytes": report.budget_bytes,
        "eager_peak_bytes": report.eager_peak_bytes,
        "planned_peak_bytes": report.predicted_peak_bytes,
        "overhead_ratio": report.overhead_ratio,
        "figures": [list(pair) for pair in figures(report)],
        "timeline": _timeline(report),
        "modules": _table(MODULE_COLUMNS, [[getattr(row, c) for c in MODULE_COLUMNS] for row in report.modules]),
        "nodes": _nodes(report),
        "storages": _table(
            ("name", "nbytes", "decision", "source", "reason"),
            [[row.name, row.nbytes, row.decision, row.source, row.reason] for row in report.rows],
        ),
        "frontier": _table(
            ("peak_bytes", "overhead_ratio"), [[each.peak_bytes, each.overhead_ratio] for each in report.frontier]
        ),
        "advice": None if advice is None else {"verdict": advice.verdict, **_advice_table(advice)},
    }


def sentence(report: Report) -> str:
    """Return the answer in words, with its figures."""
    eager, planned = report.eager_peak_bytes, report.predicted_peak_bytes
    text = f"One training step takes {in_units(eager)} of memory at its peak as the model is."
    if planned != eager:
        text += f" Under this plan it takes {in_units(planned)}, {abs(1 - planned / eager):.0%} "
        text += "less" if planned < eager else "more"
        if report.overhead_ratio:
            text += f", and about {report.overhead_ratio:.1%} more time, in which dropped values are computed again"
        text += "."
    else:
        text += " The plan changes nothing."
    if report.budget_bytes is None:
        return text + " No budget was set."
    kept = "" if planned <= report.budget_bytes else ", which no plan that was found keeps"
    return f"{text} The budget was {in_units(report.budget_bytes)}{kept}."


def page_html(data: dict[str, Any]) -> str:
    """Return the page that shows ``data``."""
    assets, vendor = files("fxmem.report") / "assets", files("fxmem.report") / "vendor"

    def read(folder: Any, name: str) -> str:
        return str((folder / name).read_text(encoding="utf-8"))

    libraries = [f"/*\n{read(vendor, terms).strip()}\n*/\n{read(vendor, name)}" for name, terms in VENDORED]
    colours = "".join(f"--{name}:{colour};" for name, colour in COLOURS.items())
    style = f"{read(vendor, 'uPlot.min.css')}\n:root{{{colours}}}\n{read(assets, 'page.css')}"
    return Template(read(assets, "page.html")).substitute(
        title=escape(data["title"]),
        sentence=escape(data["sentence"]),
        style=style,
        libraries="\n".join(libraries),
        script="\n".join(read(assets, name) for name in SCRIPTS),
        data=json_in_html(data),
    )


def json_in_html(data: Any) -> str:
    """Return ``data`` as JSON that can stand within a ``<script>`` element, whatever its texts are."""
    return (
        json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    return {"columns": list(columns), "rows": [list(row) for row in rows]}


class _Texts(dict[str, int]):
    """Texts by their place in a list: each is written once."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def _timeline(report: Report) -> dict[str, Any]:
    labels = _Texts()
    after = [
        (round(x, 3), nbytes, int(recompute), labels[step.label])
        for (x, nbytes, recompute), step in zip(curve_of(report.timeline), report.timeline.steps, strict=True)
    ]
    before = {x: nbytes for x, nbytes, _ in curve_of(report.eager_timeline)}
    return {
        "x": [x for x, *_ in after],
        "before_bytes": [before.get(x) for x, *_ in after],
        "after_bytes": [nbytes for _, nbytes, *_ in after],
        "recompute": [recompute for *_, recompute, _ in after],
        "label": [label for *_, label in after],
        "labels": list(labels),
        "phases": [[phase.value, begin, end] for phase, begin, end in phases_of(report.eager_timeline)],
    }


def _nodes(report: Report) -> Table:
    texts = _Texts()
    in_place = {decision.node for decision in report.inplace if not decision.why_not}
    columns = ("name", "op", "module", "line", "reads", "nbytes", "kept_bytes", "dropped_bytes", "seconds", "in_place")
    rows = [
        [
            node.name,
            node.op,
            texts[node.module_path],
            texts[node.source_line],
            list(node.reads),
            node.nbytes,
            node.kept_bytes,
            node.dropped_bytes,
            float(f"{node.seconds:.3g}"),
            int(node.name in in_place),
        ]
        for node in report.graph
    ]
    return {**_table(columns, rows), "texts": list(texts)}


def _advice_table(advice: Advised) -> Table:
    return _table(ADVICE_COLUMNS, [[row[c] for c in ADVICE_COLUMNS] for row in advice.to_dict()["rows"]])
