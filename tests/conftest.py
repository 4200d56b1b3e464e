"""What all tests share: one thread, a fixed seed, brief searches, hypothesis profiles, skipping without a GPU."""

import gc
import os
from pathlib import Path

# Before any import of these libraries: models are built from configurations, nothing is downloaded.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ["FXMEM_CACHE"] = "0"  # every test plans for itself,
os.environ["FXMEM_MEASURE"] = "0"  # from estimated op times, the same on every machine

import hypothesis
import pytest
import torch

from fxmem.planners import portfolio
from fxmem.planners.registry import PLANNERS
from tests.search import PLANNING_ANEW, WHOLE, plan_once, search_briefly

# With several threads the CPU kernels that accumulate into an index (the backward of an embedding, for one) add in
# any order, so two eager runs differ in the last bit. Bitwise comparisons need one thread.
torch.set_num_threads(1)

# "default" tries the same examples on every run; "fuzz" (make fuzz) many, and new ones every time.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


search_briefly()
plan_once()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is marked `cuda` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda") is not None:  # a folder of that name is a keyword too
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Makes each test independent of which tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _what_was_there_is_not_looked_through() -> None:
    """Keeps what is older than a test out of the collections of garbage that planning and tests ask for.

    A process full of libraries has a million objects: each collection would take half a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def kept_plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lets a test that asks for several budgets of one model plan it once, as any user does."""
    monkeypatch.setenv("FXMEM_CACHE", "1")
    monkeypatch.setenv("FXMEM_CACHE_DIR", str(tmp_path / "plans"))


@pytest.fixture
def whole_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the default planner search as long as it does for users, for tests of how good its plans are."""
    for name, value in WHOLE.items():
        monkeypatch.setattr(portfolio, name, value)


@pytest.fixture
def planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets planners forget what they found, for tests of what happens while they search."""
    for name, planner in PLANNING_ANEW.items():
        monkeypatch.setitem(PLANNERS, name, planner)
