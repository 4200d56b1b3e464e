"""Every script in examples/ runs as a user runs it, and what it asserts holds."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
RUN = """
import runpy, sys
from benchmarks.libraries import import_torchvision
from tests.search import search_briefly
import_torchvision()
search_briefly()
runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""transformers imports torchvision, whose compiled ops need a word first on a CPU build of torch. Any plan will do."""
MOST_SECONDS = 600


NEEDS = {
    "transformers_trainer": "accelerate",
    "accelerate_loop": "accelerate",
    "peft_lora": "peft",
    "lightning_module": "lightning",
}
"""Libraries of the test extra that fxmem does without, by example. An environment may lack them."""


def test_there_are_twelve_examples() -> None:
    assert len(EXAMPLES) == 12
    assert NEEDS.keys() <= {path.stem for path in EXAMPLES}


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, tmp_path: Path) -> None:
    needed = NEEDS.get(path.stem)
    if needed is not None and find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
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
