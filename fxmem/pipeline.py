"""The compiler on one page: capture, profile, plan, rewrite, verify.

In: a model, one call's inputs, :class:`Settings`. Out: a :class:`Compiled`: the emitted GraphModule, its plan and report.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import fx

from fxmem.capture.dynamic_batch import without_values
from fxmem.capture.export import as_in_training, capture
from fxmem.capture.graph import Captured, Inputs
from fxmem.errors import InfeasibleBudgetError
from fxmem.ir import FrontierPoint, GraphProfile, Plan, Timeline, Verification
from fxmem.passes.compress_saved import notes_of, with_lean_saves
from fxmem.passes.emit import rewrite
from fxmem.passes.inplace import decide, in_place
from fxmem.planners import frontier_cache
from fxmem.planners.bound import lower_bound
from fxmem.planners.pareto import cheapest_within, pareto
from fxmem.planners.plan_check import check_plan
from fxmem.planners.plan_transfer import Planned, carried_over, counterparts, of_same_graph, taken_over
from fxmem.planners.policy import Rule, constrain, enforce, matches
from fxmem.planners.registry import PLANNERS
from fxmem.planners.simulate import keep_all, simulate
from fxmem.profiling.caching_allocator import Allocation
from fxmem.profiling.op_benchmark import with_measured_times, with_times_like
from fxmem.profiling.profile import Profiled, profile
from fxmem.profiling.roofline import Hardware, hardware_for
from fxmem.profiling.training_step import TrainingStep
from fxmem.profiling.verify import cuda_peaks, eager_peak_bytes, verify
from fxmem.report.text import Report, build_report, place_of_tick
from fxmem.runtime.autocast import Autocast, autocast_as_in_forward, casts_kept


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for, checked. ``budget_bytes`` None: as little recomputation as possible, no bound."""

    budget_bytes: int | None
    step: TrainingStep
    planner: str
    plan_seconds: float
    """CPU time of the planner's thread."""
    hardware: Hardware | None
    """None: the preset of the model's device."""
    measure: bool = False
    """Whether op times are measured on the model's device."""
    policy: tuple[Rule, ...] = ()
    cache: bool = True
    """Whether frontiers and measured op times are kept on disk."""
    inplace: bool = True
    """Whether ops that may write over their input do."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One signature, compiled."""

    graph_module: fx.GraphModule
    captured: Captured
    plan: Plan
    report: Report
    planned: Planned | None = None
    """Its frontier, if it was planned for and not taken over."""


def compile_model(
    model: torch.nn.Module,
    inputs: Inputs,
    settings: Settings,
    autocast: Autocast | None = None,
    captured: Captured | None = None,
    earlier: Sequence[Planned] = (),
) -> Compiled:
    """Return ``model`` compiled for the signature of ``inputs``; ``captured``: its graph, if already there.

    ``earlier``: other sizes of that graph, planned before, whose plans are taken over where they are as good here. Errors:
    ``CaptureError``, ``ProfileError``, ``InfeasibleBudgetError``; nothing big is allocated before they show.
    """
    start = time.perf_counter()
    captured = captured or capture(model, inputs, autocast)
    plain = profile_as_captured(model, captured, inputs, settings)
    profiled, chosen, planned = plain, emit_if_all_fits(plain, inputs, settings), None
    if chosen is None:
        lean = profile_with_lean_saves(plain, model, inputs, settings)
        profiled, chosen = emit_taken_over(lean, model, inputs, settings, earlier)
    if chosen is None:
        profiled = with_measured_times(lean, cache=settings.cache) if settings.measure else lean
        planned = Planned(profiled.profile, frontier_of(profiled.profile, settings))
        chosen = emit_within_budget(profiled, inputs, settings, planned.points)
    eager_bytes = eager_peak_bytes(model, captured, inputs, settings.step, seen=profiled.seen)
    report = build_report(
        profiled.profile,
        chosen.point,
        chosen.verification,
        budget_bytes=settings.budget_bytes,
        eager_peak_bytes=eager_bytes,
        least_bytes=_later(plain, model, inputs, settings) if planned is None else planned.points[-1].peak_bytes,
        peak_step=chosen.timeline.peak_step,
        bound_seconds=lower_bound(
            profiled.profile, settings.budget_bytes or chosen.point.peak_bytes, chosen.point.recompute_seconds
        ),
        plan_seconds=time.perf_counter() - start,
        notes=_notes(settings, profiled.captured),
        inplace=profiled.inplace,
        cuda=cuda_peaks(chosen.events) if any(device.type == "cuda" for device in profiled.devices) else None,
    )
    return Compiled(chosen.graph_module, profiled.captured, chosen.point.plan, report, planned)


def _later(plain: Profiled, model: torch.nn.Module, inputs: Inputs, settings: Settings) -> Callable[[], int]:
    """Return a function that plans for the least peak, once, when it is called, in autocast regions as around this call;
    it does not keep the batch."""
    shapes, types = without_values(inputs), {device.type for device in plain.devices}
    around, casts = [region for kind in types if (region := Autocast.of(kind))], torch.is_autocast_cache_enabled()

    @cache
    def least_bytes() -> int:
        with ExitStack() as stack:
            for context in (as_in_training(), autocast_as_in_forward(None, plain.devices), casts_kept(casts)):
                stack.enter_context(context)
            for region in around:
                stack.enter_context(region.enter())
            profiled = profile_for_short_memory(plain, model, shapes, settings)
            return frontier_of(profiled.profile, settings)[-1].peak_bytes

    return least_bytes


def profile_model(
    model: torch.nn.Module, captured: Captured, inputs: Inputs, settings: Settings, earlier: Profiled | None = None
) -> Profiled:
    """Return the profile that plans for short memory are made on, with times of the device or of the one asked for.

    ``earlier``: a profile of another size, which spares work.
    """
    profiled = profile_as_captured(model, captured, inputs, settings, earlier)
    return profile_for_short_memory(profiled, model, inputs, settings)


def profile_as_captured(
    model: torch.nn.Module, captured: Captured, inputs: Inputs, settings: Settings, earlier: Profiled | None = None
) -> Profiled:
    """Return the profile of ``captured``, in place where that is safe, with estimated times."""
    profiled = profile(captured, inputs, _hardware(model, settings).seconds, settings.step, earlier)
    return profile_in_place(profiled, model, inputs, settings)


def profile_in_place(profiled: Profiled, model: torch.nn.Module, inputs: Inputs, settings: Settings) -> Profiled:
    """Return the profile of the same graph, in place where that is safe, with estimated times."""
    decisions = decide(profiled) if settings.inplace else ()
    if any(not decision.why_not for decision in decisions):
        captured = in_place(profiled.captured, decisions)
        profiled = profile(captured, inputs, _hardware(model, settings).seconds, settings.step, profiled)
    return replace(profiled, inplace=decisions)


def profile_for_short_memory(
    profiled: Profiled, model: torch.nn.Module, inputs: Inputs, settings: Settings
) -> Profiled:
    """Return the profile of the same graph that saves less, with times of the device or of the one asked for."""
    lean = profile_with_lean_saves(profiled, model, inputs, settings)
    return with_measured_times(lean, cache=settings.cache) if settings.measure else lean


def profile_with_lean_saves(profiled: Profiled, model: torch.nn.Module, inputs: Inputs, settings: Settings) -> Profiled:
    """Return the profile of the same graph, with calls that save less than autograd's own, with estimated times."""
    lean = with_lean_saves(profiled, lambda node: any(matches(where, node) for where, _ in settings.policy))
    if lean is profiled.captured:
        return profiled
    timer = _hardware(model, settings).seconds
    return replace(profile(lean, inputs, timer, settings.step, profiled), inplace=profiled.inplace)


def _keep_all(graph_profile: GraphProfile) -> FrontierPoint:
    plan = keep_all(graph_profile)
    return FrontierPoint(plan, simulate(graph_profile, plan).peak_bytes, 0.0)


def frontier_of(graph_profile: GraphProfile, settings: Settings) -> tuple[FrontierPoint, ...]:
    """Return the planner's points under the policy; keeping all it lets is always one of them."""
    constrained, recomputed = constrain(graph_profile, settings.policy)
    name, seconds = settings.planner, settings.plan_seconds
    points = frontier_cache.load(constrained, name, seconds) if settings.cache else None
    if points is None:
        points = PLANNERS[name](constrained, seconds=seconds)
        if settings.cache:
            frontier_cache.store(constrained, name, seconds, points)
    return pareto(enforce(constrained, pareto((_keep_all(graph_profile), *points)), recomputed))


def least_peak_bytes(profile: GraphProfile, settings: Settings, planned: list[Planned], budget_bytes: int) -> int:
    """Return the least peak of a plan, or that of any plan of an earlier size that is within the budget.

    ``planned``: sizes of the same graph, to which this one is added if it had to be planned for.
    """
    points = carried_over(profile, of_same_graph(profile, planned)[:1], settings.policy)
    if cheapest_within(points, budget_bytes) is None:
        points = frontier_of(profile, settings)
        planned.append(Planned(profile, points))
    return min(point.peak_bytes for point in points)


@dataclass(frozen=True, slots=True)
class Emitted:
    point: FrontierPoint
    timeline: Timeline
    graph_module: fx.GraphModule
    verification: Verification
    events: tuple[Allocation, ...]
    """Every allocation and free of the emitted module's step, as verified."""


def emit_if_all_fits(profiled: Profiled, inputs: Inputs, settings: Settings) -> Emitted | None:
    """Emit the plan that keeps all the policy lets; None where its peak exceeds the budget."""
    constrained, recomputed = constrain(profiled.profile, settings.policy)
    point = pareto(enforce(constrained, [_keep_all(profiled.profile)], recomputed))[0]
    most_bytes = math.inf if settings.budget_bytes is None else settings.budget_bytes
    if point.peak_bytes > most_bytes:
        return None
    emitted = _emit(profiled, inputs, settings.step, point)
    return emitted if emitted.verification.verified_bytes <= most_bytes else None


def emit_taken_over(
    profiled: Profiled, model: torch.nn.Module, inputs: Inputs, settings: Settings, earlier: Sequence[Planned]
) -> tuple[Profiled, Emitted | None]:
    """Emit the cheapest plan of an earlier size, by the times of the nearest one; None where none is good enough."""
    earlier = of_same_graph(profiled.profile, earlier)
    if not earlier:
        return profiled, None
    assert settings.budget_bytes is not None, "without a budget all fits"
    hardware, like = _hardware(model, settings), earlier[0].profile
    profiled = with_times_like(profiled, like, counterparts(profiled.profile, like), hardware.seconds)
    points = taken_over(profiled.profile, earlier, settings.policy, settings.budget_bytes)
    return profiled, _emit_cheapest(profiled, inputs, settings, points)


def emit_within_budget(
    profiled: Profiled, inputs: Inputs, settings: Settings, points: tuple[FrontierPoint, ...]
) -> Emitted:
    """Emit the cheapest point whose *verified* peak is within the budget. Errors: ``InfeasibleBudgetError``."""
    emitted = _emit_cheapest(profiled, inputs, settings, points)
    if emitted is None:
        assert settings.budget_bytes is not None
        raise _infeasible(profiled.profile, points, settings.budget_bytes)
    return emitted


def _emit_cheapest(
    profiled: Profiled, inputs: Inputs, settings: Settings, points: tuple[FrontierPoint, ...]
) -> Emitted | None:
    """Where a verified peak exceeds the budget though the planned one did not, plan again that much lower."""
    budget_bytes = settings.budget_bytes
    limit_bytes = points[0].peak_bytes if budget_bytes is None else budget_bytes
    while (point := cheapest_within(points, limit_bytes)) is not None:
        emitted = _emit(profiled, inputs, settings.step, point)
        verified_bytes = emitted.verification.verified_bytes
        if budget_bytes is None or verified_bytes <= budget_bytes:
            return emitted
        limit_bytes = min(point.peak_bytes - 1, budget_bytes - (verified_bytes - point.peak_bytes))
    return None


def _emit(profiled: Profiled, inputs: Inputs, step: TrainingStep, point: FrontierPoint) -> Emitted:
    check_plan(profiled.profile, point.plan)
    timeline = simulate(profiled.profile, point.plan)
    graph_module = rewrite(profiled, point.plan)
    events: list[Allocation] = []
    verification = verify(
        graph_module,
        profiled.captured,
        inputs,
        timeline,
        step,
        lambda *event: events.append(event),
        profiled.seen,
    )
    return Emitted(point, timeline, graph_module, verification, tuple(events))


def _infeasible(
    graph_profile: GraphProfile, points: tuple[FrontierPoint, ...], budget_bytes: int
) -> InfeasibleBudgetError:
    least = min(points, key=lambda point: point.peak_bytes)
    timeline = simulate(graph_profile, least.plan)
    tick, static = graph_profile.ticks[timeline.peak_step], graph_profile.static
    rest_bytes = max(0, tick.start_bytes - static.total_bytes)
    breakdown = (
        ("parameters", static.parameters_bytes),
        ("buffers", static.buffers_bytes),
        ("batch", static.inputs_bytes),
        ("optimizer state", static.optimizer_state_bytes),
        ("gradients of earlier micro-batches", static.gradients_bytes),
        ("gradients and loss", rest_bytes),
        ("activations and working set", least.peak_bytes - static.total_bytes - rest_bytes),
    )
    return InfeasibleBudgetError(
        budget_bytes, least.peak_bytes, breakdown, place_of_tick(graph_profile, timeline.peak_step)
    )


def _hardware(model: torch.nn.Module, settings: Settings) -> Hardware:
    """Return the hardware asked for, else the preset of the model's device."""
    if settings.hardware is not None:
        return settings.hardware
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else ""
    return hardware_for(device.type, name)


def _notes(settings: Settings, captured: Captured) -> tuple[str, ...]:
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
    num_hooked = sum(bool(p._backward_hooks or p._post_accumulate_grad_hooks) for p in captured.parameters)
    if num_hooked:
        notes.append(f"what the hooks on {num_hooked} parameters allocate is not counted")
    if torch.backends.cudnn.benchmark and any(p.is_cuda for p in captured.parameters):
        notes.append(
            "torch.backends.cudnn.benchmark is on: a convolution that runs again may choose another kernel, and bits differ"
        )
    return (*notes, *notes_of(captured))
