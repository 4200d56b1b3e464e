"""Reported elsewhere: adapters, frozen inputs, recomputed values with other metadata, data parallelism."""

import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import fxmem
from tests.exactness import check
from tests.small_models import HARD, WIDTH, Layer, assert_same_gradients, batch, least, stack, twins

# -- LoRA, frozen inputs -----------------------------------------------------------------------------------------------


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = Layer(dropout=0.1).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class FrozenEmbedding(nn.Module):
    """The embedding is frozen, so no layer's input requires grad until the first adapter has run."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(LoRA() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def _ids() -> Tensor:
    return torch.arange(12).reshape(2, 6).remainder(11)


def test_pytorch_6884_no_input_that_requires_grad() -> None:
    check(stack(*[Layer] * 3), batch(), plans=HARD)


@pytest.mark.slow
def test_pytorch_7617_inputs_that_are_integers() -> None:
    check(FrozenEmbedding, _ids(), plans=HARD)


@pytest.mark.slow
def test_peft_137_every_adapter_gets_its_gradient() -> None:
    model = FrozenEmbedding()
    optimized = least(model, _ids())
    optimized(_ids()).sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.slow
def test_transformers_42489_adapters_put_on_after_planning_are_planned_anew() -> None:
    eager, model = twins(stack(*[Layer] * 3))
    x = batch()
    optimized = least(model, x)
    budgetless = fxmem.optimize(model, x)
    for m in (eager, model):
        m.requires_grad_(False)
        m[1].up.requires_grad_()
    assert optimized.original is budgetless.original
    for m in (eager, budgetless):
        m(x).sum().backward()
    assert_same_gradients(eager, model)
    assert model[0].up.weight.grad is None
    assert model[1].up.weight.grad is not None


@pytest.mark.documents_peer
def test_peft_137_torch_checkpoint_reentrant_leaves_adapters_untrained() -> None:
    layer = LoRA()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = checkpoint(layer, batch(), use_reentrant=True)
    assert not output.requires_grad


# -- recomputed values with other metadata -----------------------------------------------------------------------------


class Routed(nn.Module):
    """A mixture of experts: each row goes to the expert that a noisy gate chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x) + torch.randn(x.shape[0], 4)
        weight, chosen = logits.softmax(-1).max(-1)
        return x + torch.bmm(x[:, None], self.experts[chosen])[:, 0].relu() * weight[:, None]


@pytest.mark.slow
def test_torchtitan_1117_routing_is_that_of_the_forward() -> None:
    check(stack(*[Routed] * 3), batch(), plans=HARD)


def test_transformers_34928_values_that_change_between_forward_and_backward_are_not_reread() -> None:
    class Cached(nn.Module):
        """Keeps a running mean in a buffer and adds it: a second run of the forward would see another one."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("seen", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.lerp_(x.detach().mean(0), 0.5)
            return self.linear(x + self.seen.clone()).tanh()

    check(stack(*[Cached] * 3), batch(), plans=HARD)


def test_transformers_47467_lengths_that_depend_on_the_routing_are_refused_by_name() -> None:
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x[: int((x > 0).sum())])

    with pytest.raises(fxmem.CaptureError, match=r"Sliced could not be captured.*depends on the values in tensors"):
        fxmem.optimize(Sliced(), batch())


@pytest.mark.documents_peer
def test_torchtitan_1117_torch_checkpoint_without_the_generator_state_routes_anew() -> None:
    class Gated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = torch.rand(x.shape[0]) > 0.5
            return x[rows].sin().exp()

    output = checkpoint(Gated(), batch(64, WIDTH).requires_grad_(), use_reentrant=False, preserve_rng_state=False)
    with pytest.raises(CheckpointError, match="different metadata"):
        output.sum().backward()


# -- data parallel -----------------------------------------------------------------------------------------------------


@pytest.fixture
def process_group(tmp_path: Any) -> Any:
    if not torch.distributed.is_available():
        pytest.skip("torch is built without distributed")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = Layer(nn.BatchNorm1d, 0.2), Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("issue", "build", "unused"),
    [
        ("pytorch_24005", stack(*[lambda: Layer(nn.BatchNorm1d, 0.2)] * 3), False),
        ("pytorch_83074", stack(*[lambda: Layer(nn.BatchNorm1d, 0.2)] * 3), True),
        ("accelerate_3536", PartlyUsed, True),
    ],
    ids=["pytorch_24005", "pytorch_83074_find_unused_parameters", "accelerate_3536_unused_parameters"],
)
def test_distributed_data_parallel_around_an_optimized_model(issue: str, build: Any, unused: bool) -> None:
    eager, model = twins(build)
    x = batch()
    told = {"loss_fn": torch.sum} if unused else {}
    wrapped = nn.parallel.DistributedDataParallel(least(model, x, **told), find_unused_parameters=unused)
    for m in (eager, wrapped):
        torch.manual_seed(2)
        for _ in range(2):
            m(x).sum().backward()
    assert_same_gradients(eager, model)
