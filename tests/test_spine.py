"""The promise of the first page: real models train inside a budget, with eager's bits, at the predicted peak."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.profiling.training_step import run_step
from tests import zoo
from tests.exactness import same_bits

MODELS = ("resnet50", "smp_unet_resnet34", "densenet121", "gpt2_6l", "bert", "vit")
SHARES = (0.75, 0.5, 0.35, 0.0)
"""Of the way from the least peak to eager's, where the budgets lie."""


def step_of(
    model: nn.Module, entry: zoo.ZooModel, batch: Any, optimizer: torch.optim.Optimizer, seed: int
) -> tuple[Tensor, dict[str, Tensor], int]:
    """One training step as a user writes it: its loss, its gradients, and the measured peak."""
    losses: list[Tensor] = []
    args, kwargs = batch
    gradients: dict[str, Tensor] = {}

    def loss_fn(output: Any) -> Tensor:
        losses.append(entry.loss(output))
        return losses[0]

    def noted_step() -> None:
        gradients.update((n, p.grad.clone()) for n, p in model.named_parameters() if p.grad is not None)

    torch.manual_seed(seed)
    with fxmem.track(model, optimizer, args, kwargs) as memory:
        run_step(lambda: model(*args, **kwargs), loss_fn, _Watched(optimizer, noted_step))  # type: ignore[arg-type]
    return losses[0].detach(), gradients, memory.peak_bytes


class _Watched:
    """An optimizer that looks at the gradients before its step, outside the measured bytes."""

    def __init__(self, optimizer: torch.optim.Optimizer, look: Any) -> None:
        self.optimizer, self.look = optimizer, look

    def step(self) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            self.look()
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.slow
@pytest.mark.usefixtures("kept_plans")
@pytest.mark.parametrize("name", ["resnet18", "gpt2_2l"])
def test_a_real_model_trains_at_its_least_and_a_middle_budget_with_eager_bits(name: str) -> None:
    check_budgets(name, (0.5, 0.0))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("kept_plans")
@pytest.mark.parametrize("name", MODELS)
def test_a_real_model_trains_inside_its_budget_with_eager_bits(name: str) -> None:
    check_budgets(name, SHARES)


def check_budgets(name: str, shares: tuple[float, ...]) -> None:
    """Train a step of a model of the zoo at each budget: bits, predicted peak, budget."""
    entry = zoo.get(name)
    torch.manual_seed(0)
    eager = entry.build().train()
    batch = entry.batch(entry.default_batch)
    floor_bytes, eager_bytes = _range(copy.deepcopy(eager), entry, batch)
    for share in shares:
        reference, model = copy.deepcopy(eager), copy.deepcopy(eager)
        budget = floor_bytes + int(share * (eager_bytes - floor_bytes))
        optimized = fxmem.optimize(model, *batch, budget=budget, optimizer="sgd", loss_fn=entry.loss)
        expected = step_of(reference, entry, batch, torch.optim.SGD(reference.parameters(), lr=0.01), seed=3)
        actual = step_of(optimized, entry, batch, torch.optim.SGD(optimized.parameters(), lr=0.01), seed=3)
        assert same_bits(expected[0], actual[0])
        assert expected[1].keys() == actual[1].keys()
        assert [n for n in expected[1] if not same_bits(expected[1][n], actual[1][n])] == []
        for (n, ours), (_, theirs) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
            assert same_bits(theirs, ours), n
        assert actual[2] == optimized.report.predicted_peak_bytes
        assert actual[2] <= budget
        assert expected[2] == optimized.report.eager_peak_bytes


def _range(model: nn.Module, entry: zoo.ZooModel, batch: Any) -> tuple[int, int]:
    report = fxmem.optimize(model, *batch, optimizer="sgd", loss_fn=entry.loss).report
    assert report.floor_bytes < report.eager_peak_bytes
    return report.floor_bytes, report.eager_peak_bytes


class DoubleConv(nn.Module):
    """Two convolutions, the block of the classic UNet."""

    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
            nn.Conv2d(cout, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class UNet(nn.Module):
    """A two-level UNet with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom, self.up = DoubleConv(3, 8), DoubleConv(8, 16), DoubleConv(24, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        low = self.bottom(nn.functional.max_pool2d(skip, 2))
        high = nn.functional.interpolate(low, scale_factor=2)
        return self.head(self.up(torch.cat([high, skip], 1)))


@pytest.mark.slow
def test_a_unet_whose_input_needs_no_grad_trains_with_equal_gradients() -> None:
    model = UNet().train()
    reference = copy.deepcopy(model)
    x = torch.randn(2, 3, 16, 16)
    least = fxmem.optimize(copy.deepcopy(model), x, optimizer=None).report.floor_bytes
    optimized = fxmem.optimize(model, x, budget=least, optimizer=None)
    assert optimized.plan.dropped
    optimized(x).square().mean().backward()
    reference(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert same_bits(theirs.grad, ours.grad)


@pytest.mark.slow
def test_twenty_steps_of_adamw_follow_the_eager_loss_curve_bit_for_bit() -> None:
    entry = zoo.get("gpt2_2l")
    curves = []
    torch.manual_seed(0)
    initial = entry.build().train()
    batch = entry.batch(4)
    least = fxmem.optimize(copy.deepcopy(initial), *batch, optimizer="adamw").report.floor_bytes
    for optimize in (False, True):
        model: nn.Module = copy.deepcopy(initial)
        if optimize:
            model = fxmem.optimize(model, budget=int(least * 1.02), optimizer="adamw")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(1)
        curve = []
        for _ in range(20):
            loss = model(*batch[0], **batch[1]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            curve.append(loss.item())
        curves.append(curve)
    assert curves[0] == curves[1]
    assert curves[0][-1] < curves[0][0]


# -- the facade --------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """A model with a buffer, dropout, an attribute and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 4)
        self.config = {"width": 64}

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(x)).tanh(), 0.5, self.training)
        return self.last(hidden.exp().sigmoid())

    def width(self) -> int:
        return self.config["width"]


def test_the_one_line_form_plans_on_the_first_training_call() -> None:
    optimized = fxmem.optimize(Small(), budget_gb=8)
    with pytest.raises(fxmem.NotPlannedError, match="call it once in training mode"):
        _ = optimized.report
    optimized(torch.randn(4, 8)).sum().backward()
    assert optimized.report.predicted_peak_bytes <= 8e9
    assert "tape" not in optimized.graph_module.code  # nothing is dropped, so nothing is taped


def test_state_dict_goes_both_ways_and_parameters_are_the_originals() -> None:
    model = Small()
    optimized = fxmem.optimize(model, torch.randn(4, 8))
    assert list(optimized.state_dict()) == list(Small().state_dict())
    assert all(a is b for a, b in zip(optimized.parameters(), model.parameters(), strict=True))
    other = Small()
    optimized.load_state_dict(other.state_dict())
    assert torch.equal(model.first.weight, other.first.weight)
    other.load_state_dict(optimized.state_dict())
    assert optimized.original is model


def test_attributes_methods_and_modes_pass_through() -> None:
    model = Small()
    optimized = fxmem.optimize(model, torch.randn(4, 8))
    assert optimized.config is model.config
    assert optimized.width() == 64
    assert optimized.first is model.first
    assert not optimized.eval().training
    assert not model.training
    assert not model.norm.training
    x = torch.randn(4, 8)
    assert torch.equal(optimized(x), model(x))
    assert optimized.train().training
    assert model.training
    optimized.requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters())
    optimized.to(torch.float64)
    assert model.first.weight.dtype == torch.float64


def test_without_grad_the_original_forward_runs() -> None:
    model = Small()
    optimized = fxmem.optimize(model)
    with torch.no_grad():
        optimized(torch.randn(4, 8))
    with pytest.raises(fxmem.NotPlannedError):
        _ = optimized.plan


@pytest.mark.slow
def test_a_new_batch_size_gets_its_own_plan() -> None:
    optimized = fxmem.optimize(Small(), torch.randn(4, 8))
    small = optimized.report.predicted_peak_bytes
    optimized(torch.randn(16, 8)).sum().backward()
    assert optimized.report.predicted_peak_bytes > small


@pytest.mark.slow
def test_a_new_batch_size_that_does_not_fit_is_refused_with_the_largest_that_does() -> None:
    x = torch.randn(4, 8)
    budget = fxmem.optimize(Small(), x, optimizer=None).report.predicted_peak_bytes * 2
    optimized = fxmem.optimize(Small(), x, budget=budget, optimizer=None)
    with pytest.raises(fxmem.InfeasibleBudgetError, match=r"largest batch that fits is \d+") as caught:
        optimized(torch.randn(4096, 8))
    largest = int(str(caught.value).split("largest batch that fits is ")[1].split()[0].rstrip("."))
    optimized(torch.randn(largest, 8)).sum().backward()
    with pytest.raises(fxmem.InfeasibleBudgetError):
        optimized(torch.randn(largest + 1, 8))


@pytest.mark.slow
def test_copies_and_pickles_train_on_their_own() -> None:
    optimized = fxmem.optimize(Small(), torch.randn(4, 8))
    stream = io.BytesIO()
    torch.save(optimized, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    for twin in (copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized)), loaded):
        assert twin.original is not optimized.original
        assert twin.first is twin.original.first
        twin(torch.randn(4, 8)).sum().backward()
        assert twin.first.weight.grad is not None
        assert optimized.first.weight.grad is None


@pytest.mark.slow
def test_the_emitted_graph_is_lint_clean_and_says_what_it_drops() -> None:
    x = torch.randn(64, 8)
    least = fxmem.optimize(Small(), x, optimizer=None).report.floor_bytes
    optimized = fxmem.optimize(Small(), x, budget=least, optimizer=None)
    assert isinstance(optimized.graph_module, torch.fx.GraphModule)
    optimized.graph_module.graph.lint()
    code = optimized.graph_module.code
    assert "taped_" in code
    assert "# drop" in code
    assert "# keep" in code


def test_an_fx_graph_module_is_optimized_as_any_module() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimized = fxmem.optimize(traced, torch.randn(4, 8))
    optimized(torch.randn(4, 8)).sum().backward()
    assert traced.get_parameter("0.weight").grad is not None


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_unreachable_budget_is_refused_with_the_least_peak_and_what_holds_it() -> None:
    with pytest.raises(fxmem.InfeasibleBudgetError, match="Raise the budget to") as caught:
        fxmem.optimize(Small(), torch.randn(64, 8), budget=1000)
    error = caught.value
    assert error.budget_bytes == 1000
    assert sum(nbytes for _, nbytes in error.breakdown) == error.least_bytes
    assert dict(error.breakdown)["parameters"] == sum(p.nbytes for p in Small().parameters())
    assert error.place
    again = fxmem.optimize(Small(), torch.randn(64, 8), budget=error.least_bytes)
    assert again.report.predicted_peak_bytes == error.least_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget_gb": 0}, "above 0"),
        ({"budget_gb": float("nan")}, "finite"),
        ({"budget_gb": "8"}, "must be a number"),
        ({"budget": 0}, "above 0 bytes"),
        ({"budget": "8 parsecs"}, "not a size"),
        ({"budget": 1500.5}, "whole number of bytes"),
        ({"budget": float("inf")}, "whole number of bytes"),
        ({"budget_gb": 8, "budget": 8}, "not several"),
        ({"planner": "magic"}, "known: auto, chen"),
        ({"optimizer": "adamwww"}, "known: .*adamw"),
        ({"optimizer": 3}, "torch.optim.Optimizer"),
        ({"plan_seconds": -1}, "above 0"),
        ({"cost": "abacus"}, "known: a100"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(fxmem.InputError, match=message):
        fxmem.optimize(Small(), **arguments)


def test_models_that_cannot_train_are_refused() -> None:
    with pytest.raises(fxmem.InputError, match=r"torch.nn.Module, not function"):
        fxmem.optimize(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(fxmem.InputError, match="no parameters"):
        fxmem.optimize(nn.ReLU())
    with pytest.raises(fxmem.InputError, match="requires grad"):
        fxmem.optimize(Small().requires_grad_(False))
    with pytest.raises(fxmem.InputError, match="eval mode"):
        fxmem.optimize(Small().eval(), torch.randn(4, 8))
    with pytest.raises(fxmem.InputError, match="no tensor"):
        fxmem.optimize(Small(), (3,))
    with pytest.raises(fxmem.InputError, match=r"Small.forward by name \(x\); pass it as example_kwargs"):
        fxmem.optimize(Small(), {"x": torch.randn(4, 8)})
    with pytest.raises(fxmem.InputError, match="already optimized"):
        fxmem.optimize(fxmem.optimize(Small()))
    with pytest.raises(fxmem.InputError, match="does not take these arguments"):
        fxmem.optimize(Small(), (torch.randn(4, 8), torch.randn(4, 8)))


@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [("24GiB", 24 * 2**30), ("800MB", 800 * 10**6), ("1.5 kb", 1500), ("12", 12), (16e6, 16_000_000)],
)
def test_budgets_are_read_as_written(budget: float | str, nbytes: int) -> None:
    assert fxmem.api.budget.parse_budget(None, budget, Small()).nbytes == nbytes
