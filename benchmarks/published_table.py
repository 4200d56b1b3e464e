"""One published point beside ours, and points as a table (:mod:`benchmarks.published`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate


@dataclass(frozen=True)
class Result:
    """One published point beside ours. Overheads are shares of the eager step's time; GB are 10^9 bytes."""

    paper: str
    network: str
    batch: int
    their_eager_gb: float | None
    our_eager_gb: float | None
    their_gb: float | None
    their_overhead: float | None
    our_gb: float | None
    our_overhead: float | None
    floor_gb: float | None
    their_max_batch: int | None = None
    our_max_batch: int | None = None
    weights_gb: float | None = None
    """Of ours: parameters and their gradients."""
    least_overhead: float | None = None
    """No plan of our peak can cost less, by the same roofline."""
    plan_seconds: float = 0.0
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Our overhead over theirs, or their largest batch over ours: below 1 is better than published."""
        if self.their_max_batch and self.our_max_batch:
            return self.their_max_batch / self.our_max_batch
        if self.our_overhead is None or not self.their_overhead or self.their_overhead < 0:
            return None
        return self.our_overhead / self.their_overhead

    @property
    def better(self) -> bool:
        """Less overhead than published in at most the published memory, or a larger batch."""
        if self.their_max_batch is not None:
            return self.our_max_batch is not None and self.our_max_batch > self.their_max_batch
        return None not in (self.our_overhead, self.their_overhead) and self.our_overhead < self.their_overhead


HEADERS = (
    "paper", "network", "batch", "their eager GB", "our eager GB", "weights GB", "their GB", "our GB", "floor GB",
    "their +%", "our +%", "least +%", "ours/theirs", "plan s", "note",
)  # fmt: skip


def table(results: Sequence[Result], style: str = "simple") -> str:
    """Return the table in one of tabulate's styles, without columns that are empty throughout."""
    cells = [_cells(r) for r in results]
    filled = [k for k in range(len(HEADERS)) if any(row[k] for row in cells)]
    rows = [[row[k] for k in filled] for row in cells]
    return str(tabulate(rows, headers=[HEADERS[k] for k in filled], tablefmt=style, disable_numparse=True))


def _cells(r: Result) -> tuple[str, ...]:
    batch = str(r.batch) if r.their_max_batch is None else f"{r.their_max_batch} -> {r.our_max_batch}"
    overheads = (r.their_overhead, r.our_overhead, r.least_overhead)
    percents = [_number(None if v is None else 100 * v, 1) for v in overheads]
    gigabytes = [r.their_eager_gb, r.our_eager_gb, r.weights_gb, r.their_gb, r.our_gb, r.floor_gb]
    return (
        r.paper, r.network, batch, *map(_number, gigabytes), *percents, _number(r.ratio), f"{r.plan_seconds:.0f}", r.note,
    )  # fmt: skip


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
