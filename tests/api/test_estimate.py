"""Estimates equal what is measured, on real models and without their bytes; the largest batch is found."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.capture.dynamic_batch import largest_batch
from fxmem.ir import Phase
from fxmem.profiling.storage_tracker import StorageTracker, tensors_of
from fxmem.profiling.training_step import run_step
from fxmem.runtime.autocast import Autocast
from tests import zoo
from tests.profiling.steps import measured_peak
from tests.tiers import representatives


class Tied(nn.Module):
    """Two names for one weight, a padded and an expanded tensor, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.register_buffer("bias", torch.zeros(1, 16).expand(8, 16))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.frozen(self.embed(tokens)).tanh() + self.bias)


def test_shared_expanded_and_frozen_storages_count_once_and_right() -> None:
    model, tokens = Tied().train(), torch.randint(0, 32, (8,))
    estimate = fxmem.estimate(model, tokens, optimizer="sgd")
    assert estimate.breakdown.parameters_bytes == (32 * 16 + 16 * 16 + 16) * 4
    assert estimate.breakdown.buffers_bytes == 16 * 4
    assert estimate.breakdown.inputs_bytes == 8 * 8
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert measured_peak(model, ((tokens,), {}), None, optimizer) == estimate.peak_bytes


REAL = tuple(
    itertools.product(("resnet18", "gpt2_2l", "whisper", "mixtral", "unet2d", "mamba", "t5"), (None, torch.bfloat16))
)
KINDS = (
    ("resnet18", None),
    ("gpt2_2l", torch.bfloat16),
    ("whisper", None),
    ("mixtral", torch.bfloat16),
    ("mamba", None),
)
"""Convolutions, a decoder, an encoder with a decoder, experts, a scan."""


@pytest.mark.slow
@pytest.mark.parametrize("case", representatives(REAL, *KINDS), ids=str)
def test_estimates_of_real_models_equal_what_is_measured(case: tuple[str, torch.dtype | None]) -> None:
    name, dtype = case
    entry = zoo.get(name)
    model = entry.build().train()
    args, kwargs = entry.batch(entry.default_batch)
    if name == "mamba":  # a loop over tokens: few, in many rows
        kwargs = {key: value.reshape(-1, 8) for key, value in kwargs.items()}
    estimate = fxmem.estimate(model, args, kwargs, optimizer=None, loss_fn=entry.loss, autocast=dtype, planner="chen")
    tracker = StorageTracker()
    tracker.hold(tensors_of((model, args, tuple(kwargs.values()))))
    with tracker:
        run_step(lambda: model(*args, **kwargs), entry.loss, None, dtype and Autocast("cpu", dtype))
    assert tracker.peak_bytes == estimate.peak_bytes
    assert sum(nbytes for _, nbytes in estimate.breakdown.rows()) == estimate.peak_bytes
    assert estimate.floor_bytes < estimate.peak_bytes
    assert estimate.peak_at.phase in Phase
    assert max(s.live_bytes for s in estimate.timeline.steps) == estimate.peak_bytes
    assert estimate.timeline.steps[estimate.timeline.peak_step].live_bytes == estimate.peak_bytes
    own = {id(t) for t in (*model.parameters(), *model.buffers())}
    graph = estimate._question._captured().graph_module
    constants = sum(t.nbytes for t in (*graph.parameters(), *graph.buffers()) if id(t) not in own)
    assert estimate.graph_peak_bytes - constants <= estimate.peak_bytes


class LastOutput(nn.Module):
    """A recurrent layer; its output only."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize(
    "layer", [nn.GRU(16, 32), nn.RNN(16, 32), nn.LSTM(16, 32), nn.LSTM(16, 32, 2, bidirectional=True)]
)
def test_recurrent_layers_are_predicted_to_the_byte(layer: nn.Module) -> None:
    model, x = LastOutput(layer).train(), torch.randn(10, 4, 16)
    assert measured_peak(model, ((x,), {}), None, None) == fxmem.estimate(model, x, optimizer=None).peak_bytes


def test_a_model_on_the_meta_device_is_estimated_as_the_real_one() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).train()

    with torch.device("meta"):
        ghost, x = build(), torch.empty(8, 64)
    real = fxmem.estimate(build(), torch.empty(8, 64))
    assert fxmem.estimate(ghost, x).peak_bytes == real.peak_bytes
    assert all(p.is_meta for p in ghost.parameters())
    with torch._subclasses.FakeTensorMode():
        fake, x = build(), torch.empty(8, 64)
    assert fxmem.estimate(fake, x).peak_bytes == real.peak_bytes


@pytest.mark.slow
def test_a_step_of_llama_3_8b_is_estimated_without_its_bytes() -> None:
    zoo.get("llama").build()  # makes transformers importable
    import resource

    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        tokens = torch.zeros(1, 2048, dtype=torch.long)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    estimate = fxmem.estimate(model, (), {"input_ids": tokens, "labels": tokens}, plan_seconds=5)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 4 * 10**6
    assert estimate.breakdown.parameters_bytes == 2 * 8_030_261_248
    assert estimate.breakdown.optimizer_state_bytes >= 4 * 8_030_261_248
    assert estimate.peak_bytes > 3 * estimate.breakdown.parameters_bytes


@pytest.mark.slow
def test_the_largest_batch_that_fits_is_exact() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).train()
    estimate = fxmem.estimate(model, torch.randn(4, 64), optimizer=None)
    budget = 4 * estimate.peak_bytes
    assert not estimate.fits(estimate.peak_bytes - 1)
    assert estimate.fits(estimate.peak_bytes)
    for recompute in (False, True):
        largest = estimate.max_batch_size(budget, recompute=recompute)
        fitting = fxmem.estimate(model, torch.randn(largest, 64), optimizer=None)
        above = fxmem.estimate(model, torch.randn(largest + 1, 64), optimizer=None)
        assert (fitting.floor_bytes if recompute else fitting.peak_bytes) <= budget
        assert (above.floor_bytes if recompute else above.peak_bytes) > budget


@pytest.mark.parametrize("budget", [0, 9, 10, 11, 12, 13, 999, 1000, 10**6, 10**9])
@pytest.mark.parametrize(
    "peak_bytes",
    [lambda n: n, lambda n: 7 + 2 * n, lambda n: n * n, lambda n: 11, lambda n: 100 * (n // 30), lambda n: int(n**0.5)],
    ids=["proportional", "affine", "square", "constant", "steps", "root"],
)
def test_the_largest_batch_is_found_in_few_tries_whatever_the_peaks(
    peak_bytes: Callable[[int], int], budget: int
) -> None:
    limit, tried = 5000, []
    largest = largest_batch(lambda n: tried.append(n) or peak_bytes(n), budget, limit)
    assert largest == max((n for n in range(1, limit + 1) if peak_bytes(n) <= budget), default=0)
    assert len(tried) <= 3 * 13
    assert len(tried) == len(set(tried))


def test_the_largest_batch_of_affine_peaks_takes_five_tries() -> None:
    tried: list[int] = []
    assert largest_batch(lambda n: tried.append(n) or 10**6 + 1234 * n, 10**7) == 7293
    assert len(tried) <= 5


def test_estimates_of_what_cannot_be_estimated_are_refused() -> None:
    with pytest.raises(fxmem.InputError, match="eval mode"):
        fxmem.estimate(nn.Linear(4, 4).eval(), torch.randn(2, 4))
    with pytest.raises(fxmem.InputError, match="no tensor"):
        fxmem.estimate(nn.Linear(4, 4).train())
    with pytest.raises(fxmem.InputError, match="batch size is 1"):
        fxmem.estimate(nn.Linear(4, 4).train(), torch.randn(1, 4)).max_batch_size("1GB")
