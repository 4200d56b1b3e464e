"""``module.fxmem``: what fxmem knows of an optimized module, and how its calls are run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import fx

from fxmem.api.arguments import check_alone, example_of, region_of_step
from fxmem.api.loop_plans import LoopPlans
from fxmem.api.post_mortem import Planned, add_post_mortem
from fxmem.capture.graph import Inputs, device_of
from fxmem.devices import DeviceModel
from fxmem.errors import InputError, NotPlannedError, in_units
from fxmem.fake.fake_tensors import FakeWorld
from fxmem.fake.stand_in import standing_in
from fxmem.ir import Plan
from fxmem.passes.context import Settings
from fxmem.pipeline import Compiled
from fxmem.profiling.training_step import TrainingStep
from fxmem.report.text import Report
from fxmem.runtime.autocast import Autocast
from fxmem.runtime.out_of_memory import explaining
from fxmem.runtime.step_in_backward import SteppedInBackward, optimizer_for
from fxmem.torch_private import FakeTensor, in_dual_level, in_transform, saved_tensor_hooks_allowed


class Namespace:
    """``module.fxmem``: what fxmem knows of an optimized module. All of it is of the kind of call made last.

    ``original``: the model as it was given. ``settings``: what was asked for. ``methods``: by name, the same for each other
    method that is planned. Before a call has been planned for, ``report`` and ``plan`` are those of :meth:`prepare_for`;
    without, they raise ``NotPlannedError``, as ``graph_module`` does.
    """

    def __init__(self, original: torch.nn.Module, settings: Settings) -> None:
        self.original, self.settings = original, settings
        self.methods: dict[str, Namespace] = {}
        self.set_forwards: dict[Callable[..., Any], Namespace] = {}
        """By function, the same for forwards that were set on the optimized module and go around its own."""
        self.said_of: dict[Callable[..., Any], str] = {}
        """Of those whose user has not heard of it, the path of the submodule that they call."""
        self.plans = LoopPlans(original, settings)
        self.choice = ""
        """With ``backend="auto"``: what was chosen, and why."""
        self._elsewhere: tuple[Plan, Report] | None = None
        """What was planned for a GPU that need not be here."""
        self._stepped: SteppedInBackward | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """With ``allow=(..., "optimizer_in_backward")``: the optimizer that steps the parameters within the backward, for
        schedulers, ``state_dict`` and ``load_state_dict``. Its ``step`` and ``zero_grad`` do nothing, and say so once.

        Errors: ``InputError`` without that choice.
        """
        if self._stepped is None:
            raise InputError('there is an optimizer here only with allow=(..., "optimizer_in_backward")')
        return self._stepped.optimizer

    def step_in_backwards(self) -> None:
        """Let backwards step the parameters from now on, if that is asked for. Errors: ``InputError``."""
        if self.settings.step.in_backward:
            parameters = [p for p in self.original.parameters() if p.requires_grad]
            self._stepped = SteppedInBackward(optimizer_for(self.settings.step.optimizer, parameters), parameters)

    def step_after_backwards(self) -> None:
        """Take back :meth:`step_in_backwards`."""
        if self._stepped is not None:
            self._stepped.detach()
            self._stepped = None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the original returns for a training call, computed under the plan of such calls."""
        _check_mode()
        inputs = Inputs.of(args, kwargs, self.original)
        region = Autocast.of(device_of(self.original).type)
        with explaining(self.explain):
            try:
                return self.plans.run(inputs, region, (args, kwargs))
            except torch.OutOfMemoryError as error:
                self.explain(error)
                raise

    def explain(self, error: BaseException) -> None:
        """Add to an error of memory what was planned, what is there, and what to do."""
        latest, planned = self.plans.latest, None
        if latest is not None:
            report = latest.report
            planned = Planned(
                report.predicted_peak_bytes,
                report.budget_bytes,
                f"as it is it takes {in_units(report.eager_peak_bytes)}",
                report.to_dict()["floor_bytes"],
                "fxmem.estimate(model, x).floor_bytes",
            )
        add_post_mortem(error, self.original, planned)

    def raise_budget(self, budget_bytes: int) -> None:
        """Plan within this budget from now on."""
        self.settings = replace(self.settings, budget_bytes=budget_bytes, budget_share=None)
        self.plans = LoopPlans(self.original, self.settings)

    def plan_anew(self, step: TrainingStep) -> None:
        """Forget all plans; those to come are for ``step``, of this method and the others."""
        step = replace(step, in_backward=self.settings.step.in_backward)
        self.settings = replace(self.settings, step=step)
        self.plans, self._elsewhere = LoopPlans(self.original, self.settings), None
        for method in (*self.methods.values(), *self.set_forwards.values()):
            method.plan_anew(step)

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

    def finish_planning(self) -> None:
        """Wait for plans that are searched for in the background (``plan="background"``): calls to come run under them.

        Where the search failed, a warning says so, and the quick plan stays.
        """
        self.plans.end_searches(wait=True)
        for method in self.methods.values():
            method.finish_planning()

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
    def runtime(self) -> str:
        """How steps of the kind used last run: ``"program"``, or ``"tape"`` and why (``runtime=`` asks for one)."""
        joint = self._latest().joint
        return "tape" if joint is None else joint.runtime

    @property
    def fused(self) -> str:
        """With ``allow=(..., "fuse")``: how many chains of ops run as one kernel each, and what of a step that gains,
        or why none do. Kernels are made when a step is written down, most often the second."""
        joint = self._latest().joint
        return "none: steps stay on the tape" if joint is None else joint.fused

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
        return tuple(t for t in held if id(t) not in own and not isinstance(t, FakeTensor))

    def _is_elsewhere(self, planned: tuple[Plan, Report] | None) -> TypeGuard[tuple[Plan, Report]]:
        """True if all that was planned for is another GPU."""
        return planned is not None and self.plans.latest is None

    def _latest(self) -> Compiled:
        if self.plans.latest is None:
            for other in self.set_forwards.values():
                if other.is_planned:
                    return other._latest()
            raise NotPlannedError(
                "this module has no plan yet: pass example_args to fxmem.optimize, or call it once in training mode"
            )
        return self.plans.latest


def _check_mode() -> None:
    """Errors: ``InputError`` where saved-tensor hooks, which recompute, cannot be."""
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
