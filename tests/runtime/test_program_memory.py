"""Which steps run as programs, and what these take: at most what is planned, known before they run."""

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.capture import joint_steps
from fxmem.capture.joint_steps import calls_before, runtime_for
from fxmem.profiling.op_benchmark import TAPE_SECONDS
from fxmem.torch_private import storage_key
from fxmem.watching.held_graphs import nodes_of, storages_of
from tests.exactness import NUM_PROGRAMS, PLANS, check, same_bits
from tests.fuzz_cases import Case, check_case
from tests.hostile.models import batch, model_of
from tests.hostile.tensor_models import einsum_and_matmuls
from tests.runtime.models import Smooth, loss_of

SUMMED = "column add column add silu linear layer_norm complex linear no_grad where detached layer_norm view_add_"
OPERANDS = [22, 21, 4, 26, 21, 9, 16, 24, 29, 7, 8, 7, 24, 26], [1, 0, 10, 26, 15, 0, 0, 25, 14, 25, 20, 7, 23, 9]


@pytest.mark.slow
def test_gradients_wait_for_no_others_where_that_would_take_more_than_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four gradients of one bias, the last of which comes late; and sums that a mode would not make in place."""
    monkeypatch.setenv("FXMEM_RUNTIME", "program")
    before = NUM_PROGRAMS[0]
    program = tuple(zip(SUMMED.split(), *OPERANDS, strict=True))
    assert check_case(Case(program, seed=158, requires_grad=False, planner="auto", share=0.0))
    check(model_of(einsum_and_matmuls), batch(), plans=PLANS[:2])
    assert NUM_PROGRAMS[0] == before + 4


@pytest.mark.slow
def test_the_gradient_of_an_output_that_is_used_inside_is_summed_in_place_as_it_is_written_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FXMEM_RUNTIME", "program")
    before = NUM_PROGRAMS[0]
    assert check_case(Case((("relu_", 13, 15),), seed=751, requires_grad=False, planner="mincut", share=0.0))
    assert NUM_PROGRAMS[0] == before + 2


TRIED = (
    *(("matmul", 5, 11), ("sequence", 2, 12), ("sequence", 20, 22), ("image_norm", 19, 22), ("gather", 28, 9)),
    *(("conv_pool", 16, 21), ("batch_norm", 29, 6)),
)


@pytest.mark.slow
def test_gradients_are_summed_in_place_where_a_program_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of that step is the planned one."""
    monkeypatch.setenv("FXMEM_RUNTIME", "program")
    assert check_case(Case(TRIED, seed=522, requires_grad=False, planner="auto", share=0.0))


def _trained(num_steps: int) -> tuple[Any, Tensor]:
    """Return a model after some steps that ask for programs, and a batch."""
    x = torch.randn(32, 8)
    policy = [("softplus", "recompute")]
    optimized = fxmem.optimize(Smooth(), x, optimizer=None, loss_fn=loss_of, policy=policy, runtime="program")
    for _ in range(num_steps):
        loss_of(optimized(x)).backward()
        optimized.zero_grad()
    return optimized, x


@pytest.mark.slow
def test_what_a_program_has_saved_is_weighed_with_its_graph() -> None:
    optimized, x = _trained(2)
    loss = loss_of(optimized(x))
    weighed = storages_of(nodes_of([loss]))
    call = next(node.call for node in nodes_of([loss]) if hasattr(node, "call"))
    saved = {storage_key(t): t.untyped_storage().nbytes() for t in call.saved if isinstance(t, Tensor)}
    assert saved
    assert saved.items() <= weighed.items()
    loss.backward()
    assert not saved.keys() & storages_of(nodes_of([loss])).keys()


@pytest.mark.slow
def test_a_program_that_would_take_more_than_the_tape_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fxmem.planning")
    monkeypatch.setattr("fxmem.runtime.programs.program.excess_bytes", lambda *_: 640)
    optimized, _ = _trained(3)
    assert optimized.fxmem.plans.latest.joint.program is None
    why = "tape: as a program its peak would be 640 bytes above the plan's"
    assert optimized.fxmem.runtime == why
    assert [record.getMessage() for record in caplog.records if "runtime" in record.getMessage()] == [f"runtime: {why}"]


@pytest.mark.slow
def test_a_program_that_would_go_over_the_budget_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxmem.emitted.ProgramJudge.__call__", lambda *_: 512)
    optimized, _ = _trained(3)
    assert optimized.fxmem.plans.latest.joint.program is None
    assert optimized.fxmem.runtime == "tape: as a program its peak would be 512 bytes above the budget"


@pytest.mark.slow
def test_a_program_is_judged_by_the_step_that_was_planned() -> None:
    """Its own peak is told, before it runs; with a loss whose gradient lies otherwise there is none to tell."""
    optimized, x = _trained(2)
    judge = optimized.fxmem.plans.latest.judge
    assert judge.peak_bytes == optimized.fxmem.report.predicted_peak_bytes
    with fxmem.track(optimized, x) as memory:
        loss_of(optimized(x)).backward()
    assert memory.peak_bytes == judge.peak_bytes
    steps = optimized.fxmem.plans.latest.joint
    other = replace(steps.program, tangents=(None,) * len(steps.program.tangents))
    assert judge(lambda leaves: steps.on_fakes(other, leaves), [x]) == 0
    assert judge.peak_bytes is None


def test_programs_are_for_cuda_and_later_calls_on_the_cpu_if_nothing_else_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FXMEM_RUNTIME", raising=False)
    cpu, cuda = [torch.device("cpu")], [torch.device("cpu"), torch.device("cuda", 0)]
    assert [runtime_for("auto", "allocated", devices) for devices in (cpu, cuda)] == ["auto", "program"]
    assert runtime_for("auto", "reserved", cuda) == "tape"
    assert runtime_for("tape", "allocated", cuda) == "tape"
    assert runtime_for("program", "reserved", cpu) == "program"


def squared(output: Tensor) -> Tensor:
    return output.square().sum()


def _normed(depth: int = 6) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU()) for _ in range(depth)]
    return nn.Sequential(*layers)


@pytest.mark.slow
def test_on_the_cpu_a_program_begins_where_the_tape_has_cost_as_much_as_writing_it_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With eager's bits before and after, within the budget all the time, which has room for the step written down."""
    monkeypatch.delenv("FXMEM_RUNTIME", raising=False)
    monkeypatch.setattr(joint_steps, "CALL_SECONDS", 1e-4)
    model, x = _normed(), torch.randn(256, 64)
    eager = copy.deepcopy(model)
    optimized = fxmem.optimize(model, x, optimizer=None, loss_fn=squared, budget="60%", cost="cpu", plan_seconds=1)
    after, ran_as = calls_before(optimized.graph_module), []
    assert after == joint_steps.LEAST_WATCHED
    for _ in range(after + 3):
        ran_as.append(optimized.fxmem.runtime)
        peaks = []
        for each in (eager, optimized):
            with fxmem.track(each, x) as memory:
                squared(each(x)).backward()
            peaks.append(memory.peak_bytes)
        assert peaks[1] <= optimized.fxmem.report.budget_bytes < peaks[0]
        for expected, found in zip(eager.parameters(), optimized.parameters(), strict=True):
            assert torch.equal(expected.grad, found.grad)
            expected.grad = found.grad = None
        for expected, found in zip(eager.buffers(), optimized.buffers(), strict=True):
            assert torch.equal(expected, found)
    assert ran_as == ["tape: no step has been written down yet"] * (after + 1) + ["program"] * 2


def test_on_the_cpu_nothing_is_written_down_where_the_tape_costs_nothing_or_next_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FXMEM_RUNTIME", raising=False)
    x = torch.randn(256, 64)
    kept = fxmem.optimize(_normed(), x, optimizer=None)
    assert calls_before(kept.graph_module) is None
    dropped = fxmem.optimize(_normed(), x, optimizer=None, budget="60%", cost="cpu", plan_seconds=1)
    assert calls_before(dropped.graph_module) is not None
    monkeypatch.setattr(joint_steps, "MOST_WATCHED", 1)
    assert calls_before(dropped.graph_module) is None
    assert kept.fxmem.runtime == "tape"


@pytest.mark.parametrize("runtime", ["auto", "tape"])
def test_plans_leave_room_for_copies_of_what_a_model_writes_where_a_step_may_be_written_down(
    monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    """The floor is told without: a budget there leaves the tape."""
    monkeypatch.delenv("FXMEM_RUNTIME", raising=False)
    model, x = _normed(), torch.randn(256, 64)
    options: dict[str, Any] = {"optimizer": None, "cost": "cpu", "plan_seconds": 1, "runtime": runtime}
    written_bytes = sum(b.nbytes for b in model.buffers())
    estimate = fxmem.estimate(model, x, optimizer=None)
    peaks = {p.predicted_peak_bytes for p in fxmem.frontier(model, x, optimizer=None, cost="cpu", plan_seconds=1)}
    for peak in sorted(peaks)[1:4]:
        told = fxmem.optimize(model, x, budget=peak, **options).report.predicted_peak_bytes
        assert told <= peak - written_bytes if runtime == "auto" else told <= peak
    least = fxmem.optimize(model, x, budget=estimate.floor_bytes, **options).report
    assert estimate.floor_bytes - written_bytes < least.predicted_peak_bytes <= estimate.floor_bytes


@pytest.mark.slow
def test_where_the_budget_has_no_room_for_programs_recipes_have_the_price_of_the_tape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FXMEM_RUNTIME", raising=False)
    x, options = torch.randn(256, 64), {"optimizer": None, "cost": "measure", "plan_seconds": 1}
    least = fxmem.estimate(_normed(), x, optimizer=None).floor_bytes
    for budget, on_tape in ((least, True), (int(1.2 * least), False)):
        planned = fxmem.optimize(_normed(), x, budget=budget, **options).fxmem.plans.latest.planned
        assert planned is not None
        nodes, recipes = planned.profile.nodes, planned.profile.recipes
        beside = {round(r.seconds - sum(nodes[k].seconds for k in r.nodes), 9) for r in recipes}
        assert beside <= {round(TAPE_SECONDS, 9), round(TAPE_SECONDS / 2, 9)} if on_tape else beside == {0.0}


def test_an_unknown_runtime_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXMEM_RUNTIME", "graphs")
    with pytest.raises(fxmem.InputError, match="FXMEM_RUNTIME='graphs' is none of auto, tape, program"):
        fxmem.optimize(nn.Linear(2, 2), torch.randn(1, 2))


def _convolved() -> nn.Module:
    convolutions = [part for _ in range(6) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.SiLU())]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *convolutions)


def test_what_a_backward_does_in_two_calls_to_hold_less_is_one_where_there_is_room() -> None:
    """Beside the peak, which is where it was; and with eager's bits."""
    torch.manual_seed(0)
    model, x = _convolved(), torch.randn(4, 3, 32, 32)
    planned: dict[str, Any] = {"optimizer": None, "loss_fn": torch.mean, "runtime": "program"}
    report = fxmem.optimize(copy.deepcopy(model), x, **planned).report
    spans, counts = report.eager_peak_bytes - report.floor_bytes, []
    eager = copy.deepcopy(model)
    torch.mean(eager(x)).backward()
    for share in (0.0, 0.5):
        budget = report.floor_bytes + int(share * spans)
        optimized = fxmem.optimize(copy.deepcopy(model), x, budget=budget, **planned)
        for _ in range(2):
            optimized.zero_grad()
            torch.mean(optimized(x)).backward()
        latest = optimized.fxmem.plans.latest
        assert latest.joint.runtime == "program"
        assert latest.report.predicted_peak_bytes == latest.planned_report.predicted_peak_bytes <= budget
        pairs = zip(eager.parameters(), optimized.parameters(), strict=True)
        assert all(same_bits(theirs.grad, ours.grad) for theirs, ours in pairs)
        recorded = [str(call.target) for call in latest.joint._recording.backward]
        assert sum("convolution_backward" in name for name in recorded) == 2 * 6 + 1
        counts.append(latest.joint.program.source.count("= convolution_backward"))
    assert 7 < counts[1] < counts[0] < 2 * 6 + 1
