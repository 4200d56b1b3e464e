"""Would-be kernels: what is in memory, and what running it again costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fxmem.compiled.joint import JointGraph
from fxmem.compiled.kernels import Kernels, profile_of
from fxmem.compiled.lower import without_duplicates
from fxmem.compiled.surroundings import Surroundings
from fxmem.ir import GraphProfile
from fxmem.profiling.roofline import PRESETS
from tests.compiled.seat import in_the_seat


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def profile_for(function: Callable[..., torch.Tensor]) -> GraphProfile:
    """Return the profile of a function of two matrices of 1,024 elements."""
    found: list[GraphProfile] = []

    def look(joint: fx.GraphModule, num_outputs: int, static: Any) -> None:
        kernels = Kernels.of(JointGraph.of(without_duplicates(joint), num_outputs))
        found.append(profile_of(kernels, Surroundings(), PRESETS["cpu"]))

    in_the_seat(look, function, torch.randn(32, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True))
    return found[0]


def test_what_is_computed_by_a_series_or_drawn_costs_more_than_what_moves_bytes_only() -> None:
    seconds = {}
    for name, step in {"plain": torch.relu, "series": torch.tanh, "drawn": lambda x: F.dropout(x, 0.5)}.items():
        profile = profile_for(lambda x, w, step=step: step(x @ w) @ w)
        seconds[name] = sum(recipe.seconds for recipe in profile.recipes)
    assert seconds["plain"] < seconds["series"] < seconds["drawn"]


def test_a_mask_of_a_dropout_is_a_byte_for_each_element_that_may_be_kept_or_made_again() -> None:
    profile = profile_for(lambda x, w: F.dropout(x @ w, 0.5) @ w)
    masks = [s for s in profile.storages if s.nbytes == 1024]
    assert len(masks) == 1
    assert masks[0].recipe is not None


def test_a_mask_is_one_where_its_random_numbers_are_drawn_in_another_order_of_dimensions() -> None:
    profile = profile_for(lambda x, w: F.dropout((x @ w).T, 0.5).relu() @ w)
    assert [s.nbytes for s in profile.storages].count(1024) == 1
