"""Planning in a process of its own, while the program that asks for it trains.

In: a profile, a planner's name, its seconds. Out: the planner's points, once they are there. A profile is plain integers
and planners are plain Python: the process needs no torch and no device, and touches nothing of the program, not its random
numbers, its modules or its threads. It ends when nobody waits for it any more.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fxmem.ir import FrontierPoint, GraphProfile
from fxmem.planners.registry import PLANNERS

REQUEST, POINTS, ERRORS = "request", "points", "errors"
"""Files of the process."""
MODULE = __name__


class PlanningFailedError(RuntimeError):
    """The process ended without points."""


class Planning:
    """One run of a planner, begun. Errors: ``OSError`` if no process can be made."""

    def __init__(self, profile: GraphProfile, planner: str, seconds: float) -> None:
        self._folder = TemporaryDirectory(prefix="fxmem-planning-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        with (folder / REQUEST).open("wb") as file:
            pickle.dump((profile, planner, seconds), file)
        paths = os.pathsep.join(filter(None, map(str, sys.path)))
        with (folder / ERRORS).open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": paths},
                start_new_session=True,  # Ctrl-C is for the program
            )
        self._end = weakref.finalize(self, _end, self._process, self._folder, os.getpid())

    @property
    def is_over(self) -> bool:
        """True if the process has ended, one way or the other. It does not wait."""
        return self._process.poll() is not None

    def points(self) -> tuple[FrontierPoint, ...]:
        """Return the points, waiting for them if need be. Errors: :class:`PlanningFailedError`."""
        folder = Path(self._folder.name)
        try:
            if self._process.wait() != 0:
                lines = (folder / ERRORS).read_text(encoding="utf-8", errors="replace").strip().splitlines()
                why = lines[-1] if lines else f"exit status {self._process.returncode}"
                raise PlanningFailedError(f"the planning process failed: {why}")
            with (folder / POINTS).open("rb") as file:
                points: tuple[FrontierPoint, ...] = pickle.load(file)
        finally:
            self._end()
        return points

    def __deepcopy__(self, memo: dict[int, Any]) -> Planning:
        return self


def _end(process: subprocess.Popen[bytes], folder: TemporaryDirectory[str], owner: int) -> None:
    """End what is left of a process, from the program that began it and not from a fork of it."""
    if os.getpid() != owner:
        return
    if process.poll() is None:
        process.kill()
        process.wait()
    folder.cleanup()


def main(folder: Path) -> None:
    """Plan as is asked in ``folder``, and leave the points there."""
    with (folder / REQUEST).open("rb") as file:
        profile, planner, seconds = pickle.load(file)
    points = PLANNERS[planner](profile, seconds=seconds)
    with (folder / POINTS).open("wb") as file:
        pickle.dump(points, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
