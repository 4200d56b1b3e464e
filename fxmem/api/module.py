"""The public face: :func:`optimize` and the module it returns.

The wrapper shares the original's parameters, buffers and submodules, so it is the same model under another forward:
training-mode calls with grad enabled run an emitted graph, all others the original.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import Parameter, signature
from types import MethodType
from typing import Any, cast

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxmem.api.budget import parse_budget
from fxmem.api.compile_cache import Plans
from fxmem.capture.graph import Inputs
from fxmem.capture.guards import REGISTRIES
from fxmem.errors import InputError, NotPlannedError
from fxmem.ir import Plan
from fxmem.pipeline import Compiled, Settings
from fxmem.planners.policy import Rule, check_policy
from fxmem.planners.registry import PLANNERS
from fxmem.profiling.op_benchmark import may_measure
from fxmem.profiling.roofline import COSTS, preset_of
from fxmem.profiling.training_step import OptimizerLike, TrainingStep, check_step, without_state
from fxmem.report.text import Report
from fxmem.runtime.autocast import Autocast


def optimize(
    model: torch.nn.Module,
    example_args: Any = None,
    example_kwargs: dict[str, Any] | None = None,
    *,
    budget_gb: float | None = None,
    budget: float | str | None = None,
    optimizer: OptimizerLike = "adamw",
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    autocast: torch.dtype | None = None,
    accumulate: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    planner: str = "auto",
    inplace: bool = True,
    policy: Sequence[Rule] = (),
    plan_seconds: float = 30.0,
    cost: str = "auto",
    cache: bool = True,
) -> OptimizedModule:
    """Return ``model`` as a module that trains inside a memory budget, with bitwise the same numbers.

    ``model``: an ``nn.Module`` or ``fx.GraphModule``; its parameters are shared, not copied. ``example_args`` (a tensor
    or a tuple) and ``example_kwargs``: one call's arguments to plan for now; without them the first training-mode call
    is planned for. The bound is on the peak of the whole training step: ``budget_gb`` in 10^9 bytes, or ``budget`` in
    bytes or as text (``"24GiB"``); with neither, what the model's CUDA device has free for it, on CPU no bound.
    ``optimizer`` (instance, class, name or None) says what state and step to count. ``loss_fn(output)`` returns the
    scalar loss; default: ``output.loss``, else the sum of the floating outputs. ``autocast``: the dtype of the autocast
    region the training calls run in, where an example is given; a call inside a region is planned for that region, and
    its peak, which counts casts of weights until the region ends, is an upper bound if that is before the step does.
    ``accumulate``: whether gradients are there when a step starts, as in gradient accumulation over micro-batches and
    after ``zero_grad(set_to_none=False)``. ``scaler``: the ``torch.amp.GradScaler`` of the step, if there is one.
    ``planner``: a name in ``fxmem.planners.PLANNERS``; it searches for at most about ``plan_seconds`` of CPU time,
    which on a busy machine takes longer by the clock. ``inplace``: whether ops that provably may write over their input
    do (:mod:`fxmem.passes.inplace`). ``cost``: ``"auto"`` measures op times on the model's device, for a few seconds at
    most (:mod:`fxmem.profiling.op_benchmark`); the name of a hardware preset, such as ``"a100"``, estimates them.
    ``policy``: rules of what must be saved or recomputed, such as ``("layers.*.attn", "save")`` or ``("relu",
    "recompute")`` (:mod:`fxmem.planners.policy`). ``cache``: whether what planning finds is kept on disk for the next
    process (:mod:`fxmem.disk_cache`).

    Errors: ``InputError`` (a ``ValueError``) for arguments that cannot be used, ``InfeasibleBudgetError`` when no plan
    fits, ``CaptureError`` when the model cannot be captured faithfully; all before anything big is allocated.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, OptimizedModule):
        raise InputError("the model is already optimized; pass model.original with the new budget")
    _check_alone(model)
    _check_trainable(model)
    settings = Settings(
        budget_bytes=parse_budget(budget_gb, budget, model, optimizer, scaler, example_args, example_kwargs),
        step=check_step(TrainingStep(loss_fn, optimizer, bool(accumulate), scaler)),
        inplace=bool(inplace),
        planner=_known("planner", planner, PLANNERS),
        plan_seconds=_positive("plan_seconds", plan_seconds),
        hardware=preset_of(_known("cost", cost, COSTS)),
        measure=cost == "measure" or (cost == "auto" and may_measure()),
        policy=check_policy(policy),
        cache=bool(cache),
    )
    optimized = OptimizedModule(model, settings)
    if example_args is not None or example_kwargs is not None:
        inputs = Inputs.of_example(example_args, example_kwargs, model)
        if not model.training:
            raise InputError("the model is in eval mode; call model.train() first: a plan is for training")
        optimized.compile_for(inputs, Autocast.of(_device_type(model), autocast))
    return optimized


class _Forward:
    """A method whose instances have the signature of their original's ``forward``, by which trainers choose columns."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, module: OptimizedModule | None, owner: type[OptimizedModule]) -> Callable[..., Any]:
        if module is None:
            return self._method
        of_original, own = module.original.forward, module.__dict__
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
    """A model that trains under a plan. It has the original's parameters, buffers, submodules and state_dict keys."""

    _OWN = frozenset(
        {
            "original",
            "_settings",
            "_plans",
            "_compiled_call_impl",
            "_fxmem_forward",
            "forward",
            "_original_forward",  # accelerate's, beside the forward that it wraps
        }
    )

    def __init__(self, original: torch.nn.Module, settings: Settings) -> None:
        super().__init__()
        own = self.__dict__
        own["original"] = original
        own["_settings"] = settings
        own["_plans"] = Plans(original, settings)
        own["_fxmem_forward"] = None
        self._share()

    def _share(self) -> None:
        """Make the original's registries this module's own, so that every nn.Module method acts on both."""
        for registry in (*REGISTRIES, *(name for name in vars(self) if "state_dict" in name)):
            self.__dict__[registry] = self.original.__dict__[registry]

    # -- planning -----------------------------------------------------------------------------------------------------

    def compile_for(self, inputs: Inputs, autocast: Autocast | None) -> Compiled:
        """Return what is compiled for the signature of ``inputs``, compiling it on first sight."""
        plans: Plans = self._plans
        compiled = plans.find(inputs, autocast)
        if compiled is None:
            _check_alone(self.original)
            compiled = plans.make(inputs, autocast)
        return compiled

    def _planned(self) -> Compiled:
        plans: Plans = self._plans
        if plans.latest is None:
            raise NotPlannedError(
                "this module has no plan yet: pass example_args to fxmem.optimize, or call it once in training mode"
            )
        return plans.latest

    @property
    def graph_module(self) -> fx.GraphModule:
        """The emitted GraphModule of the signature used last: leaf inputs to a tuple of leaf outputs."""
        return self._planned().graph_module

    @property
    def fxmem_constants(self) -> tuple[torch.Tensor, ...]:
        """Tensors that the emitted graph of the signature used last holds, and the model makes anew in each step."""
        latest = self._plans.latest
        own = {id(t) for t in (*self.original.parameters(), *self.original.buffers())}
        held = () if latest is None else (*latest.graph_module.parameters(), *latest.graph_module.buffers())
        return tuple(t for t in held if id(t) not in own)

    @property
    def plan(self) -> Plan:
        """The plan of the signature used last."""
        return self._planned().plan

    @property
    def report(self) -> Report:
        """The report of the signature used last; ``str()`` of it is a table."""
        return self._planned().report

    # -- being the model ----------------------------------------------------------------------------------------------

    @_Forward
    @torch.compiler.disable(reason="planning and recomputation run outside of torch.compile")  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return self.original(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise InputError(
                "an optimized model cannot run inside a torch.func transform (grad, vmap, jvp, ...): these forbid the "
                "saved-tensor hooks that recompute; apply the transform to the unoptimized model, model.original"
            )
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            raise InputError(
                "an optimized model cannot run where saved-tensor hooks are disabled: they are what recomputes; run the "
                "unoptimized model there, model.original"
            )
        if torch.autograd.forward_ad._current_level >= 0:
            raise InputError(
                "an optimized model has no forward-mode derivatives: run the unoptimized model, model.original, inside "
                "torch.autograd.forward_ad.dual_level"
            )
        inputs = Inputs.of(args, kwargs, self.original)
        compiled = self.compile_for(inputs, Autocast.of(_device_type(self.original)))
        return compiled.captured.call(compiled.graph_module, inputs.leaves)

    @property
    def training(self) -> bool:
        """Whether the original is in training mode."""
        return bool(self.original.training)

    @training.setter
    def training(self, mode: bool) -> None:
        """Nothing: only ``nn.Module.__init__`` comes here, before there is an original."""

    def train(self, mode: bool = True) -> OptimizedModule:
        self.original.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> OptimizedModule:
        self.original._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.original._load_from_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        original = self.__dict__.get("original")
        if original is None:
            raise AttributeError(name)
        if name in ("graph_module", "plan", "report"):  # the property has raised
            self._planned()
        return getattr(original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN or name in self.__dict__ or name == "__class__":
            object.__setattr__(self, name, value)
        else:
            setattr(self.original, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._OWN:
            object.__delattr__(self, name)
        else:
            delattr(self.original, name)

    # Those of a model that has them, an nn.Sequential; Python looks for them on the type only.

    def __getitem__(self, key: Any) -> Any:
        return cast(Any, self.original)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        cast(Any, self.original)[key] = value

    def __len__(self) -> int:
        return len(cast(Any, self.original))

    def __bool__(self) -> bool:
        return bool(self.original)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.original)})

    def extra_repr(self) -> str:
        budget = self._settings.budget_bytes
        return "no budget" if budget is None else f"budget {budget / 1e9:.3f} GB"

    def __getstate__(self) -> dict[str, Any]:
        """Plans and the optimizer's state are not copied or pickled; a copy plans again on its first training call."""
        step = self._settings.step
        settings = replace(self._settings, step=replace(step, optimizer=without_state(step.optimizer)))
        return {"original": self.original, "_settings": settings, "own": self._hooks()}

    def _hooks(self) -> dict[str, Any]:
        return {
            k: v
            for k, v in self.__dict__.items()
            if k.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        OptimizedModule.__init__(self, state["original"], state["_settings"])
        self.__dict__.update(state["own"])


def _device_type(model: torch.nn.Module) -> str:
    return next((p.device.type for p in model.parameters()), "cpu")


# -- checks of what the user passed --------------------------------------------------------------------------------------


def _known(what: str, name: str, known: Any) -> str:
    if name not in known:
        raise InputError(f"unknown {what} {name!r}; known: {', '.join(sorted(known))}")
    return name


def _positive(what: str, value: float) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise InputError(f"{what} must be a finite number above 0, not {value!r}")
    return float(value)


def _check_alone(model: torch.nn.Module) -> None:
    """Raise ``InputError`` if something else has hold of a module or parameter, and works around its forward."""
    for name, module in model.named_modules():
        wrapper, place = type(module).__name__, name or "the model"
        if type(module).__module__.startswith("torch.") and wrapper in _WRAPPERS:
            raise InputError(
                f"{place} is wrapped in {wrapper}, whose work goes on around the forward; {_WRAPPERS[wrapper]}"
            )
        if type(module).__module__ == "torch._dynamo.eval_frame" or module._compiled_call_impl is not None:
            raise InputError(
                f"{place} is compiled by torch.compile, whose kernels round otherwise than those of eager PyTorch, which "
                "an optimized model runs; optimize the module as it was before it was compiled"
            )
        if isinstance(module, OptimizedModule):
            raise InputError(
                f"{place} is an optimized module inside of {type(model).__name__}, and two plans for one step would not "
                f"know of each other; put {place}.original in its place, or optimize the parts only"
            )
    for name, parameter in model.named_parameters():
        if is_traceable_wrapper_subclass(parameter):
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
            "before fxmem.optimize, as before making an optimizer"
        )
    if not any(p.requires_grad for p in parameters):
        raise InputError(
            f"none of the {len(parameters)} parameters of {type(model).__name__} requires grad: there is no backward "
            "to plan for; call requires_grad_() on those to train"
        )
