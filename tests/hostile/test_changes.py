"""Models that are changed between planning and training, or while they run."""

from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from tests.exactness import same_bits
from tests.hostile.models import LINEAR, WIDTH, _assert_same_step, _pair, batch, model_of
from tests.hostile.module_models import first_part
from tests.tiers import representatives


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    representatives(
        ["freeze", "unfreeze", "dropout", "eval_part", "replace", "constant"],
        "freeze",
        "dropout",
        "eval_part",
        "replace",
    ),
)
def test_a_change_after_planning_is_noticed(change: str) -> None:
    def change_it(m: Any) -> None:
        if change == "freeze":
            m.first.requires_grad_(False)
        elif change == "unfreeze":
            m.parts[0].base.requires_grad_()
        elif change == "dropout":
            m.parts[0].dropout.p = 0.9
        elif change == "eval_part":
            m.parts[0].eval()
        elif change == "replace":
            torch.manual_seed(9)
            m.parts[0].up = nn.Linear(2, WIDTH)
        else:
            m.factor = 3.0

    def body(m: Any, x: Tensor) -> Tensor:
        return m.parts[0](x).exp() * getattr(m, "factor", 1.0)

    eager, model = _pair(body)
    optimized = fxmem.optimize(model, batch())
    _assert_same_step(eager, model, optimized)
    for m in (eager, model):
        change_it(m)
    _assert_same_step(eager, model, optimized)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    representatives(
        ["list", "tensor", "tensor_in_place", "forward", "plain_module"], "list", "tensor_in_place", "forward"
    ),
)
def test_a_change_of_what_the_graph_has_as_constants_is_noticed(change: str) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return m.parts[1](m.parts[0](x)).exp() * m.factors[0] * m.mask

    eager, model = _pair(body, LINEAR, nn.Tanh)
    for m in (eager, model):
        m.factors, m.mask = [1.0], torch.ones(WIDTH)
    optimized = fxmem.optimize(model, batch())
    _assert_same_step(eager, model, optimized)
    for m in (eager, model):
        if change == "list":
            m.factors[0] = 3.0
        elif change == "tensor":
            m.mask = torch.full((WIDTH,), 2.0)
        elif change == "tensor_in_place":
            m.mask.mul_(3)
        elif change == "forward":
            m.parts[0].forward = lambda x: x * 2
        else:
            m.parts[1] = nn.ReLU()
    _assert_same_step(eager, model, optimized)


@pytest.mark.slow
def test_the_optimized_module_inside_torch_compile_runs_as_it_is() -> None:
    eager, model = _pair(first_part, LINEAR)
    compiled = torch.compile(fxmem.optimize(model, batch()), backend="eager")
    _assert_same_step(eager, model, compiled)


def test_a_counter_that_is_no_buffer_is_refused() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        return x * m.calls

    model = model_of(body)()
    model.calls = 0
    with pytest.raises(fxmem.CaptureError, match=r"calls.*register_buffer"):
        fxmem.optimize(model, batch())
    assert model.calls == 0


def test_an_activation_left_on_the_model_is_left_by_the_graph() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.penalty = m.parts[0](x).square().sum()
        return m.parts[0](x.exp())

    eager, model = _pair(body, LINEAR)
    gradients = []
    for m in (eager, fxmem.optimize(model, batch())):
        (m(batch()).sum() + m.penalty).backward()
        gradients.append([p.grad for p in m.parameters() if p.grad is not None])
    assert all(map(torch.equal, *gradients))


def test_a_recurrent_layer_whose_weights_an_optimizer_writes_is_planned_once() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0]

    optimized = fxmem.optimize(Recurrent(), torch.randn(3, 2, 4), optimizer="sgd")
    first = optimized.graph_module
    optimizer = torch.optim.SGD(optimized.parameters())
    for _ in range(2):
        optimized(torch.randn(3, 2, 4)).sum().backward()
        optimizer.step()
    assert optimized.graph_module is first


class Uncounted(nn.Module):
    """A batch norm of somebody's own, which counts no batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, self.weight, None, self.training)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_running_statistics_without_a_count_are_not_read_again(frozen: bool) -> None:
    def gradients(policy: list[tuple[Any, Any]] | None) -> list[Tensor | None]:
        torch.manual_seed(0)
        norm = Uncounted().requires_grad_(not frozen)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), norm.eval(), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        run = model if policy is None else fxmem.optimize(model, batch(), policy=policy, optimizer=None)
        first = run(batch())
        norm.train()
        second = run(2 * batch() + 1)
        (first.square().mean() + second.sin().mean()).backward()
        return [p.grad for p in model.parameters()]

    assert all(map(same_bits, gradients(None), gradients([(lambda node: True, "recompute")])))


@pytest.mark.slow
def test_running_statistics_updated_by_a_later_call_are_noticed() -> None:
    def gradients(policy: list[tuple[Any, Any]] | None, *, updated: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(WIDTH)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), norm.eval(), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        run = model if policy is None else fxmem.optimize(model, batch(), policy=policy, optimizer=None)
        loss = run(batch()).square().mean()
        if updated:
            norm.train()
            with torch.no_grad():
                run(batch())
            norm.eval()
        loss.backward()
        return [p.grad for p in model.parameters()]

    everything: list[tuple[Any, Any]] = [(lambda node: True, "recompute")]
    assert all(map(same_bits, gradients(None, updated=False), gradients(everything, updated=False)))
    with pytest.raises(fxmem.SavedTensorModifiedError, match="running statistics") as refusal:
        gradients(everything, updated=True)
    assert '("frozen_batch_norm", "save")' in str(refusal.value)
    saved: list[tuple[Any, Any]] = [("batch_norm", "save"), ("frozen_batch_norm", "save"), *everything]
    assert all(map(same_bits, gradients(None, updated=True), gradients(saved, updated=True)))
