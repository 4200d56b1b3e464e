"""Heads with their loss, and MLPs, in pieces of rows: eager's gradients up to the order of sums, planned to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxmem
from fxmem.capture.export import capture
from fxmem.capture.graph import CaptureGraph, Inputs
from fxmem.passes.chunk import Chunk, in_pieces
from fxmem.passes.chunk_chains import heads_of, mlps_of
from fxmem.passes.context import CompileContext, Settings
from fxmem.profiling.training_step import TrainingStep
from fxmem.runtime.chunked_ops import pieces_of

ALLOW = ("recompute", "inplace", "chunk")
WIDTH, CLASSES = 8, 40


class Head(nn.Module):
    """Tokens, some layers, a head, and a loss of its scores."""

    def __init__(self, loss: Callable[..., torch.Tensor], bias: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        self.loss = loss
        self.register_buffer("weights", torch.rand(CLASSES, generator=torch.Generator().manual_seed(1)) + 0.5)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.loss(self.head(self.body(tokens)), labels, self.weights)


def flat(scores: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(scores.view(-1, CLASSES), labels.view(-1), **options)


def weighted(scores: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, **options: Any) -> torch.Tensor:
    return flat(scores, labels, weights, weight=weights, **options)


def shifted(scores: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores[:, :-1, :].reshape(-1, CLASSES), labels[:, 1:].reshape(-1)) * 0.5


def capped(scores: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return flat(30.0 * torch.tanh(scores / 30.0), labels, weights)


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "mean": flat,
    "sum": lambda *given: flat(*given, reduction="sum"),
    "smoothed": lambda *given: flat(*given, label_smoothing=0.1),
    "weighted": weighted,
    "weighted, smoothed": lambda *given: weighted(*given, label_smoothing=0.2),
    "another index ignored": lambda *given: flat(*given, ignore_index=3),
    "shifted": shifted,
    "flattened": lambda scores, labels, _: F.cross_entropy(scores.flatten(0, 1), labels.flatten()),
    "capped": capped,
}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(0, CLASSES, (3, 7), generator=generator) for _ in range(2))
    labels[0, :4] = -100
    return tokens, labels


def graph_of(model: nn.Module, *inputs: torch.Tensor) -> CaptureGraph:
    return capture(model, Inputs.of(inputs, {}))


def gradients(model: nn.Module, call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss = call()
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def check_pieces(model: nn.Module, inputs: tuple[torch.Tensor, ...], num_heads: int, num_mlps: int) -> None:
    graph = graph_of(model, *inputs)
    heads, mlps = heads_of(graph.graph_module.graph)[0], mlps_of(graph.graph_module.graph)
    assert (len(heads), len(mlps)) == (num_heads, num_mlps)
    expected = gradients(model, lambda: model(*inputs))
    for k in (1, 2, 5, 100):
        pieces = in_pieces(graph, dict.fromkeys((*heads, *mlps), k))
        twice = [gradients(model, lambda: pieces.call(pieces.graph_module, list(inputs))) for _ in range(2)]  # noqa: B023
        for found, again in zip((twice[0][0], *twice[0][1]), (twice[1][0], *twice[1][1]), strict=True):
            assert torch.equal(found, again)
        for found, right in zip((twice[0][0], *twice[0][1]), (expected[0], *expected[1]), strict=True):
            assert (found - right).abs().max() <= 1e-12 * right.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("bias", [False, True])
def test_heads_in_pieces_have_eagers_gradients(loss: Callable[..., torch.Tensor], bias: bool) -> None:
    tokens, labels = batch()
    if loss is LOSSES["another index ignored"]:
        labels = labels.clamp(min=3)
    check_pieces(Head(loss, bias).double().train(), (tokens, labels), 1, 0)


class Gated(nn.Module):
    """A gated MLP, as Llama has it; ``fused``: one layer for gate and values."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 64) if fused else nn.ModuleList(nn.Linear(WIDTH, 32, bias=False) for _ in range(2))
        self.down = nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, dim=-1) if isinstance(self.up, nn.Linear) else (up(x) for up in self.up)
        return x + self.down(F.silu(gate) * value)


class Conv1DMlp(nn.Module):
    """An MLP as GPT-2 has it: addmm on rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.up_bias = nn.Parameter(torch.randn(WIDTH, 32)), nn.Parameter(torch.randn(32))
        self.down, self.down_bias = nn.Parameter(torch.randn(32, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.addmm(self.up_bias, x.view(-1, WIDTH), self.up).view(*x.shape[:-1], -1)
        y = 0.5 * y * (1.0 + torch.tanh(y))
        return torch.addmm(self.down_bias, y.view(-1, 32), self.down).view(x.shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    "build", [lambda: Gated(False), lambda: Gated(True), Conv1DMlp], ids=["gated", "gated, fused", "addmm"]
)
def test_mlps_in_pieces_have_eagers_gradients(build: Callable[[], nn.Module]) -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(build(), nn.LayerNorm(WIDTH), build())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(x).square().sum()

    torch.manual_seed(0)
    check_pieces(Summed().double().train(), (torch.randn(3, 7, WIDTH).double(),), 0, 2)


class Scaled(nn.Module):
    """What is done to images between two layers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x) * self.scale * torch.sigmoid(x)


def inverted(conv: type[nn.Module] = nn.Conv2d, kernel: int = 1) -> nn.Module:
    return nn.Sequential(conv(4, 24, kernel), Scaled(24), conv(24, 4, kernel, bias=False))


@pytest.mark.parametrize("kernel", [1, 2])
def test_convolutions_in_pieces_have_eagers_gradients(kernel: int) -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = inverted(kernel=kernel), inverted(kernel=kernel)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).tanh()).square().sum()

    torch.manual_seed(0)
    check_pieces(Summed().double().train(), (torch.randn(5, 4, 6, 7).double(),), 0, 2)


def test_chains_of_convolutions_that_couple_images_or_lie_otherwise_are_left_alone() -> None:
    x = torch.randn(5, 4, 6, 7)
    left = [
        nn.Sequential(nn.Conv2d(4, 24, 1), nn.BatchNorm2d(24), nn.GELU(), nn.Conv2d(24, 4, 1)),
        nn.Sequential(nn.Conv2d(4, 24, 1), nn.Dropout(), nn.Conv2d(24, 4, 1)),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.GELU(), nn.Conv2d(4, 4, 1)),
    ]
    for model in left:
        assert mlps_of(graph_of(model.train(), x).graph_module.graph) == ()
    last = inverted().to(memory_format=torch.channels_last)
    assert mlps_of(graph_of(last, x.to(memory_format=torch.channels_last)).graph_module.graph) == ()
    assert mlps_of(graph_of(inverted(), x[0]).graph_module.graph) == ()


def test_chains_with_dropout_and_scores_read_elsewhere_are_left_alone() -> None:
    dropped = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 8)).train()
    assert mlps_of(graph_of(dropped, torch.randn(4, 8)).graph_module.graph) == ()
    tokens, labels = batch()
    with_scores = Head(lambda scores, labels, weights: (flat(scores, labels, weights), scores)).train()
    heads, left = heads_of(graph_of(with_scores, tokens, labels).graph_module.graph)
    assert heads == ()
    assert "its scores are an output of the model. Return the loss alone" in left[0]
    probabilities = Head(lambda s, y, w: F.cross_entropy(s.view(-1, CLASSES), torch.full((21, CLASSES), 1 / CLASSES)))
    assert heads_of(graph_of(probabilities.train(), tokens, labels).graph_module.graph)[0] == ()


def test_a_loss_of_no_row_that_counts_is_eagers() -> None:
    model, (tokens, labels) = Head(flat).train(), batch()
    graph = graph_of(model, tokens, labels)
    pieces = in_pieces(graph, dict.fromkeys(heads_of(graph.graph_module.graph)[0], 3))
    assert pieces.call(pieces.graph_module, [tokens, torch.full_like(labels, -100)]).isnan()


def test_a_graph_that_is_kept_has_its_gradients_twice() -> None:
    model, inputs = Head(flat).double().train(), batch()
    graph = graph_of(model, *inputs)
    pieces = in_pieces(graph, dict.fromkeys(heads_of(graph.graph_module.graph)[0], 3))
    loss = pieces.call(pieces.graph_module, list(inputs)) * 3.0
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    loss.backward()
    assert all(torch.equal(2 * a, p.grad) for a, p in zip(once, model.parameters(), strict=True) if p.grad is not None)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_pieces_are_all_rows_once() -> None:
    for num_rows in range(1, 12):
        for k in range(1, 14):
            pieces = list(pieces_of(num_rows, k))
            assert [row for start, length in pieces for row in range(start, start + length)] == list(range(num_rows))
            assert len(pieces) <= k


def test_what_follows_may_write_over_a_chains_result() -> None:
    model, x = (
        nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8), nn.ReLU(inplace=True)).train(),
        torch.randn(5, 3, 8),
    )
    graph = graph_of(model, x)
    pieces = in_pieces(graph, dict.fromkeys(mlps_of(graph.graph_module.graph), 2))
    torch.testing.assert_close(pieces.call(pieces.graph_module, [x]), model(x))


class Language(nn.Module):
    def __init__(self, num_blocks: int = 2, ratio: int = 4) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(600, 16), nn.Sequential(*(Block(ratio) for _ in range(num_blocks)))
        self.head = nn.Linear(16, 600, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.blocks(self.embed(tokens)))
        return F.cross_entropy(scores[:, :-1].reshape(-1, 600), tokens[:, 1:].reshape(-1))


class Block(nn.Module):
    def __init__(self, ratio: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 16 * ratio), nn.Linear(16 * ratio, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def trained(model: nn.Module, module: nn.Module, tokens: torch.Tensor, *held: nn.Module) -> fxmem.Measurement:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        with fxmem.track(module, *held, optimizer, tokens) as measured:
            output = module(tokens)
            loss = output.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del output, loss
    return measured


@pytest.mark.slow
def test_heads_and_mlps_are_cut_into_as_many_pieces_as_each_needs() -> None:
    torch.manual_seed(0)
    model, tokens = Language(num_blocks=1, ratio=32).train(), torch.randint(0, 600, (4, 64))
    inputs = Inputs.of((tokens,), {})
    settings = Settings(None, TrainingStep(optimizer=None), "auto", 1.0, None, allow=frozenset(ALLOW))
    context = CompileContext(model, inputs, settings)
    (choice,) = Chunk().apply(capture(model, inputs), context).choices
    assert "1 heads with a loss run in 16 pieces and 1 MLPs run in 64 pieces" in str(choice)


@pytest.mark.slow
def test_a_budget_below_what_recomputation_reaches_is_kept() -> None:
    torch.manual_seed(0)
    model, tokens = Language().train(), torch.randint(0, 600, (4, 64))
    floor = fxmem.estimate(model, tokens, cost="cpu", plan_seconds=2).floor_bytes
    module = fxmem.optimize(model, tokens, budget=floor // 2, allow=ALLOW, cost="cpu", plan_seconds=2)
    report = module.fxmem.report
    assert trained(model, module, tokens).peak_bytes == report.predicted_peak_bytes <= floor // 2
    (note,) = (note for note in report.notes if note.startswith("chunk: "))
    assert "1 heads with a loss" in note
    assert "which changes the order of sums over rows" in note


@pytest.mark.slow
def test_where_all_fits_nothing_is_in_pieces() -> None:
    torch.manual_seed(0)
    model, tokens = Language().train(), torch.randint(0, 600, (4, 64))
    module = fxmem.optimize(model, tokens, budget="1GB", allow=ALLOW, cost="cpu")
    assert not any(note.startswith("chunk") for note in module.fxmem.report.notes)
    ours, eagers = (torch.autograd.grad(m(tokens), list(model.parameters())) for m in (module, model))
    assert all(map(torch.equal, ours, eagers))


@pytest.mark.slow
def test_what_is_left_whole_is_told() -> None:
    tokens, labels = batch()
    model = Head(lambda scores, labels, weights: (flat(scores, labels, weights), scores)).train()
    floor = fxmem.estimate(model, (tokens, labels), cost="cpu").floor_bytes
    module = fxmem.optimize(model, (tokens, labels), budget=floor, allow=ALLOW, cost="cpu")
    assert any("its scores are an output of the model" in note for note in module.fxmem.report.notes)


@pytest.mark.slow
def test_under_autocast_pieces_are_planned_to_the_byte_and_near_eager() -> None:
    torch.manual_seed(0)
    model, tokens = Language().train(), torch.randint(0, 600, (4, 64))
    options: dict[str, Any] = {"cost": "cpu", "plan_seconds": 2, "autocast": torch.bfloat16}
    floor = fxmem.estimate(model, tokens, **options).floor_bytes
    module = fxmem.optimize(model, tokens, budget=int(0.7 * floor), allow=ALLOW, **options)

    class InRegion(nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return module(tokens)

    with torch.autocast("cpu", torch.bfloat16):
        expected = model(tokens)
        found = module(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    ours, eagers = (torch.autograd.grad(loss, list(model.parameters())) for loss in (found, expected))
    for a, b in zip(ours, eagers, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= 2e-2 * b.norm()
    measured = trained(model, InRegion(), tokens, model)
    assert measured.peak_bytes == module.fxmem.report.predicted_peak_bytes <= int(0.7 * floor)
