"""Calls that save less: dropout and attention keep eager's bits."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from fxmem.passes.compress_saved import with_compressed_saves
from fxmem.profiling.storage_tracker import StorageTracker
from fxmem.runtime.compressed_ops import dropout_mask, masked_dropout, safe_softmax
from tests.exactness import check, same_bits
from tests.passes.compressed_models import PLANS, lean_profile
from tests.tiers import representatives


class Dropped(nn.Module):
    """A linear layer and an op that drops some of its result."""

    def __init__(self, drop: Any, memory_format: Any = torch.contiguous_format) -> None:
        super().__init__()
        self.scale, self.drop, self.memory_format = nn.Parameter(torch.randn(6, 4, 8)), drop, memory_format

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x * self.scale).contiguous(memory_format=self.memory_format)
        return self.drop(hidden).sin()


class Attention(nn.Module):
    """``scaled_dot_product_attention`` with learned projections."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.project, self.options = nn.Linear(8, 24), options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        if self.options.get("enable_gqa"):
            k, v = k[:, :1], v[:, :1]
        return F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_dropout_gives_the_same_bits(p: float, dtype: torch.dtype, memory_format: Any) -> None:
    x = torch.randn(3, 6, 4, 8, dtype=dtype)
    x[0, 0, 0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, -float("inf")])
    checked = check(lambda: Dropped(lambda h: F.dropout(h, p), memory_format).to(dtype), x, plans=PLANS)
    assert any("saving less" in plan for plan in checked.peaks)


def byte_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    assert train
    return masked_dropout(x, dropout_mask(x, 1 - p), 1 - p)


def test_a_probability_whose_inverse_overflows_gives_the_same_bits() -> None:
    x = torch.randn(256, 8, dtype=torch.half)

    def drawn(dropout: Any) -> Tensor:
        torch.manual_seed(0)
        return dropout(x, 1 - 1e-6, True)

    assert same_bits(drawn(torch.ops.aten.dropout), drawn(byte_dropout))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"attn_mask": torch.rand(5, 5) > 0.2},
        {"attn_mask": torch.randn(5, 5)},
        {"scale": 0.3, "enable_gqa": True},
    ],
    ids=["causal", "bools", "added", "grouped"],
)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_attention_gives_the_same_bits(options: dict[str, Any], autocast: Any) -> None:
    x = torch.randn(2, 5, 8)
    checked = check(lambda: Attention(dropout_p=0.2, **options), x, autocast=autocast, plans=PLANS)
    assert any("saving less" in plan for plan in checked.peaks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"scale": 0.3, "enable_gqa": True}], ids=["causal", "grouped"]
)
def test_an_attention_multiplies_as_eager_does(options: dict[str, Any]) -> None:
    model, batch = Attention(dropout_p=0.2, **options), (torch.randn(2, 5, 8),)
    eager_bytes = fxmem.optimize(model, batch, optimizer=None).report.predicted_peak_bytes
    optimized = fxmem.optimize(model, batch, optimizer=None, budget=eager_bytes - 1)
    called = [getattr(node.target, "target", node.target) for node in optimized.graph_module.graph.nodes]
    assert called.count(torch.matmul) == 2
    assert torch.bmm not in called
    assert torch.clone not in called or "enable_gqa" in options  # which repeats the keys


SCORES = {
    "plain": lambda x: x,
    "a row masked": lambda x: x.index_fill(1, torch.tensor([2]), -math.inf),
    "all masked": lambda x: torch.full_like(x, -math.inf),
    "some of a row masked": lambda x: x.index_fill(2, torch.tensor([0, 3]), -math.inf),
    "a number is none": lambda x: x.index_put([torch.tensor(1)] * 3, torch.tensor(math.nan, dtype=x.dtype)),
    "infinite": lambda x: x.index_put([torch.tensor(1)] * 3, torch.tensor(math.inf, dtype=x.dtype)),
    "none of a masked row": lambda x: torch.full_like(x, -math.inf).index_fill(1, torch.tensor([2]), math.nan),
    "transposed": lambda x: x.transpose(0, 1),
    "expanded": lambda x: x[:1].expand(4, -1, -1),
    "empty": lambda x: x[:0],
    "rows of nothing": lambda x: x[:, :, :0],
}


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [-1, 1])
def test_a_safe_softmax_has_the_bits_and_the_layout_of_eagers(kind: str, dtype: torch.dtype, dim: int) -> None:
    x, results = torch.randn(3, 5, 7, dtype=dtype), []
    for softmax in (torch.ops.aten._safe_softmax, safe_softmax):
        scores = SCORES[kind](x).detach().requires_grad_()
        result = softmax(scores, dim)
        (gradient,) = torch.autograd.grad(result, scores, torch.ones_like(result).cumsum(-1), create_graph=True)
        results.append((result, gradient, *torch.autograd.grad(gradient.sin().sum(), scores)))
    for expected, actual in zip(*results, strict=True):
        assert same_bits(expected, actual)
        assert expected.stride() == actual.stride()


@pytest.mark.parametrize("kind", SCORES)
def test_a_safe_softmax_takes_as_many_bytes_whatever_the_scores(kind: str) -> None:
    scores = SCORES[kind](torch.randn(3, 5, 7))
    peaks = []
    for given in (scores, torch.randn(3, 5, 7).as_strided(scores.shape, scores.stride())):
        with StorageTracker() as tracker:
            safe_softmax(given, -1)
        peaks.append(tracker.peak_bytes)
    assert peaks[0] == peaks[1]


def test_an_attention_with_rows_that_are_masked_out_has_the_same_bits() -> None:
    mask = torch.rand(5, 5) > 0.3
    mask[1] = False
    checked = check(lambda: Attention(dropout_p=0.2, attn_mask=mask), torch.randn(2, 5, 8), plans=PLANS)
    lean = lean_profile(checked, torch.randn(2, 5, 8))
    assert [node.op for node in lean.nodes if "softmax" in node.op] == ["safe_softmax"]


@pytest.mark.slow
def test_what_an_attention_makes_of_its_scores_is_made_anew_without_drawing_its_mask_anew() -> None:
    x = torch.randn(2, 64, 8)
    checked = check(lambda: Attention(dropout_p=0.2), x, plans=PLANS)
    lean = lean_profile(checked, x)
    (mask,) = (storage for storage in lean.storages if storage.name.endswith("_mask"))
    scores = [storage for storage in lean.storages if storage.nbytes == 4 * mask.nbytes and storage.num_saves]
    assert len(scores) == 2  # before and after the mask
    assert all(storage.recipe is not None and not storage.internal for storage in scores)
    needed = {k for storage in scores for k in lean.recipes[storage.recipe].nodes}
    assert not any(lean.nodes[k].random for k in needed)
    assert [node.name for node in lean.nodes if node.random] == [mask.name]


def test_names_of_other_calls_stay_what_they_are() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(F.dropout(x * self.scale, 0.1), 0.1) * self.scale

    x = torch.randn(64, 8)
    checked = check(Named, x, plans=PLANS)
    plain, lean = (
        [node.name for node in graph.nodes] for graph in (checked.profiled.profile, lean_profile(checked, x))
    )
    assert [name for name in lean if not name.endswith("_mask")] == plain
    assert len(lean) == len(plain) + 2


class Biased(nn.Module):
    """Attentions that share one learned bias, a leaf, which autocast casts once for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.bias = nn.Linear(8, 8), nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.project(x)
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=self.bias, dropout_p=0.2)
        return x


class Itself(nn.Module):
    """An attention of the input, a leaf, to itself."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_attention_to_a_leaf_gives_the_same_bits(autocast: Any) -> None:
    check(Biased, torch.randn(2, 5, 8), autocast=autocast, plans=PLANS)
    x = torch.randn(2, 5, 8, requires_grad=True)
    check(Itself, x, autocast=autocast, plans=PLANS)


LAYOUTS = {
    "one pixel": torch.randn(64, 8, 1, 1).contiguous(memory_format=torch.channels_last),
    "one channel": torch.randn(4, 1, 6, 6).contiguous(memory_format=torch.channels_last),
    "pixels": torch.randn(4, 3, 6, 6).contiguous(memory_format=torch.channels_last),
    "batch of one": torch.randn(1, 4, 6),
    "columns": torch.randn(8, 20)[:, :12],
    "turned": torch.randn(6, 5, 4).permute(2, 0, 1),
    "expanded": torch.randn(6, 1, 4).expand(6, 5, 4),
    "number": torch.randn(()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spread", [False, True])
def test_results_and_gradients_are_laid_out_as_eagers(layout: str, spread: bool) -> None:
    steps = []
    for drop in (torch.dropout, byte_dropout):
        torch.manual_seed(3)
        x = LAYOUTS[layout].detach().requires_grad_()
        result = drop(x, 0.3, True)
        grad = torch.ones(()).expand(result.shape) if spread else torch.randn_like(result)
        steps.append((result, *torch.autograd.grad(result, x, grad)))
    for theirs, ours in zip(*steps, strict=True):
        assert ours.stride() == theirs.stride()
        assert same_bits(theirs, ours)


def test_what_only_narrow_strides_could_cost_is_not_paid() -> None:
    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 512)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.layer(x)[:, :384], 0.3).sum()

    model, x = Columns(), torch.randn(512, 64)
    plain = fxmem.optimize(model, x, optimizer=None).report
    assert plain.floor_bytes <= plain.predicted_peak_bytes


@pytest.mark.slow
def test_the_report_names_what_is_in_place_beside_masks_of_bytes() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, 64)).train()
    x = torch.randn(128, 64)
    plain = fxmem.optimize(model, x, optimizer=None).report
    short = fxmem.optimize(model, x, optimizer=None, budget=plain.predicted_peak_bytes - 1).report
    assert [decision.node for decision in plain.inplace if not decision.why_not] == ["relu"]
    assert short.inplace == plain.inplace


def test_autocast_inside_the_model_gives_the_same_bits() -> None:
    class Inside(Attention):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                attended = super().forward(x)
            return F.dropout(attended.float(), 0.3)

    checked = check(lambda: Inside(dropout_p=0.2, is_causal=True), torch.randn(2, 5, 8), plans=PLANS)
    assert any("saving less" in plan for plan in checked.peaks)


@pytest.mark.slow
def test_encoder_layers_give_the_same_bits() -> None:
    checked = check(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True), torch.randn(3, 5, 8), plans=PLANS
    )
    assert any("saving less" in plan for plan in checked.peaks)


@pytest.mark.slow
@pytest.mark.parametrize("kind", representatives([nn.LSTM, nn.GRU, nn.RNN], nn.RNN, quick=[nn.LSTM]))
def test_recurrent_layers_stay_whole(kind: Any) -> None:
    exact_peak = kind is not nn.LSTM  # its biases share a gradient, whose copies the simulation counts too late
    checked = check(lambda: kind(4, 4, 2, dropout=0.3), torch.randn(40, 2, 4), plans=PLANS, exact_peak=exact_peak)
    assert not any("saving less" in plan for plan in checked.peaks)


@pytest.mark.slow
def test_masks_have_bytes_only_where_memory_is_short() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, 64)).train()
    x = torch.randn(128, 64)
    plain = fxmem.optimize(model, x, optimizer=None)
    assert "masked_dropout" not in plain.graph_module.code
    assert "torch.dropout(" in plain.graph_module.code
    short = fxmem.optimize(model, x, optimizer=None, budget=plain.report.predicted_peak_bytes - 1)
    assert "masked_dropout" in short.graph_module.code
    assert any("one byte" in note for note in short.report.notes)
    assert not any("one byte" in note for note in plain.report.notes)
    # The mask was 4 bytes an element; nothing else need be given up for so small a saving.
    assert short.report.timeline.num_recomputed == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        "dropout",
        pytest.param("aten.dropout.default", marks=pytest.mark.exhaustive),
        pytest.param("1", marks=pytest.mark.exhaustive),
        lambda node: node.random,
    ],
)
def test_a_call_that_the_policy_speaks_of_stays_as_it_is(where: Any) -> None:
    layers = [nn.Linear(16, 64), nn.Dropout(0.1), nn.GELU(), nn.SiLU(), nn.GELU(), nn.Linear(64, 64)]
    model, x = nn.Sequential(*layers).train(), torch.randn(128, 16)
    eager_bytes = fxmem.optimize(model, x, optimizer=None).report.predicted_peak_bytes
    optimized = fxmem.optimize(model, x, optimizer=None, budget=eager_bytes - 1, policy=[(where, "save")])
    assert optimized.report.timeline.num_recomputed > 0
    assert "masked_dropout" not in optimized.graph_module.code


@pytest.mark.slow
@pytest.mark.parametrize(
    "drop", [nn.Dropout2d(0.5), nn.AlphaDropout(0.5), nn.Dropout(0.5, inplace=True), nn.Dropout(1.0)]
)
def test_other_ways_to_drop_stay_as_they_are(drop: nn.Module) -> None:
    checked = check(lambda: Dropped(drop), torch.randn(3, 6, 4, 8), plans=PLANS)
    assert not any("saving less" in plan for plan in checked.peaks)


def test_models_on_other_devices_stay_as_they_are() -> None:
    checked = check(lambda: Dropped(nn.Dropout(0.5)), torch.randn(3, 6, 4, 8), plans=PLANS)
    assert with_compressed_saves(checked.profiled, lambda node: False) is not checked.captured
    elsewhere = replace(checked.profiled, devices=(torch.device("cpu"), torch.device("cuda", 0)))
    assert with_compressed_saves(elsewhere, lambda node: False) is checked.captured


@pytest.mark.slow
def test_a_gradient_of_a_gradient_is_the_same() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.4), nn.Tanh(), nn.GELU(), nn.Linear(64, 64)).train()
    x = torch.randn(64, 8, requires_grad=True)
    eager_bytes = fxmem.optimize(model, x, optimizer=None).report.predicted_peak_bytes
    optimized = fxmem.optimize(model, x, optimizer=None, budget=eager_bytes - 1)
    assert "masked_dropout" in optimized.graph_module.code
    found = []
    for way in (model, optimized):
        torch.manual_seed(3)
        (grad,) = torch.autograd.grad(way(x).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), list(model.parameters()), allow_unused=True))
    for theirs, ours in zip(*found, strict=True):
        assert (theirs is None and ours is None) or torch.equal(theirs, ours)
