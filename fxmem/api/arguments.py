"""The arguments that :func:`fxmem.optimize`, :func:`fxmem.estimate` and :func:`fxmem.frontier` share.

In: what a user wrote. Out: checked :class:`Settings`, the same for all entry points, so that what one has planned is found
by the others. Errors: ``InputError`` (a ``ValueError``), before anything is captured.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypedDict, TypeVar

import torch

from fxmem.capture.graph import Inputs, device_of
from fxmem.capture.joint_steps import RUNTIMES
from fxmem.errors import InputError
from fxmem.passes.choices import DEFAULT as ALLOWED
from fxmem.passes.choices import check_choices
from fxmem.passes.context import Settings
from fxmem.planners.policy import Rule, check_policy
from fxmem.planners.registry import PLANNERS
from fxmem.profiling.op_benchmark import may_measure
from fxmem.profiling.roofline import COSTS, preset_of
from fxmem.profiling.training_step import ONCE, Loop, LossFn, OptimizerLike, TrainingStep
from fxmem.runtime.autocast import Autocast
from fxmem.torch_private import FakeTensor, is_traceable_wrapper

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


class Options(TypedDict, total=False):
    """What each entry point takes beside the model, an example and a budget; defaults: :data:`DEFAULTS`."""

    step: TrainingStep | None
    optimizer: OptimizerLike
    loss_fn: LossFn | None
    targets: Any
    loop: Loop
    autocast: torch.dtype | None
    accumulate: bool
    scaler: torch.amp.GradScaler | None
    planner: str
    plan_seconds: float
    cost: str
    policy: Sequence[Rule]
    allow: Sequence[str]
    inplace: bool
    compress_saved: bool
    budget_of: str
    runtime: str
    cache: bool


DEFAULTS: Options = {
    "step": None,
    "optimizer": "adamw",
    "loss_fn": None,
    "targets": None,
    "loop": ONCE,
    "autocast": None,
    "accumulate": False,
    "scaler": None,
    "planner": "auto",
    "plan_seconds": 30.0,
    "cost": "auto",
    "policy": (),
    "allow": ALLOWED,
    "inplace": True,
    "compress_saved": True,
    "budget_of": "allocated",
    "runtime": "auto",
    "cache": True,
}

OPTIONS_DOC = """
    Options, the same for ``optimize``, ``estimate`` and ``frontier``:

    - ``step``: a :class:`fxmem.TrainingStep`, or its parts: ``optimizer`` (instance, class, name, a function of the
      parameters that makes one, or None), ``loss_fn`` with ``targets`` (example arguments of it beside the output, as in
      ``loss_fn=F.cross_entropy, targets=y``), ``autocast``, ``accumulate``, ``scaler`` and ``loop`` (a
      :class:`fxmem.Loop`).
    - ``planner``: ``"auto"``, ``"intervals"``, ``"mincut"`` or ``"chen"``.
    - ``plan_seconds``: about how much CPU time the planner may search; on a busy machine the clock shows more.
    - ``cost``: ``"auto"`` measures op times on the model's device, for a few seconds at most
      (:mod:`fxmem.profiling.op_benchmark`); the name of a hardware preset, such as ``"a100"``, estimates them.
    - ``policy``: rules of what must be saved or recomputed, such as ``("layers.*.attn", "save")`` or
      ``("relu", "recompute")``; the first that matches a node decides (:mod:`fxmem.planners.policy`).
    - ``allow``: what may be done so that less memory is taken, by name; what each choice changes in the numbers says
      :data:`fxmem.passes.choices.CHOICES`. By default ``("recompute", "inplace")``, which change no bit.
    - ``inplace``: whether ops that provably may write over their input do (:mod:`fxmem.passes.inplace`).
    - ``compress_saved``: whether, where memory is short, dropout masks, signs of ReLUs and inputs that no backward reads
      are saved in fewer bytes (:mod:`fxmem.passes.compress_saved`), and backwards of convolutions hold less at once
      (:mod:`fxmem.passes.lean_backwards`).
    - ``budget_of``: on CUDA, what a budget bounds: ``"allocated"`` bytes, as ``torch.cuda.max_memory_allocated`` counts
      them, or ``"reserved"`` ones, what the caching allocator takes from the device.
    - ``runtime``: how steps run. ``"program"``: as straight-line code, recorded from the first steps, which costs the
      host less than autograd does; ``"tape"``: under autograd. ``"auto"`` is programs on CUDA, and on the CPU from the
      step on at which the tape has cost as much as writing one down. What no program is right for runs on the tape all
      the same, as ``module.fxmem.runtime`` says. Bits are eager's on both; of the two cases in which a step that began
      as a program equals eager's but for rounding, a warning tells.
    - ``cache``: whether what planning finds is kept on disk for the next process (:mod:`fxmem.disk_cache`).
"""


def with_options(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Let ``function(..., **options)`` show the options by name in its signature and docstring, and refuse others."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    shared = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d) for n, d in DEFAULTS.items()]
    known = {p.name for p in own} | DEFAULTS.keys()

    @functools.wraps(function)
    def checked(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        unknown = next((name for name in kwargs if name not in known), None)
        if unknown is not None:
            raise TypeError(f"{function.__name__}() has no argument {unknown!r}; it has {', '.join(sorted(known))}")
        return function(*args, **kwargs)

    checked.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
    checked.__doc__ = (function.__doc__ or "") + OPTIONS_DOC
    return checked


def settings_of(options: Options) -> Settings:
    """Return the checked settings for ``options``, without a budget."""
    given: Options = {**DEFAULTS, **options}
    cost = _known("cost", given["cost"], COSTS)
    allow, policy = check_choices(given["allow"]), check_policy(given["policy"])
    if "recompute" not in allow and any(action == "recompute" for _, action in policy):
        raise InputError('policy= says to recompute, which allow= does not: add "recompute" to allow, or drop the rule')
    if "fuse" in allow and given["runtime"] == "tape":
        raise InputError('"fuse" in allow= is of steps that run as programs, not on the tape: leave out runtime="tape"')
    step = _step_of(given)
    return Settings(
        budget_bytes=None,
        step=replace(step, in_backward=True) if "optimizer_in_backward" in allow else step,
        planner=_known("planner", given["planner"], PLANNERS),
        plan_seconds=_positive("plan_seconds", given["plan_seconds"]),
        hardware=preset_of(cost),
        measure=cost == "measure" or (cost == "auto" and may_measure()),
        policy=policy,
        cache=bool(given["cache"]),
        inplace=bool(given["inplace"]),
        compress_saved=bool(given["compress_saved"]),
        allow=allow,
        budget_of=_known("budget_of", given["budget_of"], ("allocated", "reserved")),
        runtime=_known("runtime", given["runtime"], RUNTIMES),
    )


def _step_of(given: Options) -> TrainingStep:
    parts = TrainingStep(
        loss_fn=given["loss_fn"],
        optimizer=given["optimizer"],
        accumulate=bool(given["accumulate"]),
        scaler=given["scaler"],
        autocast=given["autocast"],
        targets=given["targets"],
        loop=given["loop"],
    )
    step = given["step"]
    if step is None:
        return parts
    if not isinstance(step, TrainingStep):
        raise InputError(f"step must be a fxmem.TrainingStep, not {type(step).__name__}")
    if parts != TrainingStep():
        raise InputError(
            "pass step= or its parts (optimizer=, loss_fn=, targets=, autocast=, accumulate=, scaler=, loop=), not both"
        )
    return step


def _known(what: str, name: str, known: Any) -> str:
    if name not in known:
        raise InputError(f"unknown {what} {name!r}; known: {', '.join(sorted(known))}")
    return name


def _positive(what: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise InputError(f"{what} must be a finite number above 0, not {value!r}")
    return float(value)


def example_of(model: torch.nn.Module, example_args: Any, example_kwargs: dict[str, Any] | None) -> Inputs:
    """Return the example's inputs. Errors: ``InputError`` if they are none, or the model is not in training mode."""
    inputs = Inputs.of_example(example_args, example_kwargs, model)
    if not model.training:
        raise InputError("the model is in eval mode; call model.train() first: what is planned is a training step")
    return inputs


def check_example(example_args: Any) -> None:
    """Errors: ``InputError`` if a budget stands where one call's arguments belong."""
    size = isinstance(example_args, str) and example_args.strip()[:1].isdigit()
    if size or (isinstance(example_args, int | float) and not isinstance(example_args, bool)):
        meant = f"budget={example_args!r}" if size else f"budget_gb={example_args}"
        raise InputError(
            f"the second argument is an example of the model's arguments, not {example_args!r}; did you mean "
            f"fxmem.optimize(model, {meant})? An argument that is a number goes into a tuple: ({example_args!r},)"
        )


def region_of_step(model: torch.nn.Module, step: TrainingStep, device_type: str | None = None) -> Autocast | None:
    """Return the autocast region that an example is planned for."""
    return Autocast.of(device_type or device_of(model).type, step.autocast)


# -- the model -----------------------------------------------------------------------------------------------------------


def check_model(model: Any) -> None:
    """Errors: ``InputError`` if ``model`` cannot be planned for, with what to pass instead."""
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if is_optimized(model):
        raise InputError("the model is already optimized; pass model.fxmem.original with the new budget")
    check_alone(model)
    _check_trainable(model)


def is_optimized(module: torch.nn.Module) -> bool:
    """True of what :func:`fxmem.optimize` returns."""
    return hasattr(type(module), "_fxmem")


def check_optimizable(model: Any) -> None:
    """Errors: ``InputError`` if ``model`` cannot be planned for, or cannot become an optimized module."""
    check_model(model)
    kind = type(model)
    if "fxmem" in {*dir(kind), *vars(model), *model._modules, *model._parameters, *model._buffers}:
        raise InputError(f"{kind.__name__} has an attribute 'fxmem', which an optimized module needs: rename it")
    slots = [name for base in kind.__mro__ for name in vars(base).get("__slots__", ()) if hasattr(model, name)]
    if slots:
        raise InputError(
            f"{kind.__name__} keeps {slots[0]!r} in __slots__, which an optimized module cannot share with its model: "
            "leave __slots__ out of the class"
        )


def is_in_background(plan: str) -> bool:
    """Return whether ``plan=`` says so. Errors: ``InputError`` for another word."""
    return _known("plan", plan, ("now", "background")) == "background"


BACKENDS = ("eager", "inductor")
AUTO = "auto"
"""The cheaper one, for :func:`fxmem.optimize`."""


def check_backend(backend: str, *others: str) -> str:
    """Return ``backend``; ``others``: what is known beside :data:`BACKENDS`. Errors: ``InputError`` if it is none."""
    known = (*BACKENDS, *others)
    if backend not in known:
        raise InputError(f"unknown backend {backend!r}; known: {', '.join(known)}")
    return backend


def check_methods(model: torch.nn.Module, methods: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the methods to plan. Errors: ``InputError`` if one is no method of ``model``."""
    kind = type(model)
    if isinstance(methods, str):
        raise InputError(f"methods must be a sequence of names, not a text: methods=({methods!r},)")
    for name in methods:
        found = inspect.getattr_static(kind, name, None) if isinstance(name, str) else None
        if not inspect.isfunction(found) or (hasattr(torch.nn.Module, name) and name != "forward"):
            known = [n for n, f in inspect.getmembers_static(kind, inspect.isfunction) if _is_for_training(n)]
            raise InputError(f"{kind.__name__} has no method {name!r} that could be planned; it has {', '.join(known)}")
    return tuple(methods)


def _is_for_training(name: str) -> bool:
    return name == "forward" or not (name.startswith("_") or hasattr(torch.nn.Module, name))


def check_alone(model: torch.nn.Module) -> None:
    """Raise ``InputError`` if something else has hold of a module or parameter, and works around its forward."""
    for name, module in model.named_modules():
        wrapper, place = type(module).__name__, name or "the model"
        if type(module).__module__.startswith("torch.") and wrapper in _WRAPPERS:
            raise InputError(
                f"{place} is wrapped in {wrapper}, whose work goes on around the forward; {_WRAPPERS[wrapper]}"
            )
        if (
            wrapper == "OptimizedModule" and type(module).__module__.startswith("torch.")
        ) or module._compiled_call_impl is not None:
            raise InputError(
                f"{place} is compiled by torch.compile, whose kernels round otherwise than those of eager PyTorch, which "
                "an optimized model runs; optimize the module as it was before it was compiled"
            )
        if is_optimized(module):
            raise InputError(
                f"{place} is an optimized module inside of {type(model).__name__}, and two plans for one step would not "
                f"know of each other; put {place}.fxmem.original in its place, or optimize the parts only"
            )
    for name, parameter in model.named_parameters():
        if is_traceable_wrapper(parameter):
            raise InputError(
                f"the parameter {name} is a {type(parameter).__name__}, which other tensors make up; gathering or "
                "converting them is no part of the model's graph. With fully_shard, optimize each module first and shard "
                "the result, one by one: fully_shard(fxmem.optimize(module, ...))"
            )


_WRAPPERS = {
    "DataParallel": "optimize the model inside and wrap the result: DataParallel(fxmem.optimize(model, ...))",
    "DistributedDataParallel": "optimize the model inside and wrap the result: DistributedDataParallel(fxmem.optimize(model"
    ", ...))",
    "FullyShardedDataParallel": "use fully_shard, on optimized modules one by one: "
    "fully_shard(fxmem.optimize(module, ...))",
}
"""What to do instead."""


def _check_trainable(model: torch.nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError("a torch.jit.ScriptModule cannot be captured; pass the nn.Module it was made from")
    parameters = list(model.parameters())
    if not parameters:
        raise InputError(f"{type(model).__name__} has no parameters: there is nothing to train")
    lazy = [n for n, p in model.named_parameters() if isinstance(p, torch.nn.parameter.UninitializedParameter)]
    if lazy:
        raise InputError(
            f"{type(model).__name__} has lazy parameters that have no shape yet ({lazy[0]}); run one forward on a batch "
            "first, as before making an optimizer"
        )
    if not any(p.requires_grad for p in parameters):
        raise InputError(
            f"none of the {len(parameters)} parameters of {type(model).__name__} requires grad: there is no backward "
            "to plan for; call requires_grad_() on those to train"
        )


def without_measuring(settings: Settings, model: torch.nn.Module, *, elsewhere: bool = False) -> Settings:
    """Return ``settings`` without measured times where nothing is to be run: the model has no real tensors, or the step
    is ``elsewhere``, on a GPU that is not here."""
    ghosts = (p.is_meta or isinstance(p, FakeTensor) for p in model.parameters())
    return replace(settings, measure=False) if elsewhere or any(ghosts) else settings
