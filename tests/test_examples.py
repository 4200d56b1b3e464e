"""Every script in examples/ runs as a user runs it, and what it asserts holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
RUN = """
import runpy, sys
from benchmarks.libraries import import_torchvision
import_torchvision()
runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""transformers imports torchvision, whose compiled ops need a word first on a CPU build of torch."""
MOST_SECONDS = 600


def test_there_are_seven_examples() -> None:
    assert len(EXAMPLES) == 7


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1", "FXMEM_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
