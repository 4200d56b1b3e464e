"""Reported of recompute elsewhere: fresh dropout masks, statistics of norms updated twice."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.exactness import check, same_bits
from tests.small_models import HARD, WIDTH, Layer, assert_same_gradients, batch, least, stack, twins
from tests.tiers import diagonal

# -- never fresh randomness under recompute ----------------------------------------------------------------------------


@pytest.mark.slow
def test_pytorch_190758_dropout_masks_are_those_of_the_forward() -> None:
    check(stack(*[lambda: Layer(dropout=0.4)] * 4), batch(), plans=HARD)


@pytest.mark.slow
def test_pytorch_190717_gradient_is_zero_exactly_where_the_mask_is() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    x = batch()
    optimized = least(model, x, optimizer=None)
    dropped: list[Tensor] = []
    torch.manual_seed(1)
    optimized(x).sum().backward()
    torch.manual_seed(1)
    dropped.append(F.dropout(model[0](x), 0.5))
    mask = dropped[0] != 0
    expected = (mask * 2 * (1 - dropped[0].tanh() ** 2) * model[3].weight.sum(0)).sum(0)
    assert torch.allclose(model[0].bias.grad, expected, atol=1e-5)


@pytest.mark.slow
def test_olmo_core_828_the_loss_of_a_model_with_dropout_is_eagers() -> None:
    eager, model = twins(stack(*[lambda: Layer(nn.LayerNorm, dropout=0.1)] * 4))
    x = batch()
    optimized = least(model, x)
    for step in range(3):
        losses = []
        for m in (eager, optimized):
            torch.manual_seed(step)
            losses.append(m(x).square().mean())
            losses[-1].backward()
        assert same_bits(losses[0], losses[1])
    assert_same_gradients(eager, model)


@pytest.mark.documents_peer
def test_torch_compile_memory_budget_draws_another_dropout_mask_in_backward() -> None:
    import torch._functorch.config as functorch_config

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        dropped = F.dropout(x.sin(), 0.5)
        return dropped.cos(), dropped

    right = {}
    for budget in (1.0, 0.0):
        torch._dynamo.reset()
        x = (torch.rand(1000) + 0.5).requires_grad_()
        with functorch_config.patch(activation_memory_budget=budget), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y, dropped = torch.compile(forward, backend="aot_eager_decomp_partition")(x)
            y.sum().backward()
        right[budget] = torch.allclose(x.grad, -dropped.sin() * (dropped != 0) * 2 * x.cos(), atol=1e-5)
    assert right == {1.0: True, 0.0: False}


# -- BatchNorm statistics once -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pytorch_96136_batchnorm_statistics_are_updated_once() -> None:
    eager, model = twins(stack(*[lambda: Layer(nn.BatchNorm1d)] * 3))
    x = batch()
    optimized = least(model, x, optimizer=None)
    assert optimized.plan.dropped
    for m in (eager, optimized):
        m(x).sum().backward()
    assert int(model[0].norm.num_batches_tracked) == 1
    assert all(same_bits(a, b) for a, b in zip(eager.buffers(), model.buffers(), strict=True))


@pytest.mark.documents_peer
def test_pytorch_96136_torch_checkpoint_updates_them_twice() -> None:
    layer = Layer(nn.BatchNorm1d)
    checkpoint(layer, batch(), use_reentrant=False).sum().backward()
    assert int(layer.norm.num_batches_tracked) == 2


@pytest.mark.slow
def test_pytorch_62471_batchnorm_in_a_convolutional_network() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            *(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(inplace=True)) for _ in range(4))
        )

    check(build, batch(2, 2, 6, 6), plans=HARD)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "dtype"), diagonal([nn.BatchNorm1d, nn.LayerNorm], [torch.float32, torch.float64, torch.bfloat16])
)
def test_fairscale_1035_state_dict_after_a_step_is_the_same(norm: type[nn.Module], dtype: torch.dtype) -> None:
    eager, model = twins(lambda: stack(*[lambda: Layer(norm)] * 2)().to(dtype))
    x = batch().to(dtype)
    optimized = least(model, x)
    for m in (eager, optimized):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        m(x).sum().backward()
        optimizer.step()
    expected, found = eager.state_dict(), optimized.state_dict()
    assert list(expected) == list(found)
    assert all(same_bits(expected[name], found[name]) for name in expected)


def test_pfn_extras_117_statistics_of_a_shared_batchnorm_are_updated_once_a_use() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(self.norm(x).relu())).relu()

    check(Shared, batch(), plans=HARD)


@pytest.mark.slow
def test_efficient_densenet_73_momentum_needs_no_correction() -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.BatchNorm2d(2 + 2 * i, momentum=0.3) for i in range(3))
            self.convs = nn.ModuleList(nn.Conv2d(2 + 2 * i, 2, 3, padding=1) for i in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for norm, conv in zip(self.norms, self.convs, strict=True):
                x = torch.cat([x, conv(norm(x).relu())], 1)
            return x

    check(Dense, batch(2, 2, 5, 5), plans=HARD)
