"""The line on the terminal that follows a watched loop. Nothing is written where stderr is no terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence

from fxmem.errors import in_units
from fxmem.watching.gauges import Reading

TURN_SECONDS = 0.5
"""Between two looks."""
CELLS = 20
"""Of the bar."""


class LiveLine:
    """A line that is written anew now and then, by a thread of its own."""

    def __init__(self, text: Callable[[], str]) -> None:
        self._text, self._over = text, threading.Event()
        self._thread = threading.Thread(target=self._run, name="fxmem-watch", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self) -> None:
        """Take the line away."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(TURN_SECONDS):
            sys.stderr.write(f"\r\x1b[K{self._text()}")
            sys.stderr.flush()
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def line_of(num_steps: int, readings: Sequence[Reading], budgets: dict[str, int]) -> str:
    """Return the line: ``fxmem: step 12 | cpu 1.2 GB, peak 1.9 GB of 8 GB [=====               ] 24 %``."""
    parts = [f"fxmem: step {num_steps}"]
    for each in readings:
        reserved = "" if each.device == "cpu" else f", reserved {in_units(each.reserved_bytes)}"
        part = f"{each.device} {in_units(each.allocated_bytes)}{reserved}, peak {in_units(each.peak_bytes)}"
        if each.device in budgets:
            share = each.peak_bytes / budgets[each.device]
            bar = ("=" * min(CELLS, int(share * CELLS))).ljust(CELLS)
            part += f" of {in_units(budgets[each.device])} [{bar}] {share:.0%}"
        parts.append(part)
    return " | ".join(parts)
