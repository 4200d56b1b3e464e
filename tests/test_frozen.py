"""Models of which parts are frozen: their kernels make fewer gradients, or more than are wanted; the peaks are exact."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fxmem.simulate import drop_all, keep_all
from tests.exactness import check, on_the_way

PLANS = (keep_all, drop_all, on_the_way)


def frozen(layer: nn.Module, *names: str) -> nn.Module:
    """Freeze the parameters of ``layer`` with these names; all if there are none."""
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(bool(names) and name not in names)
    return layer


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(64),
    "group": lambda: nn.GroupNorm(4, 64),
    "layer": lambda: nn.LayerNorm((64, 14, 14)),
    "instance": lambda: nn.InstanceNorm2d(64, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("names", [(), ("weight",), ("bias",)], ids=["neither", "bias", "weight"])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_what_needs_no_gradient(norm: str, names: tuple[str, ...]) -> None:
    def build() -> nn.Module:
        learning = NORMS[norm]()
        if names:
            frozen(learning, *names)
        return nn.Sequential(frozen(nn.Conv2d(3, 64, 3)), learning, nn.ReLU(), nn.Conv2d(64, 4, 1))

    check(build, torch.randn(2, 3, 16, 16), plans=PLANS)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("cls", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("size", [(2, 4, 12, 12), (1, 4, 6, 6)])
def test_convolutions_of_which_a_part_is_frozen(
    size: tuple[int, ...], name: str, cls: type[nn.Module], groups: int
) -> None:
    def build() -> nn.Module:
        convolution = frozen(cls(4, 4, 3, groups=groups), name)
        return nn.Sequential(nn.Conv2d(4, 4, 1), convolution, nn.GELU(), nn.Conv2d(4, 4, 1))

    check(build, torch.randn(size), plans=PLANS)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_linear_layers_of_which_a_part_is_frozen(name: str) -> None:
    check(
        lambda: nn.Sequential(nn.Linear(8, 32), frozen(nn.Linear(32, 32), name), nn.GELU(), nn.Linear(32, 8)),
        torch.randn(6, 8),
        plans=PLANS,
    )
