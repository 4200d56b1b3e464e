"""``backend="inductor"``: a compiled training step under a budget, and what is returned for it.

In: what :func:`fxmem.optimize` and :func:`fxmem.estimate` take. Out: a :class:`CompiledModule`, a
:class:`CompiledEstimate`, or a :class:`fxmem.compiled.backend.Backend` for ``torch.compile``.

A compiled module is what an optimized one is (:mod:`fxmem.api.planned_class`): an object of the model's class that shares
all with it. Its copies, and what is unpickled, are planned and compiled again.
"""

from __future__ import annotations

import types
import warnings
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
from fxmem.api.planned_class import PlannedModule, optimize_in_place, optimized, restored
from fxmem.api.post_mortem import Planned, add_post_mortem
from fxmem.capture.graph import Inputs, device_of
from fxmem.capture.pytrees import looked_into
from fxmem.compiled.report import CompiledCost, CompiledEstimate, CompiledReport
from fxmem.compiled.surroundings import Surroundings, surroundings_of, with_loss, with_unread
from fxmem.compiled.unread import refusing_gradients, unread_places
from fxmem.errors import CaptureError, InputError, NotPlannedError, first_lines, in_units, raised_in
from fxmem.fake.fake_tensors import FakeWorld, ScalarReads
from fxmem.fake.python_state import tensors_restored
from fxmem.passes.context import Settings
from fxmem.profiling.training_step import Loop, TrainingStep
from fxmem.progress import CAPTURE_SECONDS, told
from fxmem.runtime.autocast import Autocast
from fxmem.torch_private import OF_FAKES, tree_flatten, tree_leaves, tree_unflatten, without_modes
from fxmem.user_frames import level_of_user

if TYPE_CHECKING:
    from fxmem.compiled.backend import Backend
    from fxmem.compiled.graph_planner import GraphPlanner

Example = tuple[Any, dict[str, Any] | None]
BudgetArguments = tuple[float | None, float | str | None, float | None]
"""``budget_gb``, ``budget``, ``budget_mb``."""


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
    loop = settings.step.loop
    if loop != Loop(keeps_output=loop.keeps_output, zero_grad_before_backward=loop.zero_grad_before_backward):
        raise InputError(
            'of a loop, backend="inductor" takes keeps_output= and zero_grad_before_backward=; several forwards before one '
            "backward are seen in the first step. Leave out the others"
        )
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
        self.methods: dict[str, CompiledNamespace] = {}
        """By name, the same for each other method that is planned."""
        self.set_forwards: dict[Callable[..., Any], CompiledNamespace] = {}
        """By function, the same for forwards that were set on the compiled module and go around its own."""
        self.said_of: dict[Callable[..., Any], str] = {}
        """Of those whose user has not heard of it, the path of the submodule that they call."""
        self.choice = ""
        """With ``backend="auto"``: what was chosen, and why."""
        self._inputs: Inputs | None = None
        self._output: Any = None
        """Of the call that is planned, on fakes."""
        self._autocast: Autocast | None = None
        self._is_loss_told = False
        self._begin()

    def _begin(self) -> None:
        """Begin with nothing planned."""
        from fxmem.compiled.backend import Backend, held_weakly
        from fxmem.compiled.lower import BREAKS, whole_graphs

        self._backend, self._breaks, self._whole_graphs = Backend(self.settings, self._around), BREAKS, whole_graphs
        self._backend.explain = self.explain
        self._compile = partial(torch.compile, backend=held_weakly(self._backend), fullgraph=True, dynamic=False)
        self._calls: dict[tuple[int, ...], Callable[..., Any]] = {}
        """By the places of outputs that the loss does not read."""
        self._unread: dict[Any, tuple[int, ...]] = {}
        """These, by the kind of a call."""

    def plan_anew(self, step: TrainingStep) -> None:
        """Forget all plans; those to come are for ``step``, of this method and the others."""
        self.settings = replace(self.settings, step=step)
        self._begin()
        for method in (*self.methods.values(), *self.set_forwards.values()):
            method.plan_anew(step)

    def raise_budget(self, budget_bytes: int) -> None:
        """Plan within this budget from now on."""
        self.settings = replace(self.settings, budget_bytes=budget_bytes)
        self._begin()

    def explain(self, error: BaseException) -> None:
        """Add to an error of memory what was planned, what is there, and what to do."""
        planned = None
        if self._backend.reports:
            report = self.report
            planned = Planned(
                report.predicted_peak_bytes,
                report.budget_bytes,
                f"compiled with nothing recomputed it takes {in_units(report.keep_all_peak_bytes)}",
                None,
                'fxmem.frontier(model, x, backend="inductor")',
                options=', backend="inductor"',
            )
        add_post_mortem(error, self.original, planned)

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
            forward = self.original.forward
            self._calls[unread] = self._compile(_own(_without_gradients(forward, unread) if unread else forward))
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

    def prepare(self, example_args: Any = None, example_kwargs: dict[str, Any] | None = None) -> CompiledReport:
        """Plan for a call with these arguments now; return the report. Nothing runs and no kernel is compiled.

        Errors: those of :func:`fxmem.optimize`.
        """
        self._only_planned(self._backend.plan_only, example_of(self.original, example_args, example_kwargs))
        return self.report

    def frontier(self, inputs: Inputs) -> tuple[CompiledCost, ...]:
        """Return what every budget costs for a call like this one."""
        found: list[CompiledCost] = []
        self._only_planned(lambda planner: found.extend(planner.frontier()), inputs)
        return tuple(found)

    def _only_planned(self, plan: Callable[[GraphPlanner], Any], inputs: Inputs) -> None:
        from fxmem.compiled.backend import Planned

        seen: list[GraphPlanner] = []

        def noted(planner: GraphPlanner) -> None:
            seen.append(planner)
            plan(planner)

        self._backend.only_plan = noted
        region = region_of_step(self.original, self.settings.step)
        try:
            with region.enter() if region else nullcontext(), torch.inference_mode(False), torch.enable_grad():
                self.call(*inputs.call())
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
        parameters, buffers = tuple(model.parameters()), tuple(model.buffers())
        around = surroundings_of((*buffers, *tensors), parameters, step)
        around = with_unread(around, batch, (*parameters, *buffers, *tensors))
        with self._autocast.enter() if self._autocast else nullcontext():
            output = self._output_on_fakes(inputs) if self._output is None else self._output
            if step.loss_fn is None and self.settings.budget_bytes is not None:
                self._tell_of_loss(output)
            return with_loss(around, output, step)

    def _tell_of_loss(self, output: Any) -> None:
        """Warn, once, where ``output`` is no loss and none was told of: what is computed outside is not seen."""
        learning = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        is_loss = isinstance(getattr(output, "loss", None), torch.Tensor) or all(t.numel() == 1 for t in learning)
        if is_loss or self._is_loss_told:
            return
        self._is_loss_told = True
        warnings.warn(
            f"{type(self.original).__name__} returns no loss: what is computed outside of it is not seen by "
            'backend="inductor", so its memory is not counted and comes on top of the budget. To plan for it, pass a '
            "function of output and targets that is like it in memory: fxmem.optimize(..., loss_fn=..., targets=...).",
            stacklevel=level_of_user(),
        )

    def _step_for(self, inputs: Inputs) -> TrainingStep:
        return self.settings.seen_with(inputs.leaves).step.for_inputs(inputs.leaves)

    def _output_on_fakes(self, inputs: Inputs) -> Any:
        """Return what a training call returns, as fakes with their graph; while torch compiles, too.

        Errors: ``CaptureError`` where that takes values.
        """
        try:
            with without_modes():
                return self._output_in(FakeWorld(inputs.leaves), inputs)
        except OF_FAKES as error:
            where = raised_in(error, self.original.named_modules())
            raise CaptureError(
                f"torch.compile cannot follow the model in one graph, which a budget needs: {first_lines(error)}{where} "
                'takes values, which only a run has. Train it with backend="eager", the default, or keep that out of it'
            ) from error

    def _output_in(self, world: FakeWorld, inputs: Inputs) -> Any:
        model = self.original
        args, kwargs = Inputs(tuple(world.fake_all(list(inputs.leaves))), inputs.spec).call()
        with tensors_restored(model), world.active(model), world.state_of(model), torch.enable_grad(), ScalarReads():
            output = model.forward(*args, **kwargs)
        looked_into(output)
        return output


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


class CompiledModule(PlannedModule):
    """What every model compiled under a budget is, beside of its own class. ``module.fxmem`` has report and original.

    Training-mode calls with grad enabled run compiled, planned at the first call of each kind. All others run the original.
    Hooks are the original's, and run around the compiled code.
    """

    _fxmem: CompiledNamespace
    _fxmem_namespace = CompiledNamespace

    @property
    def fxmem(self) -> CompiledNamespace:
        """Reports and original of this module."""
        return self._fxmem


def bounded_settings(model: torch.nn.Module, example: Example, budget: BudgetArguments, options: Options) -> Settings:
    """Return what was asked for. Errors: ``InputError`` for what is unknown, or only the eager backend takes."""
    settings = _settings_of(options)
    budget_gb, given, budget_mb = budget
    bound = parse_budget(budget_gb, given, model, settings.step.optimizer, *example, budget_mb=budget_mb)
    return _with_budget(settings, bound.nbytes, bound.share)


def compiled_module(
    model: torch.nn.Module,
    example: Example,
    budget: BudgetArguments,
    options: Options,
    methods: Sequence[str] = (),
    *,
    in_place: bool = False,
) -> CompiledModule:
    """Return ``model`` compiled under a budget, planned for the example if there is one. ``in_place``: ``model`` itself."""
    from fxmem.compiled.refusals import check_settings

    check_optimizable(model)
    check_settings({})
    settings = bounded_settings(model, example, budget, options)
    make = optimize_in_place if in_place else optimized
    made = make(CompiledModule, model, settings, methods)
    if any(given is not None for given in example):
        try:
            with told(f"planning the compiled step of {type(model).__name__}", CAPTURE_SECONDS + settings.plan_seconds):
                made.fxmem.prepare(*example)
        except BaseException:
            restored(made)
            raise
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
        return module.fxmem.frontier(inputs)
