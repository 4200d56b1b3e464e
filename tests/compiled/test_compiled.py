"""Compiled steps under a budget: the peak is the predicted one, the numbers are those of the same compiler."""

from __future__ import annotations

import copy
import gc
import logging
import re
import weakref
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import fxmem
from benchmarks.measure import allocator_rise_bytes
from benchmarks.ways import least_compiled_bytes
from fxmem.compiled import choice, fakerun, graph_planner
from fxmem.compiled.strides import laid_out_as
from tests.compiled.models import OPTIONS, Net, batch
from tests.tiers import representatives


def gradients_of(model: nn.Module, forward: Any, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    F.cross_entropy(forward(x), y).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def measured_peak_bytes(model: nn.Module, x: torch.Tensor, y: torch.Tensor, forward: Any, optimizer: Any) -> int:
    """Return the peak of a step by the CPU allocator's events, with what is there before it."""

    def step() -> None:
        output = forward(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step(), step()
    gc.collect()
    state = [t for each in optimizer.state.values() for t in each.values()]
    return sum(t.nbytes for t in (*model.parameters(), x, y, *state)) + allocator_rise_bytes(step)


LOGGER = logging.getLogger("a model")


class Logging(Net):
    """Its forward logs, as those of transformers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LOGGER.warning("%s is told", x.shape)
        return super().forward(x)


class Convolutions(nn.Sequential):
    """Its weights take more than its activations."""

    def __init__(self) -> None:
        layers = (nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()) for _ in range(4))
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.slow
def test_copies_of_weights_to_channels_last_are_spared_where_memory_is_short() -> None:
    torch.manual_seed(0)
    model, x, y = Convolutions(), torch.randn(2, 64, 8, 8), torch.randint(64, (2,))
    options = {**OPTIONS, "loss_fn": lambda output: F.cross_entropy(output, y), "optimizer": "sgd"}
    costs = fxmem.frontier(model, x, **options)
    assert [c.overhead_ratio for c in costs] == sorted(c.overhead_ratio for c in costs)
    whole, spared = (
        fxmem.optimize(copy.deepcopy(model), x, budget=costs[place].budget_bytes, **options) for place in (0, -1)
    )
    assert not whole.fxmem.report.layouts_left
    assert spared.fxmem.report.layouts_left
    weights = [p.nbytes for p in model.parameters() if p.dim() == 4]
    spared_bytes = whole.fxmem.report.predicted_peak_bytes - spared.fxmem.report.predicted_peak_bytes
    assert weights[0] < spared_bytes < sum(weights), "copies are there while they are read, and are not saved"
    for compiled in (whole, spared):
        optimizer = torch.optim.SGD(compiled.parameters())
        peak_bytes = measured_peak_bytes(compiled, x, y, compiled, optimizer)
        assert peak_bytes - y.nbytes == compiled.fxmem.report.predicted_peak_bytes
    model.load_state_dict(spared.state_dict())
    with inductor_config.patch(layout_optimization=False):  # the same compiler, recomputing nothing
        plain = torch.compile(model)
        expected = gradients_of(model, plain, x, y)
    assert all(map(torch.equal, expected, gradients_of(spared, spared, x, y)))
    assert inductor_config.layout_optimization


@pytest.mark.slow
@pytest.mark.parametrize("quicker", ["channels last", "as they are"])
def test_layouts_are_left_without_need_where_convolutions_are_quicker_so(
    quicker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(op: Any, args: Any, kwargs: Any) -> float:
        is_last = any(t.dim() == 4 and t.stride(1) == 1 for t in args if isinstance(t, torch.Tensor))
        return 1.0 if is_last == (quicker == "channels last") else 2.0

    monkeypatch.setattr(fakerun, "op_seconds", seconds)
    monkeypatch.setattr(graph_planner, "_KNOWN", {})
    torch.manual_seed(0)
    model, x, y = Convolutions(), torch.randn(2, 64, 8, 8), torch.randint(64, (2,))
    options = {**OPTIONS, "loss_fn": lambda output: F.cross_entropy(output, y), "optimizer": "sgd", "cost": "measure"}
    report = fxmem.optimize(model, x, **options).fxmem.report
    assert report.layouts_left == (quicker == "as they are")
    assert (report.overhead_ratio < -0.05) == report.layouts_left


class Masked(nn.Module):
    """Layers whose attention, which is large, is masked alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(x.shape[1])[:, None] < torch.arange(x.shape[1])[None]
        for layer in self.layers:
            query, key, value = layer(x).chunk(3, -1)
            scores = (query @ key.transpose(-1, -2)).masked_fill(mask, float("-inf"))
            x = x + F.dropout(scores.softmax(-1), 0.1) @ value
        return x.mean(1)


@pytest.mark.slow
def test_what_is_recomputed_for_two_layers_is_not_made_at_once_where_memory_is_short() -> None:
    """Inductor fuses what reads the same mask; a backward without that takes less, and has the same bits."""
    torch.manual_seed(0)
    model, x, y = Masked(), torch.randn(4, 96, 16), torch.randint(16, (4,))
    options = {**OPTIONS, "loss_fn": lambda output: F.cross_entropy(output, y), "optimizer": "sgd"}
    least = least_compiled_bytes(model, ((x,), {}), options)
    whole, deep = (fxmem.optimize(copy.deepcopy(model), x, budget=budget, **options) for budget in (None, least))
    assert not whole.fxmem.report.tight_backward
    assert deep.fxmem.report.tight_backward
    assert "compiled for less memory" in str(deep.fxmem.report)
    peak_bytes = measured_peak_bytes(deep, x, y, deep, torch.optim.SGD(deep.parameters()))
    assert peak_bytes - y.nbytes == deep.fxmem.report.predicted_peak_bytes
    whole.load_state_dict(deep.state_dict())
    assert all(map(torch.equal, gradients_of(whole, whole, x, y), gradients_of(deep, deep, x, y)))


class Looking(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        return output if output.sum().item() > 0 else -output


@pytest.mark.slow
def test_a_model_that_logs_is_one_graph_and_one_that_looks_at_values_is_told_of() -> None:
    x, _ = batch()
    options = {**OPTIONS, "backend": "inductor"}
    told, plain = (fxmem.optimize(kind(), x, budget="1GB", **options).fxmem.report for kind in (Logging, Net))
    assert told.predicted_peak_bytes == plain.predicted_peak_bytes
    with pytest.raises(
        fxmem.CaptureError, match=r"cannot follow the model in one graph.*data-dependent.*backend=.eager"
    ):
        fxmem.optimize(Looking(), x, budget="1GB", **options)


@pytest.mark.slow
def test_estimate_tells_the_compiled_steps_peak_and_nothing_runs() -> None:
    model, (x, y) = Net(), batch()
    before = torch.get_rng_state()
    found = fxmem.estimate(model, x, loss_fn=F.cross_entropy, targets=y, **OPTIONS)
    assert torch.equal(before, torch.get_rng_state())
    assert found.fixed_bytes >= 3 * sum(p.nbytes for p in model.parameters())
    assert found.fixed_bytes < found.saved_bytes < found.peak_bytes
    assert "compiled step: peak" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", representatives([1, 3], 1))
def test_the_frontier_tells_what_every_budget_gets(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "NUM_CANDIDATES", 5)
    model, (x, y) = Net(blocks=blocks), batch()
    options: dict[str, Any] = {**OPTIONS, "loss_fn": F.cross_entropy, "targets": y}
    points = fxmem.frontier(model, x, **options)
    budgets, overheads = [p.budget_bytes for p in points], [p.overhead_ratio for p in points]
    assert len(points) > 1 or blocks == 1
    assert budgets == sorted(budgets, reverse=True)
    assert overheads == sorted(overheads)
    assert all(p.predicted_peak_bytes <= p.budget_bytes for p in points)
    for point in (points[0], points[-1]):
        report: Any = fxmem.optimize(model, x, budget=point.budget_bytes, **options).fxmem.report
        assert report.predicted_peak_bytes == point.predicted_peak_bytes
        assert report.num_lowered == 0
    with pytest.raises(fxmem.InfeasibleBudgetError):
        fxmem.optimize(model, x, budget=points[-1].budget_bytes - 1, **options)


@pytest.mark.slow
def test_auto_takes_what_is_estimated_to_be_faster_and_says_so() -> None:
    model, (x, y) = Net(), batch()
    options: dict[str, Any] = {**OPTIONS, "loss_fn": F.cross_entropy, "targets": y, "backend": "auto"}
    assert fxmem.optimize(model, x, **options).fxmem.choice.startswith("inductor: estimated ")
    with inductor_config.patch(cpp_wrapper=True):
        chosen = fxmem.optimize(model, x, **options).fxmem.choice
    assert re.match(r"eager: the compiled step cannot be had \(C\+\+ wrappers", chosen)
    with pytest.raises(fxmem.InputError, match=r"runtime= is not for"):
        fxmem.optimize(model, x, **options, runtime="tape")


def test_auto_is_for_an_example() -> None:
    with pytest.raises(fxmem.InputError, match="give it an example"):
        fxmem.optimize(Net(), **{**OPTIONS, "backend": "auto"})


@pytest.mark.exhaustive
@pytest.mark.parametrize("share", [1.0, 0.75])
def test_peak_is_the_predicted_one_and_gradients_are_the_compilers_own(share: float) -> None:
    model, (x, y) = Net(blocks=3), batch()
    options: dict[str, Any] = {**OPTIONS, "loss_fn": F.cross_entropy, "targets": y}
    found = fxmem.estimate(model, x, **options)
    budget = int(found.fixed_bytes + share * (found.peak_bytes - found.fixed_bytes))
    compiled = fxmem.optimize(model, x, budget=budget, **options)
    report: Any = compiled.fxmem.report
    assert isinstance(compiled, Net)
    assert report.predicted_peak_bytes <= budget
    assert (report.num_recomputed > 0) is (share < 1)
    mine = gradients_of(model, compiled, x, y)
    optimizer = torch.optim.AdamW(model.parameters())
    assert measured_peak_bytes(model, x, y, compiled, optimizer) == report.predicted_peak_bytes
    fresh = Net(blocks=3)
    torch._dynamo.reset()
    fresh.load_state_dict(model.state_dict())
    mine = gradients_of(model, compiled, x, y)
    theirs = gradients_of(fresh, torch.compile(fresh), x, y)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_gradient_that_is_not_laid_out_as_its_parameter_is_made_anew() -> None:
    parameter, row = torch.empty(8, 4), torch.empty(1, 4)
    turned, same, of_one = torch.empty(4, 8).T, torch.empty(8, 4), torch.empty(4, 1).T
    assert laid_out_as(parameter, turned).stride() == parameter.stride()
    assert laid_out_as(parameter, same) is same
    assert laid_out_as(row, of_one) is of_one
    assert laid_out_as(parameter, None) is None


class WithLoss(nn.Module):
    """Returns a loss and what it was made from, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = self.net(x).repeat(1, 100)
        return SimpleOutput(F.cross_entropy(logits, y), logits, logits.detach().mean())


class SimpleOutput(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor
    told: torch.Tensor


@pytest.mark.slow
def test_an_output_that_the_loss_does_not_read_is_given_no_gradient_of_zeros() -> None:
    model, (x, y) = WithLoss(), batch()
    loss_fns = (lambda output: output.loss + 0 * output.logits.sum(), None)
    options = {**OPTIONS, "optimizer": None}
    all_read, compiled = (fxmem.optimize(model, (x, y), loss_fn=loss_fn, **options) for loss_fn in loss_fns)
    assert compiled.fxmem.report.predicted_peak_bytes < 0.7 * all_read.fxmem.report.predicted_peak_bytes
    found = []
    for each in (all_read, compiled):
        model.zero_grad()
        torch.manual_seed(1)
        output = each(x, y)
        assert output.logits.requires_grad
        assert not output.told.requires_grad
        output.loss.backward()
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(fxmem.InputError, match="Pass the loss that you train with"):
        compiled(x, y).logits.sum().backward()


def test_a_compiled_model_that_nobody_holds_is_freed() -> None:
    model, (x, _) = Net(), batch()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled, alive = fxmem.optimize(model, x, **OPTIONS, optimizer=optimizer), weakref.ref(model.head.weight)
    assert compiled.fxmem.original is model
    del model, compiled, optimizer
    gc.collect()
    assert alive() is None


@pytest.mark.slow
def test_a_budget_that_no_plan_fits_is_refused_before_compiling() -> None:
    model, (x, _) = Net(), batch()
    with pytest.raises(fxmem.InfeasibleBudgetError, match="least reachable peak") as caught:
        fxmem.optimize(model, x, budget_mb=0.1, **OPTIONS)
    assert caught.value.least_bytes > 100_000
    assert str(caught.value).endswith("smaller micro-batch."), "what Dynamo adds to errors is not told"


@pytest.mark.exhaustive
def test_a_backend_for_torch_compile_refuses_what_does_not_fit() -> None:
    model, (x, y) = Net(), batch()
    backend = fxmem.backend(budget_mb=0.1, cost="cpu", plan_seconds=2.0)
    with pytest.raises(fxmem.InfeasibleBudgetError, match="least reachable peak"):
        torch.compile(lambda x, y: F.cross_entropy(model(x), y), backend=backend)(x, y)


@pytest.mark.slow
def test_evaluation_runs_the_original() -> None:
    model, (x, _) = Net(), batch()
    compiled = fxmem.optimize(model, **OPTIONS)
    assert compiled.first is model.first
    compiled.eval()
    assert torch.equal(compiled(x), model(x))
    compiled.train()
    with torch.no_grad():
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        assert torch.equal(compiled(x), expected)
    with pytest.raises(fxmem.NotPlannedError, match="no training call was planned"):
        compiled.fxmem.report  # noqa: B018


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "50%"}, "write a size"),
        ({"shapes": [(2, 32)]}, "not for backend"),
        ({"loop": fxmem.Loop(forwards=2)}, "takes keeps_output="),
        ({"allow": ("recompute", "chunk")}, "chunk.* is not for backend"),
    ],
)
def test_arguments_that_a_compiled_step_cannot_keep_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fxmem.InputError, match=message):
        fxmem.optimize(Net(), torch.randn(2, 32), **{**OPTIONS, **options})


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(fxmem.InputError, match="known: eager, inductor, auto"):
        fxmem.optimize(Net(), torch.randn(2, 32), backend="tensorrt")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"triton.cudagraphs": True}, "CUDA graphs"),
        ({"cpp_wrapper": True}, r"C\+\+ wrappers"),
        ({"memory_planning": True}, "memory planning"),
    ],
)
def test_settings_that_no_budget_covers_are_refused(setting: dict[str, Any], message: str) -> None:
    with inductor_config.patch(setting), pytest.raises(fxmem.InputError, match=message):
        fxmem.optimize(Net(), torch.randn(2, 32), **OPTIONS)


@pytest.mark.parametrize("share", [0.5, 0])
def test_torchs_own_budget_below_1_is_refused(share: float) -> None:
    with functorch_config.patch(activation_memory_budget=share), pytest.raises(fxmem.InputError, match="leave it at 1"):
        fxmem.optimize(Net(), torch.randn(2, 32), **OPTIONS)


def test_regions_compiled_once_are_refused() -> None:
    region, weight = (
        torch.compiler.nested_compile_region(lambda x, w: torch.relu(x @ w)),
        nn.Parameter(torch.randn(8, 8)),
    )

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):  # of fewer calls Dynamo makes no region
            x = region(x, weight).sin()
        return x.sum()

    function = torch.compile(chain, backend=fxmem.backend(budget_gb=1))
    with pytest.raises(fxmem.InputError, match="nested_compile_region"):
        function(torch.randn(2, 8))


def test_modes_of_torch_compile_are_refused() -> None:
    function = torch.compile(Net(), backend=fxmem.backend(budget_gb=1), mode="reduce-overhead")
    with pytest.raises(fxmem.InputError, match="private pools of CUDA graphs"):
        function(torch.randn(2, 32))


@pytest.mark.slow
def test_symbolic_sizes_are_refused() -> None:
    function = torch.compile(Net(), backend=fxmem.backend(budget_gb=1), dynamic=True)
    with pytest.raises(fxmem.InputError, match="dynamic=False"):
        function(torch.randn(3, 32))
