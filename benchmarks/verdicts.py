"""fxmem at a peer's measured peak, beside that peer: who takes more time, and by how much.

In: rows of the comparison. Out: a :class:`Verdict` for each peer.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.measure import Row
from benchmarks.results_file import RESULTS

OURS, OURS_COMPILED = "fxmem at ", "fxmem, inductor at "
"""What stands before a peer's name where fxmem trains at its peak: eager, and in inductor's seat."""
EAGER_PEERS = ("checkpoint", "sequential", "selective")
"""Kinds of ways that recompute in eager PyTorch."""


PEER_WRONG = "peer's gradients wrong"
LEAST_WRONG, TIMES_ROUNDING, MOST_ROUNDING = 1e-3, 10, 0.3
"""A relative error of gradients is more than rounding above the first of these, and above so many times what gradients
change by where parameters change by their last bit (:mod:`benchmarks.rounding`), or above the last."""


def is_wrong(row: Row) -> bool:
    """True if a row's gradients differ from what they are compared with by more than rounding does on that model."""
    by_rounding = min(TIMES_ROUNDING * _rounding_errors().get(row.model, 0.0), MOST_ROUNDING)
    return (row.gradient_error or 0.0) > max(LEAST_WRONG, by_rounding)


@functools.cache
def _rounding_errors() -> dict[str, float]:
    errors: dict[str, float] = json.loads((RESULTS / "rounding.json").read_text(encoding="utf-8"))["errors"]
    return errors


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
            megabytes(self.our_bytes), f"{100 * self.our_extra:+.1f}", two_places(self.ratio),
            f"{1 - self.our_bytes / self.peer_bytes:.1%}",
        )  # fmt: skip
        note = self.note + (" LOST" if self.lost else "")
        return (
            self.model, self.peer, megabytes(self.peer_bytes), ours[0], f"{100 * self.peer_extra:+.1f}", ours[1], ours[2],
            ours[3], note,
        )  # fmt: skip


def verdicts_of(rows: list[Row], name: str, ours_at: str = OURS) -> Iterator[Verdict]:
    """Yield fxmem beside every peer at whose peak it was measured. ``ours_at``: :data:`OURS`, or for the compiled backend
    :data:`OURS_COMPILED`, whose extra time is over its own compiler's time too."""
    by_way = {row.way: row for row in rows if row.model == name}
    for peer in by_way.values():
        ours = by_way.get(ours_at + peer.way)
        if ours is None or peer.peak_bytes is None or peer.time_ratio is None:
            continue
        peer_ratio = own_ratio(peer, list(by_way.values())) or peer.time_ratio
        our_ratio = ours.own_ratio or ours.time_ratio
        spread = ((ours.time_ratio_high or 0) - (ours.time_ratio_low or 0)) / 2
        notes = [ours.problem or ""]
        if (ours.allocator_peak_bytes or 0) > 1.01 * (peer.allocator_peak_bytes or math.inf):
            notes.append("fxmem's allocator peak is higher: scratch inside kernels")
        if is_wrong(peer):
            notes.append(PEER_WRONG)
        if is_wrong(ours):
            notes.append("fxmem's gradients wrong")
        elif ours_at == OURS_COMPILED and ours.gradient_error:
            notes.append(f"fxmem's gradients differ by {ours.gradient_error:.0e}")
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
            our_extra=None if our_ratio is None else our_ratio - 1,
            our_spread=spread,
            note=", ".join(n for n in notes if n),
        )


def megabytes(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:.1f}"


def two_places(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
