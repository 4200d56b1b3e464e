"""fxmem beside its peers on the same models in one run: ``python -m benchmarks`` (or ``make bench``).

For each model: every peer, then fxmem without a budget, at each peer's measured peak, and at a ladder of budgets. Each
peer has a process of its own, in which eager steps and the peer's steps alternate (benchmarks/measure.py); so have fxmem's
budgets together. Results go to JSON after each measurement; a second run takes up where the first stopped.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from tabulate import tabulate

from benchmarks import models
from benchmarks.measure import Row, measure
from benchmarks.results_file import RESULTS, load_rows, machine, save_rows
from benchmarks.verdicts import EAGER_PEERS, OURS, OURS_COMPILED, Verdict, megabytes, own_ratio, two_places, verdicts_of
from benchmarks.ways import LEAST, NOT_INSTALLABLE, SHARES, Way, peers

NO_BUDGET = Way("fxmem, no budget", "fxmem")
NO_PEERS = ("fxmem", "fxmem inductor", "autocast", "aot")
"""Kinds of ways at whose peak fxmem is not measured."""
PATIENCE_SECONDS = 600.0
"""A measurement that takes longer is given up, unless told otherwise."""
QUICK_SECONDS = 150.0
"""The deadline of ``--quick``."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    scale: str
    names: tuple[str, ...]
    quick: bool
    inductor: bool
    seconds: float
    again: str | None
    compiled: bool
    """Whether torch.compile's ways are measured."""
    deadline_seconds: float
    """No measurement starts later than this."""
    patience_seconds: float
    """A measurement that takes longer is given up."""
    path: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, print the tables, return the exit status."""
    options = _options(argv)
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", KINETO_LOG_LEVEL="9")
    rows = [row for row in load_rows(options.path) if not _to_be_redone(row, options)]
    progress = Progress(_expected_count(options))
    for row in (row for name in options.names for row in missing_rows(name, list(rows), options, progress)):
        rows.append(row)
        save_rows(options.path, rows, scale=options.scale)
        if progress.elapsed_seconds > options.deadline_seconds:
            progress.say("the time is over; run again to go on from here")
            break
    print("\n".join(report(rows, options.names)))
    return 0


def _to_be_redone(row: Row, options: Options) -> bool:
    return options.again is not None and row.model in options.names and row.way.startswith(options.again)


def _options(argv: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n")[0])
    parser.add_argument("--scale", choices=models.SCALES, default="cpu")
    parser.add_argument("--models", nargs="+", metavar="NAME", help=f"of: {', '.join(models.MODELS)}")
    parser.add_argument("--quick", action="store_true", help="three models, eager peers, at most three minutes")
    parser.add_argument("--inductor", action="store_true", help="torch.compile's own backend too (compiles for long)")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile (compiles for long)")
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="start no measurement later than this")
    parser.add_argument("--seconds", type=float, default=6.0, help="for the timed pairs of one measurement")
    parser.add_argument("--patience", type=float, default=PATIENCE_SECONDS, help="seconds of one measurement at most")
    parser.add_argument("--again", metavar="PREFIX", help="measure anew the ways whose name starts so")
    parser.add_argument("--results", type=Path, help="the JSON file to write and to go on from")
    given = parser.parse_args(argv)
    names = tuple(given.models or (m.name for m in models.MODELS.values() if m.quick or not given.quick))
    for name in names:
        models.get(name)
    default = RESULTS / f"compare_{given.scale}{'_quick' if given.quick else ''}.json"
    seconds = min(given.seconds, 1.0) if given.quick else given.seconds
    return Options(
        scale=given.scale,
        names=names,
        quick=given.quick,
        inductor=given.inductor,
        seconds=seconds,
        again=given.again,
        compiled=not (given.no_compile or given.quick),
        deadline_seconds=given.deadline or (QUICK_SECONDS if given.quick else math.inf),
        patience_seconds=given.patience,
        path=given.results or default,
    )


def _peers(options: Options) -> list[Way]:
    ways = peers(inductor=options.inductor, quick=options.quick)
    return [way for way in ways if options.compiled or not way.compiled]


# -- the work ----------------------------------------------------------------------------------------------------------


def missing_rows(name: str, rows: list[Row], options: Options, progress: Progress) -> Iterator[Row]:
    """Measure the ways of model ``name`` that ``rows`` lacks; yield each new row."""
    done = {row.way: row for row in rows if row.model == name}

    def run(ways: list[Way]) -> Iterator[Row]:
        """Measure in one process those of ``ways`` that are missing."""
        missing = [way for way in ways if way.name not in done]
        for _ in range(len(ways) - len(missing)):
            progress.one_done()
        if missing:
            progress.say(f"{name}: {missing[0].name}")
        for row in in_own_process(name, missing, options, cache):
            done[row.way] = row
            progress.one_done()
            if row.way != missing[-1].name:
                progress.say(f"{name}: {missing[[w.name for w in missing].index(row.way) + 1].name}")
            yield row

    with tempfile.TemporaryDirectory() as cache:
        for peer in _peers(options):
            yield from run([peer])
        yield from run([NO_BUDGET])
        yield from run(budgeted_ways(done[NO_BUDGET.name], list(done.values()), quick=options.quick))
        if options.inductor:
            yield from run(compiled_ways(list(done.values())))


def budgeted_ways(free: Row, rows: list[Row], *, quick: bool) -> list[Way]:
    """Return fxmem at the peak of every peer that is below eager's, and at shares of the span above its floor."""
    if free.floor_bytes is None or free.eager_peak_bytes is None:
        return []
    floor, eager = free.floor_bytes, free.eager_peak_bytes
    ways = [
        Way(OURS + row.way, "fxmem", row.peak_bytes)
        for row in rows
        if row.kind not in NO_PEERS and row.peak_bytes is not None and row.peak_bytes < eager
    ]
    shares = (0.5,) if quick else SHARES
    ways += [Way(f"fxmem {share:.0%} of span", "fxmem", floor + int(share * (eager - floor))) for share in shares]
    return [*ways, Way("fxmem floor", "fxmem", LEAST)]


def compiled_ways(rows: list[Row]) -> list[Way]:
    """Return fxmem in inductor's seat at the peak of each of torch.compile's own ways with inductor, and at its least."""
    peaks = {row.way: row.peak_bytes for row in rows if row.kind == "inductor" and row.peak_bytes is not None}
    ways = [Way(OURS_COMPILED + way, "fxmem inductor", peak) for way, peak in peaks.items()]
    return [*ways, Way("fxmem, inductor least", "fxmem inductor", LEAST)] if ways else []


def in_own_process(name: str, ways: list[Way], options: Options, cache: str) -> Iterator[Row]:
    """Yield the rows of ``ways``, measured in a fresh process: one for each peer, one for all budgets of fxmem.

    ``cache``: the directory of fxmem's plans and op times.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.preload"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_into, args=(sender, name, options.scale, ways, options.seconds, cache))
    process.start()
    sender.close()
    left = list(ways)
    try:
        while left:
            way = left.pop(0)
            found = _received(receiver, options.patience_seconds)
            row = Row(name, way.name, way.kind, way.amount, problem=found) if isinstance(found, str) else found
            facts = machine()
            row.commit, row.cpu, row.date = facts["commit"], facts["cpu"], facts["date"]
            yield row
            if isinstance(found, str):
                break
    finally:  # before the next one starts: what was given up would go on beside it
        process.kill()
        process.join()
    if left:
        yield from in_own_process(name, left, options, cache)


def _received(receiver: Connection, patience_seconds: float) -> Row | str:
    """Return the row that is sent, or why there is none."""
    try:
        return receiver.recv() if receiver.poll(patience_seconds) else f"gave up after {patience_seconds:.0f} s"
    except EOFError:
        return "the process died"


def _measure_into(sender: Connection, name: str, scale: str, ways: list[Way], seconds: float, cache: str) -> None:
    import torch

    device = "cuda" if scale == "gpu" else "cpu"
    torch.set_num_threads(1)
    os.environ["FXMEM_CACHE_DIR"] = cache
    if device == "cuda":  # else eager's own gradients differ from step to step
        torch.use_deterministic_algorithms(True, warn_only=True)
    for row in measure(name, scale, ways, seconds, device):
        sender.send(row)


class Progress:
    """Says on standard error what runs, how much is done and how long the rest may take."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.start = total, 0, time.monotonic()

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def say(self, what: str) -> None:
        elapsed = self.elapsed_seconds
        left = elapsed / self.done * (self.total - self.done) if self.done else float("nan")
        time_left = f"{left / 60:.1f} min left" if self.done else "time left unknown"
        print(f"[{self.done + 1}/{self.total}, {time_left}] {what}", file=sys.stderr, flush=True)

    def one_done(self) -> None:
        self.done = min(self.done + 1, self.total - 1)


def _expected_count(options: Options) -> int:
    num_peers = len(_peers(options))
    ladder = 3 if options.quick else 2 + len(SHARES)
    return len(options.names) * (2 * num_peers + ladder)


# -- the tables --------------------------------------------------------------------------------------------------------


HEADERS = (
    "way", "peak MB", "of eager", "predicted", "allocator", "time / eager", "quartiles", "estimate", "own", "FLOPs",
    "prepare s", "gradients", "buffers",
)  # fmt: skip


def report(rows: list[Row], names: Sequence[str]) -> Iterator[str]:
    """Yield the tables, one for each model, then the verdicts."""
    for name in names:
        of_model = [row for row in rows if row.model == name]
        if of_model:
            yield f"\n{name}: eager peak {megabytes(_first(of_model, lambda r: r.eager_peak_bytes))} MB, step " + (
                f"{1e3 * (_first(of_model, lambda r: r.eager_seconds) or 0):.0f} ms"
            )
            missing = [(peer, reason) for peer, reason in NOT_INSTALLABLE.items()]
            table = [_cells(row, own_ratio(row, of_model)) for row in of_model]
            yield tabulate([*table, *missing], headers=HEADERS, disable_numparse=True)
    yield "\nAt each peer's measured peak: extra time of both, in percent of eager's step (compiled peers: of their own)."
    verdicts = [v for name in names for v in verdicts_of(rows, name)]
    yield tabulate([v.cells() for v in verdicts], headers=Verdict.HEADERS, disable_numparse=True)
    yield from summary(verdicts, rows, names)
    compiled = [v for name in names for v in verdicts_of(rows, name, OURS_COMPILED)]
    if compiled:
        yield "\nfxmem in inductor's seat beside torch.compile's own budgets; extra times of both over the compiler's own."
        yield tabulate([v.cells() for v in compiled], headers=Verdict.HEADERS, disable_numparse=True)


def _cells(row: Row, own: float | None) -> tuple[str, ...]:
    if row.problem is not None:
        return (row.way, row.problem[:60])
    share = (row.peak_bytes or 0) / (row.eager_peak_bytes or 1)
    spread = f"{row.time_ratio_low:.2f}-{row.time_ratio_high:.2f}"
    exact = "exact" if row.predicted_peak_bytes == row.peak_bytes else megabytes(row.predicted_peak_bytes)
    return (
        row.way, megabytes(row.peak_bytes), f"{share:.3f}", exact, megabytes(row.allocator_peak_bytes),
        f"{row.time_ratio:.3f}",
        spread, two_places(row.estimated_ratio), two_places(own), two_places(row.flops_ratio),
        f"{row.prepare_seconds:.1f}", row.gradients or "", row.buffers or "",
    )  # fmt: skip


def summary(verdicts: list[Verdict], rows: list[Row], names: Sequence[str]) -> Iterator[str]:
    """Yield the figures the project steers by."""
    ratios = [v.ratio for v in verdicts if v.ratio is not None]
    if ratios:
        yield (
            f"\nfxmem's extra time over the peer's at the peer's peak: mean {statistics.mean(ratios):.2f}, median "
            f"{statistics.median(ratios):.2f} of {len(ratios)} points; lost {sum(v.lost for v in verdicts)} of "
            f"{len(verdicts)}."
        )
    for name in names:
        of_model = [row for row in rows if row.model == name and row.peak_bytes is not None]
        eager_peers = [r for r in of_model if r.kind in EAGER_PEERS]
        floors = [r.floor_bytes for r in of_model if r.floor_bytes is not None]
        if eager_peers and floors:
            least = min(eager_peers, key=lambda r: r.peak_bytes or 0)
            theirs = f"{megabytes(least.peak_bytes)} ({least.way})"
            yield f"{name}: lowest peak {megabytes(min(floors))} MB, the best eager peer's {theirs}"
    planned = [r for r in rows if r.kind == "fxmem" and r.peak_bytes is not None]
    exact = sum(row.exact for row in planned)
    yield f"of {len(planned)} rows of fxmem, gradients and buffers bitwise and the peak as predicted to the byte: {exact}"


def _first(rows: list[Row], read: Callable[[Row], float | None]) -> float | None:
    return next((value for row in rows if (value := read(row)) is not None), None)


if __name__ == "__main__":
    raise SystemExit(main())
