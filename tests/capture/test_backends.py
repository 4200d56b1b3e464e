"""Switches of kernels, grad modes, default dtypes and branches: the graph is that of where the model is called."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_tracing
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxmem
from tests.exactness import check, same_bits
from tests.small_models import Shared, assert_same_gradients, least, plain, twins
from tests.tiers import representatives

# -- switches of kernels -----------------------------------------------------------------------------------------------


class Attending(nn.Module):
    """Two attentions, the first by matmuls and a softmax, whatever is set outside."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.layers, self.inside = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), inside

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            y = layer(x)
            with sdpa_kernel(SDPBackend.MATH) if self.inside and i != 1 else nullcontext():
                x = F.scaled_dot_product_attention(y, y, y, is_causal=True).sin()
        return x


@pytest.mark.slow
def test_attention_keeps_the_backend_the_model_chooses() -> None:
    checked = check(lambda: Attending(inside=True), torch.randn(2, 2, 8, 16))
    (output,) = checked.captured.graph_module(torch.randn(2, 2, 8, 16))
    assert sum("FlashAttention" in node.name() for node in _autograd_nodes(output)) == 1


def _autograd_nodes(output: Tensor) -> set[Any]:
    nodes, stack = set(), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            stack += [following for following, _ in node.next_functions]
    return nodes


@pytest.mark.slow
@pytest.mark.parametrize("around", representatives(["forward", "backward", "step", "nothing"], "forward", "backward"))
def test_a_rerun_has_the_backends_of_its_forward(around: str) -> None:
    def backends(*places: str) -> Any:
        return sdpa_kernel(SDPBackend.MATH) if around in places else nullcontext()

    torch.manual_seed(0)
    model, x = Attending(inside=False), torch.randn(2, 2, 8, 16)
    with backends("forward", "step"):
        expected = model(x)
    with backends("backward", "step"):
        expected.sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    with backends("forward", "step"):
        optimized = least(model, x, spare_bytes=256)  # other backends save other statistics
    optimized(x)  # planned anew where the switches are others
    with backends("forward", "step"):
        actual = optimized(x)
    with backends("backward", "step"):
        actual.sum().backward()
    assert same_bits(expected, actual)
    assert all(same_bits(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))


def test_other_switches_inside_a_model_are_refused_by_name() -> None:
    def switching(model: Any, x: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):
            return cast(Tensor, model.first(x))

    with pytest.raises(fxmem.CaptureError, match=r"a switch of torch\.backends in forward.*around the whole step"):
        fxmem.optimize(Shared(switching), torch.randn(2, 8))


@pytest.mark.parametrize("asked", [is_fx_tracing, lambda: not torch.backends.mkldnn.enabled], ids=["tracing", "oneDNN"])
def test_another_branch_while_it_is_traced_is_refused_by_name(asked: Callable[[], bool]) -> None:
    def asking(model: Any, x: Tensor) -> Tensor:
        return cast(Tensor, model.first(x) * (2 if asked() else 3))

    with pytest.raises(fxmem.CaptureError, match=r"computes aten\.mul\.Tensor\(2\) where the model itself does not"):
        fxmem.optimize(Shared(asking), torch.randn(2, 8))


class Doubled(torch.autograd.Function):
    """Attends, in a function of the model's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * F.scaled_dot_product_attention(x, x, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * F.scaled_dot_product_attention(x, x, grad)


class Choosing(nn.Module):
    """Attends in all the ways that no call of ``scaled_dot_product_attention`` in its own code shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with sdpa_kernel(SDPBackend.MATH):
            x = self.attention(x, x, x, need_weights=False)[0]
            x = Doubled.apply(x)
        x = self.layer(x)
        with sdpa_kernel(SDPBackend.MATH):
            return self.layer(x)


@pytest.mark.slow
def test_attention_that_other_code_calls_keeps_its_backend() -> None:
    check(Choosing, torch.randn(2, 12, 16))


def by_size(model: Any, x: Tensor) -> Tensor:
    """Goes through another layer with large batches, and doubles those of an even size."""
    y = model.first(x).sin()
    if x.shape[0] > 5:
        y = model.last(y).exp().sin()
    return cast(Tensor, y if x.shape[0] % 2 else y.mul_(2))


@pytest.mark.slow
def test_a_batch_of_another_size_takes_its_own_branch() -> None:
    eager, model = twins(lambda: Shared(by_size))
    optimized = fxmem.optimize(model)
    for size in (8, 4, 9, 3, 6, 1, 5, 2):
        x = torch.randn(size, 8)
        expected, actual = eager(x), optimized(x)
        assert same_bits(expected, actual), size
        expected.sum().backward()
        actual.sum().backward()
    assert_same_gradients(eager, model)
    small, large = (fxmem.estimate(model, torch.randn(size, 8), optimizer=None) for size in (4, 9))
    assert small.max_batch_size(large.floor_bytes, recompute=True) == 9


@pytest.mark.slow
def test_planning_does_not_care_where_it_is_called() -> None:
    eager, model = twins(lambda: Shared(plain))
    x = torch.randn(4, 8)

    def peaks(autocast: torch.dtype | None = None) -> tuple[int, int]:
        estimated = fxmem.estimate(model, x, autocast=autocast).peak_bytes
        return estimated, fxmem.frontier(model, x, autocast=autocast, cost="a100")[0].predicted_peak_bytes

    expected, of_region = peaks(), peaks(torch.bfloat16)
    for grad_mode in (torch.no_grad(), torch.inference_mode()):
        with grad_mode:
            optimized = fxmem.optimize(model, x)
            assert peaks() == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert peaks() == peaks(torch.bfloat16) == of_region  # casts of steps on fakes do not stay in the region around
        fxmem.optimize(copy.deepcopy(model), x)
        eager(x).float().sum().backward()
        optimized(x).float().sum().backward()
    assert_same_gradients(eager, model)


@pytest.mark.slow
def test_a_region_without_a_dtype_has_the_one_there_is() -> None:
    eager, model = twins(lambda: Shared(lambda shared, x: _in_default_region(shared.first, x)))
    optimized, x = fxmem.optimize(model), torch.randn(4, 8)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype, enabled=False):
            assert same_bits(eager(x), optimized(x))


def _in_default_region(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return layer(x)


@pytest.mark.slow
def test_tensors_made_in_forward_follow_the_default_dtype() -> None:
    class Making(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x).sin() * torch.full((8,), 0.1)

    model, x = Making(), torch.randn(4, 8)
    optimized = fxmem.optimize(model, x)
    torch.set_default_dtype(torch.float64)
    try:
        assert optimized(x).dtype is model(x).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
