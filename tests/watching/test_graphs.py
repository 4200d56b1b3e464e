"""Graphs that stay from step to step are found, with their bytes and the line that keeps them; clean loops hear nothing."""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.profiling.storage_tracker import StorageTracker

NUM_STEPS = 200


class Loop:
    """A small training loop."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model or nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.history: dict[str, list[Tensor]] = {"loss": []}

    def loss(self) -> Tensor:
        return self.model(torch.randn(8, 16)).square().mean()

    def step(self) -> Tensor:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


@pytest.fixture(autouse=True)
def _every_warning_is_an_error() -> Iterator[None]:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# -- clean loops -----------------------------------------------------------------------------------------------------------


def plain(loop: Loop) -> None:
    running = 0.0
    for _ in range(NUM_STEPS):
        loss = loop.step()
        running += loss.item()


def accumulating(loop: Loop) -> None:
    for _ in range(NUM_STEPS // 4):
        losses = []
        for _ in range(4):
            losses.append(loop.loss())
            losses[-1].backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def summing_losses(loop: Loop) -> None:
    for _ in range(NUM_STEPS // 40):
        log_probabilities = [loop.loss() for _ in range(40)]
        torch.stack(log_probabilities).sum().backward()
        loop.optimizer.step()


def averaging_weights(loop: Loop) -> None:
    average, teacher = torch.optim.swa_utils.AveragedModel(loop.model), copy.deepcopy(loop.model).eval()
    for _ in range(NUM_STEPS):
        target = teacher(torch.randn(8, 16)).detach()
        (loop.loss() - target.mean()).backward()
        loop.optimizer.step()
        average.update_parameters(loop.model)


def retaining(loop: Loop) -> None:
    features = nn.Linear(16, 16)(torch.randn(8, 16))
    for _ in range(NUM_STEPS):
        loss = loop.model(features).mean()
        loss.backward(retain_graph=True)
        loss.square().backward(retain_graph=True)
        loop.optimizer.step()


def adversarial(loop: Loop) -> None:
    critic = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
    other = torch.optim.Adam(critic.parameters())
    for _ in range(NUM_STEPS):
        fake = loop.model(torch.randn(8, 16))
        (critic(torch.randn(8, 1)).mean() - critic(fake.detach()).mean()).backward()
        other.step()
        critic(fake).mean().backward()
        loop.optimizer.step()


def with_a_window(loop: Loop) -> None:
    window: list[Tensor] = []
    for _ in range(NUM_STEPS):
        window = [*window[-2:], loop.step()]


def many_optimizers(loop: Loop) -> None:
    optimizers = [torch.optim.SGD([p], lr=1e-3) for p in loop.model.parameters()] * 1
    for _ in range(NUM_STEPS):
        losses = [loop.loss() for _ in range(3)]
        torch.stack(losses).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def evaluating(loop: Loop) -> None:
    loop.model.eval()
    losses = []
    for _ in range(NUM_STEPS):
        losses.append(loop.loss().item())


CLEAN = (
    plain,
    accumulating,
    summing_losses,
    averaging_weights,
    retaining,
    adversarial,
    with_a_window,
    many_optimizers,
    evaluating,
)


@pytest.mark.slow
@pytest.mark.parametrize("run", CLEAN, ids=lambda run: run.__name__)
def test_a_clean_loop_hears_nothing_in_200_steps(run: Callable[[Loop], None]) -> None:
    with fxmem.watch_graphs() as watch:
        run(Loop())
    assert watch.found == ()
    assert watch.num_steps > 3


def test_graphs_in_cycles_that_nobody_holds_are_no_leak() -> None:
    loop, graphs = Loop(), []
    gc.disable()
    try:
        with fxmem.watch_graphs() as watch:
            for _ in range(30):
                cycle: list[Any] = [loop.step()]
                cycle.append(cycle)
                graphs.append(len(cycle))
    finally:
        gc.enable()
    assert watch.found == ()


# -- leaks -----------------------------------------------------------------------------------------------------------------


def a_list(loop: Loop) -> None:
    losses = []
    for _ in range(14):
        loss = loop.step()
        losses.append(loss)  # here


def a_sum(loop: Loop) -> None:
    total: Any = 0
    for _ in range(14):
        loss = loop.step()
        total += loss  # here


def an_attribute(loop: Loop) -> None:
    for _ in range(14):
        loop.history["loss"].append(loop.step())  # here


def a_dictionary(loop: Loop) -> None:
    by_step = {}
    for step in range(14):
        loss = loop.step()
        by_step[step] = loss  # here


def a_closure(loop: Loop) -> None:
    kept = []

    def once() -> None:
        loss = loop.step()
        kept.append(loss)  # here

    for _ in range(14):
        once()


def outputs_of_evaluation(loop: Loop) -> None:
    outputs = []
    loop.model.eval()
    for _ in range(50):
        output = loop.model(torch.randn(8, 16))
        outputs.append(output)  # here


LEAKS = {
    a_list: ("losses", "list", "losses.append(loss)", "append loss.detach() instead, or loss.item()"),
    a_sum: ("total", "", "total += loss", "add loss.detach() instead, or loss.item()"),
    an_attribute: (
        "self.history['loss']",  # as the innermost function calls it
        "list",
        'loop.history["loss"].append(loop.step())',
        "append .detach() of it instead, or .item()",
    ),
    a_dictionary: ("by_step", "dict", "by_step[step] = loss", "store loss.detach() instead, or loss.item()"),
    a_closure: ("kept", "list", "kept.append(loss)", "append loss.detach() instead, or loss.item()"),
    outputs_of_evaluation: (
        "outputs",
        "list",
        "outputs.append(output)",
        "append output.detach() instead, or output.item(), or evaluate under torch.no_grad()",
    ),
}


def line_of(run: Callable[..., Any]) -> str:
    lines, first = inspect.getsourcelines(run)
    return f"test_graphs.py:{first + next(n for n, line in enumerate(lines) if '# here' in line)}"


@pytest.mark.slow
@pytest.mark.parametrize("run", LEAKS, ids=lambda run: run.__name__)
def test_a_leak_is_found_and_its_line_is_named(run: Callable[[Loop], None]) -> None:
    with warnings.catch_warnings(record=True) as told, fxmem.watch_graphs() as watch:
        warnings.simplefilter("always")
        run(Loop())
    (found,) = watch.found
    holder, kind, statement, remedy = LEAKS[run]
    assert (found.holder, found.kind, found.statement, found.remedy) == (holder, kind, statement, remedy)
    assert found.place == line_of(run)
    assert found.num_graphs >= 10
    assert len(told) == (2 if run is not outputs_of_evaluation else 3)
    assert str(told[-1].message).startswith(f"{statement} at {found.place} keeps {found.num_graphs} graphs of earlier")
    assert told[-1].filename == __file__


@pytest.mark.slow
def test_the_bytes_told_are_those_that_letting_go_frees() -> None:
    loop, outputs = Loop(), []
    loop.model.eval()
    with StorageTracker() as tracker, warnings.catch_warnings(record=True), fxmem.watch_graphs() as watch:
        warnings.simplefilter("always")
        while not watch.found:
            outputs.append(loop.model(torch.randn(8, 16)))
        before = tracker.live_bytes
        del outputs[:-1]
        freed = before - tracker.live_bytes
    (found,) = watch.found
    assert freed == found.nbytes == found.num_graphs * 8 * (16 + 32 + 1) * 4  # inputs, which graphs alone hold; ReLU's


@pytest.mark.slow
def test_graphs_of_an_optimized_model_are_found_with_what_its_plan_keeps() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Sigmoid()) for _ in range(4)))
    loop = Loop(fxmem.optimize(model, torch.randn(8, 16), policy=[("sigmoid", "recompute")]))
    losses = []
    with warnings.catch_warnings(record=True), fxmem.watch_graphs() as watch:
        warnings.simplefilter("always")
        for _ in range(10):
            losses.append(loop.loss())
            loop.optimizer.step()
    (found,) = watch.found
    assert found.holder == "losses"
    assert 0 < found.nbytes < found.num_graphs * 8 * 16 * 4 * 9


def test_after_it_has_stopped_nothing_is_looked_at() -> None:
    from torch.nn.modules import module

    watch, loop, losses = fxmem.watch_graphs(), Loop(), []
    watch.stop()
    for _ in range(10):
        losses.append(loop.step())
    assert watch.found == ()
    assert watch.num_steps == 0
    assert not module._global_forward_hooks
    assert not module._global_forward_pre_hooks
