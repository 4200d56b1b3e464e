"""An error of memory keeps its class and tells what was planned, what holds memory, and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.torch_private import TorchDispatchMode

X = torch.randn(64, 32)


class Failing(TorchDispatchMode):
    """An allocator that has no memory left at the ``number``-th call of ``op``."""

    def __init__(self, op: Any, number: int = 0) -> None:
        super().__init__()
        self._op, self._left = op, number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._op:
            self._left -= 1
            if self._left < 0:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


def planned(**options: Any) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Sigmoid()) for _ in range(4)]
    return fxmem.optimize(nn.Sequential(*layers), X, optimizer=None, **options)


def note_of(error: pytest.ExceptionInfo[torch.OutOfMemoryError]) -> str:
    assert type(error.value) is torch.OutOfMemoryError
    (note,) = [each for each in error.value.__notes__ if each.startswith("fxmem: ")]
    return note


@pytest.mark.slow
def test_an_error_in_the_forward_is_followed_by_what_was_planned_and_what_to_do() -> None:
    model, held = planned(budget="1MB"), torch.zeros(3_000_017, dtype=torch.uint8)
    with (
        pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as error,
        Failing(torch.ops.aten.addmm.default),
    ):
        model(X)
    note, peak = note_of(error), model.fxmem.report.predicted_peak_bytes
    assert f"a step of Sequential was planned to take {peak / 1e3:.4g} kB ({peak} bytes) with a budget of 1 MB" in note
    assert f"uint8 ({held.nbytes},)" in note
    assert note.splitlines()[-1] == (
        "  what to do: a lower budget; fxmem.estimate(model, x).floor_bytes tells how low it can be, or a smaller batch."
    )


@pytest.mark.slow
def test_an_error_while_recomputing_is_explained_too() -> None:
    model = planned(policy=[("sigmoid", "recompute")], inplace=False, compress_saved=False)
    loss = model(X).sum()
    with pytest.raises(torch.OutOfMemoryError) as error, Failing(torch.ops.aten.sigmoid.default):
        loss.backward()
    assert "a step of Sequential was planned to take" in note_of(error)


@pytest.mark.slow
def test_an_error_elsewhere_in_the_backward_is_explained_by_the_watch() -> None:
    model = planned(budget="1MB")
    loss: Tensor = model(X).sum()
    with (
        pytest.raises(torch.OutOfMemoryError) as error,
        fxmem.watch(model, X, live=False),
        Failing(torch.ops.aten.sigmoid_backward.default),
    ):
        loss.backward()
    assert "a step of Sequential was planned to take" in note_of(error)
    assert error.value.__notes__[0].startswith("watched when it was raised: fxmem: step 0 | cpu ")


def test_other_errors_are_left_as_they_are() -> None:
    with pytest.raises(fxmem.InputError) as error:
        planned()(torch.randn(3, 3))
    assert not getattr(error.value, "__notes__", [])


@torch.library.custom_op("fxmem_tests::failing", mutates_args=())
def failing(x: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@failing.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Fails(torch.autograd.Function):
    """Needs more memory in its backward than there is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return failing(gradients[0])


class Compiled(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where = nn.Linear(32, 32), where

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        x = failing(x.detach()) + x if self.where == "forward" else Fails.apply(x)  # type: ignore[no-untyped-call]
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_in_a_compiled_step_is_explained_too(where: str) -> None:
    model = fxmem.optimize(Compiled(where), X, budget="1MB", backend="inductor", optimizer=None)
    with pytest.raises(torch.OutOfMemoryError) as error:
        model(X).backward()
    note = note_of(error)
    assert f"a step of Compiled was planned to take {model.fxmem.report.predicted_peak_bytes / 1e3:.4g} kB" in note
    assert 'fxmem.frontier(model, x, backend="inductor") tells how low it can be' in note
