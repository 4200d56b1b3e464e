"""What a plan depends on: calls and models that differ in it are planned for apart, and others share a plan."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
from torch import Tensor, nn
from torch.autograd import forward_ad

import fxmem
from tests.exactness import same_bits

ROWS, WIDTH = 32, 8


def network(**like: Any) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 64, **like), nn.Tanh(), nn.Linear(64, 64, **like), nn.Tanh(), nn.Linear(64, 4, **like)]
    return nn.Sequential(*layers)


def recomputing(model: nn.Module, *args: Any, **options: Any) -> fxmem.OptimizedModule:
    """Return ``model`` under plans that drop whatever may be dropped."""
    everything = [(lambda node: True, "recompute")]
    return fxmem.optimize(model, args or None, optimizer=None, planner="chen", policy=everything, **options)


def gradients(run: Callable[[], Tensor], model: nn.Module) -> Iterator[Tensor]:
    model.zero_grad()
    output = run()
    (output.abs() if output.is_complex() else output.square()).sum().backward()
    return (p.grad for p in model.parameters() if p.grad is not None)


def same_gradients(optimized: fxmem.OptimizedModule, *args: Any, **kwargs: Any) -> bool:
    eager = copy.deepcopy(optimized.original)
    expected = list(gradients(lambda: eager(*args, **kwargs), eager))
    actual = list(gradients(lambda: optimized(*args, **kwargs), optimized))
    return len(expected) == len(actual) and all(map(torch.equal, expected, actual))


def test_slices_of_one_tensor_share_a_plan() -> None:
    data = torch.randn(4 * ROWS, WIDTH)
    optimized = recomputing(network(), data[:ROWS])
    assert optimized.plan.dropped
    for start in (ROWS, 7, 0):
        assert same_gradients(optimized, data[start : start + ROWS])
    assert same_gradients(optimized, torch.randn(ROWS, WIDTH))
    assert len(optimized.fxmem.plans.ways) == 1


class Windows(nn.Module):
    """Looks at overlapping windows of its input; ``asks``: by where that begins on its storage."""

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.inner, self.asks = network(), asks

    def forward(self, x: Tensor) -> Tensor:
        place = (x.storage_offset(),) if self.asks else ()
        return self.inner(x.as_strided((ROWS - 1, 2, WIDTH), (WIDTH, WIDTH, 1), *place)).exp()


@pytest.mark.parametrize(("asks", "num_plans"), [(False, 1), (True, 3)])
def test_a_model_that_asks_where_its_input_lies_is_planned_for_each_place(asks: bool, num_plans: int) -> None:
    data = torch.randn(4 * ROWS, WIDTH)
    optimized = recomputing(Windows(asks=asks), data[:ROWS])
    for start in (0, ROWS, 7, 0):
        assert same_gradients(optimized, data[start : start + ROWS])
    assert sum(optimized.fxmem.plans.ways) == num_plans


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.inner(query, key, value, need_weights=False)[0].exp()


def test_arguments_that_are_the_same_tensor_are_another_signature() -> None:
    x, y = torch.randn(3, 4, WIDTH), torch.randn(3, 4, WIDTH)
    optimized = fxmem.optimize(Attention(), (x, x, x), optimizer=None)
    for args in ((x, y, y), (x, x, x), (x, y, x)):
        assert same_gradients(optimized, *args)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return (self.linear(x).exp() @ weight.t()).sin()


def test_an_argument_that_is_a_parameter_is_another_signature() -> None:
    model, x = Tied(), torch.randn(4, WIDTH)
    optimized = fxmem.optimize(model, optimizer=None)
    assert torch.equal(optimized(x, model.linear.weight), model(x, model.linear.weight))
    other = torch.randn(WIDTH, WIDTH)
    assert torch.equal(optimized(x, other), model(x, other))
    assert torch.equal(optimized(x, model.linear.weight[:4]), model(x, model.linear.weight[:4]))


class Remembering(nn.Module):
    """Reads two buffers, one of which it writes after that."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("state", torch.randn(4, WIDTH))
        self.register_buffer("scale", torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = (self.linear(x.sin()).sin() * self.scale.sin()).exp()
        self.state.add_(1.0)
        return self.linear(y.tanh()).tanh()


@pytest.mark.parametrize("how", ["detach", "data", "one"])
def test_arguments_and_buffers_on_one_memory_are_another_signature(how: str) -> None:
    eager, model, x = Remembering(), Remembering(), torch.randn(4, WIDTH)
    optimized = recomputing(model)
    for module in (eager, optimized):
        module(x).sum().backward()
    if how == "one":
        for one in (eager, model):
            one.scale.data = one.state.data
    arguments = [x if how == "one" else getattr(one.state, how) for one in (eager, model)]
    one, other = (argument() if how == "detach" else argument for argument in arguments)
    expected = list(gradients(lambda: eager(one), eager))
    assert all(map(torch.equal, expected, gradients(lambda: optimized(other), optimized)))
    assert torch.equal(eager.state, model.state)


def transpose(model: nn.Module) -> None:
    for p in model.parameters():
        if p.dim() == 2:
            p.data = p.data.t().contiguous().t()


def flatten(model: nn.Module) -> None:
    flat, start = torch.cat([p.data.reshape(-1) for p in model.parameters()]), 0
    for p in model.parameters():
        p.data = flat[start : start + p.numel()].view_as(p)
        start += p.numel()


@pytest.mark.parametrize("change", [transpose, flatten], ids=lambda change: change.__name__)
def test_parameters_that_lie_otherwise_are_planned_for_anew(change: Callable[[nn.Module], None]) -> None:
    model, x = network(), torch.randn(ROWS, WIDTH)
    optimized = recomputing(model, x)
    change(model)
    eager = network()
    change(eager)
    expected = list(gradients(lambda: eager(x), eager))
    assert all(map(torch.equal, expected, gradients(lambda: optimized(x), optimized)))


def test_channels_last_may_be_asked_for_after_the_first_step() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh()), torch.randn(2, 3, 10, 10)
    optimized = recomputing(model)
    assert same_gradients(optimized, x)
    optimized.to(memory_format=torch.channels_last)
    assert same_gradients(optimized, x)


def test_conjugate_arguments_are_another_signature() -> None:
    x = torch.randn(ROWS, WIDTH, dtype=torch.complex64)
    optimized = recomputing(network(dtype=torch.complex64), x, loss_fn=lambda y: y.abs().sum())
    assert same_gradients(optimized, x.conj())
    assert same_gradients(optimized, x)


class Extras(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: Tensor | None = None, **extras: Tensor) -> Tensor:
        x = self.linear(x)
        for extra in extras.values():
            x = 2 * x + extra
        return x if scale is None else x * scale


def test_extra_keyword_arguments_come_in_the_order_given() -> None:
    model = Extras()
    optimized = fxmem.optimize(model, optimizer=None)
    x, a, b = (torch.randn(4, WIDTH) for _ in range(3))
    for kwargs in ({"q": a, "p": b}, {"p": b, "q": a}, {"z": a, "scale": b, "c": b}):
        assert torch.equal(optimized(x, **kwargs), model(x, **kwargs))
    count = len(optimized.fxmem.plans.ways)
    optimized(x=x, z=a, c=b, scale=b)
    optimized(x=x, scale=b, z=a, c=b)
    assert len(optimized.fxmem.plans.ways) == count + 1  # the order of named arguments is no matter


def test_an_op_that_writes_without_raising_a_version_is_not_run_again() -> None:
    def observed() -> nn.Sequential:
        torch.manual_seed(0)
        parts = [
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), quantization.FusedMovingAvgObsFakeQuantize()) for _ in "ab"
        ]
        return nn.Sequential(quantization.FusedMovingAvgObsFakeQuantize(), *parts)

    eager, model, x = observed(), observed(), torch.randn(64, 16)
    optimized = recomputing(model, x)
    assert optimized.plan.dropped
    for step in (1, 2, 3):
        expected = list(gradients(lambda step=step: eager(step * x), eager))
        assert all(map(torch.equal, expected, gradients(lambda step=step: optimized(step * x), optimized)))
    for one, other in zip(eager.buffers(), model.buffers(), strict=True):
        assert torch.equal(one, other)


# -- errors and warnings -----------------------------------------------------------------------------------------------


class Adjustable(nn.Module):
    """A network whose forward follows what lies in its attributes."""

    def __init__(self) -> None:
        super().__init__()
        shared, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([shared, shared, other])
        self.before, self.after = nn.Linear(WIDTH, WIDTH), None
        self.flags = {"sine": True}
        self.config = SimpleNamespace(activation=torch.tanh, layer=nn.Linear, slope=1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.before is None else self.before(x).exp()
        for layer in self.layers:
            x = self.config.slope * self.config.activation(layer(x))
        x = x if self.after is None else self.after(x)
        return x.sin() if "sine" in self.flags else x.square()


def another_layer_of_its_own(model: Adjustable) -> None:
    model.layers[1] = model.layers[2]


def a_layer_elsewhere(model: Adjustable) -> None:
    model.before, model.after = None, model.before


def another_key(model: Adjustable) -> None:
    model.flags["cosine"] = model.flags.pop("sine")


def a_number_beside_functions(model: Adjustable) -> None:
    model.config.slope = 2.0


@pytest.mark.parametrize(
    "change", [another_layer_of_its_own, a_layer_elsewhere, another_key, a_number_beside_functions]
)
def test_what_lies_elsewhere_in_a_model_is_planned_for_anew(change: Callable[[Adjustable], None]) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    optimized = recomputing(Adjustable(), x)
    assert same_gradients(optimized, x)
    change(optimized.original)
    assert same_gradients(optimized, x)
    assert len(optimized.fxmem.plans.ways) == 2


class Scaled(nn.Module):
    """Scales by a helper object, which holds a number beside a tensor that is none of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.helper = SimpleNamespace(slope=1.0, table=torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.helper.slope).sin() * self.helper.table.sum()


@pytest.mark.slow
def test_numbers_and_tensors_of_a_helper_object_are_watched() -> None:
    x = torch.randn(ROWS, WIDTH)
    optimized = recomputing(Scaled(), x)
    helper = optimized.original.helper
    assert same_gradients(optimized, x)
    helper.slope = 3.0
    assert same_gradients(optimized, x)
    helper.table.mul_(2.0)
    assert same_gradients(optimized, x)
    helper.table = torch.full((2,), 5.0)
    assert same_gradients(optimized, x)
    assert len(optimized.fxmem.plans.ways) == 4


@pytest.mark.slow
def test_a_new_function_is_never_taken_for_one_that_is_gone() -> None:
    model, x = Adjustable(), torch.randn(ROWS, WIDTH)
    optimized = fxmem.optimize(model, optimizer=None)
    for factor in range(12):  # each is freed by the next, whose address may be the same
        model.config = SimpleNamespace(activation=lambda y, by=factor: y.tanh() * by, slope=1.0)
        assert torch.equal(optimized(x), model(x))


@pytest.mark.slow
def test_replaced_parameters_are_let_go_of() -> None:
    optimized, x = recomputing(network()), torch.randn(ROWS, WIDTH)
    replaced = []
    for _ in range(3):
        assert same_gradients(optimized, x)
        replaced += [weakref.ref(p) for p in optimized.parameters()]
        optimized.load_state_dict({name: t.clone() for name, t in optimized.state_dict().items()}, assign=True)
    optimized(x)
    gc.collect()
    assert not [parameter for parameter in replaced if parameter() is not None]


@pytest.mark.slow
def test_numbers_that_change_from_call_to_call_are_warned_of() -> None:
    class Scaled(Extras):
        def forward(self, x: Tensor, factor: float) -> Tensor:  # type: ignore[override]
            return self.linear(x) * factor

    optimized = fxmem.optimize(Scaled(), optimizer=None, planner="chen")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(10):
            optimized(torch.ones(2, WIDTH), 0.1 * k)
    assert [str(w.message) for w in caught if "no tensors" in str(w.message)] == [
        "Scaled was called with 8 different values of arguments that are no tensors; each is captured and planned anew. "
        "Pass what changes from step to step as a tensor."
    ]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (torch.zeros(1, WIDTH), "Expected more than 1 value per channel"),
        (torch.zeros(4, WIDTH + 1), "reduction dim"),
        (None, "must be Tensor, not NoneType"),
    ],
)
def test_what_the_model_itself_does_not_take_is_said_so(argument: Any, message: str, caplog: Any) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4))
    optimized = fxmem.optimize(model, optimizer=None)
    for rows in (4, 6):
        optimized(torch.randn(rows, WIDTH))
    caplog.clear()
    with pytest.raises(fxmem.InputError, match=f"does not take these arguments, without fxmem either.*{message}"):
        optimized(argument)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("kind", ["item", "data_ptr", "nonzero"])
def test_a_model_that_looks_at_values_is_not_said_to_refuse_its_arguments(kind: str) -> None:
    class Looking(Extras):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            if kind == "item" and self.linear.weight.std().item() > 0.45:
                raise ValueError("diverged")
            if kind == "data_ptr" and not x.data_ptr():
                raise ValueError("no memory")
            return self.linear(x)[(x > 0).nonzero()[:, 0]] if kind == "nonzero" else self.linear(x)

    with pytest.raises(fxmem.CaptureError):
        fxmem.optimize(Looking(), torch.randn(4, WIDTH), optimizer=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_the_floor_is_that_of_a_training_call_wherever_it_is_asked_for(context: Callable[[], Any]) -> None:
    x = torch.randn(ROWS, WIDTH)
    expected = fxmem.optimize(network(), x, optimizer=None, planner="chen").report.floor_bytes
    optimized = fxmem.optimize(network(), x, optimizer=None, planner="chen")
    with context():
        assert optimized.report.floor_bytes == expected


@pytest.mark.slow
def test_the_floor_of_a_call_in_an_autocast_region_is_that_of_a_budget_too_small() -> None:
    def call(budget: int) -> fxmem.OptimizedModule:
        optimized = fxmem.optimize(network(), budget=budget, optimizer=None, planner="chen")
        with torch.autocast("cpu", torch.bfloat16):
            optimized(torch.randn(ROWS, WIDTH))
        return optimized

    floor = call(1 << 30).report.floor_bytes
    assert call(floor).report.predicted_peak_bytes == floor
    with pytest.raises(fxmem.InfeasibleBudgetError) as caught:
        call(floor - 1)
    assert caught.value.least_bytes == floor


def test_planning_where_parametrizations_are_cached() -> None:
    model = network()
    nn.utils.parametrizations.weight_norm(model[0])
    optimized, x = recomputing(model), torch.randn(ROWS, WIDTH)
    with nn.utils.parametrize.cached():
        assert torch.equal(optimized(x), model(x))
    assert same_gradients(optimized, x)


def test_planning_in_anomaly_mode() -> None:
    x, model = torch.randn(ROWS, WIDTH), network()
    eager = copy.deepcopy(model)
    with torch.autograd.detect_anomaly(check_nan=True):
        for forward in (fxmem.optimize(model, optimizer=None, planner="chen"), eager):
            forward(x).sum().backward()
        assert torch.is_anomaly_enabled()
    assert all(same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))


class Selecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[x[:, 0] > 0].sin()


class Differentiating(Selecting):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]


class Rejecting(Selecting):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        while (noise.abs() > 2).any():
            noise = torch.randn_like(x)
        return self.linear(x + noise)


def test_a_loop_until_values_are_right_is_refused() -> None:
    with pytest.raises(fxmem.CaptureError, match="control flow depends on the values in tensors"):
        fxmem.optimize(Rejecting(), torch.randn(2, WIDTH), optimizer=None)


def test_what_cannot_be_captured_is_told_with_its_place_and_a_way_out() -> None:
    with pytest.raises(fxmem.CaptureError, match=r"in the model \(test_signature.py:\d+\): the shape of what aten"):
        fxmem.optimize(Selecting(), torch.randn(4, WIDTH), optimizer=None)
    with pytest.raises(fxmem.CaptureError, match="Take derivatives outside"):
        fxmem.optimize(Differentiating(), torch.randn(4, WIDTH, requires_grad=True), optimizer=None)


def test_an_argument_that_a_forward_changes_is_named() -> None:
    class Remembering(Extras):
        def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:  # type: ignore[override]
            cache.append(self.linear(x))
            return cache[-1].exp()

    with pytest.raises(fxmem.CaptureError, match="Remembering changes its argument 'cache', a list"):
        fxmem.optimize(Remembering(), torch.randn(4, WIDTH), {"cache": []}, optimizer=None)


def test_the_training_flag_is_the_originals() -> None:
    model = network()
    optimized = fxmem.optimize(model, optimizer=None)
    optimized.eval()
    assert not model.training
    model.train()
    assert optimized.training
    optimized.training = False
    assert (model.training, model[0].training) == (False, True)


def test_plain_tensors_in_place_of_parameters_are_refused_with_what_to_do() -> None:
    optimized = fxmem.optimize(network(), optimizer=None)
    plain = {name: p.detach().clone() for name, p in optimized.named_parameters()}
    with pytest.raises(fxmem.InputError, match=r"0\.weight is a plain tensor .* model\.fxmem\.original"):
        torch.func.functional_call(optimized, plain, (torch.randn(ROWS, WIDTH),))


@pytest.mark.slow
def test_a_gradient_of_an_earlier_shape_is_refused_with_what_to_do() -> None:
    model, x = network(), torch.randn(ROWS, WIDTH)
    optimized = fxmem.optimize(model, optimizer=None)
    optimized(x).sum().backward()
    model[4].weight.data, model[4].bias.data = torch.randn(6, 64), torch.randn(6)
    with pytest.raises(
        fxmem.InputError, match=r"gradient of 4\.weight has shape \(4, 64\).* \(6, 64\): call zero_grad"
    ):
        optimized(x)
    optimized.zero_grad()
    assert same_gradients(optimized, x)


def test_forward_mode_and_disabled_hooks_are_refused() -> None:
    optimized, x = fxmem.optimize(network(), optimizer=None), torch.randn(ROWS, WIDTH)
    with forward_ad.dual_level(), pytest.raises(fxmem.InputError, match=r"forward-mode.*model\.fxmem\.original"):
        optimized(forward_ad.make_dual(x, x))
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("off"),
        pytest.raises(fxmem.InputError, match=r"hooks are disabled.*model\.fxmem\.original"),
    ):
        optimized(x)


def test_batched_gradients_are_eagers() -> None:
    def dropping() -> nn.Sequential:
        return nn.Sequential(network(), nn.Dropout(0.2), nn.Linear(4, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 3))

    x = torch.randn(ROWS, WIDTH)
    model = dropping()
    optimized = recomputing(model, x)
    assert optimized.plan.dropped
    weights = torch.randn(3, ROWS, 3)

    def batched(module: nn.Module) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        return torch.autograd.grad(module(x), list(model.parameters()), weights, is_grads_batched=True)

    assert all(map(torch.equal, batched(model), batched(optimized)))


@pytest.mark.slow
def test_threads_may_plan_at_the_same_time() -> None:
    x, failed = torch.randn(ROWS, WIDTH), []

    def train() -> None:
        try:
            fxmem.optimize(network(), optimizer=None, planner="chen")(x).sum().backward()
        except Exception as error:
            failed.append(error)

    register_hook, call = Tensor.register_hook, nn.Module.__call__
    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert Tensor.register_hook is register_hook
    assert nn.Module.__call__ is call


def test_a_refused_budget_keeps_its_remedy_when_pickled() -> None:
    error = fxmem.InfeasibleBudgetError(1, 2, (("parameters", 2),), "here", "The largest batch that fits is 64.")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
