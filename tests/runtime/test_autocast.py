"""Autocast: regions inside a model and around it cast a weight once, as eager does, in the recompute too."""

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from tests.exactness import check, same_bits
from tests.small_models import HARD, WIDTH, Layer, Shared, assert_same_gradients, batch, least, plain, stack, twins

# -- autocast ----------------------------------------------------------------------------------------------------------


class SharedInRegions(nn.Module):
    """One layer used several times in an autocast region and once in the next: each region casts its weight once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for num_uses in (3, 1):
            with torch.autocast("cpu", torch.bfloat16):
                for _ in range(num_uses):
                    x = self.layer(x).sin()
        return x.float()


@pytest.mark.slow
def test_a_region_casts_a_shared_weight_once_as_eager_does() -> None:
    # Gradients of all uses in a region add up in bfloat16.
    for requires_grad in (False, True):  # whether the use that casts the weight saves it, or only later ones do
        check(SharedInRegions, torch.randn(4, 8, requires_grad=requires_grad))
        check(SharedInRegions, torch.randn(4, 8, requires_grad=requires_grad), autocast=torch.bfloat16)


class Recurrent(nn.Module):
    """Its weights, cast once, are read at every time step by one op."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Linear(8, 8), nn.RNN(8, 8, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.rnn(self.embed(x).sin())[0])


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 3])
def test_an_op_that_reads_a_weight_many_times_casts_it_once(num_steps: int) -> None:
    check(Recurrent, torch.randn(4, num_steps, 8), autocast=torch.bfloat16)


@pytest.mark.slow
def test_the_first_call_may_be_inside_a_region_with_casts_at_hand() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.bias = nn.Linear(8, 8), nn.Parameter(torch.randn(1, 1, 6, 6))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = nn.functional.scaled_dot_product_attention(x, self.layer(x), x, attn_mask=self.bias)
            return x

    torch.manual_seed(0)
    model, x = Masked(), torch.randn(2, 1, 6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        model(x).float().sum().backward()
        expected = [p.grad for p in model.parameters()]
        model.zero_grad()
        fxmem.optimize(model)(x).float().sum().backward()
    assert all(same_bits(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))


@pytest.mark.slow
def test_a_plan_made_in_a_region_is_that_made_before_it() -> None:
    # Casts of an inner region live as long as the outer one: those of a step on fakes would be there in its backward.
    def optimized(budget: int, *example: Tensor) -> fxmem.FxMemModule:
        return fxmem.optimize(build(), *example, budget=budget, step=step)

    build = stack(Layer, Layer, Layer)
    step, x = fxmem.TrainingStep(optimizer="sgd", autocast=torch.bfloat16), batch()
    floor = fxmem.estimate(build(), x, step=step).floor_bytes
    outside, inside = optimized(floor, x), optimized(floor)
    with torch.autocast("cpu", torch.bfloat16):
        output = inside(x)
    output.sum().backward()
    assert inside.fxmem.plan == outside.fxmem.plan
    assert inside.fxmem.report.predicted_peak_bytes == outside.fxmem.report.predicted_peak_bytes == floor


@pytest.mark.slow
def test_pytorch_141896_recompute_runs_under_the_forwards_autocast() -> None:
    check(stack(*[lambda: Layer(nn.LayerNorm, 0.1)] * 3), batch(), plans=HARD, autocast=torch.bfloat16)


@pytest.mark.slow
def test_pytorch_148831_backward_inside_and_outside_the_region_agree() -> None:
    found = []
    for inside in (True, False):
        torch.manual_seed(0)
        model = stack(*[Layer] * 3)()
        x = torch.ones(4, WIDTH)
        optimized = least(model, x, autocast=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            loss = optimized(x).float().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


def test_pytorch_193338_a_region_inside_the_model() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = Layer(), Layer()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.inner(x)
            return self.outer(y.float())

    check(stack(Mixed, Mixed), batch(), plans=HARD)


def without_grad_inside(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(model.first(x).sin(), model.weight)
        with torch.no_grad():
            z = F.linear(model.last(y), model.weight).sin()
        return F.linear(y + z, model.weight)


def without_cache(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return F.linear(F.linear(model.first(x).sin(), model.weight).sin(), model.weight)


def two_dtypes(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(model.first(x).sin(), model.weight)
        with torch.autocast("cpu", torch.float16):
            y = model.last(y.sin())
        with torch.autocast("cpu", enabled=False):
            y = F.linear(y.float().sin(), model.weight)
        return F.linear(y.sin(), model.weight)


def twice_in_one_op(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.mm(model.first(x), torch.mm(model.weight, model.weight)).sin()


def view_of_a_parameter(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.linalg.matrix_power(model.weight[:4, :4], 3).sum() * model.first(x).sin()


AROUND = [without_grad_inside, without_cache, two_dtypes, twice_in_one_op, view_of_a_parameter]


@pytest.mark.slow
@pytest.mark.parametrize("around", AROUND)
def test_regions_inside_a_model_are_as_in_eager(around: Any) -> None:
    check(lambda: Shared(around), torch.randn(4, 8))
    check(lambda: Shared(around), torch.randn(4, 8, requires_grad=True), autocast=torch.bfloat16)


def two_regions(model: Any, x: Tensor) -> Tensor:
    for layer in (model.first, model.last):
        with torch.autocast("cpu", torch.bfloat16):
            x = F.linear(layer(x).sin(), model.weight)
    return x


def backward_between_forwards(model: nn.Module, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        a, b = model(x).sum(), model(x * 2).sum()
        a.backward()
        (b + model(x * 3).sum()).backward()


def another_size_in_one_region(model: nn.Module, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        (model(x).sum() + model(x[:2]).sum()).backward()


def region_switched_off(model: nn.Module, x: Tensor) -> None:
    with torch.autocast("cpu", enabled=False):
        model(x).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("around", "step"),
    [(plain, backward_between_forwards), (plain, another_size_in_one_region), (two_regions, region_switched_off)],
)
def test_casts_of_the_users_region_stay_at_hand(around: Any, step: Any) -> None:
    eager, model = twins(lambda: Shared(around))
    x = torch.randn(4, 8)
    autocast = None if step is region_switched_off else torch.bfloat16
    optimized = fxmem.optimize(model, x, policy=[("*", "recompute")], autocast=autocast)
    assert optimized.plan.dropped
    step(eager, x)
    step(optimized, x)
    assert_same_gradients(eager, model)
