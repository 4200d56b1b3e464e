"""``fxmem watch``: a training script run under a watch of its memory, its budget and graphs that stay.

In: a script and its arguments. Out: an :class:`Answer` when it has ended; what it prints goes where it prints it.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import fxmem
from fxmem.cli.options import OF_MEMORY, given
from fxmem.cli.output import DOES_NOT_FIT, FITS, Answer, Table, sized
from fxmem.errors import InputError, unit_of


def watch(arguments: argparse.Namespace) -> Answer:
    """Run a script under the watch; return what it took. Errors: ``InputError``; the script's own go on."""
    script = Path(arguments.script)
    if not script.is_file():
        raise InputError(f"no script is at {arguments.script}; write fxmem watch [options] script.py [its arguments]")
    budget = given(OF_MEMORY[2], arguments).value
    with ExitStack() as stack:
        graphs = stack.enter_context(fxmem.watch_graphs())
        log = stack.enter_context(open(arguments.log, "w", encoding="utf-8")) if arguments.log else None

        def note(record: dict[str, float]) -> None:
            if log is not None:
                print(json.dumps(record), file=log, flush=True)

        options: dict[str, Any] = {"live": False} if arguments.quiet else {}
        memory = stack.enter_context(
            fxmem.watch([], budget=budget if isinstance(budget, str) else None, callback=note, **options)
        )
        with _as_main(script, arguments.args):
            status = _run(script)
    return _answer(arguments.script, status, memory, graphs)


def _run(script: Path) -> int:
    """Run a script and return its exit status."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


@contextmanager
def _as_main(script: Path, args: Sequence[str]) -> Iterator[None]:
    """Let the interpreter's arguments and path be as if ``script`` were run by itself."""
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[0] = [str(script), *args], str(script.resolve().parent)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


def _answer(script: str, status: int, memory: fxmem.MemoryWatch, graphs: fxmem.GraphWatch) -> Answer:
    readings = [each for each in memory.readings() if each.peak_bytes]
    unit, scale = unit_of(max((each.peak_bytes for each in readings), default=0))
    rows, devices, over = [], [], False
    for each in readings:
        budget = memory.budgets.get(each.device)
        over |= budget is not None and each.peak_bytes > budget
        columns = (each.peak_bytes, each.reserved_bytes, each.allocated_bytes, *([] if budget is None else [budget]))
        rows.append((each.device, *(f"{nbytes / scale:.4f}" for nbytes in columns), *(["-"] if budget is None else [])))
        devices.append({**each.to_dict(), "budget_bytes": budget})
    heads = ("device", f"peak, {unit}", "reserved at the end", "allocated at the end", "budget")
    peaks = ", ".join(f"{sized(each.peak_bytes)} on {each.device}" for each in readings) or "nothing was allocated"
    verdict = {True: "; over the budget", False: "; within the budget"}[over] if memory.budgets else ""
    data = {
        "num_steps": memory.num_steps,
        "script_status": status,
        "fits": not over if memory.budgets else None,
        "devices": devices,
        "held_graphs": [each.to_dict() for each in graphs.found],
    }
    notes = (*(str(each) for each in graphs.found), *([f"the script ended with status {status}"] if status else []))
    headline = f"peak {peaks} in {memory.num_steps} steps{verdict}"
    table = Table(heads, tuple(rows), "by device")
    return Answer("watch", headline, data, (table,), notes, status or (DOES_NOT_FIT if over else FITS), script)
