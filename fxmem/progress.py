"""What planning tells while it runs, and how it is interrupted.

For two seconds it tells nothing, then what it does and how long it may take: the logger ``fxmem.planning`` gets one line at
level INFO; where stderr is a terminal, a line there follows the stages and goes when planning ends.
``FXMEM_LOG=planning,passes`` sends these loggers' lines to stderr.

Ctrl-C while planning takes effect at the next of many safe places (:func:`stage`, :func:`check_interrupted`), where model
and process are as they were: in the middle of an op on fakes it could end the process, since PyTorch's C++ lets no
exception through there. A second one takes effect at once.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

QUIET_SECONDS = 2.0
TURN_SECONDS = 0.5
"""Between two looks of the line on the terminal."""
CAPTURE_SECONDS = 10.0
"""What capturing, profiling and checking take of large models, beside the planner's own limit."""
LOGGERS = ("passes", "planning")

log = logging.getLogger("fxmem.planning")
_current: ContextVar[_Task | None] = ContextVar("_current", default=None)


class _Task:
    """One planning, watched by a thread of its own."""

    def __init__(self, what: str, most_seconds: float) -> None:
        self.what, self.most_seconds, self.stage = what, most_seconds, ""
        self.start, self.over = time.perf_counter(), threading.Event()
        self.thread = threading.Thread(target=self._watch, name="fxmem-progress", daemon=True)
        self.interrupted = False

    def note_interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT."""
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True

    def _watch(self) -> None:
        if self.over.wait(QUIET_SECONDS):
            return
        log.info(
            "%s: %s; this happens once for each kind of call, and may take about %.0f s",
            self.what,
            self.stage,
            self.most_seconds,
        )
        if not sys.stderr.isatty():
            return
        while not self.over.wait(TURN_SECONDS):
            sys.stderr.write(f"\r\x1b[Kfxmem: {self.what}: {self.stage} ({time.perf_counter() - self.start:.0f} s)")
            sys.stderr.flush()
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


@contextmanager
def told(what: str, most_seconds: float) -> Iterator[None]:
    """Tell of the body, if it takes long, as ``what``; inside another such body, only as its stages."""
    if _current.get() is not None:
        yield
        return
    task = _Task(what, most_seconds)
    token = _current.set(task)
    in_main_thread = threading.current_thread() is threading.main_thread()
    handled = in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handled:
        signal.signal(signal.SIGINT, task.note_interrupt)
    task.thread.start()
    try:
        yield
    finally:
        _current.reset(token)
        task.over.set()
        task.thread.join()
        if handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if task.interrupted:
        raise KeyboardInterrupt


def stage(name: str) -> None:
    """Say what the planning that is told of does from here on."""
    task = _current.get()
    if task is not None:
        task.stage = name
    log.debug("%s", name)
    check_interrupted()


def check_interrupted() -> None:
    """Raise ``KeyboardInterrupt`` if Ctrl-C was pressed since planning began: a place where it does no harm."""
    task = _current.get()
    if task is not None and task.interrupted:
        task.interrupted = False
        raise KeyboardInterrupt


def log_to_stderr(names: str | None = None) -> None:
    """Send the lines of these loggers, named as in ``FXMEM_LOG`` (the default), to stderr."""
    names = os.environ.get("FXMEM_LOG", "") if names is None else names
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in LOGGERS:
            warnings.warn(f"FXMEM_LOG names {name!r}; known: {', '.join(LOGGERS)}", stacklevel=2)
            continue
        logger, handler = logging.getLogger(f"fxmem.{name}"), logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)


@contextmanager
def collected_afterwards() -> Iterator[None]:
    """Put off collecting cycles to the body's end, which makes many objects and little garbage, but for what was there
    before. What cycles it leaves hold the batch planned for, which would be there beside the next one."""
    enabled, freeze = gc.isenabled(), not gc.get_freeze_count()
    gc.disable()
    if freeze:
        gc.freeze()
    try:
        yield
    finally:
        (gc.enable if enabled else gc.disable)()
        gc.collect()
        if freeze:
            gc.unfreeze()
