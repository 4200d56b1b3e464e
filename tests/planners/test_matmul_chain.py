"""A chain of matmuls of which one saved matrix is 1 MiB: each budget buys as many as can be bought."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.ir import KEEP, Plan
from fxmem.passes.emit import rewrite
from fxmem.planners.pareto import cheapest_within
from fxmem.planners.registry import PLANNERS
from fxmem.planners.simulate import keep_all, simulate
from fxmem.profiling.profile import Profiled, profile
from fxmem.profiling.storage_tracker import StorageTracker, tensors_of
from fxmem.profiling.training_step import TrainingStep, run_step

MIB = 2**20


# -- one saved matrix is 1 MiB -------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """cos, then five times (matmul, cos): ten saved matrices of 1 MiB beside the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.empty(512, 512) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = x.cos()
        for weight in self.weights:
            x = torch.mm(x, weight).cos()
        return x.sum()


@pytest.mark.usefixtures("whole_search")
def test_each_budget_on_the_chain_of_matmuls_buys_as_many_as_can_be_bought() -> None:
    """The chain of PyTorch's MemoryBudgetTest. cos is free; b kept matrices leave 5 - b matmuls to redo.

    Its budget is a share of saved bytes; ours bounds the peak. So for every b the oracle is exhaustive: of all plans
    that keep b of the matmuls' results, the one of the least peak sets the budget.
    """
    model = Chain().train()
    inputs = Inputs.of((torch.empty(512, 512, requires_grad=True),), {})
    captured = capture(model, inputs)
    graph_profile = profile(captured, inputs, lambda flops, _: flops / (2 * 512**3)).profile
    assert {s.nbytes for s in graph_profile.storages if s.num_saves} == {MIB}
    products = [s.index for s in graph_profile.storages if graph_profile.nodes[s.creator].seconds == 1]
    last = len(graph_profile.recipes)
    free = [s.index for s in graph_profile.storages if s.recipe is not None and s.index not in products]
    least: dict[int, int] = {}
    for kept in product((True, False), repeat=len(products)):
        for late in product((True, False), repeat=2):
            limits = [KEEP] * len(graph_profile.storages)
            for i in free:
                limits[i] = graph_profile.storages[i].recipe if late[0] else last  # type: ignore[assignment]
            for i, keep in zip(products, kept, strict=True):
                if not keep:
                    limits[i] = graph_profile.storages[i].recipe if late[1] else last  # type: ignore[assignment]
            timeline = simulate(graph_profile, Plan("oracle", tuple(limits)))
            redone = round(timeline.recompute_seconds)
            least[redone] = min(least.get(redone, timeline.peak_bytes), timeline.peak_bytes)
    points = PLANNERS["auto"](graph_profile, seconds=10)
    assert simulate(graph_profile, keep_all(graph_profile)).recompute_seconds == 0
    for b in range(6):
        point = cheapest_within(points, least[5 - b])
        assert point is not None, f"budget for {b} kept matmuls is not reached"
        assert point.recompute_seconds <= 5 - b


STEP = TrainingStep(optimizer=None, accumulate=True)
"""Gradients are there from the start, so the peak falls by what is not saved, as long as the re-run fits beneath it."""


def profiled_chain(pointwise_seconds: float) -> tuple[Profiled, Inputs]:
    """The chain with a matmul as the unit of time."""
    inputs = Inputs.of((torch.randn(512, 512, requires_grad=True),), {})
    captured = capture(Chain().train(), inputs)
    return profile(captured, inputs, lambda flops, _: 1.0 if flops else pointwise_seconds, STEP), inputs


def saved_and_redone(profiled: Profiled, inputs: Inputs, plan: Plan) -> tuple[float, int, int]:
    """Run a real step under ``plan``; return MiB held between forward and backward, matmuls beside 15, and the peak."""
    emitted = rewrite(profiled, plan)
    for tensor in (*emitted.parameters(), *inputs.leaves):
        tensor.grad = torch.zeros_like(tensor) if isinstance(tensor, nn.Parameter) else None
    num_matmuls, held = 0, []

    def count(func: Any, *_: Any) -> None:
        nonlocal num_matmuls
        num_matmuls += func is torch.ops.aten.mm.default

    tracker = StorageTracker(on_op=count)
    start_bytes = tracker.hold(tensors_of((emitted, inputs.leaves))) + 4  # the output, a scalar
    with tracker:
        run_step(
            lambda: profiled.captured.call(emitted, inputs.leaves),
            on_phase=lambda phase: held.append(tracker.live_bytes - start_bytes),
        )
    return held[1] / MIB, num_matmuls - 15, tracker.peak_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("whole_search")
def test_a_budget_of_b_mib_on_the_chain_saves_b_mib_and_redoes_the_other_matmuls() -> None:
    """PyTorch's test_matmul_even_chain, measured on the emitted module: b of 10 saved matrices, 5 - b more matmuls.

    A peak budget of eager's less 10 - b matrices asks for b saved ones. That is the same question down to b = 3; saving
    less leaves so much to re-run at once that the peak does not fall (see the next test).
    """
    profiled, inputs = profiled_chain(pointwise_seconds=0)
    eager_bytes = simulate(profiled.profile, keep_all(profiled.profile)).peak_bytes
    points = PLANNERS["auto"](profiled.profile, seconds=5)
    for b in range(3, 10):
        point = cheapest_within(points, eager_bytes - (10 - b) * MIB)
        assert point is not None
        saved, redone, peak = saved_and_redone(profiled, inputs, point.plan)
        assert (saved, redone) == (min(b, 5), max(5 - b, 0))
        assert peak == point.peak_bytes <= eager_bytes - (10 - b) * MIB
    profiled, inputs = profiled_chain(pointwise_seconds=0.01)
    for b in (9, 10):  # where a cosine costs something, no more of them are redone than must be
        point = cheapest_within(PLANNERS["auto"](profiled.profile, seconds=5), eager_bytes - (10 - b) * MIB)
        plan = keep_all(profiled.profile) if point is None else point.plan
        saved, redone, _ = saved_and_redone(profiled, inputs, plan)
        assert (saved, redone, len(plan.dropped)) == (b, 0, 10 - b)


@pytest.mark.slow
@pytest.mark.parametrize("b", range(3))
def test_saving_less_than_three_matrices_of_the_chain_saves_b_mib_but_no_peak(b: int) -> None:
    profiled, inputs = profiled_chain(pointwise_seconds=0)
    storages, last = profiled.profile.storages, len(profiled.profile.recipes)
    limits = [KEEP if s.recipe is None else last for s in storages]
    for s in [s.index for s in storages if profiled.profile.nodes[s.creator].seconds][:b]:
        limits[s] = KEEP
    saved, redone, peak = saved_and_redone(profiled, inputs, Plan("b kept", tuple(limits)))
    assert (saved, redone) == (b, 5 - b)
    three = simulate(profiled.profile, keep_all(profiled.profile)).peak_bytes - 7 * MIB
    assert peak >= three
