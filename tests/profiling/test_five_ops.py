"""A network of five ops, byte by byte: the numbers of notebooks/04_how_it_works.ipynb, each checked by hand.

Every tensor is 16 x 16 floats, 1 KiB. ``tanh`` and ``exp`` save their results, ``sin`` and ``cos`` their inputs.
"""

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.ir import Phase
from fxmem.planners.simulate import keep_all, simulate
from fxmem.profiling.profile import Profiled, profile
from fxmem.profiling.roofline import PRESETS

KIB = 1024
SCALARS = 8
"""The loss and its gradient."""


class Five(nn.Module):
    """Five ops in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        a = x @ self.weight
        b = torch.tanh(a)
        c = torch.exp(b)
        d = torch.sin(c)
        return torch.cos(d)


@pytest.fixture
def profiled() -> Profiled:
    inputs = Inputs.of((torch.randn(16, 16),), {})
    return profile(capture(Five(), inputs), inputs, PRESETS["cpu"].seconds)


def test_the_profile_has_five_nodes_of_one_kib_and_what_autograd_saves(profiled: Profiled) -> None:
    found = profiled.profile
    assert [node.name for node in found.nodes] == ["matmul", "tanh", "exp", "sin", "cos"]
    assert [s.nbytes for s in found.storages] == [KIB] * 5
    assert [node.saves for node in found.nodes] == [(), (1,), (2,), (2,), (3,)]
    assert [s.num_saves for s in found.storages] == [0, 1, 2, 1, 0]
    assert found.storages[4].recipe is None  # the output may not be dropped


def test_the_original_step_holds_these_bytes_at_each_tick(profiled: Profiled) -> None:
    steps = simulate(profiled.profile, keep_all(profiled.profile), with_steps=True).steps
    forward = [s.live_bytes for s in steps if s.phase is Phase.FORWARD]
    assert forward == [2 * KIB, 3 * KIB, 4 * KIB, 4 * KIB, 5 * KIB, 6 * KIB]
    backward = [s.live_bytes for s in steps if s.phase is Phase.BACKWARD]
    assert backward == [6 * KIB + SCALARS, *(n * KIB + SCALARS for n in (9, 8, 7, 6, 5))]


def test_the_least_plan_drops_tanh_and_exp_and_saves_two_kib() -> None:
    model, x = Five(), torch.randn(16, 16)
    free = fxmem.optimize(model, x, optimizer=None, inplace=False).report
    assert (free.eager_peak_bytes, free.floor_bytes) == (9 * KIB + SCALARS, 7 * KIB + SCALARS)
    optimized = fxmem.optimize(model, x, budget=free.floor_bytes, optimizer=None, inplace=False)
    assert [row.name for row in optimized.report.rows if row.decision == "drop"] == ["tanh", "exp"]
    timeline = optimized.report.timeline
    assert [s.label for s in timeline.steps if s.recompute] == ["matmul", "tanh", "exp", "matmul", "tanh"]
    assert timeline.peak_bytes == 7176


def test_the_emitted_code_says_what_is_kept_and_dropped_and_runs_at_the_planned_peak() -> None:
    model, x = Five(), torch.randn(16, 16)
    optimized = fxmem.optimize(model, x, budget=7176, optimizer=None, inplace=False)
    lines = {line.strip().split(" = ")[0]: line for line in optimized.graph_module.code.splitlines() if " = " in line}
    assert all("taped_" in lines[name] for name in ("matmul", "tanh", "exp", "sin"))
    assert "taped_" not in lines["cos"]
    assert "# keep" in lines["sin"]
    with fxmem.track(model, x) as memory:
        output = optimized(x)
        loss = output.sum()
        loss.backward()
    assert memory.peak_bytes == 7176
    ours, model.weight.grad = model.weight.grad, None
    model(x).sum().backward()
    assert torch.equal(ours, model.weight.grad)
