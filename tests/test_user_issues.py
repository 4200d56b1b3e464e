"""Issues that users filed elsewhere, each as a test named after it; beside some, a test that shows the peer failing."""

import copy
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_tracing
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointError, checkpoint

import fxmem
from benchmarks.libraries import import_library
from fxmem.api.module import OptimizedModule
from fxmem.planners.simulate import drop_all
from fxmem.profiling.training_step import run_step
from tests.exactness import check, on_the_way, same_bits, tightest
from tests.tiers import diagonal, representatives

WIDTH = 16
HARD = (drop_all, on_the_way, tightest)


class Layer(nn.Module):
    """A residual MLP layer; ``norm`` and ``dropout`` as asked for; checkpointed by torch if asked for."""

    def __init__(self, norm: type[nn.Module] | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = norm(WIDTH) if norm is not None else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def stack(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(layer() for layer in layers), nn.Linear(WIDTH, WIDTH))


def least(model: nn.Module, *args: Any, **options: Any) -> OptimizedModule:
    """Return ``model`` optimized to the least budget that fits."""
    with pytest.raises(fxmem.InfeasibleBudgetError) as info:
        fxmem.optimize(model, args, budget=1, **options)
    return fxmem.optimize(model, args, budget=info.value.least_bytes, **options)


def twins(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(build())
    return made[0], made[1]


def batch(*shape: int) -> Tensor:
    return torch.randn(*(shape or (8, WIDTH)))


def assert_same_gradients(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert same_bits(p.grad, q.grad), name


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
    wrapped = nn.parallel.DistributedDataParallel(least(model, x), find_unused_parameters=unused)
    for m in (eager, wrapped):
        torch.manual_seed(2)
        for _ in range(2):
            m(x).sum().backward()
    assert_same_gradients(eager, model)


# -- autocast ----------------------------------------------------------------------------------------------------------


class SharedInRegions(nn.Module):
    """One layer used several times in an autocast region and once in the next: each region casts its weight once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for num_uses in (3, 1):
            with torch.autocast("cpu", torch.bfloat16):
                for _ in range(num_uses):
                    x = self.layer(x).sin()
        return x.float()


@pytest.mark.slow
def test_a_region_casts_a_shared_weight_once_as_eager_does() -> None:
    # Gradients of all uses in a region add up in bfloat16.
    for requires_grad in (False, True):  # whether the use that casts the weight saves it, or only later ones do
        check(SharedInRegions, torch.randn(4, 8, requires_grad=requires_grad))
        check(SharedInRegions, torch.randn(4, 8, requires_grad=requires_grad), autocast=torch.bfloat16)


class Recurrent(nn.Module):
    """Its weights, cast once, are read at every time step by one op."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Linear(8, 8), nn.RNN(8, 8, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.rnn(self.embed(x).sin())[0])


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 3])
def test_an_op_that_reads_a_weight_many_times_casts_it_once(num_steps: int) -> None:
    check(Recurrent, torch.randn(4, num_steps, 8), autocast=torch.bfloat16)


@pytest.mark.slow
def test_the_first_call_may_be_inside_a_region_with_casts_at_hand() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.bias = nn.Linear(8, 8), nn.Parameter(torch.randn(1, 1, 6, 6))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = nn.functional.scaled_dot_product_attention(x, self.layer(x), x, attn_mask=self.bias)
            return x

    torch.manual_seed(0)
    model, x = Masked(), torch.randn(2, 1, 6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        model(x).float().sum().backward()
        expected = [p.grad for p in model.parameters()]
        model.zero_grad()
        fxmem.optimize(model)(x).float().sum().backward()
    assert all(same_bits(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))


@pytest.mark.slow
def test_pytorch_141896_recompute_runs_under_the_forwards_autocast() -> None:
    check(stack(*[lambda: Layer(nn.LayerNorm, 0.1)] * 3), batch(), plans=HARD, autocast=torch.bfloat16)


@pytest.mark.slow
def test_pytorch_148831_backward_inside_and_outside_the_region_agree() -> None:
    found = []
    for inside in (True, False):
        torch.manual_seed(0)
        model = stack(*[Layer] * 3)()
        x = torch.ones(4, WIDTH)
        optimized = least(model, x, autocast=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            loss = optimized(x).float().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


def test_pytorch_193338_a_region_inside_the_model() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = Layer(), Layer()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.inner(x)
            return self.outer(y.float())

    check(stack(Mixed, Mixed), batch(), plans=HARD)


# -- switches of kernels -----------------------------------------------------------------------------------------------


class Attending(nn.Module):
    """Two attentions, the first by matmuls and a softmax, whatever is set outside."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.layers, self.inside = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), inside

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            y = layer(x)
            with sdpa_kernel(SDPBackend.MATH) if self.inside and i != 1 else nullcontext():
                x = F.scaled_dot_product_attention(y, y, y, is_causal=True).sin()
        return x


@pytest.mark.slow
def test_attention_keeps_the_backend_the_model_chooses() -> None:
    checked = check(lambda: Attending(inside=True), torch.randn(2, 2, 8, 16))
    (output,) = checked.captured.graph_module(torch.randn(2, 2, 8, 16))
    assert sum("FlashAttention" in node.name() for node in _autograd_nodes(output)) == 1


def _autograd_nodes(output: Tensor) -> set[Any]:
    nodes, stack = set(), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            stack += [following for following, _ in node.next_functions]
    return nodes


@pytest.mark.slow
@pytest.mark.parametrize("around", representatives(["forward", "backward", "step", "nothing"], "forward", "backward"))
def test_a_rerun_has_the_backends_of_its_forward(around: str) -> None:
    def backends(*places: str) -> Any:
        return sdpa_kernel(SDPBackend.MATH) if around in places else nullcontext()

    torch.manual_seed(0)
    model, x = Attending(inside=False), torch.randn(2, 2, 8, 16)
    with backends("forward", "step"):
        expected = model(x)
    with backends("backward", "step"):
        expected.sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    with backends("forward", "step"):
        optimized = least(model, x)
    optimized(x)  # planned anew where the switches are others
    with backends("forward", "step"):
        actual = optimized(x)
    with backends("backward", "step"):
        actual.sum().backward()
    assert same_bits(expected, actual)
    assert all(same_bits(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))


def test_other_switches_inside_a_model_are_refused_by_name() -> None:
    def switching(model: Any, x: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):
            return cast(Tensor, model.first(x))

    with pytest.raises(fxmem.CaptureError, match=r"a switch of torch\.backends in forward.*around the whole step"):
        fxmem.optimize(Shared(switching), torch.randn(2, 8))


@pytest.mark.parametrize("asked", [is_fx_tracing, lambda: not torch.backends.mkldnn.enabled], ids=["tracing", "oneDNN"])
def test_another_branch_while_it_is_traced_is_refused_by_name(asked: Callable[[], bool]) -> None:
    def asking(model: Any, x: Tensor) -> Tensor:
        return cast(Tensor, model.first(x) * (2 if asked() else 3))

    with pytest.raises(fxmem.CaptureError, match=r"computes aten\.mul\.Tensor\(2\) where the model itself does not"):
        fxmem.optimize(Shared(asking), torch.randn(2, 8))


# -- regions inside regions, and inside the user's -------------------------------------------------------------------------


class Shared(nn.Module):
    """Two layers and a weight used twice; ``around(self, x)`` is the forward."""

    def __init__(self, around: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self, x).float()


def without_grad_inside(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(model.first(x).sin(), model.weight)
        with torch.no_grad():
            z = F.linear(model.last(y), model.weight).sin()
        return F.linear(y + z, model.weight)


def without_cache(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return F.linear(F.linear(model.first(x).sin(), model.weight).sin(), model.weight)


def two_dtypes(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(model.first(x).sin(), model.weight)
        with torch.autocast("cpu", torch.float16):
            y = model.last(y.sin())
        with torch.autocast("cpu", enabled=False):
            y = F.linear(y.float().sin(), model.weight)
        return F.linear(y.sin(), model.weight)


def twice_in_one_op(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.mm(model.first(x), torch.mm(model.weight, model.weight)).sin()


def view_of_a_parameter(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.linalg.matrix_power(model.weight[:4, :4], 3).sum() * model.first(x).sin()


AROUND = [without_grad_inside, without_cache, two_dtypes, twice_in_one_op, view_of_a_parameter]


@pytest.mark.slow
@pytest.mark.parametrize("around", AROUND)
def test_regions_inside_a_model_are_as_in_eager(around: Any) -> None:
    check(lambda: Shared(around), torch.randn(4, 8))
    check(lambda: Shared(around), torch.randn(4, 8, requires_grad=True), autocast=torch.bfloat16)


def plain(model: Any, x: Tensor) -> Tensor:
    return F.linear(F.linear(model.first(x).sin(), model.weight).sin(), model.weight)


def two_regions(model: Any, x: Tensor) -> Tensor:
    for layer in (model.first, model.last):
        with torch.autocast("cpu", torch.bfloat16):
            x = F.linear(layer(x).sin(), model.weight)
    return x


def backward_between_forwards(model: nn.Module, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        a, b = model(x).sum(), model(x * 2).sum()
        a.backward()
        (b + model(x * 3).sum()).backward()


def another_size_in_one_region(model: nn.Module, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        (model(x).sum() + model(x[:2]).sum()).backward()


def region_switched_off(model: nn.Module, x: Tensor) -> None:
    with torch.autocast("cpu", enabled=False):
        model(x).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("around", "step"),
    [(plain, backward_between_forwards), (plain, another_size_in_one_region), (two_regions, region_switched_off)],
)
def test_casts_of_the_users_region_stay_at_hand(around: Any, step: Any) -> None:
    eager, model = twins(lambda: Shared(around))
    x = torch.randn(4, 8)
    autocast = None if step is region_switched_off else torch.bfloat16
    optimized = fxmem.optimize(model, x, policy=[("*", "recompute")], autocast=autocast)
    assert optimized.plan.dropped
    step(eager, x)
    step(optimized, x)
    assert_same_gradients(eager, model)


class Doubled(torch.autograd.Function):
    """Attends, in a function of the model's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * F.scaled_dot_product_attention(x, x, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * F.scaled_dot_product_attention(x, x, grad)


class Choosing(nn.Module):
    """Attends in all the ways that no call of ``scaled_dot_product_attention`` in its own code shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with sdpa_kernel(SDPBackend.MATH):
            x = self.attention(x, x, x, need_weights=False)[0]
            x = Doubled.apply(x)
        x = self.layer(x)
        with sdpa_kernel(SDPBackend.MATH):
            return self.layer(x)


@pytest.mark.slow
def test_attention_that_other_code_calls_keeps_its_backend() -> None:
    check(Choosing, torch.randn(2, 12, 16))


def by_size(model: Any, x: Tensor) -> Tensor:
    """Goes through another layer with large batches, and doubles those of an even size."""
    y = model.first(x).sin()
    if x.shape[0] > 5:
        y = model.last(y).exp().sin()
    return cast(Tensor, y if x.shape[0] % 2 else y.mul_(2))


@pytest.mark.slow
def test_a_batch_of_another_size_takes_its_own_branch() -> None:
    eager, model = twins(lambda: Shared(by_size))
    optimized = fxmem.optimize(model)
    for size in (8, 4, 9, 3, 6, 1, 5, 2):
        x = torch.randn(size, 8)
        expected, actual = eager(x), optimized(x)
        assert same_bits(expected, actual), size
        expected.sum().backward()
        actual.sum().backward()
    assert_same_gradients(eager, model)
    small, large = (fxmem.estimate(model, torch.randn(size, 8), optimizer=None) for size in (4, 9))
    assert small.max_batch_size(large.floor_bytes, recompute=True) == 9


@pytest.mark.slow
def test_planning_does_not_care_where_it_is_called() -> None:
    eager, model = twins(lambda: Shared(plain))
    x = torch.randn(4, 8)

    def peaks(autocast: torch.dtype | None = None) -> tuple[int, int]:
        estimated = fxmem.estimate(model, x, autocast=autocast).peak_bytes
        return estimated, fxmem.frontier(model, x, autocast=autocast, cost="a100")[0].predicted_peak_bytes

    expected, of_region = peaks(), peaks(torch.bfloat16)
    for grad_mode in (torch.no_grad(), torch.inference_mode()):
        with grad_mode:
            optimized = fxmem.optimize(model, x)
            assert peaks() == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert peaks() > of_region  # casts that the region around may hold on to are counted
        assert peaks(torch.bfloat16) == peaks()
        fxmem.optimize(copy.deepcopy(model), x)
        eager(x).float().sum().backward()
        optimized(x).float().sum().backward()
    assert_same_gradients(eager, model)


@pytest.mark.slow
def test_a_region_without_a_dtype_has_the_one_there_is() -> None:
    eager, model = twins(lambda: Shared(lambda shared, x: _in_default_region(shared.first, x)))
    optimized, x = fxmem.optimize(model), torch.randn(4, 8)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype, enabled=False):
            assert same_bits(eager(x), optimized(x))


def _in_default_region(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return layer(x)


@pytest.mark.slow
def test_tensors_made_in_forward_follow_the_default_dtype() -> None:
    class Making(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x).sin() * torch.full((8,), 0.1)

    model, x = Making(), torch.randn(4, 8)
    optimized = fxmem.optimize(model, x)
    torch.set_default_dtype(torch.float64)
    try:
        assert optimized(x).dtype is model(x).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


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


@pytest.mark.parametrize("shape", [(4, 6, WIDTH), (1, 6, WIDTH), (4, 1, WIDTH)])
def test_a_batch_norm_over_transposed_sequences(shape: tuple[int, ...]) -> None:
    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.norm(self.up(x).transpose(1, 2)).transpose(1, 2).relu()).exp()

    check(Sequences, torch.randn(shape), plans=HARD)


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
