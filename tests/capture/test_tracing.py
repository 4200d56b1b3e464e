"""Reported elsewhere: train and eval graphs, models that tracers refuse, kernels chosen by strides."""

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from benchmarks.libraries import import_library
from fxmem.profiling.training_step import run_step
from tests.exactness import check, same_bits
from tests.small_models import HARD, WIDTH, Layer, Shared, assert_same_gradients, batch, least, stack, twins
from tests.tiers import diagonal

# -- graphs that train() and eval(), models that tracers refuse --------------------------------------------------------


@pytest.mark.slow
def test_pytorch_151726_train_and_eval_switch() -> None:
    eager, model = twins(stack(*[lambda: Layer(nn.BatchNorm1d, 0.5)] * 2))
    x = batch()
    optimized = least(model, x)
    for m in (eager, optimized):
        torch.manual_seed(0)
        m.train()(x).sum().backward()
    assert_same_gradients(eager, model)
    assert same_bits(eager.eval()(x), optimized.eval()(x))
    assert not model[0].dropout.training
    assert optimized.train().training
    assert model[0].dropout.training


@pytest.mark.documents_peer
def test_pytorch_151726_an_exported_module_refuses() -> None:
    exported = torch.export.export(stack(Layer)(), (batch(),)).module()
    with pytest.raises(NotImplementedError, match="train"):
        exported.train()


class Shapes(nn.Module):
    """Loops over a shape, optional and keyword arguments, an assertion: what symbolic tracers refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
        assert x.shape[-1] == WIDTH
        for _ in range(x.shape[0] // 4):
            x = self.linear(x).tanh()
        if mask is not None:
            x = x * mask
        return {"y": x * options.get("scale", 1.0), **({"n": x.sum()} if options.get("count") else {})}


def test_transformers_29923_optional_arguments() -> None:
    check(Shapes, batch(), torch.rand(WIDTH), plans=HARD)
    check(Shapes, batch(), None, plans=HARD)


def test_transformers_31200_keyword_arguments() -> None:
    check(Shapes, kwargs={"x": batch(), "scale": 0.5, "count": True}, plans=HARD)


def test_transformers_35622_loops_over_shapes() -> None:
    check(Shapes, batch(16, WIDTH), plans=HARD)


@pytest.mark.slow
def test_pytorch_70485_another_keyword_makes_another_graph() -> None:
    eager, model = twins(Shapes)
    x = batch()
    optimized = fxmem.optimize(model, x)
    for options in ({}, {"scale": 0.5}, {"count": True}, {}):
        for m in (eager, optimized):
            sum(t.sum() for t in m(x, **options).values()).backward()
        assert_same_gradients(eager, model)


@pytest.mark.documents_peer
def test_transformers_35622_fx_symbolic_trace_refuses_loops_over_shapes() -> None:
    with pytest.raises(Exception, match=r"Proxy|trace"):
        torch.fx.symbolic_trace(Shapes())


@pytest.mark.slow
@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.l1_loss])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_buffer_a_loss_is_reduced_in_is_counted(loss: Callable[..., Tensor], reduction: str) -> None:
    def around(model: Any, x: Tensor) -> Tensor:
        return loss(model.last(model.first(x).sin()), x, reduction=reduction)

    check(lambda: Shared(around), torch.randn(64, 8))


@pytest.mark.slow
def test_caches_that_causal_models_return_are_looked_into() -> None:
    transformers = import_library("transformers")
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    ids = torch.randint(0, 40, (2, 12))
    batch = {"input_ids": ids, "labels": ids}

    def build() -> nn.Module:
        return cast(nn.Module, transformers.GPT2LMHeadModel(config).train())

    output = fxmem.optimize(build(), None, batch)(**batch)
    assert type(output.past_key_values) is transformers.DynamicCache
    assert output.past_key_values.get_seq_length() == 12
    check(build, kwargs=batch, loss=lambda output: output.loss)


def test_a_kernel_chosen_by_the_stride_of_a_single_element_is_chosen_again() -> None:
    # Real and fake layer_norm differ in the strides of such dimensions, and so does all that is made of its output.
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.project, self.widen = nn.LayerNorm(320), nn.Conv1d(320, 27, 1), nn.Conv1d(320, 320 * 9, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).flatten(2)
            few = self.project(y).split([9, 9, 9], dim=1)[1]
            return (self.widen(y).view(2, 320, 9) @ few).sin().exp()

    check(Mixing, torch.randn(2, 320, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 6, WIDTH), (1, 6, WIDTH), (4, 1, WIDTH)])
def test_a_batch_norm_over_transposed_sequences(shape: tuple[int, ...]) -> None:
    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.norm(self.up(x).transpose(1, 2)).transpose(1, 2).relu()).exp()

    check(Sequences, torch.randn(shape), plans=HARD)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_a_group_norm_over_what_attention_over_pixels_leaves(batch: int) -> None:
    # As in the middle of a variational autoencoder. With a batch of 1 its layout is told by the stride of one element.
    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mix = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 16)
            self.norm, self.last = nn.GroupNorm(4, 16), nn.Conv2d(16, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            b, c, h, w = x.shape
            y = self.mix(x.view(b, c, h * w).transpose(1, 2)).transpose(-1, -2).reshape(b, c, h, w)
            return self.last(F.silu(self.norm(y))) + self.last(F.silu(self.norm((x + y) / 2.0)))

    check(Middle, torch.randn(batch, 3, 8, 8), plans=HARD)


@pytest.mark.slow
def test_a_spectral_norm_before_two_forwards_and_one_backward() -> None:
    # The step of a discriminator. Each forward writes the buffers that the weight of the one before was made of.
    def build() -> nn.Module:
        norm = nn.utils.parametrizations.spectral_norm
        return nn.Sequential(norm(nn.Linear(16, 32)), nn.GELU(), norm(nn.Linear(32, 1)))

    def step(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        for _ in range(2):
            (model(torch.randn(64, 16)).exp().mean() - model(torch.randn(64, 16)).exp().mean()).backward()
        return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]

    model = build()
    eager = step(copy.deepcopy(model))
    for planner in ("chen", "auto"):
        copied = copy.deepcopy(model)
        optimized = fxmem.optimize(copied, policy=[(lambda node: True, "recompute")], planner=planner, optimizer=None)
        step(optimized)
        assert optimized.plan.dropped
        ours = [*(p.grad for p in copied.parameters() if p.grad is not None), *copied.buffers()]
        assert all(map(same_bits, eager, ours))


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "width"), diagonal([torch.optim.SGD, torch.optim.SparseAdam], [1, 4]))
def test_sparse_gradients_of_a_table_that_is_read_twice(optimizer: Any, width: int) -> None:
    class Ratings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rating = nn.Embedding(20, width, sparse=True)

        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            return self.rating(one).sin() + self.rating(other).cos()

    def peaks(*batch: Tensor) -> tuple[int, int]:
        model = Ratings()
        optimized = fxmem.optimize(model, batch, optimizer=optimizer)
        stepping = optimizer(list(model.parameters()), lr=0.1)
        run_step(lambda: optimized(*batch), optimizer=stepping)
        with fxmem.track(model, batch, stepping) as memory:
            run_step(lambda: optimized(*batch), optimizer=stepping)
        return memory.peak_bytes, optimized.report.predicted_peak_bytes

    rows = torch.tensor([1, 2, 5])
    measured, predicted = peaks(rows, rows + 10)
    assert measured == predicted
    measured, predicted = peaks(rows, rows.flip(0))  # in which some entries are merged
    assert measured <= predicted
