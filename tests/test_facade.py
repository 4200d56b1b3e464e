"""An optimized module is an nn.Module like any other: moved, copied, saved, wrapped, and put inside another one."""

import copy
import enum
import inspect
import io
import pickle
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxmem
from fxmem.api.module import OptimizedModule
from tests.exactness import same_bits
from tests.tiers import representatives

WIDTH = 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH)
        self.dropout, self.last = nn.Dropout(0.2), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.last(self.dropout(torch.relu(self.norm(self.first(x * scale)))))


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*(shape or (32, WIDTH)), generator=torch.Generator().manual_seed(3)).to(dtype)


def tight(model: nn.Module, x: Tensor, times: float = 1.0) -> OptimizedModule:
    """Return ``model`` planned for ``x`` in the least memory that fits it, or some times as much."""
    options: dict[str, Any] = {"optimizer": None, "planner": "chen"}
    with pytest.raises(fxmem.InfeasibleBudgetError) as info:
        fxmem.optimize(model, x, budget=1, **options)
    return fxmem.optimize(model, x, budget=int(info.value.least_bytes * times), **options)


def step(model: nn.Module, x: Tensor | None = None, **kwargs: Any) -> None:
    torch.manual_seed(1)
    model.zero_grad()
    model(batch() if x is None else x, **kwargs).square().mean().backward()


def assert_same(eager: nn.Module, model: nn.Module) -> None:
    for (name, a), b in zip(eager.named_parameters(), model.parameters(), strict=True):
        assert same_bits(a.grad, b.grad), name
        assert same_bits(a.detach(), b.detach()), name
    for (name, a), b in zip(eager.named_buffers(), model.buffers(), strict=True):
        assert same_bits(a, b), name


# -- moved and changed -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", representatives([torch.float64, torch.bfloat16, torch.float16], torch.float64))
def test_another_dtype_before_and_after_planning(dtype: torch.dtype) -> None:
    eager, before, after = build().to(dtype), build().to(dtype), build()
    x = batch(dtype=dtype)
    optimized = tight(before, x), tight(after, batch(), times=2)
    assert optimized[0].plan.dropped
    for model in (eager, optimized[0], optimized[1].to(dtype)):
        step(model, x)
    assert_same(eager, before)
    assert_same(eager, after)


@pytest.mark.slow
def test_apply_visits_every_module_and_zero_grad_every_gradient() -> None:
    eager, model = build(), build()
    optimized = tight(model, batch())
    for m in (eager, optimized):
        step(m)
        m.zero_grad()
    assert all(p.grad is None for p in model.parameters())

    def shrink(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(0.5)

    for m in (eager, optimized):
        m.apply(shrink)
        step(m)
    assert_same(eager, model)


@pytest.mark.slow
def test_keyword_only_arguments() -> None:
    eager, model = build(), build()
    optimized = fxmem.optimize(model, example_kwargs={"x": batch(), "scale": 2.0}, optimizer=None, planner="chen")
    for m in (eager, optimized):
        step(m, scale=2.0)
        step(m, scale=3.0)
    assert_same(eager, model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "norm",
    [parametrizations.spectral_norm, parametrizations.weight_norm, nn.utils.spectral_norm, nn.utils.weight_norm],
    ids=["spectral_norm", "weight_norm", "spectral_norm_by_hook", "weight_norm_by_hook"],
)
def test_a_parametrization_put_on_after_planning_is_noticed(norm: Callable[[nn.Module], nn.Module]) -> None:
    eager, model = build(), build()
    optimized = tight(model, batch(), times=3)
    for m in (eager, optimized):
        torch.manual_seed(2)
        norm(m.last)
        step(m)
        step(m)
    assert_same(eager, model)


# -- copied and saved --------------------------------------------------------------------------------------------------


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded])
def test_a_copy_trains_alike_and_apart(copied: Callable[[Any], Any]) -> None:
    eager, model = build(), build()
    optimized = tight(model, batch())
    twin = copied(optimized)
    for m in (eager, twin):
        step(m)
    assert twin.plan.dropped
    assert_same(eager, twin)
    assert all(p.grad is None for p in model.parameters())


def test_a_copy_does_without_the_optimizers_state() -> None:
    model, x = build(), batch()
    optimizer = torch.optim.AdamW(model.parameters())
    optimized = fxmem.optimize(model, x, optimizer=optimizer)
    optimized(x).sum().backward()
    optimizer.step()
    twin = copy.deepcopy(optimized)
    assert len(optimizer.state) == len(list(model.parameters()))
    assert not twin.fxmem.settings.step.optimizer.state
    assert twin.fxmem.settings.step.optimizer.param_groups[0]["params"][0] is next(twin.parameters())
    assert len(pickle.dumps(optimized)) < 1.5 * len(pickle.dumps(model))


@pytest.mark.slow
@pytest.mark.parametrize("assign", [False, True])
def test_state_from_eager_and_back(assign: bool) -> None:
    eager, model = Net(), build()
    optimized = tight(model, batch())
    optimized.load_state_dict(copy.deepcopy(eager.state_dict()), assign=assign)
    for m in (eager, optimized):
        step(m)
    assert_same(eager, model)
    fresh = build()
    fresh.load_state_dict(optimized.state_dict())
    assert list(fresh.state_dict()) == list(optimized.state_dict())
    assert all(map(same_bits, fresh.state_dict().values(), eager.state_dict().values()))


class RenamesItsWeight(nn.Linear):
    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}old_name")
        super()._load_from_state_dict(state, prefix, *args)


def test_state_of_a_model_around_is_loaded_by_the_parts_own_code_and_hooks() -> None:
    outer = nn.Sequential(fxmem.optimize(RenamesItsWeight(2, 2)))
    notes: list[str] = []
    outer[0].register_load_state_dict_post_hook(lambda module, keys: notes.append("loaded"))
    outer[0].register_state_dict_post_hook(lambda module, state, prefix, metadata: notes.append("saved"))
    outer.load_state_dict({"0.old_name": torch.ones(2, 2), "0.bias": torch.ones(2)})
    assert outer.state_dict()["0.weight"].sum() == 4
    assert notes == ["loaded", "saved"]


@pytest.mark.slow
def test_averaged_weights() -> None:
    averages = []
    for model in (build(), tight(build(), batch())):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            step(model)
            optimizer.step()
            average.update_parameters(model)
        averages.append(average)
    expected, found = (average.state_dict() for average in averages)
    assert list(expected) == list(found)
    assert all(map(same_bits, expected.values(), found.values()))


# -- wrapped and compiled ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_data_parallel_without_devices_and_sync_batch_norm_without_processes() -> None:
    eager, model = build(), build()
    for m, run in ((eager, eager), (model, nn.DataParallel(tight(model, batch(), times=2)))):
        nn.SyncBatchNorm.convert_sync_batchnorm(m)
        step(run)
    assert_same(eager, model)


@pytest.mark.slow
def test_compile_in_place_compiles_nothing_and_runs_the_same() -> None:
    eager, model = build(), build()
    optimized = tight(model, batch())
    optimized.compile(backend="eager")
    for m in (eager, optimized):
        step(m)
    assert_same(eager, model)
    assert same_bits(eager.eval()(batch()).detach(), optimized.eval()(batch()).detach())


@pytest.mark.slow
def test_a_compiled_model_is_refused_whenever_it_was_compiled() -> None:
    with pytest.raises(fxmem.InputError, match=r"the model is compiled by torch\.compile.*before it was compiled"):
        fxmem.optimize(torch.compile(build(), backend="eager"))
    model = build()
    optimized = tight(model, batch())
    model.last.compile(backend="eager")
    with pytest.raises(fxmem.InputError, match=r"last is compiled"):
        step(optimized)


# -- a part of a model -------------------------------------------------------------------------------------------------


def test_an_optimized_module_inside_one_is_refused_whenever_it_was_put_there() -> None:
    model = build()
    optimized = fxmem.optimize(model)
    model.last = fxmem.optimize(model.last)
    with pytest.raises(fxmem.InputError, match=r"last is an optimized module inside of Net.*last\.fxmem\.original"):
        fxmem.optimize(model)
    with pytest.raises(fxmem.InputError, match=r"last is an optimized module"):
        step(optimized)


class Around(nn.Module):
    """Hands what ``way`` makes of a value with a history to a part that writes over it."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.way = nn.Linear(WIDTH, WIDTH), way
        self.part = nn.Sequential(nn.ReLU(inplace=True), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.way(self.first(x).sin()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [lambda h: h, lambda h: h.view(2, 16, WIDTH), lambda h: h[4:20], lambda h: h.view(2, 16, WIDTH).mT.mT],
    ids=["value", "view", "rows", "transposed"],
)
def test_a_part_may_be_given_any_value_of_the_model_around_it(way: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    eager = Around(way)
    model = copy.deepcopy(eager)
    part = model.part
    model.part = fxmem.optimize(part, budget=1, optimizer=None, planner="chen")
    with pytest.raises(fxmem.InfeasibleBudgetError) as info:
        step(model)
    model.part = fxmem.optimize(part, budget=info.value.least_bytes, optimizer=None, planner="chen")
    for m in (eager, model):
        step(m)
    assert model.part.plan.dropped
    assert_same(eager, model)


# -- what cannot be captured whole -------------------------------------------------------------------------------------


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.weigh(x)
        return y.exp() if y.sum() > 0 else y.sin()  # decided by values


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(Residual() for _ in range(4)))
        self.gates = nn.ModuleList([Gate(), Residual()])

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.encoder, *self.gates):
            x = part(x)
        return x


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sigmoid(self.up(self.norm(x))))


@pytest.mark.slow
def test_a_model_that_looks_at_values_is_refused_and_the_advice_works() -> None:
    torch.manual_seed(0)
    eager = Gated()
    model = copy.deepcopy(eager)
    with pytest.raises(fxmem.CaptureError, match=r"in gates\.0 \(test_facade\.py:\d+\)") as info:
        fxmem.optimize(model, batch())
    advice = re.findall(r"(model\S* = fxmem\.optimize\(model\S*), \.\.\.\)", str(info.value))
    assert [line.partition(" ")[0] for line in advice] == ["model.encoder", "model.gates[1]", "model.gates[0].weigh"]
    for line in advice:
        exec(f"{line}, optimizer=None, planner='chen')", {"model": model, "fxmem": fxmem})
    for m in (eager, model):
        step(m)
        step(m, -batch())
    assert_same(eager, model)
    assert [isinstance(part, OptimizedModule) for part in (model.encoder, *model.gates)] == [True, False, True]


def test_a_number_replaced_by_an_equal_one_of_another_type_or_sign_is_noticed() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.factor, self.times, self.pair = nn.Linear(4, 4), 0.0, 2, (0.0, 1)

        def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.linear(x) * self.factor, index * self.times, x * self.pair[0], index * self.pair[1]

    model, x, index = Scaled(), torch.randn(3, 4), torch.arange(3)
    optimized = fxmem.optimize(model)
    optimized(x, index)
    model.factor, model.times, model.pair = -0.0, 2.0, (-0.0, 1.0)
    for ours, theirs in zip(optimized(x, index), model(x, index), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.signbit(), theirs.signbit())


@dataclass
class Config:
    factor: Any = 1.0


class Configured(nn.Module):
    """Multiplies by what its attributes say."""

    times = 1.0

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.linear, self.value, self.config, self.ratio = nn.Linear(4, 4), value, Config(), np.float64(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.times * self.config.factor * float(self.ratio) * factor_of(self.value)


def factor_of(value: Any) -> float:
    if callable(value):
        return value()
    for kind, factor in FACTORS.items():
        if isinstance(value, kind):
            return factor(value)
    return 2.0 if value in (torch.float64, Mode.DOUBLE) else 1.0


class Mode(enum.Enum):
    SINGLE, DOUBLE = 1, 2


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Called:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self) -> float:
        return self.factor


class Knot:
    """Knots of a net: each knows all the others."""

    def __init__(self) -> None:
        self.factor, self.others = 1.0, list[Knot]()


def net_of(count: int) -> Knot:
    knots = [Knot() for _ in range(count)]
    for knot in knots:
        knot.others = knots
    return knots[0]


FACTORS: dict[type, Callable[[Any], float]] = {
    SimpleNamespace: lambda value: value.a.factor,
    Slotted: lambda value: value.factor,
    Knot: lambda value: value.others[-1].factor,
    dict: lambda value: value["a"]["b"]["c"]["d"]["e"],
    deque: lambda value: value[0],
    set: len,
    range: len,
    np.ndarray: lambda value: float(value.sum()),
}


def setting(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model, name, value)


CHANGES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "config": (None, lambda model: setattr(model.config, "factor", 2.0)),
    "another_config": (None, setting("config", Config(2.0))),
    "numpy_scalar": (None, setting("ratio", np.float64(2.0))),
    "class_attribute": (None, lambda _: setattr(Configured, "times", 2.0)),
    "record_in_a_record": (SimpleNamespace(a=Config()), lambda model: setattr(model.value.a, "factor", 2.0)),
    "slots": (Slotted(1.0), lambda model: setattr(model.value, "factor", 2.0)),
    "callable": (Called(1.0), lambda model: setattr(model.value, "factor", 2.0)),
    "deep": ({"a": {"b": {"c": {"d": {"e": 1.0}}}}}, lambda model: model.value["a"]["b"]["c"]["d"].update(e=2.0)),
    "net": (net_of(40), lambda model: setattr(model.value.others[-1], "factor", 2.0)),
    "deque": (deque([1.0]), lambda model: model.value.__setitem__(0, 2.0)),
    "set": ({"a"}, lambda model: model.value.add("b")),
    "range": (range(1), setting("value", range(2))),
    "array": (np.ones(1), lambda model: model.value.__setitem__(0, 2.0)),
    "dtype": (torch.float32, setting("value", torch.float64)),
    "enum": (Mode.SINGLE, setting("value", Mode.DOUBLE)),
}


@pytest.mark.parametrize(
    "name", representatives(CHANGES, "class_attribute", "slots", "deep", "deque", "array", quick=["config", "enum"])
)
def test_a_changed_attribute_of_any_kind_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Configured, "times", 1.0)
    value, change = CHANGES[name]
    model, x = Configured(copy.deepcopy(value)), torch.randn(3, 4)
    optimized = fxmem.optimize(model, planner="chen")
    before = optimized(x)
    assert torch.equal(before, optimized(x))
    assert len(optimized.fxmem.plans.ways) == 1
    change(model)
    assert torch.equal(optimized(x), 2 * before)
    assert torch.equal(model(x), 2 * before)


@pytest.mark.slow
def test_an_attribute_that_changes_in_every_step_is_warned_of() -> None:
    model, x = Configured(None), torch.randn(3, 4)
    optimized = fxmem.optimize(model, planner="chen")
    for factor in range(7):
        model.config.factor = factor
        optimized(x)
    model.config.factor = 7
    with pytest.warns(UserWarning, match=r"Configured was called with its attributes in 8 different states"):
        assert torch.equal(optimized(x), model(x))


def test_what_a_first_forward_leaves_in_a_config_asks_for_no_second_plan() -> None:
    class Settling(Configured):
        def forward(self, x: Tensor) -> Tensor:
            if self.config.factor is None:
                self.config.factor = 2.0
            return super().forward(x)

    model, x = Settling(None), torch.randn(3, 4)
    model.config.factor = None
    optimized = fxmem.optimize(model, x, planner="chen")
    planned = optimized.report
    assert torch.equal(optimized(x), model(x))
    assert optimized.report is planned
    model.config.factor = 3.0
    assert torch.equal(optimized(x), model(x))
    assert optimized.report is not planned


def test_an_optimized_sequential_has_its_parts_by_number() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimized = fxmem.optimize(model, torch.randn(2, WIDTH), optimizer=None)
    assert optimized[0] is model[0]
    assert list(optimized) == list(model)
    assert len(optimized) == len(optimized[:2]) + 1 == 3
    assert model[1] in optimized
    assert "append" in dir(optimized)
    optimized[1] = nn.ReLU()
    x = torch.randn(2, WIDTH)
    assert same_bits(optimized(x), model(x))
    assert fxmem.optimize(Net(), optimizer=None)  # which has no length
    with pytest.raises(TypeError, match="not subscriptable"):
        fxmem.optimize(Net(), optimizer=None)[0]


def test_forward_has_the_models_signature_and_may_be_wrapped() -> None:
    model = build()
    optimized = fxmem.optimize(model, optimizer=None)
    assert inspect.signature(optimized.forward) == inspect.signature(model.forward)
    assert optimized.forward == optimized.forward
    assert optimized.forward.__self__ is optimized
    plain, x = optimized.forward, torch.randn(4, WIDTH)
    optimized._original_forward = plain
    assert "_original_forward" in vars(optimized)
    optimized.forward = lambda *args, **kwargs: plain(*args, **kwargs).double()  # as accelerate does
    assert optimized(x).dtype == torch.float64
    assert optimized.plan
    optimized.eval()
    assert same_bits(optimized(x).float(), model(x))
    del optimized.forward
    assert same_bits(optimized(x), model(x))


def test_a_module_without_a_plan_may_be_probed_and_traced() -> None:
    optimized = fxmem.optimize(build(), optimizer=None)
    assert not hasattr(optimized, "report")
    with pytest.raises(fxmem.NotPlannedError, match="no plan yet"):
        _ = optimized.report
    x = torch.randn(4, WIDTH)
    traced = torch.jit.trace(optimized.eval(), x)
    assert same_bits(traced(x), optimized(x))
