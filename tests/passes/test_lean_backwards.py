"""Backwards that hold less at once: convolutions in two ops, ReLUs of bits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from benchmarks.libraries import import_torchvision
from fxmem import pipeline
from fxmem.capture.graph import CaptureGraph, copied, with_graph
from fxmem.passes.compress_saved import with_forms
from fxmem.passes.compressed_forms import Request
from fxmem.passes.lean_backwards import (
    before_pools,
    convolutions,
    notes_of,
    pools,
    relus,
    with_bits,
    with_narrow_indices,
    with_pools,
)
from fxmem.planners.simulate import drop_all
from fxmem.profiling.profile import Profiled
from fxmem.runtime.compressed_ops import narrowed
from fxmem.runtime.lean_backwards import relu_max_pool
from tests.exactness import NUM_PROGRAMS, check, passing, same_bits, tightest

PLANS = (drop_all, passing)


def all_lean(profiled: Profiled) -> CaptureGraph:
    """Return the graph with all forms that there are."""

    def is_free(node: Any) -> bool:
        return True

    split = with_forms(profiled, {k: Request(split=True) for k in convolutions(profiled, is_free, 0.0)})
    pooled = before_pools(profiled, is_free)
    alone = [relu.name for relu in relus(profiled, is_free, 0.0) if relu.name not in pooled]
    return with_bits(with_pools(split, pooled), alone)


def ops_of(captured: CaptureGraph) -> list[str]:
    return [str(getattr(node.target, "__name__", node.target)) for node in captured.graph_module.graph.nodes]


def num_of(checked: Any, form: str) -> int:
    return sum(form in op for op in ops_of(all_lean(checked.profiled)))


class Between(nn.Module):
    """``op`` on a value that was computed, at which the largest op of the step is."""

    def __init__(self, op: Any, size: tuple[int, ...]) -> None:
        super().__init__()
        self.op, self.scale = op, nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x * self.scale).sin()


CONVOLUTIONS = {
    "1d": (nn.Conv1d(4, 6, 3, stride=2), 1),
    "2d": (nn.Conv2d(4, 6, 3, padding=1), 2),
    "2d no bias": (nn.Conv2d(4, 6, 1, bias=False), 2),
    "2d dilated": (nn.Conv2d(4, 6, 3, dilation=2), 2),
    "grouped": (nn.Conv2d(4, 6, 3, padding=1, groups=2), 2),
    "depthwise": (nn.Conv2d(4, 4, 3, padding=1, groups=4), 2),
    "3d": (nn.Conv3d(4, 2, 3), 3),
    "transposed1d": (nn.ConvTranspose1d(4, 6, 3, 2), 1),
    "transposed2d": (nn.ConvTranspose2d(4, 6, 3, 2, output_padding=1), 2),
    "transposed3d": (nn.ConvTranspose3d(4, 2, 2), 3),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in CONVOLUTIONS), ("2d", torch.float64), ("2d", torch.bfloat16)],
)
def test_a_convolution_lets_go_of_its_input_within_its_backward(name: str, dtype: torch.dtype) -> None:
    op, dims = CONVOLUTIONS[name]
    size = (2, 4, *(7, 8, 6)[:dims])
    x = torch.randn(size, dtype=dtype)
    checked = check(lambda: Between(op, size).to(dtype), x, plans=PLANS, also=all_lean)
    assert num_of(checked, "split_convolution") == 1


@pytest.mark.parametrize("channels_last_weight", [False, True])
def test_kernels_are_eagers_whatever_the_weights_layout(channels_last_weight: bool) -> None:
    conv = nn.Conv2d(4, 6, 3, padding=1)
    if channels_last_weight:
        conv = conv.to(memory_format=torch.channels_last)
    checked = check(lambda: Between(conv, (2, 4, 7, 8)), torch.randn(2, 4, 7, 8), plans=PLANS, also=all_lean)
    assert num_of(checked, "split_convolution") == 1


def test_convolutions_whose_input_lies_otherwise_stay_as_they_are() -> None:
    x = torch.randn(2, 4, 7, 8).to(memory_format=torch.channels_last)
    model = nn.Sequential(nn.Tanh(), nn.Conv2d(4, 6, 3), nn.Tanh())
    checked = check(lambda: model, x.requires_grad_(), plans=PLANS)
    assert num_of(checked, "split_convolution") == 0


@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_convolutions_with_one_gradient_stay_as_they_are(frozen: str) -> None:
    conv = nn.Conv2d(4, 6, 3)
    if frozen == "weight":
        conv.requires_grad_(False)
    model = Between(conv, (2, 4, 7, 8)) if frozen == "weight" else nn.Sequential(conv, nn.Tanh())
    checked = check(lambda: model, torch.randn(2, 4, 7, 8), plans=(drop_all,))
    assert num_of(checked, "split_convolution") == 0


def test_the_backward_of_a_split_convolution_holds_two_maps_not_three() -> None:
    """Maps of 64 KiB; the weight is small beside them."""
    nbytes = 4 * 4 * 32 * 32 * 4
    x = torch.randn(4, 4, 32, 32)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding=1, bias=False))
    checked = check(lambda: model, x, loss=lambda y: (y * 2.0).sum(), plans=(drop_all,), also=all_lean)
    eager, lean = checked.peaks["drop_all"], checked.peaks["drop_all rewritten"]
    assert nbytes - 2000 < eager - lean <= nbytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "dtype", "in_place"),
    [
        ((3, 5, 7), torch.float32, False),
        ((3, 5, 7), torch.bfloat16, True),
        ((2, 8, 4, 4), torch.float64, True),
        ((1,), torch.float32, True),
        ((17,), torch.float32, False),
    ],
    ids=str,
)
def test_a_relu_saves_a_bit_an_element(size: tuple[int, ...], dtype: torch.dtype, in_place: bool) -> None:
    x = torch.randn(size, dtype=dtype)
    x.flatten()[0] = float("nan")
    checked = check(lambda: Between(nn.ReLU(in_place), size).to(dtype), x, plans=PLANS, also=all_lean)
    assert num_of(checked, "relu_of_bits") == 1


POOLS = {
    "2": nn.MaxPool2d(2),
    "3, 2, 1": nn.MaxPool2d(3, 2, 1),
    "dilated": nn.MaxPool2d(2, 1, dilation=2),
    "ceil": nn.MaxPool2d(3, 2, ceil_mode=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_relu_before_a_max_pooling_saves_nothing_of_its_own(name: str, in_place: bool) -> None:
    size = (2, 3, 7, 8)
    x = torch.randn(size)
    x.flatten()[:3] = torch.tensor([float("nan"), float("inf"), -0.0])
    x[1, 1] = -1.0
    op = nn.Sequential(nn.ReLU(in_place), POOLS[name])
    checked = check(lambda: Between(op, size), x, plans=PLANS, also=all_lean)
    assert num_of(checked, "relu_max_pool") == 1
    assert num_of(checked, "relu_of_bits") == 0


def all_narrow(profiled: Profiled) -> CaptureGraph:
    graph, _ = with_narrow_indices(profiled, lambda node: True)
    return graph


MORE_POOLS = {**POOLS, "1d": nn.MaxPool1d(3, 2), "3d": nn.MaxPool3d(2, 1)}
DIMENSIONS = {"1d": 1, "3d": 3}


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_POOLS)
@pytest.mark.parametrize("after_relu", [False, True])
def test_a_max_pooling_saves_its_indices_in_two_bytes(name: str, after_relu: bool) -> None:
    size = (2, 3, *(7, 8, 6)[: DIMENSIONS.get(name, 2)])
    x = torch.randn(size)
    x.flatten()[:3] = torch.tensor([float("nan"), float("inf"), -0.0])
    op = nn.Sequential(nn.ReLU() if after_relu else nn.Tanh(), MORE_POOLS[name])
    checked = check(lambda: Between(op, size), x, plans=PLANS, also=all_narrow)
    ((number, nbytes),) = pools(checked.profiled, lambda node: True).items()
    call = [node for node in checked.profiled.captured.graph_module.graph.nodes if node.op == "call_function"][number]
    assert nbytes == 8 * call.meta["val"].numel()
    lean = all_narrow(checked.profiled)
    assert [*notes_of(lean)] == ["1 max poolings save their indices in few bytes"]


def test_a_relu_and_its_max_pooling_save_two_bytes_an_index() -> None:
    op = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))

    def narrow(profiled: Profiled) -> CaptureGraph:
        pooled = with_pools(profiled.captured, before_pools(profiled, lambda node: True))
        graph, _ = copied(pooled)
        for node in graph.nodes:
            node.kwargs = {"narrow": True} if node.target is relu_max_pool else node.kwargs
        return with_graph(profiled.captured, graph)

    checked = check(lambda: Between(op, (2, 3, 8, 8)), torch.randn(2, 3, 8, 8), plans=PLANS, also=narrow)
    assert next(notes_of(narrow(checked.profiled))) == "1 max poolings save their indices in few bytes"


@pytest.mark.parametrize(
    ("plane", "dtype"),
    [((128, 256), torch.int16), ((256, 256), torch.uint16), ((256, 257), torch.int32)],
)
def test_indices_take_as_few_bytes_as_places_in_a_plane_need(plane: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.zeros(1, 1, *plane)
    x[..., -1, -1] = 1.0
    pool = torch.ops.aten.max_pool2d_with_indices.default
    _, indices = pool(x, list(plane))
    few = narrowed(indices, pool, x)
    assert (few.dtype, few.to(torch.int64)) == (dtype, indices)
    assert int(indices) == plane[0] * plane[1] - 1


@pytest.mark.exhaustive
def test_indices_are_cast_where_that_costs_less_than_recomputing() -> None:
    """On a V100, whose convolutions of many channels take long; with all the memory there is, nothing is cast."""
    layers: list[nn.Module] = []
    for before, width in ((3, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(True), nn.Conv2d(width, width, 3, padding=1)]
        layers += [nn.ReLU(True), nn.MaxPool2d(2)]
    with torch.device("meta"):
        model, x = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 64, 10)).to("meta"), torch.zeros(64, 3, 64, 64)
    estimate = fxmem.estimate(model, x, optimizer=None, cost="v100")
    notes = [estimate.report(int(share * estimate.peak_bytes)).notes for share in (0.6, 1.1)]
    assert [any("few bytes" in note for note in each) for each in notes] == [True, False]


def test_a_relu_that_others_read_too_stays_apart_from_the_pooling() -> None:
    def op(x: Tensor) -> Tensor:
        y = F.relu(x)
        return F.max_pool2d(y, 2) + y[..., ::2, ::2]

    checked = check(lambda: Between(op, (2, 3, 6, 6)), torch.randn(2, 3, 6, 6), plans=PLANS, also=all_lean)
    assert num_of(checked, "relu_max_pool") == 0


@pytest.mark.parametrize("loss", [lambda y: y.sum(), lambda y: y.transpose(1, 3).contiguous().sin().sum()])
def test_gradients_that_lie_otherwise_than_the_result_have_eagers_bits(loss: Any) -> None:
    x = torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last).requires_grad_()
    checked = check(lambda: nn.Sequential(nn.Tanh(), nn.ReLU()), x, loss=loss, plans=PLANS, also=all_lean)
    assert num_of(checked, "relu_of_bits") == 1


def test_relus_written_over_a_part_of_a_tensor_stay_as_they_are() -> None:
    class Part(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2.0
            y[:, :3].relu_()
            return y.sin()

    checked = check(Part, torch.randn(4, 8, requires_grad=True), plans=PLANS)
    assert num_of(checked, "relu_of_bits") == 0


@pytest.mark.slow
def test_gradients_of_gradients_and_of_many_losses_are_eagers() -> None:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
    model = nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 2))
    x = torch.randn(2, 3, 10, 10)
    least = fxmem.estimate(model, x, optimizer=None).floor_bytes
    optimized = fxmem.optimize(model, x, budget=least, optimizer=None)
    found: list[Any] = []
    for each in (optimized, model):
        weights = list(model.parameters())
        first = torch.autograd.grad(each(x).square().sum(), weights, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), weights, allow_unused=True)
        batched = torch.autograd.grad(each(x).sum(0), weights, torch.eye(2), is_grads_batched=True)
        loss = each(x).square().sum()
        kept = torch.autograd.grad(loss, weights, retain_graph=True) + torch.autograd.grad(loss, weights)
        found.append((*first, *second, *batched, *kept))
    assert all(same_bits(*pair) for pair in zip(*found, strict=True))


def test_calls_that_a_policy_speaks_of_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
    profiled = check(lambda: model, torch.randn(2, 3, 12, 12), plans=(drop_all,)).profiled
    assert len(list(convolutions(profiled, lambda node: True, 0.0))) == 1
    assert (len(relus(profiled, lambda node: True, 0.0)), len(before_pools(profiled, lambda node: True))) == (2, 1)
    assert list(convolutions(profiled, lambda node: False, 0.0)) == []
    assert (relus(profiled, lambda node: False, 0.0), before_pools(profiled, lambda node: False)) == ([], set())


class Vgg(nn.Module):
    """Two blocks of VGG, whose first maps are the largest."""

    def __init__(self) -> None:
        super().__init__()
        block = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(True), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(True)]
        self.first = nn.Sequential(*block, nn.MaxPool2d(2))
        self.second = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)).mean((2, 3)))


@pytest.mark.slow
def test_a_vgg_trains_in_little_more_than_two_of_its_maps() -> None:
    x = torch.randn(8, 3, 32, 32)
    map_bytes, static_bytes = 8 * 16 * 32 * 32 * 4, 8 * 3 * 32 * 32 * 4 + 2 * sum(p.nbytes for p in Vgg().parameters())
    whole = fxmem.estimate(Vgg(), x, optimizer=None, compress_saved=False).floor_bytes
    least = fxmem.estimate(Vgg(), x, optimizer=None).floor_bytes
    assert whole >= 3 * map_bytes
    assert least <= 2.3 * map_bytes + static_bytes
    torch.manual_seed(0)
    model = Vgg()
    optimized = fxmem.optimize(model, x, budget=least, optimizer=None)
    with fxmem.track(optimized, x) as memory:
        output = optimized(x)
        output.sum().backward()
    assert memory.peak_bytes == optimized.fxmem.report.predicted_peak_bytes
    ours = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    assert all(same_bits(a, p.grad) for a, p in zip(ours, model.parameters(), strict=True))
    assert any("ReLUs" in note for note in optimized.fxmem.report.notes)


@pytest.mark.slow
def test_where_forms_for_a_budget_do_not_keep_it_those_that_take_least_are_planned(monkeypatch: Any) -> None:
    """As where CUDA's allocator adds more to a planned peak than to the step as it is."""
    x = torch.randn(8, 3, 32, 32)
    estimate = fxmem.estimate(Vgg(), x, optimizer=None)
    budget, seen, emit = int(0.9 * estimate.peak_bytes), [], pipeline.emit_within_budget

    def refuse_first(profiled: Any, *arguments: Any) -> Any:
        seen.append(profiled.profile)
        if len(seen) == 1:
            raise fxmem.InfeasibleBudgetError(budget, budget + 1, (), "a convolution")
        return emit(profiled, *arguments)

    monkeypatch.setattr(pipeline, "emit_within_budget", refuse_first)
    assert fxmem.optimize(Vgg(), x, budget=budget, optimizer=None).fxmem.report.floor_bytes == estimate.floor_bytes
    assert len(set(map(id, seen))) == 2
    seen.clear()
    with pytest.raises(fxmem.InfeasibleBudgetError):
        fxmem.optimize(Vgg(), x, budget=estimate.floor_bytes, optimizer=None)
    assert len(seen) == 1, "these are the forms that take least: there are no others"


@pytest.mark.slow
def test_a_switch_leaves_calls_as_they_are() -> None:
    x = torch.randn(8, 3, 32, 32)
    peak = fxmem.estimate(Vgg(), x, optimizer=None).peak_bytes

    def notes(**options: Any) -> list[str]:
        report = fxmem.optimize(Vgg(), x, budget=int(0.9 * peak), optimizer=None, **options).fxmem.report
        return [note for note in report.notes if "ReLUs" in note or "convolutions" in note]

    assert len(notes()) >= 2
    assert notes(compress_saved=False) == []


def test_vgg_of_torchvision_is_bitwise_and_measured_as_predicted_at_its_floor() -> None:
    torch.manual_seed(0)
    features = import_torchvision().models.vgg11(weights=None).features  # its own classifier takes half a GB
    model = nn.Sequential(features, nn.Flatten(), nn.Linear(2048, 10))
    checked = check(lambda: model, torch.randn(4, 3, 64, 64), plans=(tightest,), also=all_lean)
    assert checked.peaks["intervals rewritten"] < checked.peaks["intervals"]


def test_infinite_gradients_stop_where_the_result_is_zero() -> None:
    x = torch.tensor([-1.0, 0.0, 2.0, float("nan"), -0.0, 3.0, 4.0, 5.0, -6.0])
    grad = torch.full((9,), float("inf"))

    def loss(y: Tensor) -> Tensor:
        return (y * grad).sum()

    check(lambda: Between(F.relu, (9,)), x, loss=loss, plans=PLANS, also=all_lean)


class Pooled(nn.Module):
    """One of each form."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.conv = nn.Parameter(torch.randn(2, 4, 8, 8)), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.conv((x * self.scale).relu().mul(2.0)).relu(), 2).sin()


def test_steps_with_all_forms_run_as_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXMEM_RUNTIME", "program")
    before, x = NUM_PROGRAMS[0], torch.randn(2, 4, 8, 8)
    checked = check(Pooled, x, plans=(drop_all,), also=all_lean)
    assert {form: num_of(checked, form) for form in ("split", "relu_of_bits", "relu_max_pool")} == dict.fromkeys(
        ("split", "relu_of_bits", "relu_max_pool"), 1
    )
    assert NUM_PROGRAMS[0] - before == len(checked.peaks) > 1
