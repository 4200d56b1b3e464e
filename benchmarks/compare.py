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
from benchmarks.ways import LEAST, NOT_INSTALLABLE, SHARES, Way, peers

NO_BUDGET = Way("fxmem, no budget", "fxmem")
MOST_SECONDS = 600
"""A measurement that takes longer is given up."""
EAGER_PEERS = ("checkpoint", "sequential", "selective")
"""Kinds of ways that recompute in eager PyTorch."""
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
        for row in in_own_process(name, options.scale, missing, options.seconds, cache):
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


def budgeted_ways(free: Row, rows: list[Row], *, quick: bool) -> list[Way]:
    """Return fxmem at the peak of every peer that is below eager's, and at shares of the span above its floor."""
    if free.floor_bytes is None or free.eager_peak_bytes is None:
        return []
    floor, eager = free.floor_bytes, free.eager_peak_bytes
    ways = [
        Way(f"fxmem at {row.way}", "fxmem", row.peak_bytes)
        for row in rows
        if row.kind not in ("fxmem", "autocast", "aot") and row.peak_bytes is not None and row.peak_bytes < eager
    ]
    shares = (0.5,) if quick else SHARES
    ways += [Way(f"fxmem {share:.0%} of span", "fxmem", floor + int(share * (eager - floor))) for share in shares]
    return [*ways, Way("fxmem floor", "fxmem", LEAST)]


def in_own_process(name: str, scale: str, ways: list[Way], seconds: float, cache: str) -> Iterator[Row]:
    """Yield the rows of ``ways``, measured in a fresh process: one for each peer, one for all budgets of fxmem.

    ``cache``: the directory of fxmem's plans and op times.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.preload"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_into, args=(sender, name, scale, ways, seconds, cache))
    process.start()
    sender.close()
    for i, way in enumerate(ways):
        row = Row(name, way.name, way.kind, way.amount, problem=f"gave up after {MOST_SECONDS} s")
        alive = True
        try:
            alive = receiver.poll(MOST_SECONDS)
            row = receiver.recv() if alive else row
        except EOFError:
            alive, row.problem = False, "the process died"
        facts = machine()
        row.commit, row.cpu, row.date = facts["commit"], facts["cpu"], facts["date"]
        yield row
        if not alive:
            yield from (in_own_process(name, scale, ways[i + 1 :], seconds, cache) if ways[i + 1 :] else ())
            break
    process.kill()
    process.join()


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
            yield f"\n{name}: eager peak {_mb(_first(of_model, lambda r: r.eager_peak_bytes))} MB, step " + (
                f"{1e3 * (_first(of_model, lambda r: r.eager_seconds) or 0):.0f} ms"
            )
            missing = [(peer, reason) for peer, reason in NOT_INSTALLABLE.items()]
            table = [_cells(row, own_ratio(row, of_model)) for row in of_model]
            yield tabulate([*table, *missing], headers=HEADERS, disable_numparse=True)
    yield "\nAt each peer's measured peak: extra time of both, in percent of eager's step (compiled peers: of their own)."
    verdicts = [v for name in names for v in verdicts_of(rows, name)]
    yield tabulate([v.cells() for v in verdicts], headers=Verdict.HEADERS, disable_numparse=True)
    yield from summary(verdicts, rows, names)


def own_ratio(row: Row, of_model: list[Row]) -> float | None:
    """Return a compiled way's time over that of the same compiler without recomputation: inductor's at budget 1.

    Rows measured before the two took turns have the quotient of both rows' ratios.
    """
    if row.own_ratio is not None:
        return row.own_ratio
    if row.kind not in ("partitioner", "inductor") or row.time_ratio is None:
        return None
    is_free = {"partitioner": lambda r: r.kind == "aot", "inductor": lambda r: r.kind == "inductor" and r.amount == 1.0}
    free = next((r for r in of_model if is_free[row.kind](r)), None)
    return None if free is None or free.time_ratio is None else row.time_ratio / free.time_ratio


def _cells(row: Row, own: float | None) -> tuple[str, ...]:
    if row.problem is not None:
        return (row.way, row.problem[:60])
    share = (row.peak_bytes or 0) / (row.eager_peak_bytes or 1)
    spread = f"{row.time_ratio_low:.2f}-{row.time_ratio_high:.2f}"
    exact = "exact" if row.predicted_peak_bytes == row.peak_bytes else _mb(row.predicted_peak_bytes)
    return (
        row.way, _mb(row.peak_bytes), f"{share:.3f}", exact, _mb(row.allocator_peak_bytes), f"{row.time_ratio:.3f}",
        spread, _number(row.estimated_ratio), _number(own), _number(row.flops_ratio),
        f"{row.prepare_seconds:.1f}", row.gradients or "", row.buffers or "",
    )  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """fxmem at a peer's peak beside that peer."""

    HEADERS = ("model", "peer", "peer MB", "fxmem MB", "peer +%", "fxmem +%", "of it", "fxmem lower by", "note")
    model: str
    peer: str
    eager: bool
    """Whether the peer runs in eager PyTorch."""
    peer_bytes: int
    our_bytes: int | None
    peer_ratio: float
    """The peer's time over eager's."""
    peer_extra: float
    """Of a compiled peer, over its own time without recomputation."""
    our_extra: float | None
    our_spread: float
    note: str

    @property
    def ratio(self) -> float | None:
        """Our extra time over the peer's, where both are above the noise."""
        if self.our_extra is None or self.peer_extra < 0.01:
            return None
        return max(0.0, self.our_extra) / self.peer_extra

    @property
    def lost(self) -> bool:
        """True if fxmem cannot reach the peak or is slower by more than the spread of its own pairs."""
        return self.our_extra is None or self.our_extra > self.peer_extra + self.our_spread

    def cells(self) -> tuple[str, ...]:
        ours = ("-", "-", "-", "-") if self.our_extra is None or self.our_bytes is None else (
            _mb(self.our_bytes), f"{100 * self.our_extra:+.1f}", _number(self.ratio),
            f"{1 - self.our_bytes / self.peer_bytes:.1%}",
        )  # fmt: skip
        note = self.note + (" LOST" if self.lost else "")
        return (
            self.model, self.peer, _mb(self.peer_bytes), ours[0], f"{100 * self.peer_extra:+.1f}", ours[1], ours[2],
            ours[3], note,
        )  # fmt: skip


def verdicts_of(rows: list[Row], name: str) -> Iterator[Verdict]:
    """Yield fxmem beside every peer whose peak is below eager's."""
    by_way = {row.way: row for row in rows if row.model == name}
    for peer in by_way.values():
        ours = by_way.get(f"fxmem at {peer.way}")
        if ours is None or peer.peak_bytes is None or peer.time_ratio is None:
            continue
        peer_ratio = own_ratio(peer, list(by_way.values())) or peer.time_ratio
        spread = ((ours.time_ratio_high or 0) - (ours.time_ratio_low or 0)) / 2
        notes = [ours.problem or ""]
        if (ours.allocator_peak_bytes or 0) > 1.01 * (peer.allocator_peak_bytes or math.inf):
            notes.append("fxmem's allocator peak is higher: scratch inside kernels")
        if peer.gradient_error is not None and peer.gradient_error > 1e-3:
            notes.append("peer's gradients wrong")
        if peer.buffers not in (None, "equal"):
            notes.append("peer's BatchNorm wrong")
        yield Verdict(
            model=name,
            peer=peer.way,
            eager=peer.kind in EAGER_PEERS,
            peer_bytes=peer.peak_bytes,
            our_bytes=ours.peak_bytes,
            peer_ratio=peer.time_ratio,
            peer_extra=peer_ratio - 1,
            our_extra=None if ours.time_ratio is None else ours.time_ratio - 1,
            our_spread=spread,
            note=", ".join(n for n in notes if n),
        )


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
            yield f"{name}: lowest peak {_mb(min(floors))} MB, the best eager peer's {_mb(least.peak_bytes)} ({least.way})"
    planned = [r for r in rows if r.kind == "fxmem" and r.peak_bytes is not None]
    exact = sum(row.exact for row in planned)
    yield f"of {len(planned)} rows of fxmem, gradients and buffers bitwise and the peak as predicted to the byte: {exact}"


def _first(rows: list[Row], read: Callable[[Row], float | None]) -> float | None:
    return next((value for row in rows if (value := read(row)) is not None), None)


def _mb(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:.1f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
