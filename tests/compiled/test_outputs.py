"""What a compiled model returns: objects that are looked into, and outputs that its loss does not read."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import fxmem
from tests.compiled.models import OPTIONS, Block


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Returning(nn.Module):
    """Returns a dataclass that nothing else has registered."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(16)

    def forward(self, x: torch.Tensor) -> Output:
        logits = self.block(x)
        return Output(logits.square().mean(), logits)


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(16)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor | None]:
        logits = self.block(x)
        loss = None if labels is None else (logits - labels).square().mean()
        return {"loss": loss, "logits": logits}


@pytest.mark.slow
def test_a_dataclass_that_nobody_registered_is_looked_into_and_its_logits_may_be_written_to() -> None:
    x = torch.randn(32, 16)
    model = fxmem.optimize(Returning(), x, budget="1GB", loss_fn=lambda output: output.loss, **OPTIONS)
    output = model(x)
    assert type(output) is Output
    output.loss.backward()
    before = output.logits.detach().clone()
    output.logits.div_(2)
    assert torch.equal(output.logits, before / 2)


@pytest.mark.slow
def test_writing_to_logits_before_the_backward_that_reads_them_is_an_error() -> None:
    x = torch.randn(32, 16)
    model = fxmem.optimize(Returning(), x, budget="1GB", loss_fn=lambda output: output.loss, **OPTIONS)
    output = model(x)
    output.logits.div_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.loss.backward()


def test_a_loss_that_is_none_is_an_error_with_a_name() -> None:
    model = fxmem.optimize(Labelled(), budget="1GB", loss_fn=lambda output: output["loss"], **OPTIONS)
    with pytest.raises(fxmem.InputError, match="loss_fn must return a tensor of one element, not None"):
        model(torch.randn(32, 16))


def test_a_compiled_model_is_not_compiled_again() -> None:
    model = fxmem.optimize(Labelled(), budget="1GB", **OPTIONS)
    for optimize in (fxmem.optimize, fxmem.optimize_):
        with pytest.raises(fxmem.InputError, match=r"pass model\.fxmem\.original"):
            optimize(model, budget="2GB", **OPTIONS)
