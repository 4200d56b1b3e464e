"""The compiler on one page: capture, profile, rewrite for less memory, plan, emit, verify.

In: a :class:`CompileContext`, which holds a model, one call's inputs and what the user asked for. Out: a
:class:`Compiled`: the emitted GraphModule, its plan and report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxmem.capture.export import capture
from fxmem.capture.graph import CaptureGraph
from fxmem.capture.joint_steps import runtime_for
from fxmem.emitted import (
    Emitted,
    ProgramJudge,
    bound_bytes,
    emit_if_all_fits,
    emit_taken_over,
    emit_within_budget,
    floor_bytes,
    is_on_cuda,
    least_bound_bytes,
    least_of,
    leaves_room,
    room_bytes,
    stepped_in_backward,
    with_budget,
)
from fxmem.errors import InfeasibleBudgetError
from fxmem.frontiers import begin_in_background, found, frontier_of
from fxmem.ir import ChoiceMade, FrontierPoint, GraphProfile, Plan
from fxmem.passes import compress_saved, lean_backwards
from fxmem.passes.chunk import Chunk
from fxmem.passes.compress_saved import CompressSaved
from fxmem.passes.context import CallScope, CompileContext, Settings
from fxmem.passes.contract import Pass, run_passes
from fxmem.passes.inplace import Inplace
from fxmem.passes.lean_backwards import LeanBackwards
from fxmem.passes.reorder import Reorder
from fxmem.planners.background import Planning
from fxmem.planners.bound import lower_bound
from fxmem.planners.plan_check import check_plan
from fxmem.planners.plan_transfer import Planned, carried_over, of_same_graph
from fxmem.planners.simulate import simulate
from fxmem.profiling.op_benchmark import device_measured, with_measured_times
from fxmem.profiling.optimizer_step import RecordedStep
from fxmem.profiling.profile import Profiled
from fxmem.profiling.roofline import measured_launch_seconds, priced_by_bound
from fxmem.profiling.training_step import TrainingStep
from fxmem.profiling.verify import eager_step, verify
from fxmem.progress import stage
from fxmem.report.modules import module_rows
from fxmem.report.text import Report, build_report
from fxmem.runtime.programs.joint import JointSteps
from fxmem.runtime.step_in_backward import has_foreign_hooks
from fxmem.torch_patches import as_in_training

__all__ = ["CompileContext", "Compiled", "Settings", "compile_model"]

PASSES: tuple[Pass, ...] = (Reorder(), Inplace())
"""Of every graph."""
PASSES_FOR_SHORT_MEMORY: tuple[Pass, ...] = (LeanBackwards(), CompressSaved())
"""Then, of those whose step does not fit its budget as it is: these cost time."""
PASSES_BELOW_THE_FLOOR: tuple[Pass, ...] = (Chunk(),)
"""Of these too, before all others, if they are allowed: they change numbers."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One signature, compiled."""

    graph_module: fx.GraphModule
    captured: CaptureGraph
    plan: Plan
    _report: Report | Callable[[], Report]
    """Of a size that was not planned for, it is made when it is asked for."""
    planned: Planned | None = None
    """Its frontier, if it was planned for and not taken over."""
    seen: RecordedStep | None = None
    """What other runs of the step may rely on."""
    joint: JointSteps | None = None
    """What runs its steps as programs, if that is asked for."""
    judge: ProgramJudge | None = None
    """Tells what such a step takes."""
    later: Later | None = None
    """Under a quick plan: the search for the others, which goes on beside."""

    def run(self, leaves: Sequence[Any], held_bytes: int = 0) -> tuple[Any, Sequence[Any]]:
        """Return the model's output for a call with these leaves, and its leaves. ``held_bytes``: of earlier outputs."""
        if self.joint is None:
            return self.captured.run_in_training(self.graph_module, leaves)
        with self.captured.effects.read_by(self.graph_module):
            outputs = self.joint.run(leaves, held_bytes)
        return self.captured.unflatten(outputs), outputs

    @property
    def planned_report(self) -> Report:
        """What was planned, for the size of the call, on the tape."""
        return self._report if isinstance(self._report, Report) else self._report()

    @property
    def report(self) -> Report:
        """The same, with the peak of a step as it runs."""
        report, judge = self.planned_report, self.judge
        if judge is None or judge.peak_bytes is None or self.joint is None or self.joint.runtime != "program":
            return report
        return replace(report, predicted_peak_bytes=judge.peak_bytes, cuda=judge.cuda)


def compile_model(
    context: CompileContext, captured: CaptureGraph | None = None, earlier: Sequence[Planned] = ()
) -> Compiled:
    """Return the model compiled for one signature; ``captured``: its graph, if already there.

    ``earlier``: other sizes of that graph, planned before, whose plans are taken over where they are as good here. Errors:
    ``CaptureError``, ``ProfileError``, ``InfeasibleBudgetError``; nothing big is allocated before they show.
    """
    start, settings = time.perf_counter(), context.settings
    captured = captured or capture(context.model, context.inputs, context.autocast)
    stage("profiling")
    passed = run_passes(captured, PASSES, context)
    profiled, planned = context.profile_of(passed), None
    eager = eager_step(context.model, captured, context.inputs, context.step, profiled.seen)
    context = with_budget(context, eager, profiled)
    settings = context.settings
    emitted = emit_if_all_fits(profiled, context)
    if emitted is None:
        profiled = context.profile_of(short_of_memory(captured, passed, context))
        profiled, emitted = emit_taken_over(profiled, context, earlier)
    planning: Planning | None = None
    if emitted is None:
        profiled = with_times(profiled, context)
        if settings.background and (begun := begin_in_background(profiled, context)):
            emitted, planning = begun
    if emitted is None:
        profiled, planned, emitted = _within_budget(profiled, context, captured)
    steps = Steps(context, captured, profiled, eager.peak_bytes, start)
    compiled = steps.end(emitted, planned)
    return compiled if planning is None else replace(compiled, later=Later.of(steps, planning))


def _within_budget(
    profiled: Profiled, context: CompileContext, captured: CaptureGraph
) -> tuple[Profiled, Planned, Emitted]:
    """Return what is planned within the budget: with prices of the tape where that has no room for programs. Errors:
    ``InfeasibleBudgetError``."""
    planned = _planned_within(profiled, context, captured)
    if not context.settings.measure or leaves_room(profiled, context, planned[-1]):
        return planned
    context = context.with_settings(runtime="tape")
    try:
        priced = _planned_within(with_times(context.profile_of(profiled.captured), context), context, captured)
    except InfeasibleBudgetError:  # by other prices another frontier is found
        return planned
    least, other = (least_of(each[1].points).peak_bytes for each in (planned, priced))
    return priced if other <= least else planned


def _planned_within(
    profiled: Profiled, context: CompileContext, captured: CaptureGraph
) -> tuple[Profiled, Planned, Emitted]:
    """Plan for forms that were chosen for the budget; where what comes on top of planned peaks is too much, for those that
    take least, whose floor is told of the model. Errors: ``InfeasibleBudgetError``."""
    planned = Planned(profiled.profile, frontier_of(profiled.profile, context))
    try:
        return profiled, planned, emit_within_budget(profiled, context, planned.points)
    except InfeasibleBudgetError:
        least = profile_for_short_memory(captured, context.with_settings(budget_bytes=None))
        if least.profile == profiled.profile:
            raise
    planned = Planned(least.profile, frontier_of(least.profile, context))
    return least, planned, emit_within_budget(least, context, planned.points)


@dataclass(frozen=True, slots=True)
class Steps:
    """What was done to compile for one signature, before a plan is taken."""

    context: CompileContext
    captured: CaptureGraph
    profiled: Profiled
    """Of what is planned: of the same, or where memory is short of what all passes made."""
    eager_peak_bytes: int
    start: float
    """By the clock."""

    def end(self, emitted: Emitted, planned: Planned | None) -> Compiled:
        """Return what is compiled under the plan taken. ``planned``: the frontier that it is of."""
        context, profiled, settings = self.context, self.profiled, self.context.settings
        report = build_report(
            profiled.profile,
            emitted.point,
            emitted.verification,
            budget_bytes=settings.budget_bytes,
            eager_peak_bytes=self.eager_peak_bytes,
            least_bytes=floor_bytes(profiled, context, planned.points, emitted)
            if planned
            else UnplannedFloor.of(self.captured, profiled.devices, context),
            peak_step=emitted.timeline.peak_step,
            bound_seconds=_bound_seconds(profiled.profile, emitted.point, settings),
            plan_seconds=time.perf_counter() - self.start,
            notes=_notes(settings, profiled.captured, stepped_in_backward(profiled, context, emitted)),
            inplace=profiled.captured.inplace,
            cuda=emitted.cuda,
            modules=module_rows(context.model, profiled.profile, emitted.point.plan, context.step),
            points=planned.points if planned else (),
        )
        compiled = Compiled(emitted.graph_module, profiled.captured, emitted.point.plan, report, planned, profiled.seen)
        return with_programs(compiled, context, room_in(report, context.step))


def with_programs(
    compiled: Compiled, context: CompileContext, room_bytes: int | None, num_watched: int = 1
) -> Compiled:
    """Return ``compiled`` with what runs the steps of ``context`` as programs, if that is asked for."""
    captured, graph_module = compiled.captured, compiled.graph_module
    judge = ProgramJudge.of(context, captured, graph_module, compiled.seen, room_bytes)
    return replace(
        compiled, joint=context.joint_steps(captured, graph_module, room_bytes, judge, num_watched), judge=judge
    )


def room_in(report: Report, step: TrainingStep) -> int | None:
    """Return :func:`~fxmem.emitted.room_bytes` of the plan on the tape that ``report`` is of."""
    return room_bytes(report.timeline, report.cuda, report.budget_bytes, step)


def peak_of(compiled: Compiled, context: CompileContext) -> int:
    """Return the peak in bytes of the step that ``context`` asks for, under what is compiled for perhaps another one."""
    graph, captured, timeline = compiled.graph_module, compiled.captured, compiled.report.timeline
    with as_in_training():
        verification, events = verify(graph, captured, context.inputs, timeline, context.step)
    on_cuda = any(p.is_cuda for p in captured.parameters)
    return bound_bytes(verification.verified_bytes, events.peaks() if on_cuda else None, context.settings)


# -- profiles and frontiers ------------------------------------------------------------------------------------------


def profile_for_short_memory(captured: CaptureGraph, context: CompileContext) -> Profiled:
    """Return the profile that plans are made on where a step does not fit as it is, with the times asked for."""
    stage("profiling")
    graph = short_of_memory(captured, run_passes(captured, PASSES, context), context)
    return with_times(context.profile_of(graph), context)


def short_of_memory(captured: CaptureGraph, graph: CaptureGraph, context: CompileContext) -> CaptureGraph:
    """Return what is planned where a step does not fit as it is. ``graph``: what :data:`PASSES` made of ``captured``."""
    asked_for = [each for each in PASSES_BELOW_THE_FLOOR if each.enabled(context.settings)]
    below = run_passes(captured, asked_for, context)
    graph = graph if below is captured else run_passes(below, PASSES, context)
    return run_passes(graph, PASSES_FOR_SHORT_MEMORY, context)


def with_times(profiled: Profiled, context: CompileContext) -> Profiled:
    """Return ``profiled`` with op times measured on the model's device, if that is asked for, and priced by what bounds the
    step, device or host."""
    settings, launch_seconds = context.settings, context.hardware.launch_seconds
    stage("measuring op times" if settings.measure else "planning")
    if settings.measure:
        on_tape = runtime_for(settings.runtime, settings.budget_of, profiled.devices) == "tape"
        profiled = with_measured_times(profiled, cache=settings.cache, on_tape=on_tape)
        device = device_measured(profiled)
        if device is not None and device.type == "cuda":
            launch_seconds = measured_launch_seconds(device)
            torch.cuda.empty_cache()  # of what was measured
    return replace(profiled, profile=priced_by_bound(profiled.profile, launch_seconds))


def _bound_seconds(profile: GraphProfile, point: FrontierPoint, settings: Settings) -> float:
    """Return seconds below which no plan within the budget stays; nothing is known of plans that offload."""
    if "offload" in settings.allow:
        return 0.0
    return lower_bound(profile, settings.budget_bytes or point.peak_bytes, point.recompute_seconds)


def least_bytes_within(profiled: Profiled, context: CompileContext, planned: list[Planned], budget_bytes: int) -> int:
    """Return the least budget that a plan of an earlier size can keep, if that is within ``budget_bytes``; else that of any
    plan. ``planned``: sizes of the same graph, to which this one is added if it had to be planned for."""
    profile, settings = profiled.profile, context.settings
    points = carried_over(profile, of_same_graph(profile, planned)[:1], settings.policy)
    if points and (least_bytes := least_bound_bytes(profiled, context, points)) <= budget_bytes:
        return least_bytes
    points = frontier_of(profile, context)
    planned.append(Planned(profile, points))
    return least_bound_bytes(profiled, context, points)


@dataclass(frozen=True, slots=True)
class Later:
    """A plan that is searched for in the background, to take the place of a quick one."""

    steps: Steps
    """Without the batch, which is not kept for this."""
    planning: Planning
    scope: CallScope

    @staticmethod
    def of(steps: Steps, planning: Planning) -> Later:
        without = replace(steps, context=steps.context.without_values())
        return Later(without, planning, CallScope.around(steps.profiled.devices))

    def compiled(self) -> Compiled:
        """Return what is compiled under the plan found, waiting for it if need be.

        Errors: ``PlanningFailedError``, and those of :func:`compile_model`.
        """
        profiled, context = self.steps.profiled, self.steps.context
        points = found(profiled.profile, context.settings, self.planning.points())
        with self.scope.entered():
            emitted = emit_within_budget(profiled, context, points)
            return self.steps.end(emitted, Planned(profiled.profile, points))


@dataclass(slots=True)
class UnplannedFloor:
    """The least peak of a step that was not planned for: planned for once, when it is asked for."""

    captured: CaptureGraph
    context: CompileContext
    """Without the batch, which is not kept for this."""
    scope: CallScope
    _known: int | None = field(default=None)

    @staticmethod
    def of(captured: CaptureGraph, devices: tuple[torch.device, ...], context: CompileContext) -> UnplannedFloor:
        return UnplannedFloor(captured, context.without_values(), CallScope.around(devices))

    def __call__(self) -> int:
        if self._known is None:
            with self.scope.entered():
                context = self.context.with_settings(budget_bytes=None)
                profiled = profile_for_short_memory(self.captured, context)
                self._known = floor_bytes(profiled, context, frontier_of(profiled.profile, context))
        return self._known


def report_at(context: CompileContext, compiled: Compiled, floor: UnplannedFloor, origin: str) -> Report:
    """Return the report of ``compiled`` in ``context``; it was planned for what ``origin`` says. Errors: as
    :func:`fxmem.profiling.verify.verify`, and ``ValueError`` if the plan is none for this size."""
    start, captured = time.perf_counter(), compiled.captured
    profiled = context.profile_of(captured)
    profile, plan = profiled.profile, replace(compiled.plan, planner=f"{compiled.plan.planner}, {origin}")
    check_plan(profile, plan)
    timeline, settings = simulate(profile, plan), context.settings
    point = FrontierPoint(plan, timeline.peak_bytes, timeline.recompute_seconds)
    verification, events = verify(
        compiled.graph_module, captured, context.inputs, timeline, context.step, profiled.seen
    )
    return build_report(
        profile,
        point,
        verification,
        budget_bytes=settings.budget_bytes,
        eager_peak_bytes=eager_step(context.model, captured, context.inputs, context.step, profiled.seen).peak_bytes,
        least_bytes=floor,
        peak_step=timeline.peak_step,
        bound_seconds=_bound_seconds(profile, point, settings),
        plan_seconds=time.perf_counter() - start,
        notes=_notes(settings, captured),
        inplace=captured.inplace,
        cuda=events.peaks() if is_on_cuda(profiled) else None,
        modules=module_rows(context.model, profile, plan, context.step),
    )


# -- what the user is told --------------------------------------------------------------------------------------------


def _notes(settings: Settings, captured: CaptureGraph, made: tuple[ChoiceMade, ...] = ()) -> tuple[str, ...]:
    notes = []
    step = settings.step
    if step.optimizer is None:
        notes.append("no optimizer is counted")
    elif isinstance(step.optimizer, str):
        notes.append(f"optimizer state and step are those of {step.optimizer} (optimizer= changes that)")
    if step.accumulate:
        notes.append("gradients of earlier micro-batches are there at the start of the step")
    if step.loss_fn is None:
        notes.append("the loss is output.loss, or the sum of the outputs where there is none (loss_fn= changes that)")
    num_hooked = sum(has_foreign_hooks(p) for p in captured.parameters)
    if num_hooked:
        notes.append(f"what the hooks on {num_hooked} parameters allocate is not counted")
    if torch.backends.cudnn.benchmark and any(p.is_cuda for p in captured.parameters):
        notes.append(
            "torch.backends.cudnn.benchmark is on: a convolution that runs again may choose another kernel, and bits differ"
        )
    notes += [*lean_backwards.notes_of(captured), *compress_saved.notes_of(captured)]
    return (*notes, *map(str, (*captured.choices, *made)))
