"""Independent ops in another order: bits are eager's, the peak falls where it can, what must keep its order does."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.passes.context import CompileContext, Settings
from fxmem.passes.reorder import Order, Reorder, order_of, schedule
from fxmem.planners.simulate import keep_all, simulate
from fxmem.profiling.training_step import BARE, TrainingStep
from tests.exactness import same_bits

NUM_HEADS, WIDTH = 4, 64
SETTINGS = Settings(None, TrainingStep(optimizer=None), "auto", 1.0, None, allow=frozenset({"reorder"}))


class LossesAtTheEnd(nn.Module):
    """All heads first, then all losses: the backward makes the gradients of all logits before it uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, WIDTH) for _ in range(NUM_HEADS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x).tanh()
        logits = [head(part) for head, part in zip(self.heads, x.unbind(1), strict=True)]
        return sum((part * 2).mean() for part in logits)


class FrozenTeachers(nn.Module):
    """What several frozen parts say of the batch, reduced once all have spoken."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(8, 1)
        self.teachers = nn.ModuleList(nn.Linear(8, 8 * WIDTH).requires_grad_(False) for _ in range(NUM_HEADS))

    def forward(self, x: Tensor) -> Tensor:
        said = [teacher(x) for teacher in self.teachers]
        return (self.student(x) - sum(each.mean(-1, keepdim=True) for each in said)).square().mean()


class Ordered(nn.Module):
    """Dropout in several branches, a norm used twice, a buffer that is written, a value that four ops read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.left, self.right = nn.BatchNorm1d(WIDTH), nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        left, right = self.norm(self.left(x)), self.norm(self.right(x))
        read = [op(left) for op in (torch.sin, torch.tanh, torch.exp, torch.sigmoid)]
        wide = [F.dropout(value * right, 0.3) for value in read]
        wide[0].add_(self.calls)
        return sum(value.square().mean() for value in wide)


def itself(loss: Tensor) -> Tensor:
    return loss


def reordered(model: nn.Module, x: Tensor) -> tuple[int, int, list[str]]:
    """Return the peaks before and after the pass, and the names of the ops in their new order."""
    inputs = Inputs.of((x,), {})
    context = CompileContext(model.train(), inputs, SETTINGS)
    before = capture(model, inputs)
    after = Reorder().apply(before, context)
    peaks = [
        simulate(profile, keep_all(profile)).peak_bytes
        for profile in (context.profile_of(graph).profile for graph in (before, after))
    ]
    names = [node.name for node in after.graph_module.graph.nodes if node.op == "call_function"]
    assert (after is before) == (peaks[1] == peaks[0])
    assert sum(choice.nbytes for choice in after.choices) == peaks[0] - peaks[1]
    return *peaks, names  # type: ignore[return-value]


def test_each_loss_follows_its_head() -> None:
    before, after, names = reordered(LossesAtTheEnd(), torch.randn(32, NUM_HEADS, 8))
    value = 32 * WIDTH * 4
    assert before - after >= (NUM_HEADS - 3) * value, "gradients of logits are there one at a time"
    heads = [names.index(name) for name in names if name.startswith("linear") and name != "linear"]
    assert all(b - a > 1 for a, b in pairwise(heads))


def test_each_frozen_part_is_reduced_before_the_next_speaks() -> None:
    before, after, _ = reordered(FrozenTeachers(), torch.randn(32, 8))
    said = 32 * 8 * WIDTH * 4
    assert before - after >= (NUM_HEADS - 1) * said


def test_a_chain_stays_as_it_is() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    before, after, _ = reordered(model, torch.randn(4, 8))
    assert before == after


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "shape"), [(LossesAtTheEnd, (32, NUM_HEADS, 8)), (FrozenTeachers, (32, 8)), (Ordered, (32, 8))]
)
def test_bits_are_eagers_and_the_planned_peak_is_the_measured_one(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    eager, x = make(), torch.randn(shape)
    torch.manual_seed(0)
    optimized = fxmem.optimize(make(), x, optimizer=None, loss_fn=itself, allow=("reorder",))
    results = []
    for model in (eager, optimized):
        for _ in range(2):
            torch.manual_seed(2)
            model.zero_grad(set_to_none=True)
            with fxmem.track(model, x) as memory:
                loss = model(x)
                loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad), *model.buffers()])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    assert memory.peak_bytes == optimized.fxmem.report.predicted_peak_bytes


def test_what_must_keep_its_order_keeps_it() -> None:
    model, x = Ordered(), torch.randn(32, 8)
    inputs = Inputs.of((x,), {})
    context = CompileContext(model.train(), inputs, SETTINGS)
    graph = capture(model, inputs)
    names = [node.name for node in graph.graph_module.graph.nodes if node.op == "call_function"]
    after = order_of(context.profile_of(graph)).after

    def stands_after(later: str, earlier: str) -> bool:
        stack, target = [names.index(later)], names.index(earlier)
        while stack:
            k = stack.pop()
            if k == target:
                return True
            stack.extend(after[k])
        return False

    assert stands_after("batch_norm_1", "batch_norm"), "they write the same statistics"
    assert stands_after("dropout_3", "dropout_2"), "they draw from one generator"
    assert stands_after("sigmoid", "exp"), "gradients of what both read are summed in this order"


def test_the_order_is_chosen_by_what_the_backward_leaves() -> None:
    """Two branches of one op each end in op 3; the backward of op 2 lets go of more, so it comes first in the backward."""
    order = Order(
        after=(frozenset(), frozenset({0}), frozenset({0}), frozenset({1, 2})),
        reads=((), (0,), (0,), (1, 2)),
        makes=((0,), (1,), (2,), (3,)),
        nbytes=(1, 1, 1, 1),
        saved_bytes=(0, 2, 9, 0),
        kept_bytes=(0, 0, 0, 0),
    )
    assert schedule(order) in ([0, 1, 2, 3], [0, 2, 1, 3])
    dear = Order(order.after, order.reads, order.makes, order.nbytes, (0, 9, 0, 0), (0, 0, 50, 0))
    assert schedule(dear) == [0, 2, 1, 3], "what leaves 50 bytes comes last in the backward"


def test_ops_keep_their_order_by_default() -> None:
    assert not Reorder().enabled(Settings(None, BARE, "auto", 1.0, None))
    assert Reorder().enabled(SETTINGS)
