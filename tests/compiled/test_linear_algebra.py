"""Compiled steps with linear algebra: ops that refuse zeros, and checks that are effects."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxmem
from benchmarks.measure import allocator_rise_bytes
from tests.compiled.models import OPTIONS

SIZE = 64
SOLVERS: dict[str, Callable[[Tensor], Tensor]] = {
    "inverse": torch.linalg.inv,
    "solve": lambda a: torch.linalg.solve(a, a.sin()),
    "cholesky": torch.linalg.cholesky,
    "batched": lambda a: torch.linalg.solve(a.view(4, SIZE // 4, SIZE)[:, :, : SIZE // 4], a.view(4, -1, SIZE)),
    "determinant": torch.logdet,
    "orthogonal": lambda a: torch.linalg.qr(a).Q,
}


class Solving(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.solver = nn.Linear(SIZE, SIZE), SOLVERS[name]

    def forward(self, x: Tensor) -> Tensor:
        a = self.linear(x)
        return self.solver(a.T @ a / SIZE + torch.eye(SIZE)).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVERS)
def test_linear_algebra_is_predicted_as_measured_with_eagers_gradients(name: str) -> None:
    torch.manual_seed(0)
    eager, x = Solving(name), torch.randn(SIZE, SIZE)
    model = fxmem.optimize(copy.deepcopy(eager), x, budget="1GB", optimizer=None, **OPTIONS)
    for each in (eager, model):
        each(x).backward()
    for found, right in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, right.grad, rtol=1e-3, atol=1e-6)
    model.zero_grad()
    report = model.fxmem.report
    rise = allocator_rise_bytes(lambda: model(x).backward())
    assert abs(report.fixed_bytes + rise - report.predicted_peak_bytes) <= 64
