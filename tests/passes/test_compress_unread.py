"""Calls that save less: poolings, paddings and convolutions save nothing that their backward does not read."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from fxmem.passes.compress_saved import with_compressed_saves
from tests.exactness import check, same_bits
from tests.passes.compressed_models import PLANS, lean_profile


class Amid(nn.Module):
    """``op`` after an op that does not save what ``op`` takes, before wide ones, at which the least peak is."""

    def __init__(self, op: Any, size: tuple[int, ...], memory_format: Any = torch.contiguous_format) -> None:
        super().__init__()
        self.op, self.memory_format = op, memory_format
        self.scale = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x * self.scale).contiguous(memory_format=self.memory_format)
        return self.op(hidden).repeat(40, *[1] * (x.dim() - 1)).sin()


def frozen(conv: nn.Module) -> nn.Module:
    return conv.requires_grad_(False)


UNREAD = {
    "avg_pool1d": (nn.AvgPool1d(3, 2, 1), 1),
    "avg_pool2d": (nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), 2),
    "avg_pool3d": (nn.AvgPool3d(2, divisor_override=3), 3),
    "adaptive1d": (nn.AdaptiveAvgPool1d(3), 1),
    "adaptive2d": (nn.AdaptiveAvgPool2d((3, 2)), 2),
    "adaptive3d": (nn.AdaptiveAvgPool3d((3, 2, 2)), 3),
    "reflect1d": (nn.ReflectionPad1d((1, 2)), 1),
    "reflect2d": (nn.ReflectionPad2d(2), 2),
    "reflect3d": (nn.ReflectionPad3d(1), 3),
    "replicate1d": (nn.ReplicationPad1d(3), 1),
    "replicate2d": (nn.ReplicationPad2d((0, 1, 2, 3)), 2),
    "replicate3d": (nn.ReplicationPad3d(1), 3),
    "conv1d": (frozen(nn.Conv1d(4, 6, 3, stride=2)), 1),
    "conv2d": (frozen(nn.Conv2d(4, 6, 3, padding=1, groups=2)), 2),
    "conv2d same": (frozen(nn.Conv2d(4, 6, 2, padding="same", bias=False)), 2),
    "conv2d reflect": (frozen(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")), 2),
    "conv3d": (frozen(nn.Conv3d(4, 2, 3, dilation=2)), 3),
    "depthwise": (frozen(nn.Conv2d(4, 4, 3, padding=1, groups=4)), 2),
    "transposed1d": (frozen(nn.ConvTranspose1d(4, 6, 3, 2)), 1),
    "transposed2d": (frozen(nn.ConvTranspose2d(4, 6, 3, 2, output_padding=1)), 2),
    "transposed3d": (frozen(nn.ConvTranspose3d(4, 2, 2)), 3),
    "max_pool1d": (nn.MaxPool1d(3, 2, 1), 1),
    "max_pool2d": (nn.MaxPool2d(3, 2, 1, ceil_mode=True), 2),
    "max_pool2d dilated": (nn.MaxPool2d(2, 1, dilation=2), 2),
    "max_pool3d": (nn.MaxPool3d(2), 3),
}
"""Ops that need not save their input, with the number of dimensions they work on."""


FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_what_backward_does_not_read_is_not_saved(name: str, autocast: Any, last: bool) -> None:
    op, dims = UNREAD[name]
    if last and dims not in FORMATS:
        pytest.skip("no such format")
    memory_format = FORMATS[dims] if last else torch.contiguous_format
    size = (2, 4, *(7, 8, 6)[:dims])
    x = torch.randn(size)
    x.flatten()[:3] = torch.tensor([float("nan"), float("inf"), -0.0])
    checked = check(lambda: Amid(op, size, memory_format), x, autocast=autocast, plans=PLANS)
    assert any("saving less" in plan for plan in checked.peaks)
    lean = lean_profile(checked, x)
    forms = ("max_pool_input_unread", "input_unread", "frozen_convolution")
    read = [node for node in lean.nodes if node.op in forms]
    assert read
    assert not any(lean.storages[node.reads[0]].num_saves for node in read)


def test_inputs_that_others_save_are_saved() -> None:
    class Shared(nn.Module):
        def __init__(self, other: Any) -> None:
            super().__init__()
            self.scale, self.other = nn.Parameter(torch.randn(6, 6)), other

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.scale
            return F.avg_pool2d(y, 2).sum() + self.other(y).sum()

    x = torch.randn(2, 3, 6, 6)
    read = check(lambda: Shared(torch.sin), x, plans=PLANS)
    unread = check(lambda: Shared(lambda y: F.max_pool2d(y, 3)), x, plans=PLANS)
    assert not any("saving less" in plan for plan in read.peaks)
    assert any("saving less" in plan for plan in unread.peaks)


@pytest.mark.parametrize("learning", ["weight", "bias"])
def test_convolutions_that_learn_stay_as_they_are(learning: str) -> None:
    conv = frozen(nn.Conv2d(4, 4, 3))
    conv.get_parameter(learning).requires_grad_()
    checked = check(lambda: Amid(conv, (2, 4, 6, 6)), torch.randn(2, 4, 6, 6), plans=PLANS)
    assert not any("saving less" in plan for plan in checked.peaks)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "is_left"), [(4096, True), (16, False)])
def test_what_is_worth_little_is_left(width: int, is_left: bool) -> None:
    model = nn.Sequential(
        nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8), nn.AvgPool1d(2), nn.Linear(4, 4), nn.GELU()
    )
    x = torch.randn(64, 8)
    eager_bytes = fxmem.optimize(model, x, optimizer=None).report.predicted_peak_bytes
    notes = fxmem.optimize(model, x, budget=eager_bytes - 1, optimizer=None).report.notes
    assert any("not saved" in note for note in notes) != is_left


@pytest.mark.slow
@pytest.mark.parametrize("op", [nn.AvgPool2d(2), nn.MaxPool2d(2), nn.ReflectionPad2d(1), frozen(nn.Conv2d(4, 4, 3))])
def test_gradients_of_gradients_and_batched_ones_are_the_same(op: nn.Module) -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3), op, nn.Conv2d(4, 32, 2), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Conv2d(32, 2, 1)
    )
    learning = [p for p in model.parameters() if p.requires_grad]
    x = torch.randn(2, 4, 24, 24, requires_grad=True)
    eager_bytes = fxmem.optimize(model, x, optimizer=None).report.predicted_peak_bytes
    optimized = fxmem.optimize(model, x, optimizer=None, budget=eager_bytes - 1)
    assert "fxmem_runtime_compressed_ops_" in optimized.graph_module.code
    found = []
    for way in (model, optimized):
        y = way(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        second = torch.autograd.grad(grad.square().sum(), learning, allow_unused=True)
        y = way(x)
        batched = torch.autograd.grad(y, x, torch.stack([torch.ones_like(y), y.detach()]), is_grads_batched=True)
        found.append([g for g in (grad, *second, *batched) if g is not None])
    for theirs, ours in zip(*found, strict=True):
        assert same_bits(theirs.detach(), ours.detach())


def test_what_stays_alive_is_saved() -> None:
    conv = frozen(nn.Conv2d(4, 4, 3, padding=1))

    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.conv = nn.Parameter(torch.randn(8, 8)), conv

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = x * self.scale
            return hidden, self.conv(hidden)

    x = torch.randn(2, 4, 8, 8)
    checked = check(Returned, x, plans=PLANS)
    assert with_compressed_saves(checked.profiled, lambda node: False) is checked.captured
    pool = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 1), nn.GELU())
    of_the_batch = check(lambda: pool, x.requires_grad_(), plans=PLANS)
    assert with_compressed_saves(of_the_batch.profiled, lambda node: False) is of_the_batch.captured
