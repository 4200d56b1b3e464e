"""Models of which parts are frozen, missing or of another dtype: other kernels run, which make other tensors."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fxmem.planners.simulate import drop_all, keep_all
from tests.exactness import check, passing
from tests.tiers import diagonal

PLANS = (keep_all, drop_all, passing)


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


@pytest.mark.slow
@pytest.mark.parametrize("names", [(), ("weight",), ("bias",)], ids=["neither", "bias", "weight"])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_what_needs_no_gradient(norm: str, names: tuple[str, ...]) -> None:
    def build() -> nn.Module:
        learning = NORMS[norm]()
        if names:
            frozen(learning, *names)
        return nn.Sequential(frozen(nn.Conv2d(3, 64, 3)), learning, nn.ReLU(), nn.Conv2d(64, 4, 1))

    check(build, torch.randn(2, 3, 16, 16), plans=PLANS)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(("size", "groups"), diagonal([(2, 4, 12, 12), (1, 4, 6, 6)], [1, 4]))
def test_convolutions_of_which_a_part_is_frozen(
    size: tuple[int, ...], name: str, cls: type[nn.Module], groups: int
) -> None:
    def build() -> nn.Module:
        convolution = frozen(cls(4, 4, 3, groups=groups), name)
        return nn.Sequential(nn.Conv2d(4, 4, 1), convolution, nn.GELU(), nn.Conv2d(4, 4, 1))

    check(build, torch.randn(size), plans=PLANS)


@pytest.mark.parametrize(("dims", "dtype"), diagonal([1, 2, 3], [torch.float32, torch.bfloat16, torch.float64]))
def test_transposed_convolutions_of_which_the_bias_learns(dims: int, dtype: torch.dtype) -> None:
    cls = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    x = torch.randn(2, 64, *[8] * dims, dtype=dtype, requires_grad=True)
    check(lambda: nn.Sequential(frozen(cls(64, 64, 3, padding=1), "weight"), nn.SiLU()).to(dtype), x, plans=PLANS)


@pytest.mark.parametrize(("dtype", "channels"), diagonal([torch.float32, torch.bfloat16, torch.float64], [8, 64]))
def test_transposed_convolutions_that_make_less_than_they_take(channels: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 64, 6, 6, 6, dtype=dtype)
    convolution = nn.ConvTranspose3d(64, channels, 1 if channels == 8 else 3, padding=channels // 64)
    check(lambda: nn.Sequential(convolution, nn.SiLU()).to(dtype), x, plans=PLANS)


@pytest.mark.slow
@pytest.mark.parametrize("learning", [False, True])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_running_statistics_of_another_dtype_choose_the_kernel(norm: type[nn.Module], learning: bool) -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 8, 5, 5).bfloat16().requires_grad_(learning)

    def build() -> nn.Module:
        without_parameters = norm(8, affine=False, track_running_stats=True)
        return nn.Sequential(without_parameters, nn.SiLU(), nn.Conv2d(8, 4, 1).bfloat16())

    check(build, x, plans=PLANS)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_linear_layers_of_which_a_part_is_frozen(name: str) -> None:
    check(
        lambda: nn.Sequential(nn.Linear(8, 32), frozen(nn.Linear(32, 32), name), nn.GELU(), nn.Linear(32, 8)),
        torch.randn(6, 8),
        plans=PLANS,
    )
