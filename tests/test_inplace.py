"""Ops that write over their input: only where nobody needs the old value, with the reason where somebody does."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.step import run_step
from tests.exactness import check, same_bits


class Functional(nn.Module):
    """Activations out of place, as functional code has them; each branch is another reason for or against."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(x)))  # legal: batch_norm saves its input, not its output
        hidden = torch.sigmoid(hidden)  # not legal: the backward of relu needs its result
        shifted = x + 1.0  # not legal: x is the caller's
        return self.last(hidden).tanh() + shifted.mean()  # legal: conv2d does not need its result


def test_relu_after_batch_norm_is_done_in_place_and_nothing_else_changes() -> None:
    model = Functional().train()
    reference, plain = copy.deepcopy(model), copy.deepcopy(model)
    x = torch.randn(2, 3, 12, 12)
    optimized = fxmem.optimize(model, x, optimizer=None)
    without = fxmem.optimize(plain, x, optimizer=None, inplace=False)
    assert "aten.relu_.default" in optimized.graph_module.code
    assert "aten.relu_.default" not in without.graph_module.code
    optimized(x).sum().backward()
    reference(x).sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert same_bits(theirs.grad, ours.grad)
    assert optimized.report.predicted_peak_bytes <= without.report.predicted_peak_bytes


def test_each_refusal_says_why() -> None:
    report = fxmem.optimize(Functional().train(), torch.randn(2, 3, 12, 12), optimizer=None).report
    reasons = {decision.node: decision.why_not for decision in report.inplace}
    assert reasons["relu"] == ""
    assert reasons["sigmoid"] == "the backward of relu needs what it would overwrite"
    assert reasons["add"] == "it would overwrite a parameter, buffer or input"
    assert any("write over their input" in note for note in report.notes)


# -- frozen BatchNorms -------------------------------------------------------------------------------------------------


class FrozenNorms(nn.Module):
    """Convolutions that learn behind BatchNorms that do not: as detection models fine-tune."""

    def __init__(self, *, affine: bool = True, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4, affine=affine).requires_grad_(False) for _ in range(3))
        for norm in self.norms:
            norm.eval()
            norm.running_mean.uniform_()
            norm.running_var.uniform_(0.5, 2.0)
        self.to(memory_format=memory_format)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).relu()
        return x


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_frozen_batch_norms_train_to_the_same_bits(memory_format: Any, affine: bool, autocast: Any) -> None:
    x = torch.randn(2, 4, 6, 6).to(memory_format=memory_format)
    check(lambda: FrozenNorms(affine=affine, memory_format=memory_format), x, autocast=autocast)


def test_frozen_batch_norms_save_nothing_of_their_inputs_size() -> None:
    x = torch.randn(2, 4, 6, 6)
    report = fxmem.optimize(FrozenNorms(), x, optimizer=None).report
    activation_bytes = x.nbytes
    assert sum(row.nbytes for row in report.rows) == 3 * activation_bytes  # the three relu results
    learning = FrozenNorms().requires_grad_()
    assert sum(row.nbytes for row in fxmem.optimize(learning, x, optimizer=None).report.rows) == 6 * activation_bytes


def test_state_that_the_graph_does_not_read_counts_where_ops_are_done_in_place() -> None:
    model = Functional().train()
    model.register_buffer("unused", torch.zeros(1000))
    x = torch.randn(2, 3, 12, 12)
    optimized = fxmem.optimize(model, x, optimizer=None)
    assert "aten.relu_.default" in optimized.graph_module.code
    with fxmem.track(model, x) as memory:
        run_step(lambda: optimized(x))
    assert memory.peak_bytes == optimized.report.predicted_peak_bytes
