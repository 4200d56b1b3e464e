"""An optimized module is moved, changed, copied, saved, wrapped and compiled like its model."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxmem
from fxmem.api.module import OptimizedModule
from tests.api.models import Net, assert_same, batch, build, step
from tests.exactness import same_bits
from tests.tiers import representatives


def tight(model: nn.Module, x: Tensor, times: float = 1.0) -> OptimizedModule:
    """Return ``model`` planned for ``x`` in the least memory that fits it, or some times as much."""
    options: dict[str, Any] = {"optimizer": None, "planner": "chen"}
    with pytest.raises(fxmem.InfeasibleBudgetError) as info:
        fxmem.optimize(model, x, budget="1B", **options)
    return fxmem.optimize(model, x, budget=int(info.value.least_bytes * times), **options)


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
