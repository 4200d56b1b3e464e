"""Would-be kernels: what is in memory, and what running it again costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fxmem.compiled.joint import why_not_again
from tests.compiled.seat import profile_for


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


def test_of_a_maximum_of_windows_its_place_in_the_window_is_in_memory_a_byte_each() -> None:
    x, w = torch.randn(2, 4, 16, 16), torch.randn(4, 4, 1, 1)
    profile = profile_for(lambda x, w: F.conv2d(F.max_pool2d(F.conv2d(x, w), 3, 1, 1), w), x, w)
    numel = x.numel()
    assert sorted(s.nbytes // numel for s in profile.storages) == [1, 4, 4, 4]
    seconds = {s.nbytes // numel: profile.recipes[s.recipe].seconds for s in profile.storages if s.recipe is not None}
    assert seconds[1] > 5e-9 * numel, "numbers are compared one at a time"


def test_attention_without_dropout_may_run_again_though_torch_says_that_it_draws_random_numbers() -> None:
    heads = [torch.randn(1, 2, 16, 8) for _ in range(2)]
    profile = profile_for(lambda q, k: F.scaled_dot_product_attention(q, k, k * 2).sin() @ k.mT, *heads)
    attention = next(node for node in profile.nodes if "attention" in node.op)
    assert all(profile.storages[made].recipe is not None for made in attention.creates)


@pytest.mark.parametrize(
    ("args", "kwargs", "why_not"),
    [
        ((), {}, ""),
        ((0.0,), {}, ""),
        ((0.1,), {}, "it draws random numbers"),
        ((), {"dropout_p": 0.1}, "it draws random numbers"),
    ],
)
def test_attention_never_runs_again_where_it_has_dropout(args: Any, kwargs: dict[str, Any], why_not: str) -> None:
    graph = fx.Graph()
    tensors = [graph.placeholder(name) for name in "qkv"]
    node = graph.call_function(torch.ops.aten._scaled_dot_product_flash_attention.default, (*tensors, *args), kwargs)
    assert why_not_again(node) == why_not
