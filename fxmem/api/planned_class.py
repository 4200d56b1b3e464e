"""The class of optimized modules: the original's own class, with another forward.

NOTE [One model, two objects]

1. An optimized module and its original share one ``__dict__``: parameters, buffers, submodules, attributes and flags are
   the same, whoever sets them. So every method of the model's class works on either.
2. The optimized one is of a subclass of the original's class, made for this one object, which has what fxmem knows of it
   (:class:`Namespace`) and a planned ``forward``. It has the original's name, which libraries write to disk and choose by.
   Calling the class makes a plain object of the original's class, as when part of a container is taken.
3. :func:`optimized` makes a new object of this class; :func:`optimize_in_place` gives the class to the model itself, and
   makes a new object for the original.
4. Not shared is what works around the forward (:class:`Own`): hooks, a ``forward`` put on the instance, ``compile()``. Set
   on the optimized module it runs around the plan. Hooks that the original had before are its own and in the plan; a model
   optimized in place runs them around the plan too. Hooks of torch.nn.utils, which compute weights, always stay with the
   original.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from inspect import Parameter, signature
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import fx

from fxmem.api.bypass import look, planned_call
from fxmem.api.namespace import Namespace
from fxmem.api.set_forward import as_set
from fxmem.api.twins import HOOKS, Own, twin_of, with_method
from fxmem.errors import InputError, in_units
from fxmem.passes.context import Settings

OLD_NAMES = frozenset({"graph_module", "original", "plan", "report"})
"""Attributes of :class:`Namespace` that an optimized module has too, where its model has none of that name."""

Forward = Callable[..., Any]


class _Forward(Own):
    """The planned forward, or what was put in its place. By its signature, which is the original's, trainers choose
    columns."""

    def __init__(self, planned: Forward) -> None:
        super().__init__("forward")
        self._planned = planned

    def __get__(self, module: PlannedModule | None, owner: type[PlannedModule]) -> Any:
        if module is None:
            return self._planned
        own = owner._fxmem_own
        if "forward" in own:
            return own["forward"]
        before = vars(module).get("forward")  # replaced on the instance before it was optimized
        if before is None:
            return MethodType(self._planned, module)
        if own.get("like", (None,))[0] is not before:
            own["like"] = before, _with_signature(self._planned, before, bound=True)
        return MethodType(own["like"][1], module)

    def __set__(self, module: PlannedModule, value: Any) -> None:
        super().__set__(module, as_set(module, value))

    def __delete__(self, module: PlannedModule) -> None:
        if type(module)._fxmem_own.pop("forward", None) is None:
            raise AttributeError("forward")


class PlannedModule(torch.nn.Module):
    """What every planned model is, beside of its own class: training-mode calls with grad enabled run under a plan, all
    others run the original."""

    _fxmem: Any
    """What fxmem knows of the module: a :class:`Namespace`, or what has of it all that is used here."""
    _fxmem_namespace: type[Any]
    """Its class."""
    _fxmem_own: dict[str, Any]
    _fxmem_kind: type[torch.nn.Module]
    """The original's class."""
    _fxmem_in_place: bool
    _fxmem_apart: tuple[str, ...] = ("_compiled_call_impl",)
    """Names, beside ``forward``, that the module and its original each have for themselves."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Nothing: the original's class is not to hear of a subclass that its author did not write."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_fxmem" not in vars(cls):
            return super().__new__(cls)  # to be filled by __setstate__
        return cls._fxmem_kind(*args, **kwargs)

    @classmethod
    def _fxmem_of(cls, original: torch.nn.Module, settings: Settings, methods: Sequence[str]) -> Any:
        """Return what is known of ``original`` before any call: its settings, for its forward and each of ``methods``."""
        planned = cls._fxmem_namespace(original, settings)
        for name in methods:
            if name != "forward":
                planned.methods[name] = cls._fxmem_namespace(with_method(original, name), settings)
        return planned

    @staticmethod
    def _fxmem_over(planned: Any) -> None:
        """Take back what was done to the parameters of ``planned.original``: its module is gone, or restored."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, torch.nn.Module):
            look(self)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "fxmem":
            raise AttributeError("module.fxmem is what fxmem knows of the module, and cannot be set")
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        settings = self._fxmem.settings
        if settings.budget_share is not None:
            ours = f"budget {settings.budget_share:.0%} of eager's peak"
        else:
            ours = "no budget" if settings.budget_bytes is None else f"budget {in_units(settings.budget_bytes)}"
        return ", ".join(filter(None, (super().extra_repr(), f"fxmem: {ours}")))

    def _replicate_for_data_parallel(self) -> Any:
        raise InputError(
            "DataParallel copies a model to each device in each step, and every copy would have to be planned for; use "
            "DistributedDataParallel(fxmem.optimize(model, ...)), one process for each device"
        )

    # -- copied and pickled: plans and the optimizer's state are not; a copy plans again on its first training call -------

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return object.__new__, (_base_of(type(self)),), self._fxmem_state()

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedModule:
        made = object.__new__(_base_of(type(self)))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self._fxmem_state(), memo))
        return made

    def __copy__(self) -> PlannedModule:
        made = object.__new__(_base_of(type(self)))
        made.__setstate__({**self._fxmem_state(), "own": {}})
        return made

    def _fxmem_state(self) -> dict[str, Any]:
        planned = self._fxmem
        return {
            "original": planned.original,
            "_settings": replace(planned.settings, step=planned.settings.step.without_state()),
            "own": {name: value for name, value in self._fxmem_own.items() if name in (*HOOKS, "forward")},
            "methods": tuple(planned.methods),
            "in_place": self._fxmem_in_place,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        planned = self._fxmem_of(state["original"], state["_settings"], state.get("methods", ()))
        become_optimized(self, planned, in_place=state.get("in_place", False))
        self._fxmem_own.update((name, value) for name, value in state["own"].items() if name in (*HOOKS, "forward"))


class FxMemModule(PlannedModule):
    """What every optimized model is, beside of its own class. ``module.fxmem`` has the report, the plan, the original.

    Training-mode calls with grad enabled run the emitted graph; the first call of each kind (shapes, dtypes, flags) plans
    for it. All other calls run the original.
    """

    _fxmem: Namespace
    _fxmem_namespace = Namespace
    _fxmem_apart = (*HOOKS, "_compiled_call_impl")

    @property
    def fxmem(self) -> Namespace:
        """Report, plan, emitted graph and original of this module."""
        return self._fxmem

    @classmethod
    def _fxmem_of(cls, original: torch.nn.Module, settings: Settings, methods: Sequence[str]) -> Namespace:
        planned: Namespace = super()._fxmem_of(original, settings, methods)
        planned.step_in_backwards()
        return planned

    @staticmethod
    def _fxmem_over(planned: Namespace) -> None:
        planned.step_after_backwards()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in OLD_NAMES:
                return getattr(self._fxmem, name)
            raise

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *OLD_NAMES})  # type: ignore[no-untyped-call]


for _kind in (PlannedModule, FxMemModule):
    for _name in _kind._fxmem_apart:
        setattr(_kind, _name, Own(_name))

Planned = TypeVar("Planned", bound=PlannedModule)


def optimized(base: type[Planned], model: torch.nn.Module, settings: Settings, methods: Sequence[str] = ()) -> Planned:
    """Return a new object that is ``model`` with planned methods, ``forward`` among them. ``base``: how it is planned."""
    made = object.__new__(base)
    become_optimized(made, base._fxmem_of(model, settings, methods), in_place=False)
    return made


def become_optimized(module: PlannedModule, planned: Any, *, in_place: bool) -> None:
    """Make ``module`` one with ``planned.original``, of its class and optimized."""
    object.__setattr__(module, "__dict__", planned.original.__dict__)
    object.__setattr__(module, "__class__", class_for(type(module), planned, in_place=in_place))
    weakref.finalize(module, _let_go, weakref.ref(type(module))).atexit = False


def optimize_in_place(
    base: type[Planned], model: torch.nn.Module, settings: Settings, methods: Sequence[str] = ()
) -> Planned:
    """Make ``model`` an optimized module; return it."""
    kind = class_for(base, base._fxmem_of(twin_of(model), settings, methods), in_place=True)
    own = kind._fxmem_own
    for name in _hooks_in(own):
        own[name], vars(model)[name] = vars(model)[name], own[name]
    for key, hook in list(own.get("_forward_pre_hooks", {}).items()):
        if type(hook).__module__.startswith("torch.nn.utils"):
            for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
                if key in own[name]:
                    vars(model)[name][key] = own[name].pop(key)
    object.__setattr__(model, "__class__", kind)
    weakref.finalize(model, _let_go, weakref.ref(kind)).atexit = False
    return cast(Planned, model)


def restored(module: PlannedModule) -> torch.nn.Module:
    """Make ``module`` a plain object of its original's class again; return the model as it was given."""
    kind, own, shared = type(module), module._fxmem_own, vars(module)
    if "_fxmem" not in vars(kind):
        raise InputError(
            f"the optimized {kind._fxmem_kind.__name__} has become a {kind.__name__} since, which relies on its class as "
            "it is; call fxmem.restore before fully_shard"
        )
    if "forward" in own and "forward" in shared:
        raise InputError(
            f"the forward of {kind.__name__} was replaced on the instance before it was optimized, and again after; "
            "take back what replaced it last: del model.forward"
        )
    original = module._fxmem.original
    module._fxmem_over(module._fxmem)
    object.__setattr__(module, "__class__", kind._fxmem_kind)
    for name in _hooks_in(own):
        if not shared.get(name):
            shared[name] = own[name]
        elif isinstance(own[name], dict):
            shared[name].update(own[name])
    if "forward" in own:
        shared["forward"] = own["forward"]
    return module if kind._fxmem_in_place else original


def class_for(base: type[PlannedModule], planned: Any, *, in_place: bool) -> type[PlannedModule]:
    """Return the class of the one optimized module that ``planned`` is of."""
    kind = type(planned.original)
    members: dict[str, Any] = {
        **{name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")},
        "_fxmem": planned,
        "_fxmem_kind": kind,
        "_fxmem_own": {
            "_compiled_call_impl": None,
            **{name: hooks for name, hooks in vars(torch.nn.Module()).items() if name in _hooks_in(base._fxmem_apart)},
        },
        "_fxmem_in_place": in_place,
        "forward": _Forward(_planned(kind.forward, "forward")),
        **{name: _planned(getattr(kind, name), name) for name in planned.methods},
    }
    if kind.__call__ is not torch.nn.Module.__call__:
        members["__call__"] = torch.nn.Module.__call__  # the model's own one is in the plan
    if issubclass(kind, fx.GraphModule):
        members["recompile"] = _recompile
    for name in ("__getitem__", "__iter__"):
        if hasattr(kind, name):
            members[name] = _looked_at(getattr(kind, name))
    return cast(type[PlannedModule], types.new_class(kind.__name__, (base, kind), {}, lambda own: own.update(members)))


def _hooks_in(names: Container[str]) -> list[str]:
    return [name for name in HOOKS if name in names]


def _base_of(kind: type[PlannedModule]) -> type[PlannedModule]:
    """Return how objects of a class are planned: what the class was made from."""
    return next(base for base in kind.__mro__ if issubclass(base, PlannedModule) and "_fxmem_namespace" in vars(base))


def _looked_at(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of a container that gives out submodules, as an optimized one has it."""

    @wraps(method)
    def given(self: torch.nn.Module, *args: Any) -> Any:
        look(self)
        return method(self, *args)

    return given


def _recompile(module: PlannedModule) -> Any:
    """Write the forward of the original's class anew: it is the class of one object, as that of ``module`` is."""
    return cast(fx.GraphModule, module._fxmem.original).recompile()


def _let_go(kind: weakref.ref[type[PlannedModule]]) -> None:
    """Free what the class of a module that is gone holds: fully_shard keeps all classes that it has seen."""
    held = kind()
    if held is not None:
        held._fxmem_over(held._fxmem)
        del held._fxmem
        held._fxmem_own.clear()


def _planned(method: Forward, name: str) -> Forward:
    """Return ``method``, called ``name``, as an optimized module's class has it: planned."""

    @torch.compiler.disable(reason="planning and recomputation run outside of torch.compile")  # type: ignore[untyped-decorator]
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, PlannedModule):  # it was restored, and what wraps its forward was not
            return method(self, *args, **kwargs)
        planned = self._fxmem
        with planned_call(id(self)):
            if self.training and torch.is_grad_enabled():
                return (planned if name == "forward" else planned.methods[name]).call(args, kwargs)
            has_own_hooks = bool(_hooks_in(self._fxmem_apart))  # else those of the original run around this
            run = planned.original if name == "forward" and has_own_hooks else getattr(planned.original, name)
            return run(*args, **kwargs)

    return _with_signature(forward, method)


def _with_signature(planned: Forward, like: Forward, *, bound: bool = False) -> Forward:
    """Return a method like ``planned``, with the signature of the method ``like``."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return planned(self, *args, **kwargs)

    forward.__name__, forward.__doc__ = getattr(like, "__name__", "forward"), like.__doc__
    with suppress(TypeError, ValueError):  # what Python cannot tell, nobody else can
        own = [Parameter("self", Parameter.POSITIONAL_ONLY)] if bound else []
        found = signature(like)
        forward.__signature__ = found.replace(parameters=[*own, *found.parameters.values()])  # type: ignore[attr-defined]
    return forward
