"""One plan for many sizes: that of the largest serves all smaller ones, with the bits of eager and within its peak."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fxmem
from fxmem.api import size_families
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.errors import CaptureError
from fxmem.runtime.other_sizes import NotingTape, OtherStructureError
from tests.exactness import differences, run

WIDTH, WORDS = 8, 16


class Texts(nn.Module):
    """Attention with dropout, whose mask is left out where it is all ones, and a batch norm: state that a step writes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, **kwargs: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        query, key, value = (part(hidden).unsqueeze(1) for part in (self.query, self.key, self.value))
        seen = None
        if mask is not None and mask.sum() != mask.numel():
            seen = mask[:, None, None, :].bool()
        attended = nn.functional.scaled_dot_product_attention(query, key, value, seen, dropout_p=0.1)
        hidden = self.norm((hidden + self.mlp(attended.squeeze(1))).transpose(1, 2))
        return hidden.square().sum() / kwargs["count"] if kwargs else hidden


def call(rows: int, length: int, *, padded: bool | None = None, counted: bool = False) -> Inputs:
    kwargs: dict[str, Tensor] = {"tokens": torch.randint(WORDS, (rows, length))}
    if padded is not None:
        kwargs["mask"] = torch.ones(rows, length, dtype=torch.long)
        kwargs["mask"][0, -1] = not padded
    if counted:
        kwargs["count"] = torch.tensor(rows * length)
    return Inputs.of((), kwargs, Texts())


BARE: dict[str, Any] = {"optimizer": None, "loss_fn": lambda output: output.float().sum()}
"""The step: a loss that is told of is not looked for."""


def pair(budget: int | None = None) -> tuple[Texts, fxmem.OptimizedModule]:
    torch.manual_seed(0)
    eager = Texts()
    optimized = fxmem.optimize(Texts(), budget=budget, planner="chen", cost="cpu", cache=False, **BARE)
    optimized.load_state_dict(eager.state_dict())
    return eager, optimized


def tight_budget(inputs: Inputs) -> int:
    report = fxmem.estimate(Texts(), None, inputs.call()[1], planner="chen", **BARE)
    return report.floor_bytes + (report.peak_bytes - report.floor_bytes) // 4


def same_step(eager: nn.Module, optimized: fxmem.OptimizedModule, inputs: Inputs) -> int:
    """Assert that a step is eager's; return its measured peak."""
    step = run(optimized, optimized, inputs)
    assert not differences(run(eager, eager, inputs), step)
    return step.peak_bytes


# -- capturing -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("padded", [True, False])
def test_a_graph_of_many_sizes_follows_values_and_arguments_beside_those_named(padded: bool) -> None:
    inputs = call(4, 6, padded=padded, counted=True)
    dims = frozenset((i, d) for i, leaf in enumerate(inputs.leaves) for d in range(leaf.dim()))
    captured = capture(Texts(), inputs, None, dims)
    assert captured.dynamic == dims
    assert [read.seen for read in captured.reads] == [padded]
    for rows, length in ((4, 6), (2, 9), (7, 2)):
        other = call(rows, length, padded=padded, counted=True)
        assert captured.fits(other)
        assert captured.serves(other)
        assert not captured.serves(call(rows, length, padded=not padded, counted=True))


class Tied(nn.Module):
    """Takes one length only for each of its ways, but any batch."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(4, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.short if x.shape[1] == 4 else self.long)(x).exp()


def test_a_size_that_the_model_is_tied_to_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    optimized = fxmem.optimize(Tied(), planner="chen", optimizer=None)
    asked = []

    def noted(model: Any, inputs: Any, autocast: Any, dims: Any = frozenset(), **kwargs: Any) -> Any:
        asked.extend([sorted(dims)] if dims else [])
        return capture(model, inputs, autocast, dims, **kwargs)

    monkeypatch.setattr(size_families, "capture", noted)
    for shape in ((3, 4), (5, 6), (4, 4), (2, 4), (7, 6), (3, 6)):
        x = torch.randn(shape)
        assert torch.equal(optimized(x), optimized.fxmem.original(x))
    assert asked == [[(0, 0), (0, 1)], [(0, 0)]]


def test_a_graph_that_cannot_be_captured_for_many_sizes_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refused(model: Any, inputs: Any, autocast: Any, dims: Any = frozenset(), **kwargs: Any) -> Any:
        if not dims:
            return capture(model, inputs, autocast)
        asked.append(sorted(dims))
        raise CaptureError("no")

    monkeypatch.setattr(size_families, "capture", refused)
    optimized = fxmem.optimize(nn.Linear(4, 4), planner="chen", optimizer=None)
    for rows in (3, 5, 4, 6):
        optimized(torch.randn(rows, 4))
    assert asked == [[(0, 0)]]


# -- serving -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("padded", [None, True], ids=["plain", "padded"])
def test_smaller_sizes_run_under_the_plan_of_the_largest(padded: bool | None) -> None:
    budget = tight_budget(call(4, 12, padded=padded))
    eager, optimized = pair(budget)
    same_step(eager, optimized, call(4, 9, padded=padded))  # one size: nothing is symbolic yet
    same_step(eager, optimized, call(4, 12, padded=padded))
    num_planned = optimized.fxmem.plans.asked.num_planned
    assert optimized.fxmem.plan.dropped
    for rows, length in ((4, 9), (4, 7), (3, 12), (2, 2), (4, 11), (4, 7), (2, 5)):
        peak = same_step(eager, optimized, call(rows, length, padded=padded))
        report = optimized.fxmem.report
        assert peak == report.predicted_peak_bytes <= budget
    assert optimized.fxmem.plans.asked.num_planned == num_planned
    assert report.planner.endswith("of a larger size")


@pytest.mark.slow
def test_without_a_budget_larger_sizes_are_served_too() -> None:
    eager, optimized = pair()
    for rows, length in ((4, 6), (4, 9), (3, 4), (6, 20)):
        same_step(eager, optimized, call(rows, length))
    assert optimized.fxmem.plans.asked.num_planned == 2  # the first, and that of symbolic sizes


@pytest.mark.slow
@pytest.mark.parametrize("error", [OtherStructureError, RuntimeError])
def test_a_size_at_which_the_graph_does_otherwise_gets_its_own_plan(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    eager, optimized = pair(tight_budget(call(4, 12)))
    for length in (11, 12):
        same_step(eager, optimized, call(4, length))
    planned = optimized.fxmem.plans.asked.num_planned

    def otherwise(tape: NotingTape) -> None:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(NotingTape, "close", otherwise)
    same_step(eager, optimized, call(4, 5))  # buffers and random state as eager's: what was given up left nothing
    assert optimized.fxmem.plans.asked.num_planned == planned + 1
    same_step(eager, optimized, call(4, 5))
    assert optimized.fxmem.plans.asked.num_planned == planned + 1


@pytest.mark.slow
def test_a_size_with_a_larger_storage_than_planned_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, optimized = pair(tight_budget(call(4, 12)))
    for length in (11, 12):
        same_step(eager, optimized, call(4, length))
    planned = optimized.fxmem.plans.asked.num_planned
    table = optimized.fxmem.graph_module.fxmem_tape.table
    object.__setattr__(table, "nbytes", (1,) * len(table.nbytes))
    same_step(eager, optimized, call(4, 5))
    assert optimized.fxmem.plans.asked.num_planned == planned + 1


@pytest.mark.slow
def test_images_by_channels_last_share_a_plan() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    optimized = fxmem.optimize(model, planner="chen", optimizer=None)
    for side in (8, 6, 10, 12):
        optimized(torch.randn(2, 3, side, side).contiguous(memory_format=torch.channels_last)).sum().backward()
    assert optimized.fxmem.plans.asked.num_planned == 2


@pytest.mark.slow
def test_the_user_hears_of_prepare_after_many_growing_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxmem.api.planning_hints.MANY_SIZES", 3)
    model = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 4))
    optimized = fxmem.optimize(model, budget="1MB", planner="chen", optimizer=None)
    for rows in (2, 3):
        optimized(torch.randn(rows, 4))
    with pytest.warns(UserWarning, match=r"Sequential came in 3 sizes.*fxmem\.prepare\(model, dataloader\)"):
        optimized(torch.randn(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimized(torch.randn(5, 4))


# -- preparing -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_prepare_plans_for_the_worst_of_all_batches_and_leaves_random_states(
    capsys: pytest.CaptureFixture[str],
) -> None:
    eager, optimized = pair(tight_budget(call(4, 12)))
    sizes = [(4, 5), (4, 12), (2, 9), (4, 7)]
    loader = DataLoader([call(*size).call()[1] for size in sizes], batch_size=None, shuffle=True)
    torch.manual_seed(3)
    states = torch.get_rng_state(), random.getstate()
    prepared = fxmem.prepare(optimized, loader)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (prepared.num_batches, prepared.num_sizes, prepared.num_plans) == (4, 4, 1)
    assert prepared.worst == ((4, 12),)
    assert [size.quantile for size in prepared.sizes] == ["p50", "p95", "max"]
    assert str(prepared) in capsys.readouterr().out
    peaks = {size.shapes: size.peak_bytes for size in prepared.sizes}
    for size in sizes:
        peak = same_step(eager, optimized, call(*size))
        assert peaks.get((size,), peak) == peak
    assert optimized.fxmem.plans.asked.num_planned == 1


@pytest.mark.slow
def test_prepare_plans_for_both_ways_of_a_mask() -> None:
    eager, optimized = pair()
    batches = [call(3, 6, padded=padded, counted=True).call()[1] for padded in (True, False)]
    batches += [call(3, 4, padded=padded, counted=True).call()[1] for padded in (True, False)]
    assert fxmem.prepare(optimized, batches).num_plans == 2
    for padded in (True, False):
        same_step(eager, optimized, call(3, 5, padded=padded, counted=True))
    assert optimized.fxmem.plans.asked.num_planned == 2


@pytest.mark.slow
def test_expected_sizes_are_those_of_any_state_of_the_model() -> None:
    eager, optimized = pair()
    fxmem.prepare(optimized, [call(3, length).call()[1] for length in (4, 7)])
    for model in (eager, optimized):
        model.mlp[2].p = 0.3
    for length in (4, 7, 5):
        same_step(eager, optimized, call(3, length))
    assert optimized.fxmem.plans.asked.num_planned == 2  # one for each state


@pytest.mark.slow
def test_lengths_are_those_of_the_examples_sequences() -> None:
    optimized = fxmem.optimize(
        Texts(), example_kwargs=call(3, 6).call()[1], shapes=[4, 9, 7], planner="chen", optimizer=None
    )
    optimized(**call(2, 8).call()[1])
    assert optimized.fxmem.plans.asked.num_planned == 1


def test_what_cannot_be_prepared_for_is_said() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(fxmem.InputError, match="prepare needs an optimized module"):
        fxmem.prepare(model, [torch.randn(2, 4)])
    optimized = fxmem.optimize(model)
    with pytest.raises(fxmem.InputError, match="there are no batches"):
        fxmem.prepare(optimized, [])
    with pytest.raises(fxmem.InputError, match="must be a dataloader, batches or lengths, not float"):
        fxmem.prepare(optimized, 1.5)
    with pytest.raises(fxmem.InputError, match="lengths need an example"):
        fxmem.prepare(optimized, [3, 4], torch.randn(4))
