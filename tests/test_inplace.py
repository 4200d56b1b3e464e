"""Ops that write over their input: only where nobody needs the old value, with the reason where somebody does."""

import copy

import torch
from torch import Tensor, nn

import fxmem
from tests.exactness import same_bits


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
