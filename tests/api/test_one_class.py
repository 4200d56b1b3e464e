"""An optimized model is an object of its model's class, in place or beside it, and can be taken back."""

from __future__ import annotations

import abc
import copy
import gc
import inspect
import io
import multiprocessing
import pickle
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxmem
from tests.api.models import WIDTH, Net, assert_same, batch, build, step
from tests.exactness import same_bits

QUICK: dict[str, Any] = {"optimizer": None, "planner": "chen"}
WAYS: list[Callable[..., Any]] = [fxmem.optimize, fxmem.optimize_]


# -- the class ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_an_optimized_model_is_of_its_models_class_by_any_look(way: Callable[..., Any]) -> None:
    model = way(build(), **QUICK)
    assert isinstance(model, Net)
    assert isinstance(model, fxmem.FxMemModule)
    kind = type(model)
    assert (kind.__name__, kind.__qualname__, kind.__module__) == (Net.__name__, Net.__qualname__, Net.__module__)
    assert inspect.signature(kind.forward) == inspect.signature(Net.forward)
    assert inspect.signature(model.forward) == inspect.signature(Net().forward)
    assert model._get_name() == "Net"
    assert type(kind()) is Net  # calling the class makes a plain one
    assert fxmem.OptimizedModule is fxmem.FxMemModule


@pytest.mark.parametrize("way", WAYS)
def test_what_is_set_on_either_is_set_on_both(way: Callable[..., Any]) -> None:
    model = way(build(), **QUICK)
    original = model.fxmem.original
    assert type(original) is Net
    model.note, original.extra = "a note", nn.Linear(2, 2)
    assert original.note == "a note"
    assert model.extra is original.extra
    model.eval()
    assert not original.training
    del original.note
    assert not hasattr(model, "note")
    assert (
        list(model.state_dict()) == list(original.state_dict()) == [*Net().state_dict(), "extra.weight", "extra.bias"]
    )
    assert "fxmem" not in " ".join(vars(original)), "the model itself has no trace of it"


class Registered(nn.Module, abc.ABC):
    """Its author keeps a register of subclasses, and has a ``__call__`` of their own."""

    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, doubling: bool) -> None:
        Registered.known[cls.__name__] = cls
        cls.doubling = doubling

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(2 * x if self.doubling else x)

    @abc.abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...


class Doubled(Registered, doubling=True):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


@pytest.mark.parametrize("way", WAYS)
def test_a_class_with_a_call_and_a_register_of_its_own(way: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    eager = Doubled()
    model = way(copy.deepcopy(eager), **QUICK)
    assert Registered.known == {"Doubled": Doubled}
    for m in (eager, model):
        assert m(batch()).shape == (32, WIDTH)
        step(m)
    assert_same(eager, model)
    assert same_bits(eager.eval()(batch()).detach(), model.eval()(batch()).detach())


class Deeper(Net):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.tanh()) + 1

    def training_step(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_super_forward_and_methods_that_call_the_model(way: Callable[..., Any], recwarn: Any) -> None:
    torch.manual_seed(0)
    eager = Deeper()
    model = way(copy.deepcopy(eager), **QUICK)
    for m in (eager, model):
        torch.manual_seed(1)
        m.training_step(batch()).backward()
    assert model.fxmem.is_planned, "training_step calls the planned forward"
    assert not [w for w in recwarn if "outside of the plan" in str(w.message)]
    assert_same(eager, model)


def test_slots_and_what_is_no_method_are_refused() -> None:
    class Slotted(nn.Module):
        __slots__ = ("scale",)

        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = 2.0, nn.Linear(2, 2)

    with pytest.raises(fxmem.InputError, match="Slotted keeps 'scale' in __slots__"):
        fxmem.optimize(Slotted())
    with pytest.raises(fxmem.InputError, match=r"Net has no method 'encode' that could be planned; it has forward$"):
        fxmem.optimize(Net(), methods=("encode",))
    with pytest.raises(fxmem.InputError, match=r"methods=\('forward',\)"):
        fxmem.optimize(Net(), methods="forward")


# -- in place, and back ------------------------------------------------------------------------------------------------


def test_in_place_is_the_same_object_wherever_it_is_held() -> None:
    eager, model = build(), build()
    around = nn.ModuleList([model])
    assert fxmem.optimize_(model, batch(), **QUICK) is model is around[0]
    assert model.fxmem.report.predicted_peak_bytes
    for m in (eager, model):
        step(m)
    assert_same(eager, model)
    assert fxmem.restore(around) is around
    assert type(model) is Net
    assert not hasattr(model, "fxmem")
    for m in (eager, model):
        step(m)
    assert_same(eager, model)
    assert fxmem.restore(model) is model, "what is not optimized stays"


def test_restore_returns_the_model_that_was_given() -> None:
    model = build()
    optimized = fxmem.optimize(model, **QUICK)
    outer = nn.Sequential(optimized)
    assert fxmem.restore(outer)[0] is model
    assert type(optimized) is Net
    assert not hasattr(optimized, "fxmem")


def test_an_error_leaves_a_model_that_was_to_be_changed_as_it_was() -> None:
    model = build()
    with pytest.raises(fxmem.InfeasibleBudgetError):
        fxmem.optimize_(model, batch(), budget="1B", **QUICK)
    assert type(model) is Net
    assert fxmem.optimize_(model, batch(), **QUICK).fxmem.is_planned


def test_hooks_run_once_in_order_whenever_they_are_set_and_taken_away() -> None:
    notes: dict[str, list[Any]] = {"eager": [], "fxmem": []}
    for key, m in (("eager", build()), ("fxmem", build())):
        note = notes[key].append
        first = m.register_forward_hook(lambda module, args, output, note=note, m=m: note(("first", module is m)))
        m.register_forward_pre_hook(lambda module, args, note=note: note(("pre 1", type(module).__name__)))
        if key == "fxmem":
            fxmem.optimize_(m, **QUICK)
        last = m.register_forward_hook(lambda module, args, output, note=note, m=m: note(("last", module is m)))
        m.register_forward_pre_hook(lambda module, args, note=note: note(("pre 2", type(module).__name__)))
        step(m)
        first.remove()
        step(m)
        m.eval()(batch())
        if key == "fxmem":
            fxmem.restore(m)
        last.remove()
        m(batch())
    assert notes["eager"] == notes["fxmem"]
    assert notes["eager"][:4] == [("pre 1", "Net"), ("pre 2", "Net"), ("first", True), ("last", True)]


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_a_hook_computes(way: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    eager = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
    model = way(copy.deepcopy(eager), **QUICK)
    for _ in range(2):
        for m in (eager, model):
            step(m)
        assert_same(eager, model)


@pytest.mark.slow
def test_nothing_holds_an_optimized_model_that_is_let_go() -> None:
    for way in WAYS:
        model = way(build(), batch(), **QUICK)
        model.itself = [model]
        step(model)
        gone = weakref.ref(model), weakref.ref(model.first.weight), weakref.ref(model.fxmem)
        del model
        gc.collect()
        assert [ref() for ref in gone] == [None] * 3


# -- copied, saved, sent ------------------------------------------------------------------------------------------------


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded])
def test_a_copy_of_a_model_that_knows_itself(way: Callable[..., Any], copied: Callable[[Any], Any]) -> None:
    model = way(build(), budget="1MB", **QUICK)
    model.itself, model.register = [model], model.register_forward_hook
    twin = copied(model)
    assert isinstance(twin, Net)
    assert isinstance(twin, fxmem.FxMemModule)
    assert twin.itself[0] is twin
    assert twin.first.weight is not model.first.weight
    assert twin.fxmem.settings.budget_bytes == 10**6
    assert type(twin.fxmem.original) is Net
    assert vars(twin) is vars(twin.fxmem.original)
    assert (fxmem.restore(twin) is twin) == (way is fxmem.optimize_)


def test_a_shallow_copy_has_the_same_parameters() -> None:
    model = fxmem.optimize(build(), **QUICK)
    twin = copy.copy(model)
    assert isinstance(twin, Net)
    assert twin.first is model.first
    assert twin.fxmem is not model.fxmem


def train_there(model: nn.Module, queue: Any) -> None:
    torch.set_num_threads(1)
    step(model)
    queue.put((type(model).__name__, model.fxmem.is_planned, [p.grad.numpy() for p in model.parameters()]))


@pytest.mark.slow
def test_a_model_is_sent_to_a_spawned_process() -> None:
    eager, model = build(), fxmem.optimize_(build(), **QUICK)
    step(eager)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=train_there, args=(model, queue))
    process.start()
    name, planned, gradients = queue.get(timeout=100)
    process.join()
    assert (name, planned) == ("Net", True)
    for p, found in zip(eager.parameters(), gradients, strict=True):
        assert same_bits(p.grad, torch.from_numpy(found))


# -- with other libraries ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_graph_module_may_be_edited_and_recompiled(way: Callable[..., Any]) -> None:
    x = batch()
    model = way(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())), x, **QUICK)
    eager = copy.deepcopy(model.fxmem.original)
    for m in (eager, model):
        (relu,) = (node for node in m.graph.nodes if node.name == "_1")
        relu.op, relu.target = "call_function", torch.tanh
        m.recompile()
        step(m, x)
    assert_same(eager, model)
    assert model.fxmem.is_planned


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_torch_compile_around_and_inside_runs_the_plan(way: Callable[..., Any]) -> None:
    eager = nn.Sequential(build(), nn.Linear(WIDTH, 1))
    model = copy.deepcopy(eager)
    model[0] = way(model[0], **QUICK)
    step(eager)
    step(torch.compile(model, backend="eager"))
    assert_same(eager, model)
    assert model[0].fxmem.is_planned
    alone, whole = build(), way(build(), **QUICK)
    for m in (alone, torch.compile(whole, backend="eager")):
        step(m)
    assert_same(alone, whole)


def test_data_parallel_on_several_devices_is_refused() -> None:
    with pytest.raises(fxmem.InputError, match="use DistributedDataParallel"):
        fxmem.optimize(build())._replicate_for_data_parallel()
