"""The public face: :func:`optimize` and the module it returns.

The wrapper shares the original's parameters, buffers and submodules, so it is the same model under another forward:
training-mode calls with grad enabled run an emitted graph, all others the original. What fxmem has to say is on one
attribute, ``module.fxmem``, so that no other name of the model is shadowed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from inspect import Parameter, signature
from types import MethodType
from typing import Any, TypeGuard, Unpack

import torch
from torch import fx

from fxmem.api.arguments import (
    Options,
    check_alone,
    check_model,
    example_of,
    region_of_step,
    settings_of,
    with_options,
)
from fxmem.api.budget import parse_budget
from fxmem.api.loop_plans import LoopPlans
from fxmem.capture.graph import Inputs, device_of
from fxmem.capture.guards import REGISTRIES
from fxmem.devices import DeviceModel, device_named
from fxmem.errors import InputError, NotPlannedError
from fxmem.fake.fake_tensors import FakeWorld
from fxmem.fake.stand_in import standing_in
from fxmem.ir import Plan
from fxmem.passes.context import Settings
from fxmem.pipeline import Compiled
from fxmem.report.text import Report
from fxmem.runtime.autocast import Autocast
from fxmem.torch_private import in_dual_level, in_transform, saved_tensor_hooks_allowed


@with_options
def optimize(
    model: torch.nn.Module,
    example_args: Any = None,
    example_kwargs: dict[str, Any] | None = None,
    *,
    budget_gb: float | None = None,
    budget: float | str | None = None,
    plan_for: str | None = None,
    **options: Unpack[Options],
) -> OptimizedModule:
    """Return ``model`` as a module that trains inside a memory budget, with bitwise the same numbers.

    - ``model``: an ``nn.Module`` or ``fx.GraphModule``; its parameters are shared, not copied.
    - ``example_args`` (a tensor or a tuple) and ``example_kwargs``: one call's arguments, to plan for now. Without them the
      first training-mode call is planned for.
    - ``budget_gb`` in 10^9 bytes, or ``budget`` in bytes or as text (``"24GiB"``): the bound on the peak of the whole
      training step, on CUDA with what ops and libraries take inside. ``"auto"``, and with neither: what the model's CUDA
      device has free for it, of this process's share, less a margin of 3 %; on the CPU no bound.
    - ``plan_for``: a GPU by name (``"a100-80gb"``, :mod:`fxmem.devices`) to plan the example for, which need not be here;
      ``report`` is then of that GPU, and the first training call plans for the device it is on.

    Under autocast the peak counts casts of weights until the region ends; if yours ends before the step does, the peak is
    an upper bound.

    Errors, all before anything big is allocated: ``InputError`` (a ``ValueError``) for arguments that cannot be used,
    ``InfeasibleBudgetError`` when no plan fits, ``CaptureError`` when no graph does what the model does.
    """
    check_model(model)
    if "fxmem" in {*dir(type(model)), *vars(model), *model._modules, *model._parameters, *model._buffers}:
        raise InputError(f"{type(model).__name__} has an attribute 'fxmem', which an optimized module needs: rename it")
    settings = settings_of(options)
    holders = (settings.step.optimizer, settings.step.scaler, example_args, example_kwargs)
    gpu = None if plan_for is None else device_named(plan_for)
    budget_bytes = parse_budget(budget_gb, budget, model, *holders, gpu=gpu)
    optimized = OptimizedModule(model, replace(settings, budget_bytes=budget_bytes))
    if gpu is not None:
        optimized.fxmem.prepare_for(gpu, example_args, example_kwargs)
    elif example_args is not None or example_kwargs is not None:
        optimized.fxmem.prepare(example_args, example_kwargs)
    return optimized


class Namespace:
    """``module.fxmem``: what fxmem knows of an optimized module. All of it is of the kind of call made last.

    ``original``: the model as it was given. ``settings``: what was asked for. Before a call has been planned for,
    ``report`` and ``plan`` are those of :meth:`prepare_for`; without, they raise ``NotPlannedError``, as ``graph_module``
    does.
    """

    def __init__(self, original: torch.nn.Module, settings: Settings) -> None:
        self.original, self.settings = original, settings
        self.plans = LoopPlans(original, settings)
        self._elsewhere: tuple[Plan, Report] | None = None
        """What was planned for a GPU that need not be here."""

    def prepare(self, example_args: Any = None, example_kwargs: dict[str, Any] | None = None) -> Report:
        """Plan for a call with these arguments now, before training; return the report.

        Errors: those of :func:`fxmem.optimize`.
        """
        inputs = example_of(self.original, example_args, example_kwargs)
        return self.compiled_for(inputs, region_of_step(self.original, self.settings.step)).report

    def prepare_for(
        self, gpu: DeviceModel, example_args: Any = None, example_kwargs: dict[str, Any] | None = None
    ) -> Report:
        """Plan for a call with these arguments on a GPU that need not be here; return the report.

        Errors: those of :func:`fxmem.optimize`.
        """
        inputs = example_of(self.original, example_args, example_kwargs)
        world = FakeWorld(inputs.leaves, "cuda", moved=True)
        moved = Inputs(tuple(world.fake_all(leaf) for leaf in inputs.leaves), inputs.spec)
        with standing_in(gpu), world.state_of(self.original):
            region = region_of_step(self.original, self.settings.step, "cuda")
            self._elsewhere = self.plans.plan_elsewhere(moved, region)
        return self._elsewhere[1]

    def compiled_for(self, inputs: Inputs, autocast: Autocast | None) -> Compiled:
        """Return what is compiled for the signature of ``inputs``, compiling it on first sight."""
        compiled = self.plans.find(inputs, autocast)
        if compiled is None:
            check_alone(self.original)
            compiled = self.plans.make(inputs, autocast)
        return compiled

    @property
    def is_planned(self) -> bool:
        """Whether any call has been planned for."""
        return self.plans.latest is not None

    @property
    def graph_module(self) -> fx.GraphModule:
        """The emitted GraphModule: leaf inputs to a tuple of leaf outputs."""
        return self._latest().graph_module

    @property
    def plan(self) -> Plan:
        """What is kept and what is recomputed."""
        return self._elsewhere[0] if self._is_elsewhere(self._elsewhere) else self._latest().plan

    @property
    def report(self) -> Report:
        """Budget, peaks, overhead and decisions; ``str()`` of it is a table."""
        return self._elsewhere[1] if self._is_elsewhere(self._elsewhere) else self._latest().report

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """Tensors that the emitted graph holds, and the model makes anew in each step."""
        latest = self.plans.latest
        own = {id(t) for t in (*self.original.parameters(), *self.original.buffers())}
        held = () if latest is None else (*latest.graph_module.parameters(), *latest.graph_module.buffers())
        return tuple(t for t in held if id(t) not in own)

    def _is_elsewhere(self, planned: tuple[Plan, Report] | None) -> TypeGuard[tuple[Plan, Report]]:
        """True if all that was planned for is another GPU."""
        return planned is not None and self.plans.latest is None

    def _latest(self) -> Compiled:
        if self.plans.latest is None:
            raise NotPlannedError(
                "this module has no plan yet: pass example_args to fxmem.optimize, or call it once in training mode"
            )
        return self.plans.latest


OLD_NAMES = frozenset({"graph_module", "original", "plan", "report"})
"""Attributes of :class:`Namespace` that an optimized module has too, where its model has none of that name."""


class _Forward:
    """A method whose instances have the signature of their original's ``forward``, by which trainers choose columns."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, module: OptimizedModule | None, owner: type[OptimizedModule]) -> Callable[..., Any]:
        if module is None:
            return self._method
        of_original, own = module.fxmem.original.forward, module.__dict__
        if own["_fxmem_forward"] is None or own["_fxmem_forward"][0] != of_original:
            own["_fxmem_forward"] = of_original, _with_signature(self._method, of_original)
        return MethodType(own["_fxmem_forward"][1], module)


def _with_signature(method: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method like ``method``, with the signature of the bound method ``other``."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    forward.__doc__ = other.__doc__
    with suppress(TypeError, ValueError):  # what Python cannot tell, nobody else can
        own = Parameter("self", Parameter.POSITIONAL_ONLY)
        like = signature(other)
        forward.__signature__ = like.replace(parameters=[own, *like.parameters.values()])  # type: ignore[attr-defined]
    return forward


class OptimizedModule(torch.nn.Module):
    """A model that trains under a plan. It has the original's parameters, buffers, submodules and state_dict keys.

    Training-mode calls with grad enabled run the emitted graph; the first call of each kind (shapes, dtypes, flags) plans
    for it. All other calls run the original. ``module.fxmem`` has the report, the plan and the original.
    """

    _OWN = frozenset({"_fxmem", "_fxmem_forward", "_compiled_call_impl", "forward", "_original_forward"})
    """Kept on the wrapper; ``_original_forward`` is accelerate's, beside the forward that it wraps."""

    def __init__(self, original: torch.nn.Module, settings: Settings) -> None:
        super().__init__()
        own = self.__dict__
        own["_fxmem"] = Namespace(original, settings)
        own["_fxmem_forward"] = None
        for registry in (*REGISTRIES, *(name for name in vars(self) if "state_dict" in name)):
            own[registry] = original.__dict__[registry]  # so that every nn.Module method acts on both
        object.__setattr__(
            self, "__class__", _class_with(tuple(n for n in OF_CONTAINERS if hasattr(type(original), n)))
        )

    @property
    def fxmem(self) -> Namespace:
        """Report, plan, emitted graph and original of this module."""
        planned: Namespace = self._fxmem
        return planned

    # -- being the model ----------------------------------------------------------------------------------------------

    @_Forward
    @torch.compiler.disable(reason="planning and recomputation run outside of torch.compile")  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return self._fxmem.original(*args, **kwargs)
        if in_transform():
            raise InputError(
                "an optimized model cannot run inside a torch.func transform (grad, vmap, jvp, ...): these forbid the "
                "saved-tensor hooks that recompute; apply the transform to the unoptimized model, model.fxmem.original"
            )
        if not saved_tensor_hooks_allowed():
            raise InputError(
                "an optimized model cannot run where saved-tensor hooks are disabled: they are what recomputes; run the "
                "unoptimized model there, model.fxmem.original"
            )
        if in_dual_level():
            raise InputError(
                "an optimized model has no forward-mode derivatives: run the unoptimized model, model.fxmem.original, "
                "inside torch.autograd.forward_ad.dual_level"
            )
        original = self._fxmem.original
        inputs = Inputs.of(args, kwargs, original)
        plans = self._fxmem.plans
        compiled = plans.for_call(inputs, Autocast.of(device_of(original).type))
        leaves = compiled.captured.run(compiled.graph_module, inputs.leaves)
        plans.note(inputs, leaves)
        return compiled.captured.unflatten(leaves)

    @property
    def training(self) -> bool:
        """Whether the original is in training mode."""
        return bool(self._fxmem.original.training)

    @training.setter
    def training(self, mode: bool) -> None:
        """Nothing: only ``nn.Module.__init__`` comes here, before there is an original."""

    def train(self, mode: bool = True) -> OptimizedModule:
        self._fxmem.original.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> OptimizedModule:
        self._fxmem.original._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._fxmem.original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._fxmem.original.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._fxmem.original._load_from_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        planned = self.__dict__.get("_fxmem")
        if planned is None:
            raise AttributeError(name)
        if name in OLD_NAMES and not hasattr(planned.original, name):
            return getattr(planned, name)
        return getattr(planned.original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "fxmem":
            raise AttributeError("module.fxmem is what fxmem knows of the module, and cannot be set")
        if name in self._OWN or name in self.__dict__ or name == "__class__":
            object.__setattr__(self, name, value)
        else:
            setattr(self._fxmem.original, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._OWN:
            object.__delattr__(self, name)
        else:
            delattr(self._fxmem.original, name)

    def __bool__(self) -> bool:
        return bool(self._fxmem.original)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._fxmem.original), *OLD_NAMES})

    def extra_repr(self) -> str:
        budget = self._fxmem.settings.budget_bytes
        return "no budget" if budget is None else f"budget {budget / 1e9:.3f} GB"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Plans and the optimizer's state are not copied or pickled; a copy plans again on its first training call."""
        planned: Namespace = self._fxmem
        settings = replace(planned.settings, step=planned.settings.step.without_state())
        state = {"original": planned.original, "_settings": settings, "own": self._hooks()}
        return OptimizedModule.__new__, (OptimizedModule,), state

    def _hooks(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if "_hooks" in k}

    def __setstate__(self, state: dict[str, Any]) -> None:
        OptimizedModule.__init__(self, state["original"], state["_settings"])
        self.__dict__.update(state["own"])


OF_CONTAINERS = ("__len__", "__iter__", "__getitem__", "__setitem__", "__delitem__", "__contains__", "__reversed__")
"""Methods that Python looks for on the type only: an optimized module has those that its original's type has."""


@cache
def _class_with(names: tuple[str, ...]) -> type[OptimizedModule]:
    """Return the class of optimized modules, or one with these container methods too."""
    if not names:
        return OptimizedModule
    methods: dict[str, Any] = {name: _forwarded(name) for name in names}
    methods |= {"__module__": __name__, "__doc__": OptimizedModule.__doc__}
    return type("OptimizedModule", (OptimizedModule,), methods)


def _forwarded(name: str) -> Callable[..., Any]:
    def call(self: OptimizedModule, *args: Any) -> Any:
        original = self.fxmem.original
        return getattr(type(original), name)(original, *args)

    call.__name__ = name
    return call
