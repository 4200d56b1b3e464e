"""The public face: :func:`optimize`, :func:`optimize_` in place, :func:`restore` back.

An optimized module is an object of its original's class and shares all that the original has
(:mod:`fxmem.api.planned_class`): training-mode calls with grad enabled run an emitted graph, all others the original. What
fxmem has to say is on one attribute, ``module.fxmem``, so that no other name of the model is shadowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack, cast

import torch

from fxmem.api.arguments import (
    AUTO,
    Options,
    check_backend,
    check_example,
    check_methods,
    check_optimizable,
    is_in_background,
    settings_of,
    with_options,
)
from fxmem.api.budget import parse_budget
from fxmem.api.cheaper_backend import compiled_if_cheaper
from fxmem.api.compiled import BudgetArguments, CompiledModule, compiled_module
from fxmem.api.planned_class import FxMemModule, PlannedModule, optimize_in_place, optimized, restored
from fxmem.api.prepare import prepare
from fxmem.devices import device_named
from fxmem.errors import InputError
from fxmem.passes.context import Settings

OptimizedModule = FxMemModule
"""What :class:`FxMemModule` was called before; torch.compile has a class of this name too."""


@with_options
def optimize(
    model: torch.nn.Module,
    example_args: Any = None,
    example_kwargs: dict[str, Any] | None = None,
    *,
    budget_gb: float | None = None,
    budget: float | str | None = None,
    budget_mb: float | None = None,
    plan_for: str | None = None,
    methods: Sequence[str] = ("forward",),
    shapes: Any = None,
    plan: str = "now",
    backend: str = "eager",
    **options: Unpack[Options],
) -> FxMemModule:
    """Return ``model`` as a module that trains inside a memory budget, with bitwise the same numbers.

    What is returned is an object of the model's class, and shares with it all attributes, parameters and submodules.
    ``model`` itself stays as it is; :func:`fxmem.optimize_` changes it instead.

    - ``model``: an ``nn.Module`` or ``fx.GraphModule``; its parameters are shared, not copied.
    - ``example_args`` (a tensor or a tuple) and ``example_kwargs``: one call's arguments, to plan for now. Without them the
      first training-mode call is planned for.
    - ``budget_gb`` in 10^9 bytes, ``budget_mb`` in 10^6, or ``budget`` in bytes or as text (``"24GiB"``): the bound on the
      peak of the whole training step, on CUDA with what ops and libraries take inside. ``budget="50%"``: that share of the
      peak of the model as it is, of each kind of call its own. ``"auto"``, and with none: what the model's CUDA device has
      free for it, of this process's share, less a margin of 3 %; on the CPU no bound.
    - ``plan_for``: a GPU by name (``"a100-80gb"``, :mod:`fxmem.devices`) to plan the example for, which need not be here;
      ``report`` is then of that GPU, and the first training call plans for the device it is on.
    - ``methods``: names of methods that are called in training beside ``forward``, such as ``("forward", "encode")``; each
      is planned as a step of its own, ``module.fxmem.methods["encode"]``.
    - ``shapes``: batches, or lengths of the example, to plan for now: all their sizes run under one plan, as
      :func:`fxmem.prepare` says.
    - ``plan``: ``"background"`` searches for plans in a process of its own; the first steps run under a quick plan that
      keeps the budget, and the better one takes its place at the first step after it is found. No bit depends on it. What
      no quick plan fits, and offloads, are planned at once, as with ``"now"``; ``module.fxmem.finish_planning()`` waits.
    - ``backend``: ``"inductor"`` compiles the model with torch.compile's Inductor under the same budget, and returns a
      :class:`fxmem.CompiledModule`, whose bits are that compiler's, not eager's. ``"auto"`` takes what is estimated to be
      faster, as ``module.fxmem.choice`` says, and takes no ``methods``. Neither takes ``plan_for``, ``shapes``, ``plan``.

    Under autocast the peak counts casts of weights until the region ends; if yours ends before the step does, the peak is
    an upper bound.

    Errors, all before anything big is allocated: ``InputError`` (a ``ValueError``) for arguments that cannot be used,
    ``InfeasibleBudgetError`` when no plan fits, ``CaptureError`` when no graph does what the model does.
    """
    bound = (budget_gb, budget, budget_mb)
    asked = methods, plan_for is None and shapes is None and plan == "now"
    compiled, choice = _in_inductor(backend, model, (example_args, example_kwargs), bound, options, *asked)
    if compiled is not None:
        return cast(FxMemModule, compiled)
    settings = _settings(model, (example_args, example_kwargs), bound, plan_for, options)
    settings = replace(settings, background=is_in_background(plan))
    module = optimized(FxMemModule, model, settings, check_methods(model, methods))
    module.fxmem.choice = choice
    try:
        return _planned(module, example_args, example_kwargs, plan_for, shapes)
    except BaseException:
        module.fxmem.step_after_backwards()
        raise


@with_options
def optimize_(
    model: torch.nn.Module,
    example_args: Any = None,
    example_kwargs: dict[str, Any] | None = None,
    *,
    budget_gb: float | None = None,
    budget: float | str | None = None,
    budget_mb: float | None = None,
    plan_for: str | None = None,
    methods: Sequence[str] = ("forward",),
    shapes: Any = None,
    plan: str = "now",
    backend: str = "eager",
    **options: Unpack[Options],
) -> FxMemModule:
    """Make ``model`` itself a module that trains inside a memory budget; return it. All else as :func:`fxmem.optimize`.

    It stays the same object of the same class, wherever it is held. :func:`fxmem.restore` takes this back. An error leaves
    it as it was. ``backend``: ``"eager"`` or ``"inductor"``.
    """
    if check_backend(backend) == "inductor":
        bound = (budget_gb, budget, budget_mb)
        asked = methods, plan_for is None and shapes is None and plan == "now"
        made, _ = _in_inductor(backend, model, (example_args, example_kwargs), bound, options, *asked, in_place=True)
        return cast(FxMemModule, made)
    settings = _settings(model, (example_args, example_kwargs), (budget_gb, budget, budget_mb), plan_for, options)
    settings = replace(settings, background=is_in_background(plan))
    module = optimize_in_place(FxMemModule, model, settings, check_methods(model, methods))
    try:
        return _planned(module, example_args, example_kwargs, plan_for, shapes)
    except BaseException:
        restored(module)
        raise


def _in_inductor(
    backend: str,
    model: torch.nn.Module,
    example: tuple[Any, Any],
    budget: BudgetArguments,
    options: Options,
    methods: Sequence[str],
    is_plain: bool,
    *,
    in_place: bool = False,
) -> tuple[CompiledModule | None, str]:
    """Return ``model`` compiled, or None for the eager backend; and what "auto" chose, and why.

    ``is_plain``: nothing else is asked for that only the eager backend takes.
    """
    if check_backend(backend, AUTO) == "eager":
        return None, ""
    if not is_plain:
        raise InputError(f'plan_for=, shapes= and plan= are not for backend="{backend}"; leave them out')
    check_optimizable(model)
    if backend != AUTO:
        names = check_methods(model, methods)
        return compiled_module(model, example, budget, options, names, in_place=in_place), ""
    if tuple(methods) != ("forward",):
        raise InputError('methods= is not for backend="auto"; name a backend')
    compiled, choice = compiled_if_cheaper(model, example, budget, options)
    if compiled is not None:
        compiled.fxmem.choice = choice
    return compiled, choice


def restore(model: torch.nn.Module) -> torch.nn.Module:
    """Return ``model`` as it was before :func:`fxmem.optimize` or :func:`fxmem.optimize_`, and so each optimized part.

    Optimized modules become plain objects of their class again; hooks set on them stay. What was never optimized is
    returned as it is. Errors: ``InputError`` where another library builds on the optimized class (``fully_shard``).
    """
    for module in list(model.modules()):
        for name, part in list(module._modules.items()):
            if isinstance(part, PlannedModule):
                module._modules[name] = restored(part)
    return restored(model) if isinstance(model, PlannedModule) else model


def _settings(
    model: torch.nn.Module,
    example: tuple[Any, ...],
    budget: BudgetArguments,
    plan_for: str | None,
    options: Options,
) -> Settings:
    """Return what is asked for, once it and ``model`` are checked."""
    check_optimizable(model)
    check_example(example[0])
    settings = settings_of(options)
    gpu = None if plan_for is None else device_named(plan_for)
    holders = (settings.step.optimizer, settings.step.scaler, *example)
    budget_gb, given, budget_mb = budget
    bound = parse_budget(budget_gb, given, model, *holders, budget_mb=budget_mb, gpu=gpu)
    return replace(settings, budget_bytes=bound.nbytes, budget_share=bound.share)


def _planned(
    module: FxMemModule, example_args: Any, example_kwargs: dict[str, Any] | None, plan_for: str | None, shapes: Any
) -> FxMemModule:
    """Return ``module``, planned for the example where one is given."""
    if plan_for is not None:
        module.fxmem.prepare_for(device_named(plan_for), example_args, example_kwargs)
    elif shapes is not None:
        prepare(module, shapes, example_args, example_kwargs)
    elif example_args is not None or example_kwargs is not None:
        module.fxmem.prepare(example_args, example_kwargs)
    return module
