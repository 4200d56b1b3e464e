"""What a training step calls of one backend's compiled graphs, and how each call's graph is compiled for it.

In: graphs from Dynamo, and their calls. Out: each call's outputs, by code under a plan of the step that the call is in. A
step is one call where a model is one graph. It is several where a graph breaks, where one layer is compiled and called for
each, or where two forwards go before one backward.

NOTE [Steps of several calls]

1. Calls whose backward may still come are one step: a hook on a call's node of autograd tells that its backward has begun,
   and dies with the node.
2. A graph is planned when Dynamo hands it over, by itself if no other call is pending. If Dynamo tells that the graph
   ends where it breaks, more is to come, and it is compiled to take least. The optimizer given may have parameters that no
   graph reads: then too the step is planned once it was seen.
3. A call that continues a step takes the cheapest plan that fits beside the calls before it. If none does, these took too
   much: the budget is refused where all of them at their deepest take too much as well; else this one step goes over it,
   and a warning says by how much. Where one graph is called again and again, calls are not judged that by those judged
   before leave room, up to twice as many: each is run on fakes with all before it.
4. When the next step begins, the step that was seen is planned as a whole, and from then on each of its calls runs code
   of that plan, compiled at the call. Steps that begin alike share code up to where they part: the deepest of their plans.
5. Which outputs are held until a step is over is observed in its first run; meanwhile all are taken to be.
6. What is there beside as a step begins is looked at each time (:class:`Beside`): gradients, which the backward adds to or
   the loop clears before it, and outputs of steps before. Of these, those are taken to stay that were there as the latest
   backward began. Steps are planned by what is there.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fxmem.compiled.beside import Beside, Room
from fxmem.compiled.fakerun import GraphCall, Source
from fxmem.compiled.graph_call import (
    NUMBERS,
    Call,
    Compile,
    CompiledGraph,
    Inputs,
    Node,
    Output,
    node_of,
    tell_of_outside,
    warn_of_more,
)
from fxmem.compiled.graph_planner import STEP, infeasible
from fxmem.compiled.lower import compiling_alone
from fxmem.compiled.report import CompiledReport
from fxmem.compiled.step_planner import StepPlanner, Variant
from fxmem.compiled.step_run import StepRun
from fxmem.compiled.surroundings import is_trained, joined, trained_places, weight_of, weights_in
from fxmem.errors import InfeasibleBudgetError, in_units
from fxmem.passes.context import Settings
from fxmem.profiling.training_step import TrainingStep
from fxmem.runtime.old_gradients import OldGradients, have_gradients
from fxmem.runtime.old_outputs import OldOutputs
from fxmem.torch_private import storage_key
from fxmem.user_frames import level_of_user

MOST_KEPT = 4
"""Different amounts of outputs of steps before that are planned for: where they get more each step, no plan is for long."""

Key = tuple[Any, ...]
"""Of calls that begin a step: what is there beside, and their graphs."""


def _ref(tensor: torch.Tensor) -> weakref.ref[torch.Tensor]:
    return weakref.ref(tensor)


class Calls:
    """The calls of one backend's graphs."""

    def __init__(self, settings: Settings, tell: Callable[[CompiledReport], None], compile_it: Compile) -> None:
        self._settings, self._tell, self._compile = settings, tell, compile_it
        self._step: list[Call] = []
        """The calls since the latest one began, whose backward came or may come."""
        self._beside = Beside(settings.step)
        """What was there as the present step began."""
        self._old_gradients, self._old_outputs = OldGradients(), OldOutputs()
        self._kept: set[int] = set()
        """Bytes of outputs that stayed, which were planned for."""
        self._variants: dict[Key, Variant] = {}
        """Of the last of so many calls that begin a planned step."""
        self._tried: dict[Key, Variant] = {}
        """The same, of the step that is seen for the first time."""
        self._steps: dict[Key, tuple[Call, ...]] = {}
        """Those that were planned."""
        self._room: dict[tuple[Beside, CompiledGraph], Room] = {}
        """By the graph that a step begins with."""
        self._is_told = False
        """Whether it was told that the step that is seen for the first time goes over the budget."""
        self._judged: list[tuple[CompiledGraph, int, StepRun]] = []
        """Of that step: the last graph, and how many calls were run on fakes."""
        self._is_retained_told = self._is_beside_told = self._is_outside_told = False
        self._kept_told: set[str] = set()
        self._noted: dict[tuple[CompiledGraph, ...], Inputs] = {}
        """Of the last of so many calls that begin a step, as they once were."""

    def first_variant(self, graph: CompiledGraph, inputs: Sequence[Any]) -> Variant:
        """Return how to compile a graph for the first time, for a call that follows. Errors: ``InfeasibleBudgetError``."""
        before, budget = self._begun(graph, inputs), self._settings.budget_bytes
        assert graph.planned is not None
        if not before:
            self._forget_dropped()
        call = self._call_of(graph)
        self._note(call, before, inputs)
        if before:
            return self._tried_variant(before, call)
        if graph.breaks_off and budget is not None:
            alone = StepPlanner((graph.planned,), (graph.planned.planner.call,), graph.planned.planner.around)
            (deepest,) = alone.deepest()
            if alone.peak_bytes((deepest,)) <= budget:
                return self._tried.setdefault(self._key([call]), deepest)
        if not (graph.breaks_off or graph.planned.planner.around.others):
            self._plan([call])
            return self._variants[self._key([call])]
        taken, _ = graph.planned.planner.within(budget, _first(1))
        return self._tried.setdefault(self._key([call]), graph.planned.variant(taken.place, taken.levers))

    def call(self, graph: CompiledGraph, inputs: Sequence[Any]) -> Any:
        """Run one call of a graph. Errors: ``InfeasibleBudgetError``, before anything ran."""
        before = self._begun(graph, inputs)
        call = self._call_of(graph)
        key = self._key([*before, call])
        known = self._variants.get(key)
        if known is None:
            self._note(call, before, inputs)
            known = self._tried.get(key) or self._tried_variant(before, call)
        call.variant = known
        outputs = graph.under(call.variant, inputs, self._compile)(*inputs)
        self._follow(call, inputs, outputs)
        return outputs

    # -- which step a call is in ------------------------------------------------------------------------------------------

    def _begun(self, graph: CompiledGraph, inputs: Sequence[Any]) -> list[Call]:
        """Return the calls that the next one continues; where there are none, plan for the step that was seen, and for what
        is there as the next one begins."""
        step = self._step
        pending = [call for call in step if call.is_pending]
        if len(pending) < len(step):
            self._plan_step()
            if pending:  # what is left of it begins another step
                places = {step.index(call): place for place, call in enumerate(pending)}
                for call, was_given in zip(step, self._inputs_of(step), strict=True):
                    call.inputs = was_given.after(places)
            self._step = pending
            over = [call for call in step if call not in pending]
            self._old_outputs.add((output.storage, output.nbytes) for call in over for output in call.made.values())
        self._old_outputs.leave_out(lambda: inputs)
        if not pending and self._settings.budget_bytes is not None:
            self._look_beside(graph, inputs)
        return pending

    def _look_beside(self, graph: CompiledGraph, inputs: Sequence[Any]) -> None:
        """Look at what is there as a step begins with a call of ``graph``; plan for it, where that is new."""
        step, parameters = self._settings.step, _trained_in(inputs)
        if not step.accumulate and have_gradients(parameters):
            loop = step.loop
            clears = self._old_gradients.will_be_cleared(parameters, is_said=loop.zero_grad_before_backward)
            step = replace(step, accumulate=not clears, loop=replace(loop, zero_grad_before_backward=clears))
        self._beside = Beside(step, *self._outputs_beside(step, graph))
        like = {key[1:]: calls for key, calls in self._steps.items() if calls[0].graph is graph}
        for rest, calls in like.items():
            if (self._beside, *rest) not in self._steps:
                self._plan(calls)

    def _outputs_beside(self, step: TrainingStep, graph: CompiledGraph) -> tuple[int, int]:
        """Return the bytes of outputs of steps before that go before the backward, and of those that stay, as far as there
        is no room for them."""
        held_bytes = self._old_outputs.nbytes
        kept_bytes = min(held_bytes, self._old_outputs.kept_bytes)
        room = self._room.get((Beside(step), graph))
        if room is None or (held_bytes <= room.in_forwards and kept_bytes <= room.throughout):
            return 0, 0
        if kept_bytes and kept_bytes not in self._kept:
            if len(self._kept) == MOST_KEPT:
                return 0, max(self._kept)
            self._kept.add(kept_bytes)
        return max(0, held_bytes - kept_bytes), kept_bytes

    def _look_at_kept(self, graph: CompiledGraph) -> None:
        """Look, as the backward of a step that begins with ``graph`` begins, at what stays of outputs of steps before."""
        self._old_outputs.note_backward()
        kept_bytes, room = self._old_outputs.kept_bytes, self._room.get((self._beside, graph))
        more_bytes = 0 if room is None else kept_bytes - self._beside.kept_bytes - max(0, room.throughout)
        rest = "from the next step on it is planned with them"
        if len(self._kept) == MOST_KEPT:
            rest = "there are more each step, which no plan is for; let go of them, or keep detached copies on the host"
        if more_bytes <= 0 or rest in self._kept_told:
            return
        self._kept_told.add(rest)
        warnings.warn(
            f"outputs of steps before, {in_units(kept_bytes)}, are still referred to as the backward of a compiled step "
            f"begins: this step takes {in_units(more_bytes)} more than the budget; {rest}",
            stacklevel=level_of_user(),
        )

    def _follow(self, call: Call, inputs: Sequence[Any], outputs: Any) -> None:
        tensors = [(place, t) for place, t in enumerate(outputs) if isinstance(t, torch.Tensor)]
        node = node_of(t for _, t in tensors)
        if node is None:
            return  # no backward comes
        call.outputs = tuple(_ref(t) for _, t in tensors)
        storages = {storage_key(t): (place, t.untyped_storage()) for place, t in tensors}
        call.made = {key: Output(place, weakref.ref(s), s.nbytes()) for key, (place, s) in storages.items()}
        step, place, parameters = self._step, len(self._step), _trained_in(inputs)
        were_there = have_gradients(parameters)
        self._old_gradients.note_call(parameters)

        def begins() -> None:
            if not any(call.has_run for call in step):
                self._old_gradients.note_backward(parameters, were_there=were_there)
                self._look_at_kept(step[0].graph)

        def next_call() -> Call | None:
            return step[place + 1] if place + 1 < len(step) else None

        watch = Node(begins, next_call, self._tell_of_retained)
        node.register_prehook(watch.runs)
        call.node = weakref.ref(watch)
        step.append(call)

    def _note(self, call: Call, before: Sequence[Call], inputs: Sequence[Any]) -> None:
        """Note what the inputs of a call are."""
        assert call.graph.planned is not None
        memory = call.graph.planned.planner.around.memory
        there = (
            (i, key, output) for i, each in enumerate(before) for key, output in each.made.items() if output.is_there
        )
        made = {key: Source(i, output.place) for i, key, output in there}
        tensors = {storage_key(t): t for t in inputs if isinstance(t, torch.Tensor)}
        keys = [storage_key(t) if isinstance(t, torch.Tensor) else next(NUMBERS) for t in inputs]
        nbytes = {key: weight_of(t, memory) for key, t in tensors.items() if key not in made}
        sources, budget = tuple(made.get(key, key) for key in keys), self._settings.budget_bytes
        if budget is not None and not self._is_outside_told:
            self._is_outside_told = tell_of_outside(inputs, made, budget)
        call.inputs = Inputs(sources, nbytes, tuple(map(_ref, weights_in(inputs))), trained_places(inputs))
        self._noted[*(each.graph for each in before), call.graph] = call.inputs

    def _tell_of_retained(self) -> None:
        if self._settings.budget_bytes is not None and not self._is_retained_told:
            self._is_retained_told = True
            warnings.warn(
                "a backward with retain_graph=True keeps what a compiled step saved, which the plan frees as it goes: the "
                f"budget, {in_units(self._settings.budget_bytes)}, may be exceeded. The eager backend plans for such loops",
                stacklevel=level_of_user(),
            )

    # -- plans ------------------------------------------------------------------------------------------------------------

    def _tried_variant(self, before: Sequence[Call], call: Call) -> Variant:
        """Return what the last call of a step takes that is seen for the first time (NOTE, 3)."""
        calls, budget = [*before, call], self._settings.budget_bytes
        key = self._key(calls)
        if before and before[-1].graph is call.graph and self._has_room_for(call.graph, len(calls)):
            return self._tried.setdefault(key, before[-1].variant)
        planned, variants = self._planner_of(calls), [each.variant for each in before]
        with compiling_alone():
            found, run = planned.last_within(variants, math.inf if budget is None else budget)
            self._judged = [] if run is None else [*self._judged[-1:], (call.graph, len(calls), run)]
            if found is None:
                assert budget is not None
                found = planned.deepest()[-1]
                least = planned.letting_go()
                if (least_bytes := least.peak_bytes(least.deepest())) > budget:
                    raise infeasible(least_bytes, planned.around, budget, _first(len(calls)))
                if not self._is_told:
                    warn_of_more(len(calls), planned.peak_bytes([*variants, found]), budget)
                    self._is_told = True
        self._tried[key] = found
        return found

    def _has_room_for(self, graph: CompiledGraph, num_calls: int) -> bool:
        """True if so many calls, the last ones of ``graph``, keep the budget by what was judged (NOTE, 3)."""
        budget = self._settings.budget_bytes
        if budget is None:
            return True
        if [each for each, _, _ in self._judged] != [graph, graph]:
            return False
        (_, num_before, before), (_, num_judged, judged) = self._judged
        each_bytes = (judged.saved_bytes - before.saved_bytes) / max(1, num_judged - num_before)
        likely_bytes = judged.needed_bytes + (num_calls - num_judged) * max(0.0, each_bytes)
        return num_calls < 2 * num_judged and likely_bytes <= budget

    def _plan_step(self) -> None:
        """Plan for the step that was seen, if it is another one than those before. Where that is refused or interrupted,
        it is still to be done at the next call."""
        if self._key(self._step) not in self._steps:
            self._plan(self._step)
        self._tried, self._judged, self._is_told = {}, [], False

    def _plan(self, calls: Sequence[Call]) -> None:
        """Plan for a step of these calls, with what is there beside. Where no plan fits that, but one would without, the
        step takes the least that it can, and a warning tells. Errors: ``InfeasibleBudgetError``."""
        key, budget = self._key(calls), self._settings.budget_bytes
        with compiling_alone():
            try:
                variants, report, run = self._planned(calls, budget)
            except InfeasibleBudgetError as error:
                if self._beside == Beside(self._settings.step):
                    raise
                if not any(other[1:] == key[1:] for other in self._steps):
                    self._planned(calls, budget, Beside(self._settings.step))
                variants, report, run = self._planned(calls, error.least_bytes)
                self._warn_of_beside(report.predicted_peak_bytes, error)
        self._tell(report)
        for i, variant in enumerate(variants):
            prefix = key[: i + 2]
            self._variants[prefix] = max(variant, self._variants.get(prefix, variant))
        if budget is not None:
            first = self._beside, calls[0].graph
            left_bytes = budget - run.needed_bytes
            room = Room(left_bytes + run.room_in_forwards_bytes, left_bytes)
            self._room[first] = room.least(self._room.get(first, room))
        self._steps[key] = tuple(replace(call, inputs=None, made={}, outputs=(), node=None) for call in calls)

    def _planned(
        self, calls: Sequence[Call], budget: int | None, beside: Beside | None = None
    ) -> tuple[tuple[Variant, ...], CompiledReport, StepRun]:
        graph = calls[0].graph.planned
        assert graph is not None
        planner, usual = self._planner_of(calls, beside or self._beside), Beside(self._settings.step)
        if len(calls) > 1 or graph.planner.around.others:
            return replace(planner, around=planner.around.with_others()).within(budget)
        alone = graph.planner if (beside or self._beside) == usual else graph.planner.beside(planner.around)
        taken, report = alone.within(budget)
        return (graph.variant(taken.place, taken.levers),), report, taken.run

    def _call_of(self, graph: CompiledGraph) -> Call:
        return Call(graph, Variant(0), outputs_stay=self._settings.step.loop.keeps_output)

    def _forget_dropped(self) -> None:
        tables: tuple[dict[Any, Any], ...] = self._variants, self._tried, self._steps, self._room, self._noted
        for table in tables:
            for key in [k for k in table if any(isinstance(part, CompiledGraph) and part.is_dropped for part in k)]:
                del table[key]

    def _key(self, calls: Sequence[Call]) -> Key:
        return self._beside, *(call.graph for call in calls)

    def _warn_of_beside(self, peak_bytes: int, error: InfeasibleBudgetError) -> None:
        if self._is_beside_told:
            return
        self._is_beside_told = True
        step = self._beside.step
        what = "outputs of steps before are still referred to"
        if step != self._settings.step:
            clears = step.loop.zero_grad_before_backward
            told = "clears only after it" if clears else "does not clear, but adds to or fills with zeros"
            what = f"gradients are there, which the loop {told}"
        warnings.warn(
            f"as the forward of a compiled step begins, {what}: with these the step's peak is {in_units(peak_bytes)}, the "
            f"least that a plan reaches, above the budget of {in_units(error.budget_bytes)}. Let go of them before the "
            f"forward, for gradients by optimizer.zero_grad(), or raise the budget to {error.least_bytes} bytes",
            stacklevel=level_of_user(),
        )

    def _planner_of(self, calls: Sequence[Call], beside: Beside | None = None) -> StepPlanner:
        beside = beside or self._beside
        graphs = tuple(call.graph.planned for call in calls if call.graph.planned is not None)
        arounds = [graph.planner.around for graph in graphs]
        inputs = self._inputs_of(calls)
        made = {s for call, each in zip(calls, inputs, strict=True) for s in call.made if s not in each.nbytes}
        nbytes = {s: weight for each in inputs for s, weight in each.nbytes.items()}
        parameters = [p for each in inputs for ref in each.parameters if (p := ref()) is not None]
        around = beside.around(joined(arounds, nbytes, parameters, made, beside.step))
        graph_calls = (
            GraphCall(each.sources, call.outputs_stay, each.trained if beside.step.accumulate else frozenset())
            for call, each in zip(calls, inputs, strict=True)
        )
        return StepPlanner(graphs, tuple(graph_calls), around)

    def _inputs_of(self, calls: Sequence[Call]) -> list[Inputs]:
        graphs = [call.graph.planned for call in calls if call.graph.planned is not None]
        there = frozenset[int]().union(*(graph.planner.around.storages_there() for graph in graphs))
        key = tuple(call.graph for call in calls)
        return [call.inputs or self._noted[key[: i + 1]].later(there) for i, call in enumerate(calls)]


def _trained_in(inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Return those of a call's inputs that are trained."""
    return tuple(filter(is_trained, inputs))


def _first(num_calls: int) -> str:
    calls = "call" if num_calls == 1 else f"{num_calls} calls"
    return f"{STEP}'s first {calls}, which more may follow"
