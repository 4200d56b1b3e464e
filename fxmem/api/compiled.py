"""``backend="inductor"``: a compiled training step under a budget, and what is returned for it.

In: what :func:`fxmem.optimize` and :func:`fxmem.estimate` take. Out: a :class:`CompiledModule`, a
:class:`CompiledEstimate`, or a :class:`fxmem.compiled.backend.Backend` for ``torch.compile``.

A compiled module is smaller than an optimized one: it has the model's class, attributes, parameters and hooks, but cannot
be pickled, copied or planned for other devices; do these with ``module.fxmem.original``.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import torch

from fxmem.api.arguments import (
    DEFAULTS,
    Options,
    check_model,
    check_optimizable,
    example_of,
    region_of_step,
    settings_of,
    with_options,
)
from fxmem.api.budget import parse_budget
from fxmem.capture.graph import Inputs, device_of
from fxmem.compiled.report import CompiledCost, CompiledEstimate, CompiledReport
from fxmem.compiled.surroundings import Surroundings, surroundings_of, with_loss
from fxmem.compiled.unread import refusing_gradients, unread_places
from fxmem.errors import InputError, NotPlannedError
from fxmem.fake.fake_tensors import FakeWorld, ScalarReads
from fxmem.fake.python_state import tensors_restored
from fxmem.passes.context import Settings
from fxmem.profiling.training_step import ONCE, TrainingStep
from fxmem.progress import CAPTURE_SECONDS, told
from fxmem.runtime.autocast import Autocast
from fxmem.torch_private import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from fxmem.compiled.backend import Backend
    from fxmem.compiled.graph_planner import GraphPlanner

Example = tuple[Any, dict[str, Any] | None]
BudgetArguments = tuple[float | None, float | str | None, float | None]
"""``budget_gb``, ``budget``, ``budget_mb``."""
BACKENDS = ("eager", "inductor")
AUTO = "auto"
"""The cheaper one, for :func:`fxmem.optimize`."""


def check_backend(backend: str, *others: str) -> str:
    """Return ``backend``; ``others``: what is known beside :data:`BACKENDS`. Errors: ``InputError`` if it is none."""
    known = (*BACKENDS, *others)
    if backend not in known:
        raise InputError(f"unknown backend {backend!r}; known: {', '.join(known)}")
    return backend


@with_options
def backend(
    *,
    budget_gb: float | None = None,
    budget: float | str | None = None,
    budget_mb: float | None = None,
    **options: Unpack[Options],
) -> Backend:
    """Return a backend for ``torch.compile`` that keeps a budget: ``torch.compile(model, backend=fxmem.backend(...))``.

    The budget bounds the peak of the whole training step in allocated bytes, as for :func:`fxmem.optimize`, where the
    compiled function takes all that the step works on and returns its loss: parameters, batch, gradients and the state of
    ``optimizer`` are counted. Of a loss outside it knows nothing; :func:`fxmem.optimize` with ``backend="inductor"`` does.
    Where a graph breaks, or several functions are given one backend, the budget is over all compiled calls that go before
    one backward, from the second step on; what runs between them is not counted. Other sizes are planned as they come.
    Loss and gradients are those of the same compiler with nothing recomputed, on the CPU bit by bit in most transformers;
    they are not eager's bits.
    ``backend.reports``: what was planned.

    Errors, when the first training call compiles: ``InfeasibleBudgetError`` with the least peak that was reached,
    ``InputError`` for settings of torch that no budget can be promised with.
    """
    from fxmem.compiled.backend import Backend  # which imports Inductor, for seconds

    settings = _settings_of(options)
    bound = parse_budget(budget_gb, budget, torch.nn.Module(), budget_mb=budget_mb)
    return Backend(_with_budget(settings, bound.nbytes, bound.share))


def _settings_of(options: Options) -> Settings:
    settings = settings_of(options)
    if settings.step.loop != ONCE:
        raise InputError('loop= is not for backend="inductor": its step is one forward and one backward')
    if settings.runtime != "auto":
        raise InputError('runtime= is not for backend="inductor", whose steps are compiled; leave it out')
    others = sorted(settings.allow - set(DEFAULTS["allow"]))
    if others:
        raise InputError(
            f'allow={tuple(others)} is not for backend="inductor", whose plans keep or recompute; leave it out'
        )
    return settings


def _with_budget(settings: Settings, budget_bytes: int | None, share: float | None) -> Settings:
    if share is not None:
        raise InputError(
            'a budget in percent is of eager\'s peak; with backend="inductor" write a size, such as "24GiB"'
        )
    return replace(settings, budget_bytes=budget_bytes)


# -- compiled modules ---------------------------------------------------------------------------------------------------


class CompiledNamespace:
    """What fxmem knows of a compiled module: ``module.fxmem``."""

    def __init__(self, original: torch.nn.Module, settings: Settings) -> None:
        self.original = original
        """The model as it was given."""
        self.settings = settings
        self.choice = ""
        """With ``backend="auto"``: what was chosen, and why."""
        from fxmem.compiled.backend import Backend, held_weakly
        from fxmem.compiled.lower import BREAKS, whole_graphs

        self._backend, self._breaks, self._whole_graphs = Backend(settings, self._around), BREAKS, whole_graphs
        self._compile = partial(torch.compile, backend=held_weakly(self._backend), fullgraph=True, dynamic=False)
        self._calls: dict[tuple[int, ...], Callable[..., Any]] = {(): self._compile(_own(original.forward))}
        """By the places of outputs that the loss does not read."""
        self._unread: dict[Any, tuple[int, ...]] = {}
        """These, by the kind of a call."""
        self._inputs: Inputs | None = None
        self._output: Any = None
        """Of the call that is planned, on fakes."""
        self._autocast: Autocast | None = None

    @property
    def reports(self) -> tuple[CompiledReport, ...]:
        """One for each kind of training call that was planned."""
        return tuple(self._backend.reports)

    @property
    def report(self) -> CompiledReport:
        """Of the latest kind of call. Errors: ``NotPlannedError``."""
        if not self._backend.reports:
            raise NotPlannedError("no training call was planned yet; give optimize an example, or run a step first")
        return self._backend.reports[-1]

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one training call, compiled. Errors: ``CaptureError`` where it cannot be one graph."""
        self._inputs = Inputs.of(args, kwargs, self.original)
        self._autocast = Autocast.of(device_of(self.original).type)
        unread = self._unread_outputs(self._inputs)
        if unread not in self._calls:
            self._calls[unread] = self._compile(_own(_without_gradients(self.original.forward, unread)))
        call = self._calls[unread]
        try:
            return refusing_gradients(call(*args, **kwargs), unread)
        except self._breaks:  # while it is traced: nothing has run
            with self._whole_graphs():
                return refusing_gradients(call(*args, **kwargs), unread)
        finally:
            self._inputs = self._output = None

    def _unread_outputs(self, inputs: Inputs) -> tuple[int, ...]:
        """Return the places of outputs that the loss does not read: compiled code would be given a gradient of zeros."""
        leaves = (leaf if isinstance(leaf, bool | str) else type(leaf) for leaf in inputs.leaves)  # they may decide
        kind = inputs.spec, tuple(leaves)
        if kind not in self._unread:
            self._output = self._output_on_fakes(inputs)
            self._unread[kind] = unread_places(self._output, self._step_for(inputs))
        return self._unread[kind]

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan for a call like this one; nothing runs and no kernel is compiled. Errors: as :func:`fxmem.optimize`."""
        self._only_planned(self._backend.plan_only, args, kwargs)

    def frontier(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CompiledCost, ...]:
        """Return what every budget costs for a call like this one."""
        found: list[CompiledCost] = []
        self._only_planned(lambda planner: found.extend(planner.frontier()), args, kwargs)
        return tuple(found)

    def _only_planned(self, plan: Callable[[GraphPlanner], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from fxmem.compiled.backend import Planned

        seen: list[GraphPlanner] = []

        def noted(planner: GraphPlanner) -> None:
            seen.append(planner)
            plan(planner)

        self._backend.only_plan = noted
        region = region_of_step(self.original, self.settings.step)
        try:
            with region.enter() if region else nullcontext(), torch.inference_mode(False), torch.enable_grad():
                self.call(args, kwargs)
        except Planned:
            pass
        finally:
            self._backend.only_plan = None
        if not seen:
            raise InputError(
                "no output of this call needs a gradient, so that there is no training step to plan; let parameters that "
                "are to be trained require gradients"
            )

    def _around(self, tensors: Sequence[torch.Tensor]) -> Surroundings:
        model, inputs = self.original, self._inputs
        assert inputs is not None
        step = self._step_for(inputs)
        batch = [t for t in inputs.leaves if isinstance(t, torch.Tensor)]
        around = surroundings_of((*model.buffers(), *batch, *tensors), tuple(model.parameters()), step)
        with self._autocast.enter() if self._autocast else nullcontext():
            output = self._output_on_fakes(inputs) if self._output is None else self._output
            return with_loss(around, output, step)

    def _step_for(self, inputs: Inputs) -> TrainingStep:
        return self.settings.seen_with(inputs.leaves).step.for_inputs(inputs.leaves)

    def _output_on_fakes(self, inputs: Inputs) -> Any:
        """Return what a training call returns, as fakes with their graph."""
        model, world = self.original, FakeWorld(inputs.leaves)
        args, kwargs = Inputs(tuple(world.fake_all(list(inputs.leaves))), inputs.spec).call()
        with tensors_restored(model), world.active(model), world.state_of(model), torch.enable_grad(), ScalarReads():
            return model.forward(*args, **kwargs)


def _own(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` as code of its own: Dynamo compiles one code for eight kinds of calls at most, and those of all
    models of a class would be of one."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)


def _without_gradients(forward: Callable[..., Any], places: tuple[int, ...]) -> Callable[..., Any]:
    """Return ``forward`` whose outputs at ``places`` have no gradient."""

    def detached(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten(forward(*args, **kwargs))
        return tree_unflatten([t.detach() if place in places else t for place, t in enumerate(leaves)], spec)

    return detached


class CompiledModule(torch.nn.Module):
    """What every model compiled under a budget is, beside of its own class. ``module.fxmem`` has report and original.

    Training-mode calls with grad enabled run compiled, planned at the first call of each kind. All others run the original.
    """

    _fxmem_compiled: CompiledNamespace

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Nothing: the original's class is not to hear of a subclass that its author did not write."""

    @property
    def fxmem(self) -> CompiledNamespace:
        return self._fxmem_compiled

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            "a compiled module cannot be copied or pickled; copy module.fxmem.original, and compile the copy"
        )


def _forward(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
    if self.training and torch.is_grad_enabled():
        return self.fxmem.call(args, kwargs)
    return self.fxmem.original.forward(*args, **kwargs)


def bounded_settings(model: torch.nn.Module, example: Example, budget: BudgetArguments, options: Options) -> Settings:
    """Return what was asked for. Errors: ``InputError`` for what is unknown, or only the eager backend takes."""
    settings = _settings_of(options)
    budget_gb, given, budget_mb = budget
    bound = parse_budget(budget_gb, given, model, settings.step.optimizer, *example, budget_mb=budget_mb)
    return _with_budget(settings, bound.nbytes, bound.share)


def compiled_module(
    model: torch.nn.Module, example: Example, budget: BudgetArguments, options: Options
) -> CompiledModule:
    """Return ``model`` compiled under a budget, planned for the example if there is one."""
    from fxmem.compiled.refusals import check_settings

    check_optimizable(model)
    check_settings({})
    settings = bounded_settings(model, example, budget, options)
    kind = type(model)
    members = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_fxmem_compiled": CompiledNamespace(model, settings),
        "forward": _forward,
    }
    made: CompiledModule = object.__new__(
        types.new_class(kind.__name__, (CompiledModule, kind), {}, lambda own: own.update(members))
    )
    object.__setattr__(made, "__dict__", model.__dict__)
    if any(given is not None for given in example):
        inputs = example_of(model, *example)
        with told(f"planning the compiled step of {kind.__name__}", CAPTURE_SECONDS + settings.plan_seconds):
            made.fxmem.prepare(*inputs.call())
    return made


# -- estimates ----------------------------------------------------------------------------------------------------------


def compiled_estimate(model: torch.nn.Module, example: Example, options: Options) -> CompiledEstimate:
    """Return what a compiled step takes, without running or compiling it."""
    check_model(model)
    module = compiled_module(model, example, (None, None, None), options)
    report = module.fxmem.report
    return CompiledEstimate(report.predicted_peak_bytes, report.fixed_bytes, report.saved_bytes)


def compiled_frontier(model: torch.nn.Module, example: Example, options: Options) -> tuple[CompiledCost, ...]:
    """Return what every budget costs for a compiled step. Errors: as :func:`fxmem.optimize`."""
    check_model(model)
    inputs = example_of(model, *example)
    module = compiled_module(model, (None, None), (None, None, None), options)
    seconds = CAPTURE_SECONDS + module.fxmem.settings.plan_seconds
    with told(f"planning the compiled step of {type(model).__name__} for every budget", seconds):
        return module.fxmem.frontier(*inputs.call())
