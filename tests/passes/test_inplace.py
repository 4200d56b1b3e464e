"""Ops that write over their input: only where nobody needs the old value, with the reason where somebody does."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from fxmem.profiling.training_step import run_step
from tests.exactness import check, same_bits
from tests.tiers import diagonal


class Functional(nn.Module):
    """Activations out of place, as functional code has them; each branch is another reason for or against."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(x)))  # legal: batch_norm saves its input, not its output
        hidden = torch.sigmoid(hidden)  # not legal: the backward of relu needs its result
        shifted = x + 1.0  # not legal: x is the caller's
        return self.last(hidden).tanh() + shifted.mean()  # legal: conv2d does not need its result


@pytest.mark.slow
def test_relu_after_batch_norm_is_done_in_place_and_nothing_else_changes() -> None:
    model = Functional().train()
    reference, plain = copy.deepcopy(model), copy.deepcopy(model)
    x = torch.randn(2, 3, 12, 12)
    optimized = fxmem.optimize(model, x, optimizer=None)
    without = fxmem.optimize(plain, x, optimizer=None, inplace=False)
    assert "inplace_ops_relu_(" in optimized.graph_module.code
    assert "inplace_ops" not in without.graph_module.code
    assert "torch.relu(" in without.graph_module.code
    optimized(x).sum().backward()
    reference(x).sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert same_bits(theirs.grad, ours.grad)
    assert optimized.report.predicted_peak_bytes <= without.report.predicted_peak_bytes


def test_each_refusal_says_why() -> None:
    report = fxmem.optimize(Functional().train(), torch.randn(2, 3, 12, 12), optimizer=None).report
    reasons = {decision.node: decision.why_not for decision in report.inplace}
    assert reasons["relu"] == ""
    assert reasons["sigmoid"] == "the backward of relu needs what it would overwrite"
    assert reasons["add"] == "it would overwrite a parameter, buffer or input"
    assert any("write over their input" in note for note in report.notes)


# -- frozen BatchNorms -------------------------------------------------------------------------------------------------


class FrozenNorms(nn.Module):
    """Convolutions that learn behind BatchNorms that do not: as detection models fine-tune."""

    def __init__(self, *, affine: bool = True, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4, affine=affine).requires_grad_(False) for _ in range(3))
        for norm in self.norms:
            norm.eval()
            norm.running_mean.uniform_()
            norm.running_var.uniform_(0.5, 2.0)
        self.to(memory_format=memory_format)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).relu()
        return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory_format", "affine", "autocast"),
    diagonal([torch.contiguous_format, torch.channels_last], [True, False], [None, torch.bfloat16]),
)
def test_frozen_batch_norms_train_to_the_same_bits(memory_format: Any, affine: bool, autocast: Any) -> None:
    x = torch.randn(2, 4, 6, 6).to(memory_format=memory_format)
    check(lambda: FrozenNorms(affine=affine, memory_format=memory_format), x, autocast=autocast)


@pytest.mark.slow
def test_frozen_batch_norms_save_nothing_of_their_inputs_size() -> None:
    x = torch.randn(2, 4, 6, 6)
    report = fxmem.optimize(FrozenNorms(), x, optimizer=None).report
    activation_bytes = x.nbytes
    assert sum(row.nbytes for row in report.rows) == 3 * activation_bytes  # the three relu results
    learning = FrozenNorms().requires_grad_()
    assert sum(row.nbytes for row in fxmem.optimize(learning, x, optimizer=None).report.rows) == 6 * activation_bytes


def test_state_that_the_graph_does_not_read_counts_where_ops_are_done_in_place() -> None:
    model = Functional().train()
    model.register_buffer("unused", torch.zeros(1000))
    x = torch.randn(2, 3, 12, 12)
    optimized = fxmem.optimize(model, x, optimizer=None)
    assert "inplace_ops_relu_(" in optimized.graph_module.code
    with fxmem.track(model, x) as memory:
        run_step(lambda: optimized(x))
    assert memory.peak_bytes == optimized.report.predicted_peak_bytes


# -- clipping in place without a copy ----------------------------------------------------------------------------------

EDGES = (-float("inf"), -1.0, -0.0, 0.0, 1e-45, 3.0, 6.0, 6.0000005, float("inf"), float("nan"))
"""Inputs at and around the bounds of relu6."""


class Clipped(nn.Module):
    """Clips what ``before`` makes of the input, in place or not, and goes on with ``after``."""

    def __init__(self, clip: Any, before: Any = torch.neg, after: Any = torch.sin) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(len(EDGES)))
        self.clip, self.before, self.after = clip, before, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.clip(self.before(x * self.scale)))


def in_relu6(y: Tensor) -> Tensor:
    return F.relu6(y, inplace=True)


def in_hardtanh(y: Tensor) -> Tensor:
    return F.hardtanh(y, 0.0, 3.0, inplace=True)


def in_a_view(y: Tensor) -> Tensor:
    F.hardtanh(y.view(-1)[3:], -1.0, 1.0, inplace=True)
    return y


def clipping_trained(model: nn.Module, forward: nn.Module) -> tuple[Tensor | None, ...]:
    """Return the gradients of parameters and input, first and second order."""
    x = torch.tensor(EDGES).repeat(4, 1).requires_grad_()
    weights = torch.randn(4, len(EDGES), generator=torch.Generator().manual_seed(0))
    loss = (forward(x) * weights).nan_to_num(0.0, 1.0, -1.0).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    grad.nan_to_num().square().sum().backward()
    return grad.detach(), x.grad, *(p.grad for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("clip", [in_relu6, in_hardtanh, in_a_view, F.relu6, F.hardtanh])
def test_clipping_that_reads_its_result_in_the_backward_gives_the_same_bits(clip: Any) -> None:
    eager, model = Clipped(clip), Clipped(clip)
    optimized = fxmem.optimize(model, torch.zeros(4, len(EDGES), requires_grad=True), optimizer=None, planner="chen")
    assert "inplace_ops" in optimized.graph_module.code
    for expected, found in zip(clipping_trained(eager, eager), clipping_trained(model, optimized), strict=True):
        assert same_bits(expected, found)


@pytest.mark.slow
def test_clipping_in_place_saves_no_copy_and_may_be_dropped() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        parts = [[nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU6(inplace=True)] for _ in range(3)]
        return nn.Sequential(*(m for part in parts for m in part), nn.Conv2d(4, 4, 1))

    x = torch.randn(2, 4, 12, 12)
    models = [build() for _ in range(3)]
    kept = fxmem.optimize(models[1], x, optimizer=None, planner="chen")
    copies_bytes = sum(decision.nbytes for decision in kept.report.inplace)
    assert copies_bytes == 2 * 4 * (10**2 + 8**2 + 6**2) * 4
    assert sum(row.nbytes for row in kept.report.rows) == _saved_bytes(models[0], x) - copies_bytes
    tight = fxmem.optimize(models[2], x, optimizer=None, planner="chen", budget=kept.report.floor_bytes)
    assert tight.plan.dropped
    for model, forward in zip(models, (models[0], kept, tight), strict=True):
        model.zero_grad()
        forward(x).square().sum().backward()
    for other in models[1:]:
        for p, q in zip(models[0].parameters(), other.parameters(), strict=True):
            assert same_bits(p.grad, q.grad)


def _saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Return the bytes of the activations that autograd saves in a forward of an eager model."""
    own = {t.untyped_storage()._cdata for t in (x, *model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.setdefault(t.untyped_storage()._cdata, t), lambda t: t
    ):
        model(x)
    return sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in own)


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (lambda y: y.add_(1).sin(), "its result is written over later"),
        (lambda y: y, "its result is an output of the model"),
    ],
    ids=["overwritten", "output"],
)
def test_a_result_that_may_be_written_over_is_not_relied_on(after: Any, reason: str) -> None:
    eager, model = Clipped(in_relu6, after=after), Clipped(in_relu6, after=after)
    optimized = fxmem.optimize(model, torch.zeros(4, len(EDGES), requires_grad=True), optimizer=None, planner="chen")
    assert [decision.why_not for decision in optimized.report.inplace][:1] == [reason]
    for expected, found in zip(clipping_trained(eager, eager), clipping_trained(model, optimized), strict=True):
        assert same_bits(expected, found)


def test_bounds_that_the_dtype_rounds_are_not_relied_on() -> None:
    def clip(y: Tensor) -> Tensor:
        return F.hardtanh(y.bfloat16(), -0.7, 0.7, inplace=True).float()

    eager, model = Clipped(clip), Clipped(clip)
    optimized = fxmem.optimize(model, torch.zeros(4, len(EDGES), requires_grad=True), optimizer=None, planner="chen")
    assert optimized.report.inplace[0].why_not.startswith("torch.bfloat16 rounds its bounds")
    for expected, found in zip(clipping_trained(eager, eager), clipping_trained(model, optimized), strict=True):
        assert same_bits(expected, found)


# -- over views --------------------------------------------------------------------------------------------------------


OVER_VIEWS = {
    "add": lambda y, x: y + x,
    "add twice": lambda y, x: y.add(x, alpha=2),
    "sub": lambda y, x: y - x,
    "relu": lambda y, x: torch.relu(y) + x,
    "leaky_relu": lambda y, x: F.leaky_relu(y, 0.2),
    "tanh": lambda y, x: torch.tanh(y),
    "sigmoid": lambda y, x: torch.sigmoid(y),
    "relu6": lambda y, x: F.relu6(y),
}


@pytest.mark.slow
@pytest.mark.parametrize(("op", "batch"), diagonal(OVER_VIEWS, [1, 3]))
def test_gradients_of_what_is_written_over_a_view_keep_their_layout(op: str, batch: int) -> None:
    class Block(nn.Module):
        """A linear layer's result on sequences is a view; what comes after gives it a transposed gradient."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.conv = nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv1d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            y = self.mix(x)
            assert y._is_view()
            return self.conv(OVER_VIEWS[op](y, x).transpose(1, 2)).exp()

    weights = torch.randn(batch, 8, 64)
    report = fxmem.optimize(Block(), torch.randn(batch, 64, 8), optimizer=None).report
    assert [decision.node for decision in report.inplace if not decision.why_not][:1] == [op.split()[0]]
    check(Block, torch.randn(batch, 64, 8), loss=lambda y: (y * weights).sum())
