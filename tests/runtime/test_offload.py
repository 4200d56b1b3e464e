"""Values that wait for the backward in host memory: eager's bits, autograd's promises, the planned bytes, no leaks."""

import gc
import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxmem
from fxmem.api.module import OptimizedModule
from fxmem.capture.export import capture
from fxmem.capture.graph import CaptureGraph, Inputs
from fxmem.ir import KEEP, GraphProfile, Offload, Phase, Plan
from fxmem.passes.emit import rewrite
from fxmem.planners.offload.choice import offload_all
from fxmem.planners.plan_check import check_plan
from fxmem.planners.simulate import keep_all, simulate
from fxmem.profiling.profile import Profiled, profile
from fxmem.profiling.roofline import PRESETS
from fxmem.profiling.storage_tracker import StorageTracker, tensors_of
from fxmem.profiling.training_step import TrainingStep, run_step
from fxmem.profiling.verify import verify
from fxmem.runtime import host_memory
from fxmem.runtime.host_memory import Arriving, HostCopy
from tests.exactness import same_bits
from tests.runtime.models import Net, Smooth, assert_both_do, loss_of, pair
from tests.runtime.test_failures_and_changes import Bomb
from tests.tiers import representatives

ONLY = {"allow": ("inplace", "offload"), "cache": False, "budget": "65%"}
MIXED = {"allow": ("recompute", "inplace", "offload"), "cache": False}
STEP = TrainingStep(loss_fn=loss_of, optimizer=None)


class Pools(nn.Module):
    """Convolutions, norms, pools and dropout: outputs, internals of several kinds, and residual sums."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        seen = []
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x))) + x
            seen.append(x.flatten(1))
            x = F.max_pool2d(x, 2) if x.shape[-1] > 4 else F.dropout(x, 0.2)
        return {"hidden": x, "out": torch.cat(seen, 1).tanh()}


def profiled(make: Callable[[], nn.Module], x: Tensor) -> tuple[nn.Module, CaptureGraph, Inputs, Profiled]:
    torch.manual_seed(0)
    model, inputs = make().train(), Inputs.of((x,), {})
    captured = capture(model, inputs)
    return model, captured, inputs, profile(captured, inputs, PRESETS["cpu"].seconds, STEP)


def ran(model: nn.Module, x: Tensor, call: Callable[[], Any]) -> tuple[list[Tensor], StorageTracker]:
    """Return the gradients and buffers that a step of ``call`` leaves, and what it took; buffers are put back."""
    before = [buffer.clone() for buffer in model.buffers()]
    model.zero_grad(set_to_none=True)
    x.grad = None
    torch.manual_seed(3)
    tracker = StorageTracker()
    tracker.hold([*tensors_of(model), x])
    with tracker:
        run_step(call, loss_of)
    left = [p.grad for p in model.parameters()] + [x.grad] + [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
    return left, tracker


def random_plan(graph: GraphProfile, rng: random.Random) -> Plan:
    """Return a plan that keeps, recomputes and offloads at random, with random times of letting go and of fetching."""
    last = len(graph.recipes) - 1
    limits = [KEEP if s.recipe is None or rng.random() < 0.2 else rng.randint(s.recipe, last) for s in graph.storages]
    dropped = [s.index for s in graph.storages if s.num_saves and limits[s.index] != KEEP]
    offloads = []
    for recipe in graph.recipes:
        if rng.random() < 0.5 and any(limits[s] != KEEP for s in recipe.products):
            lets_go = [
                tick.node
                for tick in graph.ticks
                if tick.phase is Phase.FORWARD and tick.node is not None and set(tick.last_used) & set(recipe.products)
            ]
            left = rng.choice([None, rng.randint(max(lets_go), len(graph.nodes) - 1)])
            offloads.append(Offload(recipe.index, rng.choice([None, *dropped]), left))
    return Plan("random", tuple(limits), tuple(offloads))


def emitted(found: Profiled, plan: Plan) -> fx.GraphModule:
    check_plan(found.profile, plan)
    return rewrite(found, plan)


@pytest.fixture(scope="module")
def compiled() -> tuple[OptimizedModule, Tensor]:
    _, optimized, x = pair(**ONLY)
    return optimized, x


@pytest.fixture
def offloading(compiled: tuple[OptimizedModule, Tensor]) -> tuple[OptimizedModule, Tensor]:
    """Return a model that offloads and recomputes nothing, without gradients, and a batch."""
    optimized, x = compiled
    optimized.zero_grad(set_to_none=True)
    x.grad = None
    return optimized, x


# -- bytes and bits ----------------------------------------------------------------------------------------------------


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "smooth": (Smooth, (32, 8)),
    "net": (Net, (32, 8)),
    "pools": (Pools, (2, 4, 16, 16)),
}


@pytest.mark.parametrize("case", representatives(CASES, "net", "pools", quick=["smooth"]))
def test_planned_verified_and_measured_peaks_are_one_number_and_bits_are_eagers(case: str) -> None:
    make, shape = CASES[case]
    x = torch.randn(shape, requires_grad=True)
    model, captured, inputs, found = profiled(make, x)
    expected, _ = ran(model, x, lambda: model(x))
    rng, num_fetched_ahead = random.Random(1), 0
    everything = offload_all(found.profile, keep_all(found.profile))
    for plan in (everything, *(random_plan(found.profile, rng) for _ in range(5))):
        timeline, graph_module = simulate(found.profile, plan), emitted(found, plan)
        verification, _ = verify(graph_module, captured, inputs, timeline, STEP, found.seen)
        left, tracker = ran(model, x, lambda graph_module=graph_module: captured.call(graph_module, [x]))
        assert verification.exact
        assert tracker.peak_bytes == timeline.peak_bytes
        assert tracker.host_peak_bytes > 0
        assert tracker.host_bytes == 0, "copies go with the step"
        assert all(same_bits(a, b) for a, b in zip(left, expected, strict=True))
        num_fetched_ahead += sum(offload.after is not None for offload in plan.offloads)
    assert num_fetched_ahead > 0
    assert simulate(found.profile, everything).num_recomputed == 0


@pytest.mark.slow
def test_a_plan_of_all_three_choices_is_within_the_budget_and_says_what_it_offloads() -> None:
    eager, optimized, x = pair(Smooth, **MIXED)
    report = optimized.fxmem.report
    assert optimized.plan.offloads
    assert report.offloaded_bytes > 0
    assert any(note.startswith("offload: what ") for note in report.notes)
    x = x.detach()
    expected, _ = ran(eager, x, lambda: eager(x))
    left, tracker = ran(optimized, x, lambda: optimized(x))
    assert tracker.peak_bytes <= report.budget_bytes
    assert all(same_bits(a, b) for a, b in zip(left, expected, strict=True))


@pytest.mark.slow
def test_track_counts_the_device_without_the_copies(offloading: tuple[OptimizedModule, Tensor]) -> None:
    optimized, x = offloading
    with fxmem.track(optimized, x) as memory:
        output = optimized(x)
        loss = loss_of(output)
        loss.backward()
    assert memory.peak_bytes == optimized.fxmem.report.predicted_peak_bytes


# -- autograd's promises -----------------------------------------------------------------------------------------------


def retained(model: nn.Module, x: Tensor) -> None:
    loss = loss_of(model(x))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def part(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss_of(model(x)), [x, model.blocks[1].up.weight]))


def parts_then_all(model: nn.Module, x: Tensor) -> None:
    output = model(x)
    output["hidden"].sum().backward(retain_graph=True)
    output["out"].sum().backward(retain_graph=True)
    loss_of(output).backward()


def two_forwards(model: nn.Module, x: Tensor) -> None:
    first, second = loss_of(model(x)), loss_of(model(x))
    first.backward()
    second.backward()


def in_another_thread(model: nn.Module, x: Tensor) -> None:
    loss = loss_of(model(x))
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    "action",
    representatives(
        [retained, part, parts_then_all, two_forwards, in_another_thread],
        *(part, parts_then_all, two_forwards, in_another_thread),
        quick=[retained],
    ),
)
def test_what_autograd_promises_holds(action: Callable[[nn.Module, Tensor], Any]) -> None:
    assert_both_do(action, **ONLY)


@pytest.mark.slow
def test_double_backward_through_offloaded_values() -> None:
    def action(model: nn.Module, x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + grad.square().sum()).backward()
        return grad

    assert_both_do(action, Smooth, **ONLY)


def test_a_retained_backward_leaves_on_the_device_what_was_there_before(
    offloading: tuple[OptimizedModule, Tensor],
) -> None:
    optimized, x = offloading
    with fxmem.track(optimized, x) as memory:
        loss = loss_of(optimized(x))
        before = memory.events[-1].live_bytes
        torch.autograd.grad(loss, list(optimized.parameters()), retain_graph=True)
        assert memory.events[-1].live_bytes == before


@pytest.mark.slow
def test_a_backward_that_fails_may_be_repeated_on_a_retained_graph() -> None:
    def fail(_: Tensor) -> None:
        raise KeyboardInterrupt

    def action(model: nn.Module, x: Tensor) -> None:
        loss = loss_of(model(x))
        handle = model.blocks[1].up.weight.register_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            loss.backward(retain_graph=True)
        handle.remove()
        model.zero_grad(set_to_none=True)
        x.grad = None
        loss.backward()

    assert_both_do(action, **ONLY)


# -- nothing leaks -----------------------------------------------------------------------------------------------------


def plain(model: nn.Module, x: Tensor) -> None:
    loss_of(model(x)).backward()


def forward_only(model: nn.Module, x: Tensor) -> None:
    model(x)


def failing_forward(model: nn.Module, x: Tensor) -> None:
    with pytest.raises(RuntimeError, match="the bomb"), Bomb(40, RuntimeError):
        model(x)


@pytest.mark.parametrize("action", [plain, forward_only, pytest.param(part, marks=pytest.mark.slow), failing_forward])
def test_host_copies_die_with_the_graph(
    action: Callable[[nn.Module, Tensor], Any], offloading: tuple[OptimizedModule, Tensor], monkeypatch: Any
) -> None:
    optimized, x = offloading
    made: list[weakref.ref[Tensor]] = []
    init = HostCopy.__init__

    def noted(self: HostCopy, tensor: Tensor) -> None:
        init(self, tensor)
        made.append(weakref.ref(self._host))

    monkeypatch.setattr(HostCopy, "__init__", noted)
    action(optimized, x)
    gc.collect()  # a traceback
    assert made
    assert [copy for copy in made if copy() is not None] == []


# -- the discipline of streams, on a fake timeline ---------------------------------------------------------------------


class Streams:
    """Stands for CUDA's streams: notes what is enqueued and what waits for what."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "compute"

    def stream(self, way: str) -> Any:
        streams = self

        class Stream:
            device = torch.device("cpu")

            def wait_stream(self, other: Any) -> None:
                streams.log.append(f"{way} waits for {other.name}")

            def wait_event(self, event: str) -> None:
                streams.log.append(f"{way} waits for {event}")

            def record_event(self) -> str:
                streams.log.append(f"copy {way}")
                return f"the copy {way}"

        Stream.name = way  # type: ignore[attr-defined]
        return Stream()


def test_copies_wait_for_compute_and_compute_for_copies_before_it_reads_or_frees(monkeypatch: Any) -> None:
    streams = Streams()
    ways = {way: streams.stream(way) for way in ("to host", "to device", "compute")}
    monkeypatch.setattr(host_memory, "_stream", lambda tensor, way: ways[way])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ways["compute"])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    monkeypatch.setattr(host_memory, "_empty_on_host", lambda like, pinned: torch.empty_like(like))
    tensor = torch.randn(4)
    copy = HostCopy(tensor)
    assert streams.log == ["to host waits for compute", "copy to host"]
    streams.log.clear()
    copy.left()
    assert streams.log == ["compute waits for the copy to host"]
    streams.log.clear()
    arriving = copy.fetch()
    assert streams.log == ["to device waits for the copy to host", "to device waits for compute", "copy to device"]
    streams.log.clear()
    arriving.wait()
    arriving.wait()
    assert streams.log == ["compute waits for the copy to device"], "once"
    assert torch.equal(arriving.tensor, tensor)
    streams.log.clear()
    unread = copy.fetch()
    streams.log.clear()
    del unread
    assert streams.log == ["compute waits for the copy to device"], "before its memory is used again"


def test_what_is_fetched_ahead_is_started_by_another_values_unpacking(monkeypatch: Any) -> None:
    x = torch.randn(32, 8, requires_grad=True)
    model, captured, _, found = profiled(Smooth, x)
    plan = offload_all(found.profile, keep_all(found.profile))
    asked = [s for tick in found.profile.ticks for s in tick.unpacks if plan.limits[s] != KEEP]
    order = list(dict.fromkeys(asked))
    ahead = {found.profile.storages[s].recipe: before for before, s in pairwise(order)}
    plan = replace(plan, offloads=tuple(replace(o, after=ahead.get(o.recipe)) for o in plan.offloads))
    log: list[str] = []
    fetch, wait = HostCopy.fetch, Arriving.wait

    def noted_fetch(self: HostCopy) -> Arriving:
        log.append("fetch")
        return fetch(self)

    def noted_wait(self: Arriving) -> None:
        log.append("wait")
        wait(self)

    graph_module = emitted(found, plan)
    loss = loss_of(captured.call(graph_module, [x]))
    monkeypatch.setattr(HostCopy, "fetch", noted_fetch)
    monkeypatch.setattr(Arriving, "wait", noted_wait)
    loss.backward()
    first_waits = [i for i, what in enumerate(log) if what == "wait"]
    assert log[0] == "fetch"
    assert log[first_waits[0] + 1] == "fetch", "the next fetch runs while the first value is used"
    assert log.count("fetch") == len(plan.offloads)
    assert same_bits(x.grad, torch.autograd.grad(loss_of(model(x)), x)[0])
