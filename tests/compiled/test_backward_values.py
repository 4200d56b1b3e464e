"""What the backward makes itself: which of its values Inductor writes to memory, and until when they are there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fxmem.ir import GraphProfile, Phase
from tests.compiled.seat import profile_for


def most_bytes_in_backward(profile: GraphProfile) -> int:
    return max(tick.peak_bytes for tick in profile.ticks if tick.phase is Phase.BACKWARD)


def test_gradients_of_a_residual_do_not_stay_until_the_backward_is_over() -> None:
    """Inductor writes a sum that is computed from many buffers, and lets go of these."""

    def tower(depth: int) -> Callable[..., torch.Tensor]:
        def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            for _ in range(depth):
                x = x + (F.layer_norm(x, x.shape[-1:]) @ w).relu()
            return x

        return run

    shallow, deep = (profile_for(tower(depth), torch.randn(256, 32), torch.randn(32, 32)) for depth in (6, 12))
    more_bytes = most_bytes_in_backward(deep) - most_bytes_in_backward(shallow)
    assert more_bytes <= 6 * 32 * 32 * 4, "beside gradients of w"


@pytest.mark.parametrize(("num_readers", "num_gradients"), [(7, 7), (30, 13)])
def test_gradients_that_are_summed_are_all_there_until_inductor_writes_their_sum(
    num_readers: int, num_gradients: int
) -> None:
    """Inductor writes a sum as soon as it is computed from more than 12."""

    def read_often(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        x = F.conv1d(x, weights[0])
        return sum(F.conv1d(x, w).sum() for w in weights[1:])  # type: ignore[return-value]

    x, weights = torch.randn(4, 8, 512), (torch.randn(8, 8, 1) for _ in range(num_readers + 1))
    most_bytes = most_bytes_in_backward(profile_for(read_often, x, *weights))
    assert num_gradients * x.nbytes <= most_bytes < (num_gradients + 2) * x.nbytes


def test_what_a_gradient_is_computed_from_goes_before_the_op_that_reads_it_has_its_result() -> None:
    profile = profile_for(lambda x, w: F.dropout(x @ w, 0.5), torch.randn(32, 1024), torch.randn(1024, 32))
    (mask,) = (storage.index for storage in profile.storages if storage.nbytes == 32 * 32)
    released = next(tick for tick in profile.ticks if mask in tick.releases)
    assert released.peak_bytes - released.start_bytes == 32 * 32 * 4, "the masked gradient, and no product of it"
