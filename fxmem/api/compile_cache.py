"""What is compiled for one model, by the signature of its calls.

In: the inputs of a call, the autocast region it is in. Out: a :class:`Compiled`. A model that looks at its inputs'
values has one for each way it takes; calls that differ in sizes only share a graph where the model's code allows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from fxmem.api.background import Searches
from fxmem.api.planning_hints import PlanningHints
from fxmem.api.size_families import Family, LazyReport, SizedPlan, taken_over
from fxmem.capture.advice import Part, real_like
from fxmem.capture.dynamic_batch import Shapes, largest_batch, resized, shapes_of
from fxmem.capture.export import fitting
from fxmem.capture.graph import CaptureGraph, Inputs
from fxmem.capture.guards import arguments_of
from fxmem.capture.model_states import ModelStates
from fxmem.capture.ways import Way
from fxmem.capture.written_state import Before
from fxmem.errors import CaptureError, InfeasibleBudgetError, InputError
from fxmem.ir import Plan
from fxmem.microbatch import compile_in_pieces
from fxmem.partial import FoundParts, PartsGraph, RunPart, Serve, along_way_of, compile_in_parts, find_parts, run_part
from fxmem.passes.context import CompileContext, Settings
from fxmem.pipeline import Compiled, compile_model, least_bytes_within, profile_for_short_memory
from fxmem.planners.plan_transfer import Planned
from fxmem.profiling.training_step import TrainingStep
from fxmem.progress import CAPTURE_SECONDS, collected_afterwards, told
from fxmem.report.text import Report
from fxmem.runtime.autocast import Autocast
from fxmem.runtime.backend_flags import present
from fxmem.runtime.other_sizes import OtherStructureError
from fxmem.torch_patches import as_in_training
from fxmem.user_frames import level_of_user


class CompileCache:
    """What is compiled for ``model`` under ``settings``."""

    def __init__(self, model: torch.nn.Module, settings: Settings) -> None:
        self.latest: Compiled | None = None
        """That of the signature used last."""
        self._model, self._settings = model, settings
        self._states = ModelStates(model)
        self._compiled: dict[tuple[Any, ...], list[Compiled]] = {}
        self._families: dict[tuple[Any, ...], Family] = {}
        self._expected: dict[tuple[Any, ...], tuple[Shapes, ...]] = {}
        """By what calls have in common but for their sizes, the shapes said to come."""
        self._untried: dict[int, Compiled] = {}
        """By id: what is compiled for larger sizes and has not run yet at the size that it is noted for."""
        self._alone: set[tuple[Any, ...]] = set()
        """Signatures that no plan of a larger size serves."""
        self._hints = PlanningHints(type(model).__name__)
        self._searches = Searches(type(model).__name__)
        self._of_parts: dict[str, CompileCache] = {}
        """By path, where the model cannot be captured whole."""
        self._found: dict[tuple[Any, ...], FoundParts] = {}
        """By signature, what can be planned of such a model."""
        self._in_parts: set[tuple[Any, ...]] = set()
        """Calls in which its own code runs, and the state that it was in but for which buffers it has."""

    def for_step(self, step: TrainingStep) -> CompileCache:
        """Return a cache for another step of the same model, which shares captured graphs, targets and the numbers of the
        model's states with this one."""
        other = CompileCache(self._model, replace(self._settings, step=self.with_targets(step)))
        other._states = self._states
        other._searches = Searches(type(self._model).__name__, self._searches)
        other._expected, other._found, other._in_parts = self._expected, self._found, self._in_parts
        other._families = {kind: family.without_plans() for kind, family in self._families.items()}
        return other

    def with_targets(self, step: TrainingStep) -> TrainingStep:
        """Return ``step`` with this cache's targets, and the inputs that they are an example for, if it has its loss."""
        own = self._settings.step
        return replace(step, targets=own.targets) if step.loss_fn is own.loss_fn else step

    def raise_budget(self, budget_bytes: int) -> None:
        """Plan within this budget from now on."""
        self._settings = replace(self._settings, budget_bytes=budget_bytes, budget_share=None)

    @property
    def specializations(self) -> list[int]:
        """By signature: how many ways through the model are compiled."""
        return [len(specializations) for specializations in self._compiled.values()]

    @property
    def num_planned(self) -> int:
        """How many calls, different in their sizes or otherwise, were planned for."""
        return sum(len(family.plans) for family in self._families.values())

    def find(self, inputs: Inputs, autocast: Autocast | None) -> Compiled | None:
        """Return what is compiled for the signature of ``inputs`` and serves them, if anything is."""
        signature = self.signature(inputs, autocast)
        ways = self._compiled.get(signature, [])
        compiled = next((one for one in ways if one.captured.serves(inputs)), None)
        if compiled is None:
            compiled = self._of_larger_size(signature, inputs, autocast)
        self.latest = compiled or self.latest
        return compiled

    def _of_larger_size(self, signature: tuple[Any, ...], inputs: Inputs, autocast: Autocast | None) -> Compiled | None:
        """Return what is compiled for larger sizes and serves ``inputs``, if anything is, and note it for their own."""
        if signature in self._alone or self._settings.budget_share is not None:
            return None
        plan = self._family(inputs, autocast).plan_for(inputs, self._settings.budget_bytes is not None)
        if plan is None:
            return None
        compiled = plan.compiled
        if plan.shapes != shapes_of(inputs):
            compiled = self._at_other_size(compiled, inputs, autocast)
        self._compiled.setdefault(signature, []).append(compiled)
        return compiled

    def _at_other_size(self, compiled: Compiled, inputs: Inputs, autocast: Autocast | None) -> Compiled:
        context = CompileContext(self._model, inputs, self._settings, autocast)
        compiled = taken_over(context, compiled, "of a larger size")
        self._untried[id(compiled)] = compiled
        return compiled

    def run(
        self,
        compiled: Compiled,
        inputs: Inputs,
        autocast: Autocast | None,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        held_bytes: int = 0,
    ) -> tuple[Any, Sequence[Any]]:
        """Return the model's output for ``inputs`` and its leaves, computed by what was found or made for them. ``call``:
        the arguments that they are of. ``held_bytes``: of earlier outputs that are alive.

        The first call of a size that was not planned for is tried: where the graph does otherwise than planned, what it
        wrote is put back, and the size gets a plan of its own.
        """
        captured: CaptureGraph | PartsGraph = compiled.captured
        if isinstance(captured, PartsGraph):
            run = captured.run_call if captured.latest_calls else partial(self._first_run, compiled, inputs, autocast)
            return run(*call)
        if id(compiled) not in self._untried:
            return compiled.run(inputs.leaves, held_bytes)
        before = Before(captured, inputs.leaves)
        try:
            output = captured.run_in_training(compiled.graph_module, inputs.leaves)
            self._untried.pop(id(compiled), None)
            return output
        except torch.OutOfMemoryError:
            raise
        except (
            OtherStructureError,
            RuntimeError,
        ):  # the latter: a size that the graph is not for, or a user's own error
            before.restore()
        signature = self.signature(inputs, autocast)
        self._alone.add(signature)
        self._untried.pop(id(compiled), None)
        self._compiled[signature] = [one for one in self._compiled[signature] if one is not compiled]
        anew = self.make(inputs, autocast)
        return anew.captured.run_in_training(anew.graph_module, inputs.leaves)

    def _first_run(self, compiled: Compiled, inputs: Inputs, autocast: Autocast | None, args: Any, kwargs: Any) -> Any:
        """As :meth:`run`, of a model in parts: what its own code changes in it makes no other kind of call from now on."""
        graph, before = cast(PartsGraph, compiled.captured), self.signature(inputs, autocast)
        with self._states.noting_changes():
            output = graph.run_call(args, kwargs)
        self._in_parts.add(self._call_in_parts(inputs, autocast))
        after = self.signature(inputs, autocast)
        if after != before:
            self._compiled.setdefault(after, []).append(compiled)
            self._found |= {after: self._found[before]} if before in self._found else {}
        return output

    def make(self, inputs: Inputs, autocast: Autocast | None) -> Compiled:
        """Compile for the signature of ``inputs``, where nothing was found. Errors: as :func:`fxmem.optimize` tells."""
        signature = self.signature(inputs, autocast)
        most = CAPTURE_SECONDS + self._settings.plan_seconds
        with (
            collected_afterwards(),
            told(f"planning a training step of {type(self._model).__name__}", most),
            as_in_training(),
        ):
            compiled = self.find(inputs, autocast)
            if compiled is not None:  # another thread was faster
                return compiled
            self._forget_replaced()
            self.latest = compiled = self._compile(inputs, autocast)
            specializations = self._compiled.setdefault(signature, [])
            specializations.append(compiled)
            after = self.signature(inputs, autocast)
            if after != signature:  # a first forward may leave something in the model's configs that later ones find
                self._compiled.setdefault(after, []).append(compiled)
        self._hints.note(inputs, len(specializations), self._states.count)
        return compiled

    def make_or_least(self, inputs: Inputs, autocast: Autocast | None) -> tuple[Compiled, InfeasibleBudgetError | None]:
        """As :meth:`make`; where no plan keeps the budget, with the least peak from now on, and with what says so."""
        try:
            return self.make(inputs, autocast), None
        except InfeasibleBudgetError as error:
            self.raise_budget(error.least_bytes)
            return self.make(inputs, autocast), error

    def adopt(self, compiled: Compiled, inputs: Inputs, autocast: Autocast | None) -> Compiled:
        """Return what is compiled for another step, at the size of ``inputs``, as it serves this one: its peak fits too."""
        context = CompileContext(self._model, inputs, self._settings, autocast)
        adopted = taken_over(context, compiled, "of another step")
        self._compiled.setdefault(self.signature(inputs, autocast), []).append(adopted)
        self._family(inputs, autocast).plans.append(SizedPlan(adopted, shapes_of(inputs)))
        self.latest = adopted
        return adopted

    def plan_elsewhere(self, inputs: Inputs, autocast: Autocast | None) -> tuple[Plan, Report]:
        """Plan for fakes of the model and ``inputs`` where fakes lie now, for its floor too: what is found serves no call,
        and the fakes do not stay."""
        most = CAPTURE_SECONDS + self._settings.plan_seconds
        settings = replace(self._settings, measure=False, background=False)
        with (
            collected_afterwards(),
            told(f"planning a training step of {type(self._model).__name__}", most),
            as_in_training(),
        ):
            compiled = compile_model(CompileContext(self._model, inputs, settings, autocast))
            return compiled.plan, replace(compiled.report, _least_bytes=compiled.report.floor_bytes)

    def end_searches(self, *, wait: bool = False) -> list[fx.GraphModule]:
        """Let plans found in the background take the places of quick ones; return the graphs that these ran.

        ``wait``: until all are found.
        """
        pairs = self._searches.found(self._families.values(), self._compiled.values(), wait=wait)
        for quick, found in pairs:
            if self.runs(quick.graph_module):
                self.latest = found
        return [quick.graph_module for quick, _ in pairs]

    def runs(self, graph_module: fx.GraphModule) -> bool:
        """True if the call made last ran ``graph_module``."""
        return self.latest is not None and self.latest.graph_module is graph_module

    def _forget_replaced(self) -> None:
        """Let go of what is compiled for parameters that the model has no longer: nothing else may hold them."""
        present_ids = set(map(id, self._model.parameters()))

        def holds(captured: CaptureGraph) -> bool:
            return all(id(parameter) in present_ids for parameter in captured.parameters)

        for specializations in self._compiled.values():
            specializations[:] = [compiled for compiled in specializations if holds(compiled.captured)]
        for key in [key for key, family in self._families.items() if not family.outlives(holds)]:
            del self._families[key]
        for key in [key for key, found in self._found.items() if not all(map(holds, found.graphs))]:
            del self._found[key]

    def signature(self, inputs: Inputs, autocast: Autocast | None, *, with_sizes: bool = True) -> tuple[Any, ...]:
        """Return what a plan depends on; without ``with_sizes``, what a graph of symbolic sizes does."""
        others = [kind for kind in ("cpu", "cuda") if autocast is None or autocast.device_type != kind]
        dtypes = torch.get_default_dtype(), *((kind, torch.get_autocast_dtype(kind)) for kind in others)
        in_parts = self._in_parts and self._call_in_parts(inputs, autocast) in self._in_parts
        call = arguments_of(inputs, with_sizes=with_sizes, with_numbers=not in_parts), autocast
        number = self._states.number(buffers_by_name=bool(in_parts))
        return (*call, dtypes, present(), number, self._states.among(inputs.tensors))

    def _call_in_parts(self, inputs: Inputs, autocast: Autocast | None) -> tuple[Any, ...]:
        """Return what a call in which the model's own code runs depends on: not on numbers, which that is given."""
        return arguments_of(inputs, with_numbers=False), autocast, self._states.number(buffers_by_name=True)

    def kind_of(self, inputs: Inputs, autocast: Autocast | None) -> tuple[Any, ...]:
        """Return what calls have in common that differ in sizes only."""
        return self.signature(inputs, autocast, with_sizes=False)

    def expect(self, inputs: Inputs, autocast: Autocast | None, shapes: Iterable[Shapes]) -> None:
        """Note the shapes in which calls of the kind of ``inputs`` will come, in whatever state the model is then: plans
        are made for the largest."""
        expected = tuple(dict.fromkeys(shapes))
        self._expected[arguments_of(inputs, with_sizes=False)] = expected
        self._family(inputs, autocast).expect(expected)

    def peak_bytes(self, compiled: Compiled) -> int:
        """Return the peak of the step at the size that ``compiled`` was found or made for, verified on fakes."""
        report = compiled._report
        return report.peak_bytes() if isinstance(report, LazyReport) else compiled.report.predicted_peak_bytes

    def _family(self, inputs: Inputs, autocast: Autocast | None) -> Family:
        kind = self.kind_of(inputs, autocast)
        family = self._families.get(kind)
        if family is None:
            family = self._families.setdefault(kind, Family())
            family.expect(self._expected.get(arguments_of(inputs, with_sizes=False), ()))
        return family

    def _compile(self, inputs: Inputs, autocast: Autocast | None) -> Compiled:
        """Compile a new signature; one that differs from an earlier one in sizes only re-uses that one's graph."""
        self._settings = self._settings.seen_with(inputs.leaves)
        family = self._family(inputs, autocast)
        if (found := self._found.get(self.signature(inputs, autocast))) is not None:
            return self._compile_in_parts(inputs, autocast, found)
        try:
            captured = family.graph_for(self._model, inputs, autocast)
            self._states.note(captured)
        except CaptureError as refused:
            return self._compile_in_parts(inputs, autocast, refused)
        larger = family.larger(inputs, captured) if self._settings.budget_share is None else None
        if larger is not None:
            with suppress(InfeasibleBudgetError):  # its own size may fit
                compiled = self._planned(family, captured, larger, autocast)
                return self._at_other_size(compiled, inputs, autocast)
        try:
            return self._planned(family, captured, inputs, autocast)
        except InfeasibleBudgetError as error:
            if "microbatch" not in self._settings.allow:
                raise
            settings = replace(self._settings, background=False)
            return compile_in_pieces(CompileContext(self._model, inputs, settings, autocast), error)

    def _planned(self, family: Family, captured: CaptureGraph, inputs: Inputs, autocast: Autocast | None) -> Compiled:
        context = CompileContext(self._model, inputs, self._settings, autocast)
        try:
            compiled = compile_model(context, captured, family.planned)
        except InfeasibleBudgetError as error:
            if not captured.dynamic or "microbatch" in self._settings.allow:
                raise
            try:
                largest = self._largest_batch(captured, inputs, error.budget_bytes)
            except InputError:  # what varies is no batch, and the model does not take every size of it
                raise error from None
            raise InfeasibleBudgetError(
                error.budget_bytes,
                error.least_bytes,
                error.breakdown,
                error.place,
                f"The largest batch that fits is {largest}.",
            ) from None
        if compiled.planned is not None:
            family.planned.append(compiled.planned)
        self._searches.note(compiled)
        family.plans.append(SizedPlan(compiled, shapes_of(inputs)))
        self._hints.note_sizes(len(family.plans))
        return compiled

    def _compile_in_parts(
        self, inputs: Inputs, autocast: Autocast | None, found: FoundParts | CaptureError
    ) -> Compiled:
        """Compile the parts that were ``found``, or are found now, as the whole cannot be captured."""
        self._in_parts.add(self._call_in_parts(inputs, autocast))
        context = CompileContext(self._model, inputs, replace(self._settings, background=False), autocast)
        if isinstance(found, FoundParts):
            return compile_in_parts(context, found, self._serve_part(autocast))
        anew = self._found[self.signature(inputs, autocast)] = find_parts(context, found)
        compiled = compile_in_parts(context, anew, self._serve_part(autocast))
        warnings.warn(anew.said, stacklevel=level_of_user())
        return compiled

    def follow_way(self, inputs: Inputs, autocast: Autocast | None) -> Way | None:
        """Let plans to come be for the way that a call with ``inputs`` takes, and forget those that are there; return the
        way if it can be followed."""
        signature = self.signature(inputs, autocast)
        known = self._found.get(signature)
        if known is None:
            return None
        found = along_way_of(CompileContext(self._model, inputs, self._settings, autocast), known)
        if found is None:
            return None
        self._found[signature] = found
        self._compiled.pop(signature, None)
        return found.way

    def _serve_part(self, autocast: Autocast | None) -> Serve:
        """Return what keeps the plans of a part of the model, one cache for each part."""

        def serve(part: Part, settings: Settings, compiled: Compiled) -> RunPart:
            cache = self._of_parts.get(part.path)
            if cache is None or cache._model is not part.module:
                cache = self._of_parts[part.path] = CompileCache(part.module, settings)
            signature = cache.signature(real_like(part.inputs), autocast)
            cache._compiled.setdefault(signature, []).insert(0, compiled)
            # A call that the plan of the whole does not have may take the least peak.
            return run_part(part.module, lambda i: cache.find(i, autocast) or cache.make_or_least(i, autocast)[0])

        return serve

    def _largest_batch(self, captured: CaptureGraph, inputs: Inputs, budget_bytes: int) -> int:
        """Return the largest size of the dynamic dimensions at which some plan fits."""
        settings = replace(self._settings, measure=False)
        planned: list[Planned] = []

        def floor_bytes(size: int) -> int:
            other = resized(inputs, captured.dynamic, size)
            graph = fitting(captured, self._model, other)
            context = CompileContext(self._model, other, settings, graph.autocast)
            return least_bytes_within(profile_for_short_memory(graph, context), context, planned, budget_bytes)

        return largest_batch(floor_bytes, budget_bytes)
