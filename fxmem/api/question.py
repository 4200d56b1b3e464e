"""What an estimate is of, for further questions: capture, plans, other batch sizes, evaluation.

In: a context on fakes or real tensors, and where its step is counted. Out: bytes and reports; what is made is kept, so that
each question captures and plans at most once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from fxmem.api.beside_the_step import cyclic_bytes, evaluation_peak_bytes
from fxmem.api.frontier import Frontier, frontier_from
from fxmem.capture.dynamic_batch import batch_dims, resized
from fxmem.capture.export import capture, check_call, fitting
from fxmem.capture.graph import CaptureGraph
from fxmem.devices import DeviceModel
from fxmem.emitted import bound_bytes, floor_bytes
from fxmem.errors import FxMemError, InfeasibleBudgetError, InputError, ProfileError, first_lines
from fxmem.fake.fake_tensors import FakeWorld, gradients_untouched
from fxmem.fake.stand_in import standing_in
from fxmem.frontiers import frontier_of
from fxmem.microbatch import compile_in_pieces
from fxmem.passes.context import CompileContext
from fxmem.pipeline import compile_model, least_bytes_within, profile_for_short_memory
from fxmem.planners.plan_transfer import Planned
from fxmem.planners.simulate import keep_all, simulate
from fxmem.profiling.allocator_state import AllocatorPeaks
from fxmem.profiling.optimizer_on_meta import usual_step
from fxmem.profiling.optimizer_step import RecordedStep
from fxmem.profiling.step_events import StepEvents
from fxmem.profiling.verify import EagerCall, FakeStep, eager_step
from fxmem.progress import CAPTURE_SECONDS, told
from fxmem.report.text import Report
from fxmem.torch_patches import as_in_training, without_dynamo


@dataclass(slots=True)
class Question:
    """What an estimate is of, for further questions: a context, and the world of fakes that it is answered in."""

    context: CompileContext
    world: FakeWorld
    on_cuda: bool
    gpu: DeviceModel | None
    """The GPU that stands in for the device of the model, if one does."""
    planned: list[Planned] = field(default_factory=list)
    events: StepEvents | None = None
    """What the step as it is allocates, once that was asked."""
    _graph: CaptureGraph | None = None
    _dynamic: CaptureGraph | None = None
    _floor_bytes: int | None = None
    _seen: tuple[RecordedStep | None] | None = None
    """What the step is supposed to leave and allocate, once that was asked."""

    @contextmanager
    def on_fakes(self) -> Iterator[None]:
        """Stand in for parameters that have no bytes; real ones stay."""
        model = self.context.model
        stand_ins = self.gpu is not None or any(t.is_meta for t in (*model.parameters(), *model.buffers()))
        with (
            as_in_training(),
            without_dynamo(),
            standing_in(self.gpu),
            self.world.state_of(model) if stand_ins else nullcontext(),
        ):
            yield

    def first_answer(self) -> FakeStep:
        """Return the step of the model as it is. Where it cannot be run on fakes, or goes a way that fakes may not tell,
        a capture says why, or that it is right. Errors: those of a capture."""
        with self.on_fakes():
            check_call(self.context.model, self.context.inputs)
            try:
                ran = self._eager_step(self.context, watching=True)
            except FxMemError:
                raise
            except Exception as error:
                self._captured()
                raise ProfileError(f"the step does not run on fake tensors: {first_lines(error)}") from error
            assert ran.watched is not None
            if ran.watched.doubtful:
                self._captured()
        return ran

    @property
    def _call(self) -> EagerCall:
        return EagerCall(tuple(self.context.model.parameters()), self.context.autocast)

    def _eager_step(self, context: CompileContext, watching: bool = False) -> FakeStep:
        model, step, call = context.model, context.step, self._call
        if self._seen is None:
            self._seen = (usual_step(step, call.parameters),)
        with gradients_untouched(call.parameters):
            try:
                return eager_step(model, call, context.inputs, step, self._seen[0], watching)
            except Exception:
                if self._seen[0] is None:
                    raise
                self._seen = (None,)  # an optimizer may not take such gradients; whatever else is wrong shows below
            return eager_step(model, call, context.inputs, step, None, watching)

    def _captured(self) -> CaptureGraph:
        if self._graph is None:
            self._graph = capture(self.context.model, self.context.inputs, self.context.autocast)
        return self._graph

    @property
    def known_floor_bytes(self) -> int | None:
        """The minimum feasible peak, if it was asked for already."""
        return self._floor_bytes

    def floor_bytes(self) -> int:
        """Return the minimum feasible peak."""
        self._plan()
        assert self._floor_bytes is not None
        return self._floor_bytes

    def frontier(self) -> Frontier:
        """Return the budgets at which the plan changes."""
        planned = self._plan()
        return frontier_from(planned.profile, planned.points)

    def graph_peak_bytes(self) -> int:
        """Return the peak of the captured graph's own step."""
        with self.on_fakes():
            profile = self.context.profile_of(self._captured()).profile
        return simulate(profile, keep_all(profile)).peak_bytes

    def report(self, budget_bytes: int | None, most_pieces: int | None = None) -> Report:
        """Return what is planned for a budget; a batch that may run in pieces is cut into at most ``most_pieces``. Errors:
        ``InfeasibleBudgetError``."""
        context = self.context.with_settings(budget_bytes=budget_bytes)
        with (
            told(f"planning {type(context.model).__name__}", CAPTURE_SECONDS + context.settings.plan_seconds),
            self.on_fakes(),
        ):
            try:
                return compile_model(context, self._captured()).report
            except InfeasibleBudgetError as error:
                if "microbatch" not in context.settings.allow:
                    raise
                return compile_in_pieces(context, error, most_pieces).report

    def cuda_with(self, expandable: bool, emptied: bool) -> AllocatorPeaks:
        """Return what the caching allocator makes of the step with these settings. Errors: ``InputError``."""
        if not self.on_cuda:
            raise InputError("the step is on the CPU: there is no caching allocator")
        assert self.events is not None
        return self.events.peaks(expandable=expandable, emptied=emptied)

    def evaluation_peak_bytes(self, no_grad: bool) -> int:
        """Return the peak of a forward and loss in eval mode, beside the optimizer's state."""
        with self.on_fakes():
            return evaluation_peak_bytes(
                self.context.model, self._call, self.context.inputs, self.context.step, self._state_bytes(), no_grad
            )

    def cyclic_bytes(self) -> int:
        """Return what reference cycles hold of a step that is over."""
        with self.on_fakes(), gradients_untouched(self._call.parameters):
            return cyclic_bytes(self.context.model, self._call, self.context.inputs, self.context.step)

    def _state_bytes(self) -> int:
        assert self.events is not None
        return sum(nbytes for _, _, nbytes in self.events.state)

    def _plan(self) -> Planned:
        """Capture, profile and plan for every budget, once."""
        if self._floor_bytes is None:
            context = self.context
            what = f"planning {type(context.model).__name__} for every budget"
            with told(what, CAPTURE_SECONDS + context.settings.plan_seconds), self.on_fakes():
                base = context.profile_of(self._captured())
                short = profile_for_short_memory(self._captured(), context)
                points = frontier_of(short.profile, context)
                self._floor_bytes = floor_bytes(short, context, points)
            self.planned.insert(0, Planned(short.profile, points))
            self.context = replace(context, base=base, _profiles={})
        return self.planned[0]

    def peak_at_batch(self, size: int, budget_bytes: int | None) -> int:
        """What a budget bounds at another batch size, as it is or under a plan: one within the budget, else the least."""
        if budget_bytes is not None:
            self._plan()  # so that its plans may be taken over
        context = self.context
        other = replace(context, inputs=resized(context.inputs, batch_dims(context.inputs), size), _profiles={})
        with self.on_fakes():
            if budget_bytes is None:
                try:
                    return self.bound_bytes(self._eager_step(other))
                except Exception:
                    self._dynamic_graph()  # tells if the model is tied to its batch size
                    raise
            graph = fitting(self._dynamic_graph(), context.model, other.inputs)
            return least_bytes_within(profile_for_short_memory(graph, other), other, self.planned, budget_bytes)

    def bound_bytes(self, ran: FakeStep) -> int:
        """Return what a budget bounds of a step."""
        return bound_bytes(ran.peak_bytes, ran.events.peaks() if self.on_cuda else None, self.context.settings)

    def _dynamic_graph(self) -> CaptureGraph:
        """Return the graph that serves other batch sizes. Errors: ``CaptureError`` if the model is tied to its own."""
        if self._dynamic is None:
            context = self.context
            dims = batch_dims(context.inputs)
            self._dynamic = capture(context.model, context.inputs, context.autocast, dims)
        return self._dynamic
