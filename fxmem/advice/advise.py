"""``fxmem.advise``: what each habit that saves memory brings for one model, and the smallest stack of them that fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from tabulate import tabulate

from fxmem.advice.evaluate import MOST_CHANGES, Evaluator, Row, Stack, place_in_words, row_of, smallest_stack
from fxmem.advice.habits import HABITS, Disruption, Habit
from fxmem.advice.lengths import habits_of, lengths_of
from fxmem.advice.subject import Subject
from fxmem.api.arguments import Options, check_model, example_of, settings_of, with_options
from fxmem.api.budget import parse_bytes
from fxmem.errors import InputError, unit_of
from fxmem.ir import PlainData
from fxmem.progress import stage, told

PARTS_OF_STEP = frozenset({"step", "optimizer", "loss_fn", "autocast", "accumulate", "scaler"})
SECONDS_EACH = 2.0
"""About what an estimate takes."""


@dataclass(frozen=True, slots=True)
class Advice(PlainData):
    """What habits bring: rows by whether they fit, by disruption, by bytes. ``str()`` of it is a table."""

    peak_bytes: int
    """What a budget bounds of the step as it is."""
    peak_at: str
    limit_bytes: int | None
    rows: tuple[Row, ...]
    stack: Stack | None
    """The smallest stack that fits, or the one that comes nearest; None without a limit, where the step fits as it is, and
    where nothing helps."""
    _named: dict[str, Row] = field(repr=False, compare=False)

    def __getitem__(self, name: str) -> Row:
        """Return the row of that name. Errors: ``InputError``."""
        if name not in self._named:
            raise InputError(f"no habit is called {name!r}; known are {', '.join(self._named)}")
        return self._named[name]

    @property
    def verdict(self) -> str:
        """What to do, in one sentence."""
        unit, scale = unit_of(self.peak_bytes)

        def sized(nbytes: int) -> str:
            return f"{nbytes / scale:.4g} {unit}"

        if self.limit_bytes is None:
            return f"peak {sized(self.peak_bytes)} at {self.peak_at}; without a budget nothing has to be done"
        if self.peak_bytes <= self.limit_bytes:
            return f"it fits as it is: {sized(self.peak_bytes)} of {sized(self.limit_bytes)}"
        if self.stack is None:
            return f"nothing known here helps: {sized(self.peak_bytes)} of {sized(self.limit_bytes)}"
        changes = " + ".join(self[name].label for name in self.stack.names)
        if self.stack.fits:
            return f"the smallest change to {sized(self.limit_bytes)}: {changes}; peak {sized(self.stack.peak_bytes)}"
        return (
            f"no {MOST_CHANGES} of these changes were found to fit {sized(self.limit_bytes)}; "
            f"nearest: {changes}; peak {sized(self.stack.peak_bytes)}"
        )

    def lines(self) -> list[str]:
        """Return the lines to write for the stack."""
        return [] if self.stack is None else [self[name].line for name in self.stack.names]

    def table(self, style: str = "simple") -> str:
        """Return the rows as a table of ``tabulate``'s style."""
        unit, scale = unit_of(self.peak_bytes)
        head = ("habit", f"peak, {unit}", f"saves, {unit}", "disruption", "what to write, or why not")
        body = [
            (
                row.label + {True: " (fits)", False: "", None: ""}[row.fits],
                "-" if row.peak_bytes is None else f"{row.peak_bytes / scale:.4f}",
                "-" if row.saved_bytes is None else f"{row.saved_bytes / scale:.4f}",
                row.disruption,
                row.line + (f"; {row.note}" if row.note else "") if row.saved_bytes else row.note,
            )
            for row in self.rows
        ]
        aligned = ("left", "right", "right", "left", "left")
        return tabulate(body, headers=head, tablefmt=style, disable_numparse=True, colalign=aligned)

    def to_markdown(self) -> str:
        """Return verdict and table for a document."""
        return f"**{self.verdict}**\n\n{self.table('github')}"

    def __str__(self) -> str:
        return "\n".join([self.verdict, *(f"  {line}" for line in self.lines()), "", self.table()])


@with_options
def advise(
    model: torch.nn.Module,
    example_args: Any = None,
    example_kwargs: dict[str, Any] | None = None,
    *,
    budget: float | str | None = None,
    device: torch.device | str | None = None,
    lengths: Iterable[Any] | None = None,
    **options: Unpack[Options],
) -> Advice:
    """Return what each habit that saves memory brings for a training step of ``model``, and the smallest stack that fits.

    Each change is made to a copy of the model without bytes, and the step is estimated again; the model given stays as it
    is. Bytes are whole numbers; on CUDA they are those that a budget bounds there.

    - ``budget``: bytes, or text such as "8GB"; without, nothing has to fit.
    - ``device``: as of :func:`fxmem.estimate`.
    - ``lengths``: of the data's sequences, or the batches of its data loader, which are read once. There are rows then for
      p50, p95 and the longest, and for batches of like lengths.

    Errors: ``InputError``, ``BudgetError``, and those of the estimate of the step as it is; a change that cannot be made is
    a row that says so.
    """
    check_model(model)
    settings = settings_of(options)
    example_of(model, example_args, example_kwargs)
    limit_bytes = None if budget is None else parse_bytes(budget)
    args = tuple(example_args) if isinstance(example_args, tuple | list) else (example_args,)
    given = Subject(
        model,
        () if example_args is None else args,
        dict(example_kwargs or {}),
        settings.step,
        _device_of(model, device),
    )
    habits = HABITS if lengths is None else (*habits_of(lengths_of(lengths)), *HABITS)
    others = {name: value for name, value in options.items() if name not in PARTS_OF_STEP}
    evaluator = Evaluator(given.as_ghost(), others, limit_bytes)
    with told(f"advising on {type(model).__name__}", SECONDS_EACH * len(habits) + settings.plan_seconds):
        return _advice(habits, evaluator, limit_bytes)


def _device_of(model: torch.nn.Module, device: torch.device | str | None) -> torch.device | str | None:
    """Return where the step of a copy on the meta device is: where the model is."""
    own = next(model.parameters()).device
    return device if device is not None or own.type != "cuda" else own


def _advice(habits: tuple[Habit, ...], evaluator: Evaluator, limit_bytes: int | None) -> Advice:
    stage("estimating the step as it is")
    base = evaluator.estimate()
    rows = []
    for habit in habits:
        stage(f"estimating {habit.label}")
        rows.append(row_of(habit, evaluator, base, limit_bytes))
    stack = None
    if limit_bytes is not None and base.bound_bytes > limit_bytes:
        stage("looking for the smallest stack")
        stack = smallest_stack(habits, rows, evaluator, base.bound_bytes, limit_bytes)
    ranks = {str(disruption): disruption for disruption in Disruption}
    rows.sort(
        key=lambda row: (row.fits is not True, row.peak_bytes is None, ranks[row.disruption], -(row.saved_bytes or 0))
    )
    place = place_in_words(base.peak_at)
    return Advice(base.bound_bytes, place, limit_bytes, tuple(rows), stack, {row.name: row for row in rows})
