"""Parameters stepped within the backward: eager's bits, the gradients' bytes gone, and what cannot be is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from benchmarks.libraries import import_library
from fxmem.runtime.step_in_backward import check_steps_alone

ALLOW = ("recompute", "inplace", "optimizer_in_backward")
Make = Callable[[Any], torch.optim.Optimizer]
MAKES: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}
sgd = MAKES["sgd"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "optimizer.step\\(\\) and zero_grad\\(\\) do nothing")
        yield


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))


def batch() -> torch.Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def optimized(model: nn.Module, make: Any = sgd, **options: Any) -> fxmem.FxMemModule:
    return fxmem.optimize(model, batch(), optimizer=make, allow=ALLOW, cost="cpu", **options)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 20) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    torch.manual_seed(1)
    for _ in range(steps):
        module(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_weights_and_state_are_eagers_after_twenty_steps(make: Make) -> None:
    eager, model = build(), build()
    theirs = make(eager.parameters())
    train(eager, theirs)
    module = optimized(model, make, policy=[("*", "recompute")])
    train(module, module.fxmem.optimizer)
    assert all(map(torch.equal, eager.parameters(), model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    state, expected = module.fxmem.optimizer.state_dict(), theirs.state_dict()
    assert state["param_groups"][0]["lr"] == expected["param_groups"][0]["lr"]
    for key, values in expected["state"].items():
        assert all(
            torch.equal(torch.as_tensor(v), torch.as_tensor(state["state"][key][n]))
            for n, v in values.items()
            if v is not None
        )


def test_an_optimizer_that_exists_is_the_one_that_steps() -> None:
    eager, model = build(), build()
    theirs, ours = sgd(eager.parameters()), sgd(model.parameters())
    module = optimized(model, ours)
    train(eager, theirs, 3)
    train(module, ours, 3)
    theirs.load_state_dict(copy.deepcopy(theirs.state_dict()))
    module.fxmem.optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert isinstance(module.fxmem.optimizer, torch.optim.SGD)
    train(eager, theirs, 3)
    train(module, module.fxmem.optimizer, 3)
    assert all(map(torch.equal, eager.parameters(), model.parameters()))


def test_all_but_one_of_eight_gradients_leave_the_peak_to_the_byte() -> None:
    def peak(**options: Any) -> tuple[int, int]:
        model, x = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))), torch.zeros(1, 64)
        given = torch.optim.SGD(model.parameters(), lr=0.1)
        module = fxmem.optimize(model, x, optimizer=given, cost="cpu", **options)
        with fxmem.track(module, given, x) as measured:
            output = module(x)
            loss = output.sum()
            loss.backward()
            given.step()
            given.zero_grad()
            del output, loss
        return module.fxmem.report.predicted_peak_bytes, measured.peak_bytes

    ordinary, in_backward = peak(), peak(allow=ALLOW)
    assert ordinary[0] == ordinary[1]
    assert in_backward[0] == in_backward[1]
    assert ordinary[0] - in_backward[0] == 7 * 64 * 64 * 4 - 7 * 64 * 4, (
        "seven activations are there beside the first gradient"
    )


@pytest.mark.slow
def test_the_report_says_what_it_brought() -> None:
    model = build()
    (note,) = (n for n in optimized(model).fxmem.report.notes if n.startswith("optimizer_in_backward"))
    assert "MB off the peak; parameters are stepped within the backward" in note
    assert not any("hooks on" in note for note in optimized(build()).fxmem.report.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scaler": torch.amp.GradScaler("cpu")}, "a GradScaler may skip a step"),
        ({"accumulate": True}, "gradients cannot accumulate over micro-batches"),
        ({"loop": fxmem.Loop(backwards=2)}, "a second backward through one graph"),
        ({"optimizer": None}, "there is no optimizer"),
        ({"optimizer": "adamw"}, "needs the optimizer that is to step the parameters, not 'adamw'"),
    ],
)
def test_what_needs_all_gradients_at_once_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fxmem.InputError, match=message):
        fxmem.optimize(build(), batch(), **{"optimizer": sgd, "allow": ALLOW, **options})


def test_clipping_by_norm_is_refused_where_it_happens() -> None:
    module, other = optimized(build()), build()
    module(batch()).sum().backward()
    with pytest.raises(fxmem.InputError, match=r"gradients cannot be clipped by norm: .*Leave out clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    other(batch()).sum().backward()
    assert torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0) > 0


def test_micro_batches_are_refused_where_they_happen() -> None:
    module = optimized(build())
    for _ in range(2):
        module(batch()).sum().backward()
    with pytest.raises(fxmem.InputError, match="a second backward came before optimizer"):
        module.fxmem.optimizer.step()
    train(module, module.fxmem.optimizer, 1)
    module(batch()).sum().backward()
    with pytest.raises(fxmem.InputError, match="a second backward came before optimizer"):
        module(batch()).sum().backward()


class ClippedSGD(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        super().step()


class CountingSGD(torch.optim.SGD):
    """Counts its steps in its group."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1


def test_optimizers_that_mix_parameters_are_refused() -> None:
    with pytest.raises(fxmem.InputError, match="ClippedSGD steps a parameter otherwise when others are there"):
        optimized(build(), lambda p: ClippedSGD(p, lr=0.1))
    with pytest.raises(fxmem.InputError, match="CountingSGD keeps something of its own from step to step"):
        optimized(build(), lambda p: CountingSGD(p, lr=0.1))
    for make in MAKES.values():
        check_steps_alone(make(build().parameters()))


@pytest.mark.slow
def test_restored_models_and_copies_step_as_they_should() -> None:
    model = build()
    module = optimized(model, sgd)
    twin = copy.deepcopy(module)
    train(module, module.fxmem.optimizer, 2)
    train(twin, twin.fxmem.optimizer, 2)
    assert all(map(torch.equal, module.parameters(), twin.parameters()))
    with pytest.raises(fxmem.InputError, match="there is an optimizer here only with allow="):
        _ = fxmem.optimize(build(), batch()).fxmem.optimizer
    fxmem.restore(module)(batch()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
def test_parameters_are_stepped_by_one_optimizer() -> None:
    model = build()
    with pytest.raises(fxmem.InfeasibleBudgetError) as refused:
        optimized(model, budget=1000)
    module = optimized(model)
    assert refused.value.budget_bytes == 1000
    with pytest.raises(fxmem.InputError, match=r"stepped within the backward already.*fxmem.restore"):
        optimized(model)
    fxmem.restore(module)
    optimized(model)


@pytest.mark.exhaustive
def test_a_gpt2_holds_one_gradient_at_its_peak_and_trains_to_eagers_bits() -> None:
    transformers = import_library("transformers")
    tokens = torch.randint(0, 500, (2, 16), generator=torch.Generator().manual_seed(0))
    call, sizes = {"input_ids": tokens, "labels": tokens}, {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 2000}

    def gpt2() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.GPT2Config(n_positions=64, use_cache=False, **sizes)
        return transformers.GPT2LMHeadModel(config).train()  # type: ignore[no-any-return]

    def trained(
        model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[int, list[torch.Tensor]]:
        torch.manual_seed(1)
        for _ in range(20):
            with fxmem.track(module, optimizer, tokens) as measured:
                output = module(**call)
                output.loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                del output
        return measured.peak_bytes, list(model.parameters())

    def planned(**options: Any) -> tuple[int, list[torch.Tensor]]:
        model, given = gpt2(), {"optimizer": MAKES["adamw"], "cost": "cpu", "plan_seconds": 1, **options}
        floor = fxmem.estimate(model, None, call, **given).floor_bytes
        module = fxmem.optimize(model, None, call, budget=floor, **given)
        own = module.fxmem.optimizer if options else MAKES["adamw"](model.parameters())
        peak, parameters = trained(model, module, own)
        assert peak == module.fxmem.report.predicted_peak_bytes == floor
        return peak, parameters

    (ordinary, theirs), (in_backward, ours) = planned(), planned(allow=ALLOW)
    nbytes = [p.nbytes for p in ours]
    assert ordinary - in_backward == sum(nbytes) - max(nbytes)
    eager = gpt2()
    _, expected = trained(eager, eager, MAKES["adamw"](eager.parameters()))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(expected, ours, theirs, strict=True))


def test_step_says_once_that_it_does_nothing() -> None:
    module = optimized(build())
    module(batch()).sum().backward()
    with pytest.warns(UserWarning, match=r"optimizer.step\(\) and zero_grad\(\) do nothing"):
        module.fxmem.optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(batch()).sum().backward()
        module.fxmem.optimizer.step()


def test_estimates_count_it_without_an_instance() -> None:
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), torch.zeros(2, 64)
    ordinary = fxmem.estimate(model, x, cost="cpu", optimizer="sgd")
    in_backward = fxmem.estimate(model, x, cost="cpu", optimizer="sgd", allow=ALLOW)
    assert in_backward.floor_bytes < ordinary.floor_bytes
    assert in_backward.peak_bytes == ordinary.peak_bytes, "of the model as it is"
