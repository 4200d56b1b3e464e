"""The models that the other tests train do train, and twice from the same seed give the same bits."""

import pytest
import torch
from torch import Tensor

from tests import zoo
from tests.tiers import first_of_each


def _train_step(entry: zoo.ZooModel, batch: int) -> tuple[Tensor, dict[str, Tensor | None]]:
    torch.manual_seed(0)
    model = entry.build()
    args, kwargs = entry.batch(batch)
    loss = entry.loss(model(*args, **kwargs))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of_each(zoo.names(), lambda name: zoo.get(name).family, "bert", "mamba"))
def test_eager_step_reaches_every_parameter_and_repeats_bitwise(name: str) -> None:
    entry = zoo.get(name)
    loss, gradients = _train_step(entry, entry.default_batch)
    assert loss.isfinite()
    assert [parameter for parameter, gradient in gradients.items() if gradient is None] == []
    again, gradients_again = _train_step(entry, entry.default_batch)
    assert torch.equal(loss, again)
    assert [n for n, g in gradients.items() if g is None or not torch.equal(g, gradients_again[n])] == []


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"no model 'resnet' in the zoo; known: resnet18, "):
        zoo.get("resnet")
    with pytest.raises(KeyError, match=r"no family 'hf' in the zoo; known: torchvision, timm, "):
        zoo.names("hf")


def test_families_share_out_the_names() -> None:
    assert [name for family in zoo.FAMILIES for name in zoo.names(family)] == zoo.names()
