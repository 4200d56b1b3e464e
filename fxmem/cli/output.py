"""Answers of the command line as text, JSON, Markdown, or Markdown for GitHub.

In: an :class:`Answer`. The JSON is an object of ``schema`` (1), ``command``, ``model``, ``assumed`` and the answer's data,
in bytes and seconds as the names say; fields are added to it, not renamed or taken away.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tabulate import tabulate

from fxmem.cli.assumptions import Assumed
from fxmem.errors import unit_of

SCHEMA = 1
FITS, DOES_NOT_FIT, USAGE, NOT_CAPTURED = range(4)
"""Exit statuses."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headers; numbers are texts already."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command found."""

    command: str
    headline: str
    """The answer in one line."""
    data: dict[str, Any]
    """For JSON."""
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    status: int = FITS
    model: str = ""
    assumed: tuple[Assumed, ...] = field(default=())


def sized(nbytes: int, like: int | None = None) -> str:
    """Return bytes as text, in the unit that fits ``like``, or themselves."""
    unit, scale = unit_of(nbytes if like is None else like)
    return f"{nbytes / scale:.4g} {unit}" if like is None else f"{nbytes / scale:.4f} {unit}"


def as_text(answer: Answer, color: bool = False) -> str:
    """Return the answer for a terminal."""
    bold, plain = ("\x1b[1m", "\x1b[0m") if color else ("", "")
    shade = ("\x1b[32m", "\x1b[31m")[min(answer.status, 1)] if color else ""
    lines = [f"{bold}{shade}{answer.headline}{plain}"]
    for table in answer.tables:
        lines += ["", *_table(table, "simple").splitlines()]
    lines += ["", *answer.notes] if answer.notes else []
    if answer.assumed:
        lines += ["", f"{bold}assumed{plain}", *(f"  {each}" for each in answer.assumed)]
    return "\n".join(lines)


def as_json(answer: Answer, color: bool = False) -> str:
    """Return the answer for programs."""
    head = {"schema": SCHEMA, "command": answer.command, "model": answer.model, "answer": answer.headline}
    assumed = [each.to_dict() for each in answer.assumed]
    return json.dumps({**head, "status": answer.status, **answer.data, "assumed": assumed}, indent=1)


def as_markdown(answer: Answer, color: bool = False) -> str:
    """Return the answer for a document."""
    lines = [f"**{answer.headline}**"]
    for table in answer.tables:
        lines += ["", _table(table, "github")]
    lines += ["", *(f"- {note}" for note in answer.notes)] if answer.notes else []
    if answer.assumed:
        lines += ["", "Assumed: " + "; ".join(map(str, answer.assumed)) + "."]
    return "\n".join(lines)


def as_github(answer: Answer, color: bool = False) -> str:
    """Return the answer for a workflow of GitHub: an annotation, then a summary with the tables folded."""
    level = "notice" if answer.status == FITS else "error"
    lines = [f"::{level} title=fxmem {answer.command} {answer.model}::{answer.headline}", "", f"### {answer.headline}"]
    for table in answer.tables:
        title = table.title or table.headers[0]
        lines += ["", f"<details><summary>{title}</summary>", "", _table(table, "github"), "", "</details>"]
    lines += ["", *(f"- {note}" for note in answer.notes)] if answer.notes else []
    lines += ["", *(f"- assumed: {each}" for each in answer.assumed)] if answer.assumed else []
    return "\n".join(lines)


def _table(table: Table, style: str) -> str:
    sides = ["left", *["right"] * (len(table.headers) - 1)]
    if table.rows and not any(c.isdigit() for c in table.rows[0][-1][:1]):
        sides[-1] = "left"
    return tabulate(table.rows, headers=table.headers, tablefmt=style, disable_numparse=True, colalign=sides)


WRITERS: dict[str, Callable[[Answer, bool], str]] = {
    "text": as_text,
    "json": as_json,
    "markdown": as_markdown,
    "github": as_github,
}


def shown(answer: Answer, style: str, quiet: bool, no_color: bool) -> str:
    """Return what is printed."""
    if quiet and style != "json":
        return answer.headline
    color = sys.stdout.isatty() and not no_color and "NO_COLOR" not in os.environ
    return WRITERS[style](answer, color)


def bytes_table(title: str, pairs: Sequence[tuple[str, int]], like: int) -> Table:
    """Return (name, bytes) pairs as a table."""
    unit, scale = unit_of(like)
    return Table((title, unit), tuple((name, f"{nbytes / scale:.4f}") for name, nbytes in pairs), title)
