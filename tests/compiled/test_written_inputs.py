"""Inputs and buffers that the forward writes over: the backward of a compiled step does not read them any more."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxmem
from benchmarks.measure import allocator_rise_bytes
from fxmem.compiled.joint import JointGraph
from tests.compiled.models import OPTIONS
from tests.compiled.seat import in_the_seat


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.register_buffer("mean", torch.ones(32))

    def rest(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class RunningMean(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.rest(x - self.mean).square().mean()


class OwnInput(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1.0)
        return self.rest(x).square().mean()


class InputAsItWas(Net):
    """torch's own compiler takes the copy for nothing and has the backward read what was written."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x.clone().view(2, -1)
        x.mul_(2.0)
        return (self.rest(x).view(2, -1) * before).square().mean()


class Spectral(Net):
    def __init__(self) -> None:
        super().__init__()
        for part in (self.up, self.down):
            nn.utils.parametrizations.spectral_norm(part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(x).square().mean()


class Row(Net):
    """Writes a part, reads, then writes over all: torch's own compiler has the backward read what was written last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean[:4] = x.detach().mean()
        y = torch.exp(-(x * self.mean.clone()).square())
        self.mean.mul_(0.5)
        return (self.rest(y) * self.mean.clone()).square().mean()


class Parts(Net):
    """Writes to parts twice, and reads between."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.randn(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean[:, 0] = x.detach().mean(0)
        self.mean[::2, 1] = 0.5
        y = torch.exp(-(self.rest(x) * self.mean.clone()[:, 0]).square()) * self.mean[:, 1].clone()
        self.mean[:, 2:].mul_(0.5)
        return (y + torch.sigmoid(x + self.mean[:, 2:].sum(1) + self.mean[:, 1])).square().mean()


class Checkpointed(Net):
    """A checkpoint of torch's, and a BatchNorm whose statistics are written."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.rest, self.norm(x), use_reentrant=False).square().mean()


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model(x.clone()).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RunningMean, OwnInput, InputAsItWas, Spectral, Row, Parts, Checkpointed])
def test_gradients_are_eagers_where_the_forward_writes_over_what_it_read(kind: type[Net]) -> None:
    torch.manual_seed(0)
    eager, x = kind(), torch.randn(512, 32)
    models, reports = [copy.deepcopy(eager) for _ in range(2)], []
    with pytest.raises(fxmem.InfeasibleBudgetError) as refused:
        fxmem.optimize(copy.deepcopy(eager), x, budget="1kB", optimizer=None, **OPTIONS)
    expected = gradients(eager, x)
    for model, budget in zip(models, (None, refused.value.least_bytes), strict=True):
        compiled = fxmem.optimize(model, x, budget=budget, optimizer=None, **OPTIONS)
        for found, right in zip(gradients(compiled, x), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
        for found, right in zip(model.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(found, right)
        compiled.zero_grad()
        report, given = compiled.fxmem.report, x.clone()
        rise = allocator_rise_bytes(lambda compiled=compiled, given=given: compiled(given).backward())
        assert abs(report.fixed_bytes + rise - report.predicted_peak_bytes) <= 64
        reports.append(report)
    assert reports[1].predicted_peak_bytes <= reports[0].predicted_peak_bytes


def test_statistics_that_only_the_forward_reads_are_no_memory() -> None:
    """What is pinned is what the backward is computed from."""

    def look(joint: torch.fx.GraphModule, num_outputs: int, _: object) -> None:
        seen.append(JointGraph.of(joint, num_outputs))

    seen: list[JointGraph] = []
    in_the_seat(look, nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(2, 3, 8, 8))
    in_the_seat(look, RunningMean(), torch.randn(8, 32))
    assert not seen[0].read_once
    assert [n.target for n in seen[1].read_once] == [torch.ops.aten.mul.Tensor]
