"""Which plan of a Pareto set is taken: the cheapest whose step, emitted and run on fakes, keeps the budget.

In: a profile, its points, a context. Out: an :class:`Emitted`. What a budget bounds may be more than a planned peak, by
what CUDA's allocator adds or a training loop holds; so each plan that is tried is judged by its own step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxmem.capture.graph import CaptureGraph, Inputs
from fxmem.capture.joint_steps import runtime_for
from fxmem.capture.written_state import written_by
from fxmem.errors import FxMemError, InfeasibleBudgetError
from fxmem.fake.stand_in import stand_in
from fxmem.ir import ChoiceMade, FrontierPoint, GraphProfile, Phase, Timeline, Verification
from fxmem.passes.context import CallScope, CompileContext, Settings
from fxmem.passes.contract import run_passes
from fxmem.passes.emit import Emit
from fxmem.planners.pareto import cheapest_within, pareto
from fxmem.planners.plan_check import check_plan
from fxmem.planners.plan_transfer import Planned, counterparts, of_same_graph, taken_over
from fxmem.planners.policy import constrain, enforce
from fxmem.planners.simulate import keep_all, simulate
from fxmem.profiling.allocator_state import MOST_UNSPLIT_BYTES, AllocatorPeaks
from fxmem.profiling.op_benchmark import with_times_like
from fxmem.profiling.optimizer_step import RecordedStep
from fxmem.profiling.profile import Profiled
from fxmem.profiling.training_step import TrainingStep
from fxmem.profiling.verify import FakeStep, emitted_step, verify
from fxmem.progress import stage
from fxmem.report.peak import place_of

SLACK = 0.003
"""Of a budget: what programs took on the emulated H100 beyond the plan was at most .0024 in 144 steps of 24 models."""
MOST_TRIED = 6
"""Points that are emitted where the least of a loop is looked for."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """A plan written into the graph, and its step as it ran on fakes."""

    point: FrontierPoint
    timeline: Timeline
    graph_module: fx.GraphModule
    verification: Verification
    cuda: AllocatorPeaks | None
    """On CUDA: what the caching allocator makes of the step."""
    bound_bytes: int
    """What a budget bounds (:func:`bound_bytes`)."""


def floor_bytes(
    profiled: Profiled, context: CompileContext, points: Sequence[FrontierPoint], emitted: Emitted | None = None
) -> int:
    """Return the least budget to tell of that one of ``points`` keeps; ``emitted``: one of them, if it is there already."""
    return least_bound_bytes(profiled, context, points, emitted) + _room_told_bytes(profiled, context.settings)


def least_bound_bytes(
    profiled: Profiled, context: CompileContext, points: Sequence[FrontierPoint], emitted: Emitted | None = None
) -> int:
    """Return the least that one of ``points`` takes of what a budget bounds."""
    least = least_of(points)
    if not is_on_cuda(profiled):
        return least.peak_bytes
    if emitted is None or emitted.point is not least:
        emitted = emit_point(profiled, context, least)
    return emitted.bound_bytes


def _room_told_bytes(profiled: Profiled, settings: Settings) -> int:
    """Return what is told on top of the least that a step takes now, so that it can be had later too: on a GPU another
    moment finds other free blocks, and one that is left unsplit counts whole."""
    varies = is_on_cuda(profiled) and settings.budget_of == "allocated" and stand_in() is None
    return MOST_UNSPLIT_BYTES if varies else 0


def emit_if_all_fits(profiled: Profiled, context: CompileContext) -> Emitted | None:
    """Emit the plan that keeps all the policy lets; None where its peak exceeds the budget."""
    settings = context.settings
    constrained, recomputed = constrain(profiled.profile, settings.policy)
    point = pareto(enforce(constrained, [keeping_all(profiled.profile)], recomputed))[0]
    most_bytes = math.inf if settings.budget_bytes is None else settings.budget_bytes
    if point.peak_bytes > most_bytes:
        return None
    emitted = emit_point(profiled, context, point)
    return emitted if emitted.bound_bytes <= most_bytes else None


def emit_taken_over(
    profiled: Profiled, context: CompileContext, earlier: Sequence[Planned]
) -> tuple[Profiled, Emitted | None]:
    """Emit the cheapest plan of an earlier size, by the times of the nearest one; None where none is good enough."""
    earlier, settings = of_same_graph(profiled.profile, earlier), context.settings
    if not earlier:
        return profiled, None
    assert settings.budget_bytes is not None, "without a budget all fits"
    like = earlier[0].profile
    profiled = with_times_like(profiled, like, counterparts(profiled.profile, like), context.hardware.seconds)
    points = taken_over(profiled.profile, earlier, settings.policy, settings.budget_bytes)
    return profiled, emit_cheapest(profiled, context, points)


def emit_within_budget(profiled: Profiled, context: CompileContext, points: tuple[FrontierPoint, ...]) -> Emitted:
    """Emit the cheapest point whose *verified* peak is within the budget. Errors: ``InfeasibleBudgetError``."""
    emitted = emit_cheapest(profiled, context, points)
    if emitted is None:  # what comes on top of a planned peak differs from point to point: the least may fit still
        budget_bytes = context.settings.budget_bytes
        assert budget_bytes is not None
        emitted = _emit_least(profiled, context, points)
        if emitted.bound_bytes > budget_bytes:
            raise _infeasible(profiled, emitted, budget_bytes, context.settings)
    return emitted


def emit_cheapest(profiled: Profiled, context: CompileContext, points: tuple[FrontierPoint, ...]) -> Emitted | None:
    """Emit the cheapest point that keeps the budget, and where steps may run as programs one that leaves them their slack,
    if there is one; None if none keeps the budget."""
    settings = context.settings
    slack_bytes = _slack_for(profiled, context)
    if settings.budget_bytes is not None and slack_bytes:
        roomy = context.with_settings(budget_bytes=settings.budget_bytes - slack_bytes)
        emitted = _emit_cheapest(profiled, roomy, points)
        if emitted is not None:
            return emitted
    return _emit_cheapest(profiled, context, points)


def _slack_for(profiled: Profiled, context: CompileContext) -> int:
    """Return what the budget leaves to programs: copies of what the model writes, made while a step is written down, and on
    CUDA :func:`slack_of`; 0 where steps run on the tape, and where there is no budget."""
    settings = context.settings
    runs = runtime_for(settings.runtime, settings.budget_of, profiled.devices)
    if settings.budget_bytes is None or runs == "tape":
        return 0
    written = written_by(profiled.captured, context.inputs.leaves)
    return sum(t.nbytes for t in written) + (slack_of(settings.budget_bytes) if is_on_cuda(profiled) else 0)


def leaves_room(profiled: Profiled, context: CompileContext, emitted: Emitted) -> bool:
    """True if ``emitted`` leaves the budget the room that writing a program down takes; on CUDA too, where recipes have one
    price in both runtimes."""
    if is_on_cuda(profiled):
        return True
    timeline = simulate(profiled.profile, emitted.point.plan, with_steps=True)
    room = room_bytes(timeline, emitted.cuda, context.settings.budget_bytes, context.step)
    return room is None or _slack_for(profiled, context) <= room


def room_bytes(
    timeline: Timeline, cuda: AllocatorPeaks | None, budget_bytes: int | None, step: TrainingStep
) -> int | None:
    """Return what ``step`` leaves of its budget to what writes a program down: in forward and backward; on CUDA at all,
    beyond the slack. None if there is no budget. ``timeline``, with steps, and ``cuda``: of the plan on the tape. Gradients
    that go before the backward are still there where a step is written down, whose own go at once: neither counts."""
    if budget_bytes is None:
        return None
    clears, slack_bytes = step.loop.zero_grad_before_backward, 0
    written = [each for each in timeline.steps if each.phase in (Phase.FORWARD, Phase.BACKWARD)]
    most_bytes = max((each.live_bytes - clears * each.gradient_bytes for each in written), default=0)
    if cuda is not None:
        most_bytes = cuda.allocated_bytes - clears * (timeline.peak_bytes - most_bytes)
        slack_bytes = slack_of(budget_bytes)
    return budget_bytes - slack_bytes - most_bytes


def slack_of(budget_bytes: int) -> int:
    """Return how many bytes of a budget are left free for programs on CUDA: they, and the step that is written down, ask
    for no more than was planned, but the allocator may serve them from other blocks. Whether that was enough for a program
    a :class:`ProgramJudge` tells; where it is not left, nothing is written down."""
    return max(MOST_UNSPLIT_BYTES, int(SLACK * budget_bytes))


def _emit_cheapest(profiled: Profiled, context: CompileContext, points: tuple[FrontierPoint, ...]) -> Emitted | None:
    """Where what the budget bounds exceeds it though the planned peak did not, take a point that much lower."""
    budget_bytes = context.settings.budget_bytes
    if budget_bytes is not None and context.step.loop != context.step.loop.as_profiled():
        return _emit_in_loop(profiled, context, points, budget_bytes)
    limit_bytes = points[0].peak_bytes if budget_bytes is None else budget_bytes
    while (point := cheapest_within(points, limit_bytes)) is not None:
        emitted = emit_point(profiled, context, point)
        if budget_bytes is None or emitted.bound_bytes <= budget_bytes:
            return emitted
        limit_bytes = min(point.peak_bytes - 1, budget_bytes - (emitted.bound_bytes - point.peak_bytes))
    return None


def _emit_least(profiled: Profiled, context: CompileContext, points: Sequence[FrontierPoint]) -> Emitted:
    """Emit the point of the least peak; in a loop, whose peaks fall otherwise, the least of some in the lower half."""
    if context.step.loop == context.step.loop.as_profiled():
        return emit_point(profiled, context, least_of(points))
    lower = sorted(points, key=lambda point: point.peak_bytes)[: max(1, len(points) // 2)]
    tried = lower[:: max(1, len(lower) // MOST_TRIED)]
    return min((emit_point(profiled, context, point) for point in tried), key=lambda emitted: emitted.bound_bytes)


def _emit_in_loop(
    profiled: Profiled, context: CompileContext, points: Sequence[FrontierPoint], budget_bytes: int
) -> Emitted | None:
    """As :func:`emit_cheapest`, where a step holds more than its plan's peak by bytes that fall with it: by bisection."""
    within = sorted((p for p in points if p.peak_bytes <= budget_bytes), key=lambda point: point.peak_bytes)
    best: Emitted | None = None
    low, high = 0, len(within)
    while low < high:
        middle = (low + high) // 2
        emitted = emit_point(profiled, context, within[middle])
        if emitted.bound_bytes <= budget_bytes:
            best, low = emitted, middle + 1
        else:
            high = middle
    if best is None and within:
        least = _emit_least(profiled, context, within)
        best = least if least.bound_bytes <= budget_bytes else None
    return best


def emit_point(profiled: Profiled, context: CompileContext, point: FrontierPoint) -> Emitted:
    """Write a plan into the graph and run its step on fakes."""
    stage("checking the plan")
    check_plan(profiled.profile, point.plan)
    timeline = simulate(profiled.profile, point.plan)
    graph_module = run_passes(profiled.captured, (Emit(point.plan),), context).graph_module
    step = context.step
    verification, events = verify(graph_module, profiled.captured, context.inputs, timeline, step, profiled.seen)
    cuda = events.peaks(context.allocator_state()) if is_on_cuda(profiled) else None
    bound = bound_bytes(verification.verified_bytes, cuda, context.settings)
    return Emitted(point, timeline, graph_module, verification, cuda, bound)


def bound_bytes(peak_bytes: int, cuda: AllocatorPeaks | None, settings: Settings) -> int:
    """Return what a budget bounds of a step: its peak; on CUDA allocated or reserved bytes, as is asked for."""
    if cuda is None:
        return peak_bytes
    return cuda.reserved_bytes if settings.budget_of == "reserved" else cuda.allocated_bytes


def with_budget(context: CompileContext, eager: FakeStep, profiled: Profiled) -> CompileContext:
    """Return ``context`` with its budget in bytes, where that is a share of what it bounds of eager's step; on CUDA, with
    what the allocator adds to that step's peak, and what is left to programs."""
    share, settings = context.settings.budget_share, context.settings
    bound = bound_bytes(eager.peak_bytes, eager.events.peaks() if is_on_cuda(profiled) else None, settings)
    if share is not None:
        context = context.with_settings(budget_bytes=int(share * bound))
    beside_bytes = max(0, bound - eager.peak_bytes) + _slack_for(profiled, context)
    return context.with_settings(beside_bytes=beside_bytes)


@dataclass(slots=True)
class ProgramJudge:
    """Tells what a step takes that runs as a program, before it does, and by how much that exceeds the budget."""

    context: CompileContext
    """Without the batch, which is not kept for this."""
    captured: CaptureGraph
    graph_module: fx.GraphModule
    seen: RecordedStep | None
    room_bytes: int | None
    """What the planned step leaves of the budget beyond the slack."""
    scope: CallScope
    peak_bytes: int | None = None
    """Of the program that it was asked for last; None where it could not be told."""
    cuda: AllocatorPeaks | None = None
    """From what the allocator held then on, for the program runs from there; whether it may, a new process's peak tells
    too, as another moment finds other free blocks."""

    @staticmethod
    def of(
        context: CompileContext,
        captured: CaptureGraph,
        graph_module: fx.GraphModule,
        seen: RecordedStep | None,
        room_bytes: int | None,
    ) -> ProgramJudge:
        scope = context.scope_around(captured)
        return ProgramJudge(context.without_values(), captured, graph_module, seen, room_bytes, scope)

    def __call__(self, run: Callable[[Sequence[Any]], Sequence[Any]], leaves: Sequence[Any]) -> int:
        """``run``: a call on fakes. ``leaves``: of a call to come. Where the loop goes backward otherwise than was planned
        for, its step is not known; then the slack that the plan left decides."""
        context, on_cuda = self._context_for(leaves), any(device.type == "cuda" for device in self.scope.devices)
        budget_bytes = context.settings.budget_bytes
        self.peak_bytes = self.cuda = None
        try:
            ran = self._ran(run, context)
        except FxMemError:  # what is wrong was not when it was planned
            if not on_cuda or budget_bytes is None or self.room_bytes is None:
                return 0
            return -self.room_bytes
        self.peak_bytes, most = ran.peak_bytes, None
        if on_cuda:
            anew, now = ran.events.peaks(), context.allocator_state()
            here_bytes = anew.allocated_bytes if now is None else ran.events.allocated_from(now)
            self.cuda = anew.with_allocated(here_bytes)
            most = anew.with_allocated(max(anew.allocated_bytes, here_bytes))
        return 0 if budget_bytes is None else bound_bytes(ran.peak_bytes, most, context.settings) - budget_bytes

    def _context_for(self, leaves: Sequence[Any]) -> CompileContext:
        return replace(self.context, inputs=Inputs(tuple(leaves), self.context.inputs.spec))

    def _ran(self, run: Callable[[Sequence[Any]], Sequence[Any]], context: CompileContext) -> FakeStep:
        def call(fakes: Sequence[Any]) -> Any:
            return self.captured.unflatten(run(fakes))

        with self.scope.entered():
            return emitted_step(self.graph_module, self.captured, context.inputs, context.step, self.seen, call)


def stepped_in_backward(profiled: Profiled, context: CompileContext, emitted: Emitted) -> tuple[ChoiceMade, ...]:
    """Return what steps in the backward bring: the peak of the same plan in an ordinary step is the measure."""
    step = context.step
    if not step.in_backward:
        return ()
    ordinary = emitted_step(
        emitted.graph_module, profiled.captured, context.inputs, replace(step, in_backward=False), profiled.seen
    )
    brought_bytes = ordinary.peak_bytes - emitted.verification.verified_bytes
    what = "parameters are stepped within the backward and gradients let go of, which changes no bit"
    return (ChoiceMade("optimizer_in_backward", what, brought_bytes),)


def is_on_cuda(profiled: Profiled) -> bool:
    return any(device.type == "cuda" for device in profiled.devices)


def keeping_all(profile: GraphProfile) -> FrontierPoint:
    plan = keep_all(profile)
    return FrontierPoint(plan, simulate(profile, plan).peak_bytes, 0.0)


def least_of(points: Sequence[FrontierPoint]) -> FrontierPoint:
    """Return the point of the least peak."""
    return min(points, key=lambda point: point.peak_bytes)


def _infeasible(profiled: Profiled, least: Emitted, budget_bytes: int, settings: Settings) -> InfeasibleBudgetError:
    profile, timeline = profiled.profile, least.timeline
    least_bytes = least.bound_bytes + _room_told_bytes(profiled, settings)
    place = str(place_of(profile, timeline.peak_step))
    if "recompute" not in settings.allow:
        remedy = 'allow= lets nothing be recomputed: add "recompute" to it.'
        return InfeasibleBudgetError(budget_bytes, least_bytes, (), place, remedy)
    tick, static = profile.ticks[timeline.peak_step], profile.static
    rest_bytes = max(0, tick.start_bytes - static.total_bytes)
    breakdown = (
        ("parameters", static.parameters_bytes),
        ("buffers", static.buffers_bytes),
        ("batch", static.inputs_bytes),
        ("optimizer state", static.optimizer_state_bytes),
        ("gradients of earlier micro-batches", static.gradients_bytes),
        ("gradients and loss", rest_bytes),
        ("activations and working set", timeline.peak_bytes - static.total_bytes - rest_bytes),
        ("workspaces of cuBLAS", static.library_bytes),
        ("unused parts of CUDA's blocks", least_bytes - timeline.peak_bytes),
    )
    return InfeasibleBudgetError(budget_bytes, least_bytes, breakdown, place)
