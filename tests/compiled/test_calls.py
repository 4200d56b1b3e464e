"""Steps of several calls of compiled graphs: one budget over all of them, and the numbers of the same compiler."""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxmem
from benchmarks.measure import allocator_rise_bytes
from fxmem.api.arguments import settings_of
from fxmem.compiled.choice import Candidates
from fxmem.compiled.fakerun import GraphCall
from fxmem.compiled.graph_planner import GraphPlanner
from fxmem.compiled.levers import Levers
from fxmem.compiled.step_planner import PlannedGraph, StepPlanner, Variant, path
from fxmem.compiled.step_run import IN_ORDER
from fxmem.compiled.surroundings import Surroundings, joined, surroundings_of, with_loss
from fxmem.ir import FrontierPoint, Plan
from fxmem.torch_private import storage_key
from tests.compiled.models import Block

WIDTH, ROWS = 64, 256
OPTIONS: dict[str, Any] = {"cost": "cpu", "plan_seconds": 2.0}


class Breaking(nn.Module):
    """Two halves with a graph break between them; returns its loss."""

    num_blocks = 2

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(self.num_blocks))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        x = self.blocks[1](x)
        return F.cross_entropy(self.head(x), y)


class Looping(Breaking):
    """A graph break in a loop: Dynamo compiles one block, and calls it for each; the rest runs eager."""

    num_blocks = 4

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x), y)


class Case:
    """A step of several calls: ``loss`` computes it, given a backend's name and a budget."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.x, self.y = torch.randn(ROWS, WIDTH), torch.randint(10, (ROWS,))
        self.other = torch.randn(ROWS, WIDTH)
        self.kind = kind
        kinds: dict[str, Callable[[], nn.Module]] = {"breaks": Breaking, "loops": Looping}
        self.model = kinds.get(kind, lambda: nn.Sequential(Block(WIDTH)))()
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def compiled(self, budget: int | None) -> tuple[Callable[[], torch.Tensor], Any]:
        """Return the loss of a step, and what has its reports."""
        torch._dynamo.reset()
        options = {**OPTIONS, "budget": budget, "optimizer": self.optimizer}
        if self.kind == "two forwards":
            both = fxmem.optimize(
                self.model, backend="inductor", loss_fn=lambda output: output.square().mean(), **options
            )
            return lambda: (both(self.x) - both(self.other)).square().mean(), both.fxmem
        backend = fxmem.backend(**options)
        model = torch.compile(self.model, backend=backend, dynamic=False)
        return lambda: model(self.x, self.y), backend

    def step(self, loss: Callable[[], torch.Tensor]) -> None:
        loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self, loss: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        return list(torch.autograd.grad(loss(), list(self.model.parameters())))

    def measured_bytes(self, loss: Callable[[], torch.Tensor]) -> int:
        """Return the peak of a step by the CPU allocator's events, with what is there before it."""
        gc.collect()
        state = [t for each in self.optimizer.state.values() for t in each.values()]
        batch = (self.x, self.other) if self.kind == "two forwards" else (self.x, self.y)
        here = sum(t.nbytes for t in (*self.model.parameters(), *batch, *state))
        return here + allocator_rise_bytes(lambda: self.step(loss))


def check_budgets(kind: str, shares: list[float], uncounted_bytes: int = 0) -> None:
    """``shares``: of what the step takes with nothing recomputed above seven tenths of its rise, about what plans reach."""
    case = Case(kind)
    initial = {name: value.clone() for name, value in case.model.state_dict().items()}
    expected: list[torch.Tensor] = []
    most = least = 0
    for share in (None, *sorted(shares, reverse=True)):
        budget = None if share is None else int(least + share * (most - least))
        loss, told = case.compiled(budget)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "[0-9]+ calls of compiled graphs before one backward")
            for _ in range(2):
                case.step(loss)
        report = told.reports[-1]
        assert report.num_calls > 1
        assert case.measured_bytes(loss) == report.predicted_peak_bytes + uncounted_bytes
        assert budget is None or report.predicted_peak_bytes <= budget
        case.model.load_state_dict(initial)
        found = case.gradients(loss)
        expected = expected or found
        assert all(map(torch.equal, expected, found))
        most = most or report.predicted_peak_bytes
        least = least or report.fixed_bytes + 7 * (most - report.fixed_bytes) // 10
    assert report.num_recomputed > 0


@pytest.mark.slow
def test_graphs_of_a_step_that_breaks_share_one_budget() -> None:
    check_budgets("breaks", [0.3])


@pytest.mark.slow
def test_two_forwards_before_one_backward_share_one_budget() -> None:
    check_budgets("two forwards", [0.1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["breaks", "loops", "two forwards"])
def test_random_budgets_of_steps_of_several_calls(kind: str) -> None:
    draw = random.Random(kind)
    uncounted = ROWS * 8 + 8 if kind == "loops" else 0  # the labels and the loss, of a loss that nothing compiles
    check_budgets(kind, [draw.uniform(0.2, 1.0) for _ in range(10)], uncounted)


@pytest.mark.slow
def test_calls_whose_backwards_come_in_turns_are_one_step_as_long_as_they_wait() -> None:
    """The first of two chained calls is over while the second waits; random states are those of a training as it is."""
    torch.manual_seed(0)
    one, other, x = Block(WIDTH), Block(WIDTH), torch.randn(ROWS, WIDTH)
    backend = fxmem.backend(budget="8MB", optimizer=None, **OPTIONS)
    first, second = (torch.compile(each, backend=backend, dynamic=False) for each in (one, other))
    states = []
    for _ in range(3):
        torch.manual_seed(2)
        made = first(x)
        waiting = second(made.detach())
        made.sum().backward()
        joined = second(first(x)) + waiting
        joined.sum().backward()
        one.zero_grad(), other.zero_grad()
        states.append(torch.get_rng_state())
    assert [report.num_calls for report in backend.reports] == [1, 2, 3]
    assert all(torch.equal(state, states[0]) for state in states)


@pytest.mark.slow
def test_a_budget_that_no_plans_of_a_step_fit_is_refused_with_what_was_seen_of_it() -> None:
    case = Case("breaks")
    loss, _ = case.compiled(1_000_000)
    with pytest.raises(fxmem.InfeasibleBudgetError, match="first call, which more may follow") as caught:
        loss()
    loss, _ = case.compiled(caught.value.least_bytes)
    with pytest.raises(fxmem.InfeasibleBudgetError, match="first 2 calls, which more may follow"):
        loss()


class Partly(nn.Module):
    """A graph break in a loop: of the rest Dynamo compiles the blocks alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block = nn.Embedding(16, 16), Block(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.table(x) * 2
        for _ in range(2):
            hidden = self.block(hidden).sin()
            torch._dynamo.graph_break()
        return hidden.square().mean()


@pytest.mark.slow
def test_what_is_computed_outside_of_compiled_graphs_is_told_of_once() -> None:
    model = torch.compile(Partly(), backend=fxmem.backend(budget="1GB", **OPTIONS), dynamic=False)
    x = torch.randint(16, (32,))
    with pytest.warns(UserWarning, match="what code outside of compiled graphs computes.* budget of 1 GB") as told:
        model(x).backward()
    assert sum("outside of compiled graphs" in str(each.message) for each in told) == 1
    model(x).backward()  # a second warning would be an error


class Thin(nn.Module):
    """Of its graphs one only adds, whose backward has no op, and two only look at their input in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH // 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        hidden = hidden + x
        torch._dynamo.graph_break()
        hidden = hidden.view(-1, WIDTH // 2)
        torch._dynamo.graph_break()
        middle = self.last(hidden.tanh())[:1]
        torch._dynamo.graph_break()
        middle = middle.expand(ROWS, 1)
        torch._dynamo.graph_break()
        return (middle * x).square().mean()


@pytest.mark.slow
def test_graphs_without_ops_are_part_of_a_step() -> None:
    model, x = Thin(), torch.randn(ROWS, WIDTH)
    backend = fxmem.backend(budget="1GB", optimizer=None, **OPTIONS)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    for _ in range(2):
        found = torch.autograd.grad(compiled(x), list(model.parameters()))
        torch.testing.assert_close(found, expected)
    assert backend.reports[-1].num_calls > 2


@pytest.mark.slow
def test_calls_of_one_graph_that_there_is_room_for_are_not_all_run_on_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[int] = []
    judge = StepPlanner.last_within

    def noted(self: StepPlanner, *args: Any) -> Any:
        judged.append(len(self.calls))
        return judge(self, *args)

    monkeypatch.setattr(StepPlanner, "last_within", noted)
    model = torch.compile(nn.Sequential(Block(16)), backend=fxmem.backend(budget="1GB", **OPTIONS), dynamic=False)
    sum(model(torch.randn(8, 16)).mean() for _ in range(20)).backward()
    assert judged == [2, 3, 6, 12]


@pytest.mark.slow
def test_nothing_stays_of_a_backend_and_a_model_that_nobody_holds() -> None:
    case = Case("two forwards")
    loss, told = case.compiled(None)
    case.step(loss), case.step(loss)
    alive = [weakref.ref(told._backend), weakref.ref(case.model[0].up.weight)]
    del case, loss, told
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_what_is_around_a_step_of_one_call_is_what_is_around_its_graph() -> None:
    """Parameters, their state, the batch, and the targets of a loss outside."""
    model, x, y = nn.Linear(8, 4), torch.randn(2, 8), torch.tensor([1, 2])
    step = settings_of({"loss_fn": F.cross_entropy, "targets": y, "optimizer": "adamw"}).step
    alone = with_loss(surroundings_of((x,), tuple(model.parameters()), step), torch.empty(2, 4), step)
    both = joined([alone, alone], {storage_key(x): x.nbytes}, model.parameters(), (), step)
    assert alone.fixed_bytes > 3 * sum(p.nbytes for p in model.parameters()) + x.nbytes + y.nbytes - 1
    assert both.fixed_bytes == alone.fixed_bytes
    assert (both.loss, both.optimizer) == (alone.loss, alone.optimizer)


peaks = st.lists(st.integers(1, 1000), min_size=1, max_size=8, unique=True)


@given(st.lists(peaks, min_size=1, max_size=4))
def test_the_path_of_a_step_goes_from_keeping_all_to_the_deepest_and_costs_ever_more(drawn: list[list[int]]) -> None:
    frontiers = [
        tuple(FrontierPoint(Plan("test", ()), peak, float(i * i)) for i, peak in enumerate(sorted(each, reverse=True)))
        for each in drawn
    ]
    found = list(path(frontiers))
    assert found[0].places == (0,) * len(frontiers)
    assert found[-1].places == tuple(len(points) - 1 for points in frontiers)
    for before, after in pairwise(found):
        assert sum(a != b for a, b in zip(before.places, after.places, strict=True)) == 1
        assert after.recompute_seconds >= before.recompute_seconds
    seconds = [sum(points[i].recompute_seconds for points, i in zip(frontiers, c.places, strict=True)) for c in found]
    assert [c.recompute_seconds for c in found] == pytest.approx(seconds)


@pytest.mark.parametrize("tight_takes", [90, 110])
def test_at_its_deepest_a_step_has_tight_backwards_where_these_take_less(
    monkeypatch: pytest.MonkeyPatch, tight_takes: int
) -> None:
    """A budget that only these keep is not refused."""
    points = tuple(FrontierPoint(Plan("test", ()), peak, 0.0) for peak in (3, 2, 1))
    graph: Any = PlannedGraph(cast(GraphPlanner, SimpleNamespace(candidates=Candidates(points), as_laid_out=None)))
    planner = StepPlanner((graph, graph), (GraphCall(), GraphCall()), Surroundings())

    def peak_bytes(_: StepPlanner, variants: Sequence[Variant]) -> int:
        return tight_takes if all(each.levers.tightness == IN_ORDER for each in variants) else 100

    monkeypatch.setattr(StepPlanner, "peak_bytes", peak_bytes)
    assert planner.deepest() == (Variant(2, Levers(tightness=IN_ORDER if tight_takes < 100 else 0)),) * 2
