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
   and a warning says by how much.
4. When the next step begins, the step that was seen is planned as a whole, and from then on each of its calls runs code
   of that plan, compiled at the call. Steps that begin alike share code up to where they part: the deepest of their plans.
5. Which outputs are held until a step is over is observed in its first run; meanwhile all are taken to be.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from fxmem.compiled.fakerun import GraphCall, Source
from fxmem.compiled.graph_planner import STEP, infeasible
from fxmem.compiled.lower import compiling_alone
from fxmem.compiled.report import CompiledReport
from fxmem.compiled.step_planner import PlannedGraph, StepPlanner, Variant
from fxmem.compiled.surroundings import joined, weight_of
from fxmem.errors import in_units
from fxmem.passes.context import Settings
from fxmem.torch_private import keeps_graph, storage_key
from fxmem.user_frames import level_of_user

Compiled = Callable[..., Any]
Compile = Callable[["CompiledGraph", fx.GraphModule, Sequence[Any]], Compiled]
"""Compiles a graph under :attr:`CompiledGraph.wanted`."""


class CompiledGraph:
    """A training graph from Dynamo, compiled under the plans of the steps that it is called in."""

    def __init__(self, graph_module: fx.GraphModule, breaks_off: bool) -> None:
        self.breaks_off = breaks_off
        """Whether the graph ends because it breaks."""
        self.planned: PlannedGraph | None = None
        """None until its joint graph was seen."""
        self.wanted: Variant | None = None
        """How it is to be compiled now; None: how is still to be found."""
        self._module, self._graph = graph_module, copy.deepcopy(graph_module.graph)
        self._compiled: dict[Variant, Compiled] = {}

    @property
    def any_compiled(self) -> Compiled:
        return next(iter(self._compiled.values()))

    def keep(self, made: Compiled) -> None:
        """``made``: the graph compiled as :attr:`wanted` says."""
        assert self.wanted is not None
        self._compiled[self.wanted] = made

    def under(self, variant: Variant, inputs: Sequence[Any], compile_it: Compile) -> Compiled:
        if variant not in self._compiled:
            self.wanted = variant
            again = fx.GraphModule(self._module, copy.deepcopy(self._graph))
            again.meta = dict(self._module.meta)
            with compiling_alone():
                self.keep(compile_it(self, again, inputs))
        return self._compiled[variant]


class Inputs(NamedTuple):
    """What a graph was called with."""

    sources: tuple[Source | int, ...]
    """As in :class:`GraphCall`; a source's call is its place in the step."""
    nbytes: Mapping[int, int]
    """By storage, of those that no call of the step made."""
    parameters: tuple[weakref.ref[torch.Tensor], ...]

    def later(self, there: Container[int]) -> Inputs:
        """Return the inputs of a call like this in a later step; what is not ``there`` any more gets a new number, as its
        storage may be another tensor's now."""
        named = {s: s if s in there else next(_NUMBERS) for s in self.sources if not isinstance(s, Source)}
        sources = tuple(s if isinstance(s, Source) else named[s] for s in self.sources)
        return self._replace(sources=sources, nbytes={named[s]: nbytes for s, nbytes in self.nbytes.items()})

    def after(self, places: Mapping[int, int]) -> Inputs:
        """Return the same where of the calls before only those at ``places`` still are in the step, by their new place."""
        sources = (s if not isinstance(s, Source) or s.call in places else next(_NUMBERS) for s in self.sources)
        moved = (s._replace(call=places[s.call]) if isinstance(s, Source) else s for s in sources)
        return self._replace(sources=tuple(moved))


@dataclass(slots=True, eq=False)
class Call:
    """One call of a compiled graph; holds no tensor."""

    graph: CompiledGraph
    variant: Variant
    inputs: Inputs | None = None
    """None: not looked at, as others like it were."""
    made: dict[int, int] = field(default_factory=dict)
    """Places of its outputs by storage."""
    outputs: tuple[weakref.ref[torch.Tensor], ...] = ()
    outputs_stay: bool = True
    node: weakref.ref[_Node] | None = None
    """Dead where its backward can no longer come."""

    @property
    def is_pending(self) -> bool:
        node = None if self.node is None else self.node()
        return node is not None and not node.has_run

    def look_at_outputs(self) -> None:
        """Note, when its backward is over, whether anybody still holds its outputs."""
        self.outputs_stay = any(ref() is not None for ref in self.outputs)


def _ref(tensor: torch.Tensor) -> weakref.ref[torch.Tensor]:
    return weakref.ref(tensor)


class _Node:
    """Lives as long as a call's node of autograd, which holds it by a hook."""

    def __init__(self, next_call: Callable[[], Call | None], retained: Callable[[], None]) -> None:
        """``retained``: called where a backward retains its graph."""
        self._next_call, self._retained = next_call, retained
        self.has_run = False

    def runs(self, _: Any) -> None:
        self.has_run = True
        if keeps_graph():
            self._retained()
        later = self._next_call()
        if later is not None:
            later.look_at_outputs()


class Calls:
    """The calls of one backend's graphs."""

    def __init__(self, settings: Settings, tell: Callable[[CompiledReport], None], compile_it: Compile) -> None:
        self._settings, self._tell, self._compile = settings, tell, compile_it
        self._step: list[Call] = []
        """The calls since the latest one began, whose backward came or may come."""
        self._variants: dict[tuple[CompiledGraph, ...], Variant] = {}
        """Of the last of so many calls that begin a planned step."""
        self._tried: dict[tuple[CompiledGraph, ...], Variant] = {}
        """The same, of the step that is seen for the first time."""
        self._steps: set[tuple[CompiledGraph, ...]] = set()
        """Those that were planned."""
        self._is_told = False
        """Whether it was told that the step that is seen for the first time goes over the budget."""
        self._is_retained_told = False
        self._noted: dict[tuple[CompiledGraph, ...], Inputs] = {}
        """Of the last of so many calls that begin a step, as they once were."""

    def first_variant(self, graph: CompiledGraph, inputs: Sequence[Any]) -> Variant:
        """Return how to compile a graph for the first time, for a call that follows. Errors: ``InfeasibleBudgetError``."""
        before, budget = self._begun(), self._settings.budget_bytes
        assert graph.planned is not None
        call = Call(graph, Variant(0))
        self._note(call, before, inputs)
        if before:
            return self._tried_variant(before, call)
        if graph.breaks_off and budget is not None:
            alone = StepPlanner((graph.planned,), (GraphCall(),), graph.planned.planner.around)
            (deepest,) = alone.deepest()
            if alone.peak_bytes((deepest,)) <= budget:
                return self._tried.setdefault((graph,), deepest)
        is_all = not (graph.breaks_off or graph.planned.planner.around.others)
        taken, report = graph.planned.planner.within(budget, STEP if is_all else _first(1))
        variant = graph.planned.variant(taken.place, taken.levers)
        if not is_all:
            return self._tried.setdefault((graph,), variant)
        self._tell(report)
        self._steps.add((graph,))
        return self._variants.setdefault((graph,), variant)

    def call(self, graph: CompiledGraph, inputs: Sequence[Any]) -> Any:
        """Run one call of a graph. Errors: ``InfeasibleBudgetError``, before anything ran."""
        before = self._begun()
        key = (*(call.graph for call in before), graph)
        known = self._variants.get(key)
        call = Call(graph, known or Variant(0))
        if known is None:
            self._note(call, before, inputs)
            call.variant = self._tried.get(key) or self._tried_variant(before, call)
        outputs = graph.under(call.variant, inputs, self._compile)(*inputs)
        self._follow(call, outputs)
        return outputs

    # -- which step a call is in ------------------------------------------------------------------------------------------

    def _begun(self) -> list[Call]:
        """Return the calls that the next one continues; where there are none, plan for the step that was seen."""
        step = self._step
        pending = [call for call in step if call.is_pending]
        if len(pending) < len(step):
            self._plan_step()
            if pending:  # what is left of it begins another step
                places = {step.index(call): place for place, call in enumerate(pending)}
                for call, inputs in zip(step, self._inputs_of(step), strict=True):
                    call.inputs = inputs.after(places)
            self._step = pending
        return pending

    def _follow(self, call: Call, outputs: Any) -> None:
        tensors = [(place, t) for place, t in enumerate(outputs) if isinstance(t, torch.Tensor)]
        node = next((t.grad_fn for _, t in tensors if t.grad_fn is not None), None)
        if node is None:
            return  # no backward comes
        call.outputs = tuple(_ref(t) for _, t in tensors)
        call.made = {storage_key(t): place for place, t in tensors}
        step, place = self._step, len(self._step)
        watch = _Node(lambda: step[place + 1] if place + 1 < len(step) else None, self._tell_of_retained)
        node.register_prehook(watch.runs)
        call.node = weakref.ref(watch)
        step.append(call)

    def _note(self, call: Call, before: Sequence[Call], inputs: Sequence[Any]) -> None:
        """Note what the inputs of a call are."""
        assert call.graph.planned is not None
        memory = call.graph.planned.planner.around.memory
        made = {key: Source(i, place) for i, each in enumerate(before) for key, place in each.made.items()}
        tensors = {storage_key(t): t for t in inputs if isinstance(t, torch.Tensor)}
        keys = [storage_key(t) if isinstance(t, torch.Tensor) else next(_NUMBERS) for t in inputs]
        nbytes = {key: weight_of(t, memory) for key, t in tensors.items() if key not in made}
        parameters = tuple(_ref(t) for t in inputs if isinstance(t, torch.nn.Parameter))
        call.inputs = Inputs(tuple(made.get(key, key) for key in keys), nbytes, parameters)
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
        key = tuple(each.graph for each in calls)
        planned, variants = self._planner_of(calls), [each.variant for each in before]
        with compiling_alone():
            found = planned.last_within(variants, math.inf if budget is None else budget)
            if found is None:
                assert budget is not None
                found = planned.deepest()[-1]
                least = planned.letting_go()
                if (least_bytes := least.peak_bytes(least.deepest())) > budget:
                    raise infeasible(least_bytes, planned.around, budget, _first(len(calls)))
                if not self._is_told:
                    _warn(len(calls), planned.peak_bytes([*variants, found]), budget)
                    self._is_told = True
        self._tried[key] = found
        return found

    def _plan_step(self) -> None:
        """Plan for the step that was seen, if it is another one than those before. Where that is refused or interrupted,
        it is still to be done at the next call."""
        key = tuple(call.graph for call in self._step)
        if key not in self._steps:
            planner = self._planner_of(self._step)
            planner = replace(planner, around=planner.around.with_others())
            with compiling_alone():
                variants, report = planner.within(self._settings.budget_bytes)
            self._tell(report)
            for i, variant in enumerate(variants):
                prefix = key[: i + 1]
                self._variants[prefix] = max(variant, self._variants.get(prefix, variant))
            self._steps.add(key)
        self._tried, self._is_told = {}, False

    def _planner_of(self, calls: Sequence[Call]) -> StepPlanner:
        graphs = tuple(call.graph.planned for call in calls if call.graph.planned is not None)
        arounds = [graph.planner.around for graph in graphs]
        inputs = self._inputs_of(calls)
        made = {s for call, each in zip(calls, inputs, strict=True) for s in call.made if s not in each.nbytes}
        nbytes = {s: weight for each in inputs for s, weight in each.nbytes.items()}
        parameters = [p for each in inputs for ref in each.parameters if (p := ref()) is not None]
        around = joined(arounds, nbytes, parameters, made, self._settings.step)
        stay = [call.outputs_stay for call in calls]
        return StepPlanner(
            graphs, tuple(GraphCall(each.sources, s) for each, s in zip(inputs, stay, strict=True)), around
        )

    def _inputs_of(self, calls: Sequence[Call]) -> list[Inputs]:
        graphs = [call.graph.planned for call in calls if call.graph.planned is not None]
        there = frozenset[int]().union(*(graph.planner.around.storages_there() for graph in graphs))
        key = tuple(call.graph for call in calls)
        return [call.inputs or self._noted[key[: i + 1]].later(there) for i, call in enumerate(calls)]


_NUMBERS = itertools.count(-1, -1)
"""Of what is no storage that lives."""


def _first(num_calls: int) -> str:
    calls = "call" if num_calls == 1 else f"{num_calls} calls"
    return f"{STEP}'s first {calls}, which more may follow"


def _warn(num_calls: int, peak_bytes: int, budget_bytes: int) -> None:
    warnings.warn(
        f"{num_calls} calls of compiled graphs before one backward take {in_units(peak_bytes)} this once, and more with "
        f"those that may follow; the budget is {in_units(budget_bytes)}. The first of them were compiled before the others "
        "were known; from the next step on the budget is over all of them",
        stacklevel=level_of_user(),
    )
