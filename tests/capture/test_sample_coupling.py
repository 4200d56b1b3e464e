"""Samples of a batch that depend on each other are found, and so is what cannot be told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxmem
from benchmarks.libraries import import_library
from fxmem.capture.dynamic_batch import batch_dims
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.capture.sample_coupling import check_samples_apart


class After(nn.Module):
    """A linear layer, and what is done to its result."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


def check(model: nn.Module, x: torch.Tensor) -> None:
    inputs = Inputs.of((x,), {})
    check_samples_apart(capture(model.train(), inputs, None, batch_dims(inputs)))


COUPLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gram": lambda y: y @ y.t(),
    "mean": lambda y: y.mean(),
    "centred": lambda y: y - y.mean(0),
    "softmax": lambda y: y.softmax(0),
    "cumsum": lambda y: y.cumsum(0),
    "flip": lambda y: y.flip(0),
    "roll": lambda y: y.roll(1, 0),
    "sort": lambda y: y.sort(0).values,
    "pairs": lambda y: y[:, None] - y[None],
    "shift": lambda y: y - torch.cat([y[1:], y[:1]]),
    "wrong view": lambda y: y.reshape(8, -1).t(),
    "batch size": lambda y: y / y.shape[0],
    "place": lambda y: y + torch.arange(y.shape[0])[:, None],
    "looked up": lambda y: F.embedding(torch.zeros(y.shape[0], dtype=torch.int64), y),
    "batch norm": nn.BatchNorm1d(8),
    "running statistics": nn.Sequential(nn.Unflatten(1, (4, 2)), nn.InstanceNorm1d(4, track_running_stats=True)),
}
APART: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda y: y.softmax(1),
    "sum": lambda y: y.sum(1, keepdim=True) * y,
    "views": lambda y: y.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8),
    "norm": nn.LayerNorm(8),
    "frozen batch norm": nn.BatchNorm1d(8).eval(),
    "noise": lambda y: y * torch.empty(y.shape[0], 1).bernoulli_(0.5),
    "dropout": nn.Dropout(0.5),
    "in place": lambda y: y.relu_(),
}


@pytest.mark.slow
@pytest.mark.parametrize("function", COUPLED.values(), ids=COUPLED)
def test_samples_that_meet_are_found(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(fxmem.InputError, match="micro-batches: "):
        check(After(function), torch.randn(4, 8))


@pytest.mark.parametrize("function", APART.values(), ids=APART)
def test_samples_apart_are_let_pass(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = After(function)
    model.train()
    if isinstance(function, nn.BatchNorm1d):
        function.eval()
        inputs = Inputs.of((torch.randn(4, 8),), {})
        check_samples_apart(capture(model, inputs, None, batch_dims(inputs)))
    else:
        check(model, torch.randn(4, 8))


@pytest.mark.exhaustive
def test_models_of_others_are_told_apart() -> None:
    models, timm = import_library("torchvision").models, import_library("timm")
    image = torch.randn(4, 3, 64, 64)
    check(models.vgg11(num_classes=10), image)
    check(timm.create_model("vit_tiny_patch16_224", img_size=64), image)
    with pytest.raises(fxmem.InputError, match=r"BatchNorm in training mode .* at bn1, resnet.py:"):
        check(models.resnet18(num_classes=10), image)
