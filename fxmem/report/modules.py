"""A model module by module: bytes of parameters, gradients and optimizer state, what is saved and recomputed, and time.

In: the model, a profile and a plan. Out: :class:`ModuleRow` objects, one for each module that has parameters or ops of its
own, and tables of them: like layers that follow one another are one row (``layers.0..31``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from tabulate import tabulate

from fxmem.errors import unit_of
from fxmem.ir import KEEP, GraphProfile, PlainData, Plan
from fxmem.profiling.optimizer_on_meta import state_bytes
from fxmem.profiling.training_step import TrainingStep

MOST_ROWS = 30
"""More rows than this are collapsed one level of the module path further."""


@dataclass(frozen=True, slots=True)
class ModuleRow(PlainData):
    """What is a module's own, or all below it where rows are collapsed."""

    path: str
    """Such as ``layers.0.mlp``, or ``layers.0..31.mlp`` of several; empty: the model itself."""
    kind: str
    """Name of its class."""
    count: int
    """How many like modules are summed up."""
    parameters_bytes: int
    """Parameters that have two names count at the first."""
    gradients_bytes: int
    """Of the parameters that require grad, as large as themselves."""
    optimizer_state_bytes: int | None
    """None: it was not seen parameter by parameter."""
    saved_bytes: int
    """Of what autograd saves, made here: what the plan keeps."""
    recomputed_bytes: int
    """What the plan drops and recomputes."""
    seconds: float
    """Estimated time of its forward."""


def module_rows(model: torch.nn.Module, profile: GraphProfile, plan: Plan, step: TrainingStep) -> tuple[ModuleRow, ...]:
    """Return the rows of a model, in its own order."""
    state_of = state_bytes(step, tuple(model.parameters()))
    saved: dict[str, list[int]] = {}
    seconds: dict[str, float] = {}
    for node in profile.nodes:
        path = node.source.module_path
        seconds[path] = seconds.get(path, 0.0) + node.seconds
        of_path = saved.setdefault(path, [0, 0])
        for storage in (profile.storages[s] for s in node.creates):
            of_path[plan.limits[storage.index] != KEEP] += storage.nbytes if storage.num_saves else 0
    rows, seen = [], set[int]()
    known = dict(model.named_modules(remove_duplicate=False))
    for path in (*known, *(path for path in saved if path not in known)):
        module = known.get(path)
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen] if module is not None else []
        seen.update(map(id, own))
        if not own and path not in saved:
            continue
        kept, dropped = saved.get(path, (0, 0))
        learning = [p for p in own if p.requires_grad]
        states = [state_of.get(id(p)) for p in learning]
        rows.append(
            ModuleRow(
                path=path,
                kind="" if module is None else type(module).__name__,
                count=1,
                parameters_bytes=sum(p.nbytes for p in own),
                gradients_bytes=sum(p.nbytes for p in learning),
                optimizer_state_bytes=None if None in states else sum(s for s in states if s is not None),
                saved_bytes=kept,
                recomputed_bytes=dropped,
                seconds=seconds.get(path, 0.0),
            )
        )
    return tuple(rows)


def collapsed(rows: Sequence[ModuleRow], depth: int | None = None) -> tuple[ModuleRow, ...]:
    """Return rows of at most ``depth`` parts of a path, like ones that follow one another as one.

    Default depth: as many parts as give at most :data:`MOST_ROWS` rows.
    """
    deepest = max((row.path.count(".") + 1 for row in rows if row.path), default=1)
    for each in (depth,) if depth is not None else range(deepest, 0, -1):
        found = _folded(_summed(rows, each))
        if len(found) <= MOST_ROWS:
            break
    return found


def _summed(rows: Sequence[ModuleRow], depth: int) -> list[ModuleRow]:
    """Return one row for each path cut to ``depth`` parts, with all that is below it."""
    result: dict[str, ModuleRow] = {}
    for row in rows:
        path = ".".join(row.path.split(".")[:depth])
        kind = row.kind if path == row.path else ""
        result[path] = _added(result[path], row) if path in result else replace(row, path=path, kind=kind)
    return list(result.values())


def _added(one: ModuleRow, other: ModuleRow, count: int = 0) -> ModuleRow:
    states = one.optimizer_state_bytes, other.optimizer_state_bytes
    return replace(
        one,
        count=one.count + count,
        parameters_bytes=one.parameters_bytes + other.parameters_bytes,
        gradients_bytes=one.gradients_bytes + other.gradients_bytes,
        optimizer_state_bytes=None if None in states else sum(s for s in states if s is not None),
        saved_bytes=one.saved_bytes + other.saved_bytes,
        recomputed_bytes=one.recomputed_bytes + other.recomputed_bytes,
        seconds=one.seconds + other.seconds,
    )


def _folded(rows: Sequence[ModuleRow]) -> tuple[ModuleRow, ...]:
    """Sum up like rows whose paths differ in one number only: of layers that hold the same bytes."""
    groups: dict[tuple[object, ...], list[ModuleRow]] = {}
    for row in rows:
        groups.setdefault(_likeness(row), []).append(row)
    result = []
    for members in groups.values():
        total = members[0]
        for member in members[1:]:
            total = _added(total, member, member.count)
        result.append(replace(total, path=_path_of([member.path for member in members])))
    return tuple(result)


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _likeness(row: ModuleRow) -> tuple[object, ...]:
    pattern = _NUMBER.sub("#", row.path, count=1)
    return pattern, row.kind, row.parameters_bytes, row.gradients_bytes, row.saved_bytes, row.recomputed_bytes


def _path_of(paths: Sequence[str]) -> str:
    """Return ``layers.0..31.mlp`` for paths that differ in their first number."""
    if len(paths) == 1:
        return paths[0]
    numbers = [int(match[0]) for path in paths if (match := _NUMBER.search(path))]
    runs = [(n, i) for i, n in enumerate(numbers) if i == 0 or n != numbers[i - 1] + 1]
    ends = [numbers[start - 1] for _, start in runs[1:]] + [numbers[-1]]
    told = ",".join(
        str(first) if first == end else f"{first}..{end}" for (first, _), end in zip(runs, ends, strict=True)
    )
    return _NUMBER.sub(told, paths[0], count=1)


def module_table(rows: Sequence[ModuleRow], depth: int | None = None, style: str = "simple") -> str:
    """Return the rows as a table, collapsed and folded, with their sum."""
    unit, cells = table_cells(rows, depth)
    heads = ("module", "class", "parameters", "gradients", "optimizer", "saved", "recomputed", "ms")
    if not cells:
        return "what each module holds is not told of a model that is planned in its parts"
    units = tuple(f"{head}, {unit}" if head in heads[2:7] else head for head in heads)
    return tabulate(
        cells, headers=units, tablefmt=style, disable_numparse=True, colalign=("left", "left", *["right"] * 6)
    )


def table_cells(rows: Sequence[ModuleRow], depth: int | None = None) -> tuple[str, list[tuple[str, ...]]]:
    """Return the unit and the cells of the table, the last row being the sum."""
    if not rows:  # a model planned in its parts
        return "B", []
    total = replace(rows[0], path="all", kind="")
    for row in rows[1:]:
        total = _added(total, row)
    unit, scale = unit_of(max(total.parameters_bytes, total.saved_bytes + total.recomputed_bytes))

    def sized(nbytes: int | None) -> str:
        return "-" if nbytes is None else f"{nbytes / scale:.4f}"

    cells = []
    for row in (*collapsed(rows, depth), total):
        name = (row.path or "(the model itself)") + (f" (x{row.count})" if row.count > 1 else "")
        held = (
            row.parameters_bytes,
            row.gradients_bytes,
            row.optimizer_state_bytes,
            row.saved_bytes,
            row.recomputed_bytes,
        )
        cells.append((name, row.kind, *map(sized, held), f"{row.seconds * 1e3:.3f}"))
    return unit, cells
