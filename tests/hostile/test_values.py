"""Numbers, data and shapes that a graph cannot hold, and what is said of them."""

from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn

import fxmem
from tests.exactness import check
from tests.hostile.models import WIDTH, batch


class Sized(tuple):
    """A tuple whose length is not to be asked for, as e3nn's Irreps."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_numbers_come_first_and_tuples_have_no_length() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.sized = nn.Linear(WIDTH, WIDTH), Sized([1, 2])

        def forward(self, x: Tensor) -> Tensor:
            return torch.add(0, self.layer(x)).sin()

    check(Odd, batch())
    fxmem.optimize(Odd(), optimizer=None)(batch()).sum().backward()


class ReadsData(nn.Module):
    def __init__(self, way: Any) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(WIDTH, WIDTH), way
        self.register_buffer("mean", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, self.layer(x))


def adds_data(m: Any, y: Tensor) -> Tensor:
    return y.sin() + y.data


def averages(m: Any, y: Tensor) -> Tensor:
    m.mean.data.lerp_(y.data.mean(0), 0.1)
    return y * 2


def decays(m: Any, y: Tensor) -> Tensor:
    m.mean.data.mul_(0.9)
    return y * m.mean


def overwrites(m: Any, y: Tensor) -> Tensor:
    product = y * m.mean
    m.mean.data.mul_(0.9)
    return product


def assigns(m: Any, y: Tensor) -> Tensor:
    m.mean.data = m.mean.data * 0.9
    return y * m.mean


@pytest.mark.parametrize("way", [adds_data, averages, decays])
def test_data_of_tensors_may_be_read_and_written_through(way: Any) -> None:
    check(lambda: ReadsData(way), batch())


@pytest.mark.parametrize(("way", "text"), [(overwrites, "write to a clone"), (assigns, "assigns to .data")])
def test_what_data_hides_from_autograd_is_refused(way: Any, text: str) -> None:
    with pytest.raises(fxmem.FxMemError, match=text):
        fxmem.optimize(ReadsData(way), batch(), optimizer=None)


def test_parts_that_share_parameters_are_counted_once() -> None:
    class Outer(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x)

    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            self.outer = Outer(self.part)

        def forward(self, x: Tensor) -> Tensor:
            y = self.outer(self.part(x))
            return y * (2.0 if y.sum() > 0 else 1.0)

    with pytest.warns(UserWarning, match=r"Sharing is planned in parts.*: 1 with 100% of its parameters \("):
        fxmem.optimize(Sharing(), batch(), optimizer=None)


def test_shapes_that_follow_from_values_are_refused_as_such() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y[y > 0]

    with pytest.raises(fxmem.CaptureError, match=r"the shape of what aten\.nonzero\.default returns"):
        fxmem.optimize(Masked(), batch(), optimizer=None)


def test_a_second_argument_given_for_a_dict_is_refused_as_such() -> None:
    with pytest.raises(fxmem.InputError, match="pass several arguments as one tuple"):
        fxmem.optimize(nn.Bilinear(WIDTH, WIDTH, 2), batch(), batch())  # type: ignore[arg-type]
