"""What a planner finds quickly, for forms to be chosen by."""

from typing import Any

import pytest
import torch

import fxmem
from fxmem.passes.lean_backwards import PLAN_SECONDS
from fxmem.planners import chen
from fxmem.planners.registry import PLANNERS
from tests.passes.test_lean_backwards import Vgg


@pytest.mark.usefixtures("planned_anew")
def test_no_graph_is_planned_for_quickly_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[tuple[Any, float]] = []

    def planner(profile: Any, *, seconds: float) -> Any:
        planned.append((profile, seconds))
        return chen.frontier(profile, seconds=seconds)

    monkeypatch.setitem(PLANNERS, "auto", planner)
    fxmem.optimize(Vgg(), torch.randn(8, 3, 32, 32), budget="70%", optimizer=None, cache=False)
    quick = [id(profile) for profile, seconds in planned if seconds == PLAN_SECONDS]
    assert len(quick) == len(set(quick)) > 1
