"""How convolutions of a backward are laid out: as those of its forward, and plain where they take much less inside so."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from functorch.compile import default_partition
from torch import fx, nn

import fxmem
from benchmarks.measure import allocator_rise_bytes
from fxmem.api.arguments import settings_of
from fxmem.compiled.fakerun import GraphCall, run_step
from fxmem.compiled.graph_planner import GraphPlanner
from fxmem.compiled.levers import Levers
from fxmem.compiled.lower import function_of, lowered_backward
from fxmem.compiled.scratch import scratch_bytes
from fxmem.compiled.step_run import IN_ORDER, TIGHT
from fxmem.compiled.surroundings import Surroundings
from fxmem.fake.attention import torch_release
from fxmem.torch_private import FakeTensorMode
from tests.compiled.seat import in_the_seat

SETTINGS = settings_of({"cost": "cpu", "plan_seconds": 1.0, "optimizer": None, "cache": False})
from_2_13_on = pytest.mark.skipif(
    torch_release() < (2, 13), reason="convolutions' backwards are given what they are in eager"
)
BACKWARD = torch.ops.aten.convolution_backward.default


class Seen(FakeTensorMode):
    """Fakes that note what backwards of convolutions are given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is BACKWARD:
            self.given.append(args)
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def given_in_backward(model: nn.Module, x: torch.Tensor, levers: Levers | None) -> list[tuple[Any, ...]]:
    """Return the arguments of each convolution's backward, in code made with ``levers``, or as Inductor makes it."""
    found: list[tuple[Any, ...]] = []

    def look(joint: fx.GraphModule, num_outputs: int, static: Any) -> None:
        _, backward = default_partition(joint, None, num_fwd_outputs=num_outputs, static_lifetime_input_indices=static)
        given = [n.meta["val"] for n in backward.graph.find_nodes(op="placeholder")]
        images = [t.ndim == 4 and t.shape[-1] == x.shape[-1] for t in given]
        for node, is_image in zip(backward.graph.find_nodes(op="placeholder"), images, strict=True):
            if is_image:  # as a forward in channels last saves it
                val = torch.empty_like(node.meta["val"], memory_format=torch.channels_last)
                node.meta = {**node.meta, "val": val}
        num_saved = sum("tangents" not in n.name for n in backward.graph.find_nodes(op="placeholder"))
        if levers is None:
            wrapper = lowered_backward(backward, num_saved, ())
        else:
            with levers.pulled(is_backward=True):
                wrapper = lowered_backward(backward, num_saved, ())
        with Seen() as seen:
            inputs = [
                torch.empty_strided(n.meta["val"].shape, n.meta["val"].stride())
                for n in backward.graph.find_nodes(op="placeholder")
            ]
            function_of(wrapper, lambda *call: None)(inputs)
        found.extend(seen.given)

    in_the_seat(look, model, x)
    return found


def depthwise(channels: int, size: int) -> tuple[nn.Module, torch.Tensor]:
    convolution = nn.Conv2d(channels, channels, 5, padding=2, groups=channels, bias=False)
    return nn.Sequential(convolution, nn.ReLU()), torch.randn(2, channels, size, size)


def layers_of_depthwise(channels: int, kernel_size: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 1)]
    for _ in range(3):
        convolution = nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels)
        layers += [convolution, nn.BatchNorm2d(channels), nn.SiLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))


def is_in_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


@from_2_13_on
@pytest.mark.parametrize("as_forward", [False, True])
def test_decide_layout_opt_decides_how_a_backward_without_convolutions_of_its_own_is_laid_out(as_forward: bool) -> None:
    model, x = depthwise(16, 24)
    ((gradient, image, *_),) = given_in_backward(model, x, Levers() if as_forward else None)
    assert is_in_channels_last(gradient) is as_forward
    assert is_in_channels_last(image) is as_forward


@from_2_13_on
@pytest.mark.parametrize("tight", [False, True])
def test_maybe_layout_constraints_has_a_convolution_that_takes_much_inside_given_plain_copies(tight: bool) -> None:
    model, x = depthwise(256, 4)
    ((gradient, image, weight, *rest),) = given_in_backward(model, x, Levers(tightness=int(tight)))
    assert is_in_channels_last(image) is not tight
    assert gradient.is_contiguous() is tight
    usual, plain = (
        scratch_bytes(
            BACKWARD, [torch.empty_like(t, memory_format=layout) for t in (gradient, image)] + [weight, *rest], {}
        )
        for layout in (torch.channels_last, torch.contiguous_format)
    )
    assert usual > 10 * plain


@pytest.mark.slow
def test_run_node_and_realize_reads_threshold_decide_when_a_backward_in_order_writes_what() -> None:
    """A gradient is there before a layer runs again, what two ops read is there once, and a norm's result is not. In double
    precision, in which layouts and kernels hardly round, gradients are eager's."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.BatchNorm2d(32), nn.ReLU6()]
    model, x = nn.Sequential(*layers).double(), torch.randn(4, 32, 32, 32).double()
    peaks: dict[int, int] = {}

    def look(joint: fx.GraphModule, num_outputs: int, static: Any) -> None:
        planner = GraphPlanner.of(joint, num_outputs, static, Surroundings(), SETTINGS)
        code = planner.lowered(planner.candidates.points[-1].plan, Levers())
        for tightness in (TIGHT, IN_ORDER):
            tight = code.tight(tightness)
            run = run_step([tight], [GraphCall()], planner.around, planner.hardware)
            peaks[tightness] = run.backward_peak_bytes

    in_the_seat(look, model, x)
    assert peaks[IN_ORDER] < 0.9 * peaks[TIGHT]
    options: dict[str, Any] = {"optimizer": "sgd", "backend": "inductor", "loss_fn": torch.sum, "cost": "cpu"}
    with pytest.raises(fxmem.InfeasibleBudgetError) as error:
        fxmem.optimize(copy.deepcopy(model), x, budget="1KB", **options)
    deep = fxmem.optimize(copy.deepcopy(model), x, budget=error.value.least_bytes, **options)
    assert deep.fxmem.report.tight_backward
    pairs = zip(gradients(deep, deep, x), gradients(model, model, x), strict=True)
    assert all(torch.allclose(ours, eagers, rtol=1e-9, atol=1e-9) for ours, eagers in pairs)


@pytest.mark.slow
def test_a_step_of_depthwise_convolutions_keeps_a_budget_with_the_layouts_of_keeping_all() -> None:
    """What is recomputed changes no layout, so gradients are the bits of keeping all."""
    model, x = layers_of_depthwise(32, kernel_size=3), torch.randn(4, 3, 32, 32)
    options: dict[str, Any] = {"optimizer": "sgd", "backend": "inductor", "loss_fn": torch.sum}
    kept = fxmem.optimize(copy.deepcopy(model), x, budget_gb=1, **options)
    peak_bytes = kept.fxmem.report.predicted_peak_bytes
    deep = fxmem.optimize(copy.deepcopy(model), x, budget=int(0.85 * peak_bytes), **options)
    assert deep.fxmem.report.num_recomputed
    assert not deep.fxmem.report.layouts_left
    assert not deep.fxmem.report.tight_backward
    assert all(map(torch.equal, gradients(kept, kept, x), gradients(deep, deep, x)))


@pytest.mark.slow
def test_what_convolutions_take_inside_is_spared_where_memory_is_short() -> None:
    model, x = layers_of_depthwise(192, kernel_size=5), torch.randn(4, 3, 8, 8)
    options: dict[str, Any] = {"optimizer": "sgd", "backend": "inductor", "loss_fn": torch.sum}
    deep = fxmem.optimize(copy.deepcopy(model), x, budget="2MB", **options)
    report = deep.fxmem.report
    assert report.tight_backward
    assert 2 * report.predicted_peak_bytes < report.keep_all_peak_bytes

    def step() -> None:
        output = deep(x)
        output.sum().backward()
        deep.zero_grad()

    step()
    here = sum(t.nbytes for t in (*deep.parameters(), *deep.buffers(), x))
    assert here + allocator_rise_bytes(step) == report.predicted_peak_bytes
    expected = gradients(torch.compile(model), model, x)
    assert all(map(torch.allclose, gradients(deep, deep, x), expected)), "by rounding, as other kernels sum"


def gradients(forward: Any, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    forward(x).sum().backward()
    found = [p.grad for p in model.parameters()]
    assert all(gradient is not None for gradient in found)
    return found  # type: ignore[return-value]
