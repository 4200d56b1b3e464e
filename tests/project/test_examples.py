"""Every script in examples/ runs as a user runs it, and what it asserts holds."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"
EXAMPLES = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
TOGETHER = {
    "torch": (
        "plain_loop",
        "accumulation_and_amp",
        "estimate_and_frontier",
        "policy",
        "save_and_load",
        "track",
        "accelerate_loop",
        "compiled_step",
    ),
    "models": ("transformers_gpt2", "peft_lora", "diffusers_unet"),
    "trainers": ("transformers_trainer", "lightning_module", "lightning_callback"),
}
"""Those of a process, which imports what they need once."""
NEEDS = {
    "transformers_trainer": "accelerate",
    "accelerate_loop": "accelerate",
    "peft_lora": "peft",
    "lightning_module": "lightning",
    "lightning_callback": "lightning",
}
"""Libraries of the test extra that fxmem does without, by example. An environment may lack them."""
RUN = """
import runpy, sys
from benchmarks.libraries import import_torchvision
from tests.search import search_briefly
import_torchvision()
search_briefly()
for path in sys.argv[1:]:
    print("running", path)
    runpy.run_path(path, run_name="__main__")
"""
"""transformers imports torchvision, whose compiled ops need a word first on a CPU build of torch. Any plan will do."""
MOST_SECONDS = 600


def test_there_are_fourteen_examples() -> None:
    assert len(EXAMPLES) == 14
    assert sorted(name for names in TOGETHER.values() for name in names) == list(EXAMPLES)
    assert NEEDS.keys() <= EXAMPLES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("names", TOGETHER.values(), ids=TOGETHER)
def test_examples_run(names: tuple[str, ...], tmp_path: Path) -> None:
    lacking = {NEEDS[name] for name in names if name in NEEDS and find_spec(NEEDS[name]) is None}
    paths = [str(EXAMPLES[name]) for name in names if NEEDS.get(name) not in lacking]
    cache = {"FXMEM_CACHE": "1", "FXMEM_CACHE_DIR": str(tmp_path / "cache")}
    env = {**os.environ, **cache, "PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *paths],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout + "running "
    for path in paths:
        assert f"running {path}\nrunning " not in printed, "it printed nothing"
    if lacking:
        pytest.skip(f"not installed: {', '.join(sorted(lacking))}")
