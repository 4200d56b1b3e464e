"""Plans for the step that a training loop really makes, found while it runs.

In: training calls. Out: what is compiled for each, in the step it is a part of. Planned for first is the step asked for;
what :class:`~fxmem.api.step_watch.StepWatch` sees beyond it is planned for from then on: gradients that are there as a call
begins, at that very call; other forwards, backwards and names, which show in a whole step, at the next. Where that step
went over the budget, or no plan keeps it, one warning tells its peak and what to do. A model that is planned in parts may
call these more often than planned for, which shows in a forward, and is planned for from the next one on.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from fxmem.api.arguments import check_alone
from fxmem.api.compile_cache import CompileCache
from fxmem.api.loss_watch import FoundLoss, LossWatch
from fxmem.api.planning_hints import in_mb, least_said, option_for, said_of
from fxmem.api.size_families import is_of_own_size, report_planned_for
from fxmem.api.step_watch import StepWatch, grown
from fxmem.capture.graph import CaptureGraph, Inputs
from fxmem.capture.unused_numbers import UnusedNumbers
from fxmem.errors import InfeasibleBudgetError, in_units
from fxmem.ir import Phase, Plan
from fxmem.partial import PartsGraph
from fxmem.passes.context import CompileContext, Settings
from fxmem.pipeline import Compiled, peak_of
from fxmem.profiling.seen_loss import OtherSizeError
from fxmem.profiling.training_step import Loop, TrainingStep
from fxmem.report.text import Report
from fxmem.runtime.autocast import Autocast, LatestRegion
from fxmem.runtime.old_gradients import have_gradients
from fxmem.torch_patches import casts_stay_at_hand
from fxmem.user_frames import level_of_user, modules_called

OUTPUTS = "outputs of steps before"
MOST_LOSSES = 4
"""That are seen anew, each at a size at which the one before does not run."""
MOST_WAYS = 8
"""Through a model that is planned in parts, each with more calls of these than the one before."""

FOLLOWED = CaptureGraph | PartsGraph
"""What is planned for other steps than the one asked for."""


class LoopPlans:
    """What is compiled for ``model``, by the step that its calls are a part of."""

    def __init__(self, model: torch.nn.Module, settings: Settings) -> None:
        self._model, self._settings = model, settings
        self.asked = CompileCache(model, settings)
        """Plans for the step asked for."""
        self._numbers = UnusedNumbers(model, self.asked.signature)
        self._latest = self.asked
        self._caches: dict[TrainingStep, CompileCache] = {settings.step: self.asked}
        self._watch = StepWatch()
        self._loss: FoundLoss | None = None
        """A loss that nobody told of, once it was seen."""
        self._seen: tuple[Loop, FoundLoss | None] = self._watch.loop, None
        self._step = settings.step
        """What is planned for, but for gradients that are there."""
        self._trained: tuple[Compiled | None, tuple[torch.Tensor, ...]] = (None, ())
        self._roomy: tuple[Compiled | None, int] = (None, 0)
        """What was compiled for the latest call, and bytes that its forward leaves of the budget."""
        self._region = LatestRegion()
        self._held_bytes = 0
        """Of the outputs of the call before that were alive as the latest one began."""
        self._are_states_left_out = False
        """Of outputs of steps before, those that the model has as its state."""
        self._warned: set[str] = set()
        self._loss_watch = None if settings.step.loss_fn is not None else LossWatch()
        """None where the loss is known."""
        self._num_losses = 0
        self._num_ways = 0

    # -- as a CompileCache is used --------------------------------------------------------------------------------------

    @property
    def latest(self) -> Compiled | None:
        """That of the signature and step used last."""
        return self._latest.latest

    @property
    def specializations(self) -> list[int]:
        """By signature: how many ways through the model are compiled, for the step asked for."""
        return self.asked.specializations

    def find(self, inputs: Inputs, autocast: Autocast | None) -> Compiled | None:
        """Return what is compiled for the step asked for, if anything is."""
        self._latest = self.asked
        return self.asked.find(self._numbers.settled(inputs, autocast), autocast)

    def make(self, inputs: Inputs, autocast: Autocast | None) -> Compiled:
        """Compile for the step asked for."""
        return self.asked.make(self._numbers.settled(inputs, autocast), autocast)

    def plan_elsewhere(self, inputs: Inputs, autocast: Autocast | None) -> tuple[Plan, Report]:
        """As :meth:`CompileCache.plan_elsewhere`."""
        return self.asked.plan_elsewhere(inputs, autocast)

    def end_searches(self, *, wait: bool = False) -> None:
        """As :meth:`CompileCache.end_searches`, for each step. What took over the quick plan of another step looks for one
        again."""
        for cache in tuple(self._caches.values()):
            exchanged = cache.end_searches(wait=wait)
            others = [(step, other) for step, other in self._caches.items() if other is not cache]
            for step, other in others:
                if any(map(other.runs, exchanged)):
                    del self._caches[step]

    # -- training calls --------------------------------------------------------------------------------------------------

    def run(self, inputs: Inputs, autocast: Autocast | None, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Return the model's output for a training call, under the plan of its step. ``call``: the arguments that
        ``inputs`` are of."""
        watch = self._loss_watch
        if watch is not None:
            watch.stop()
        with casts_stay_at_hand(partial(self._region.goes_on, autocast)):
            inputs = self._numbers.settled(inputs, autocast)
            compiled = self.for_call(inputs, autocast)
        output, leaves = self._latest.run(compiled, inputs, autocast, call, self._held_bytes)
        self._region.note(autocast)
        if compiled.captured.effects:
            leaves = compiled.captured.returned(call, leaves)
        self._note(compiled, inputs, leaves)
        return output

    @property
    def _is_bounded(self) -> bool:
        return self._settings.budget_bytes is not None or self._settings.budget_share is not None

    def _is_inside_another(self) -> bool:
        """True if the model runs in the call of a module that has parameters beside its own: it is a part of that."""
        own_ids = set(map(id, self._model.parameters()))
        return any(id(p) not in own_ids for module in modules_called() for p in module.parameters())

    def _note(self, compiled: Compiled, inputs: Inputs, leaves: Sequence[Any]) -> None:
        """Note the outputs of a training call."""
        if self._is_bounded:
            parameters = self._trained_parameters()
            call = self._watch.note(leaves, parameters)
            if self._loss_watch is not None and self._is_inside_another():
                self._loss_watch = None  # what comes after is the rest of that model, not a loss
            if self._loss_watch is not None and isinstance(compiled.captured, FOLLOWED):
                captured = compiled.captured
                self._loss_watch.note_call(call, captured.parameters, inputs.leaves, leaves, captured.effects)

    def for_call(self, inputs: Inputs, autocast: Autocast | None) -> Compiled:
        """Return what is compiled for a training call, compiling it on first sight. Errors: as :func:`fxmem.optimize` tells
        of the step asked for."""
        latest = self.asked.latest
        if not self._is_bounded or latest is None or not isinstance(latest.captured, FOLLOWED):
            self._watch.look()  # a model in pieces is planned for the step asked for alone
            return self._compiled(self._settings.step, inputs, autocast)
        held_bytes = self._held_bytes = self._watch.look()
        if self._watch.is_new_step:
            self._look_at_loss()
            self._tell_of_outputs()
            if self._settings.background:
                self.end_searches()
        if self._watch.old_outputs.kept_bytes:  # which few loops have: going over all modules takes time
            self._watch.old_outputs.leave_out(lambda: (*inputs.leaves, *_states_of(self._model)))
            self._are_states_left_out = True
        try:
            return self._for_loop(held_bytes, inputs, autocast)
        except OtherSizeError as error:
            self._forget_loss(str(error))
            return self._for_loop(held_bytes, inputs, autocast)

    def _for_loop(self, held_bytes: int, inputs: Inputs, autocast: Autocast | None) -> Compiled:
        """Return what is compiled for a call in the loop as it was seen so far. Errors: as :meth:`for_call`;
        ``OtherSizeError`` if the loss that was seen does not go with these inputs."""
        loop, loss = self._watch.loop, self._loss
        if (loop, loss) != self._seen:
            self._seen = loop, loss
            step = replace(self._step, loop=grown(self._step.loop, loop))
            if loss is not None:
                seen = replace(step.loop, keeps_output=loop.keeps_output)
                step = replace(step, loss_fn=loss.loss_fn, targets=loss.targets, loop=seen)
            if step != self._step:
                self._turn_to(step, inputs, autocast)
        step = self._with_gradients(self._step)
        compiled = self._compiled(step, inputs, autocast)
        may_be_carried = self._watch.is_new_step or not isinstance(compiled.captured, PartsGraph)
        if held_bytes and may_be_carried and not step.loop.carried and held_bytes > self._room(compiled):
            loop = replace(step.loop, carried=True, keeps_output=True)
            self._turn_to(replace(self._step, loop=loop), inputs, autocast)
            compiled = self._compiled(replace(step, loop=loop), inputs, autocast)
        return compiled

    def _tell_of_outputs(self) -> None:
        """Warn, once, where outputs of steps before stayed through the backward of the latest one, which no plan counts."""
        kept_bytes, latest = self._watch.old_outputs.kept_bytes, self._latest.latest
        if not (kept_bytes and self._are_states_left_out) or latest is None or OUTPUTS in self._warned:
            return
        peak_bytes, budget_bytes = kept_bytes + self._most_bytes(latest, in_forward=False), latest.report.budget_bytes
        if budget_bytes is None or peak_bytes <= budget_bytes:
            return
        self._warned.add(OUTPUTS)
        warnings.warn(
            f"{OUTPUTS}, {in_units(kept_bytes)}, stayed through the backward of the latest step, whose peak was "
            f"{peak_bytes} bytes ({in_units(peak_bytes)}) with them, above the budget of {budget_bytes} bytes: fxmem plans "
            "without them. Let go of them before the next step (del output), or keep copies elsewhere (output.cpu())",
            stacklevel=level_of_user(),
        )

    def _compiled(
        self, step: TrainingStep, inputs: Inputs, autocast: Autocast | None, seen_bytes: int | None = None
    ) -> Compiled:
        """Return what is compiled for a call of ``step``. ``seen_bytes``: the peak that such a step had under another plan,
        which is told of where no plan keeps the budget."""
        cache = self._caches.get(step)
        if cache is None:
            cache = self._caches[step] = self.asked.for_step(step)
        self._latest = cache
        compiled = cache.find(inputs, autocast)
        if compiled is not None:
            went_further = isinstance(compiled.captured, PartsGraph) and compiled.captured.went_further
            return self._followed(cache, compiled, step, inputs, autocast) if went_further else compiled
        check_alone(self._model)
        if cache is self.asked:
            return cache.make(inputs, autocast)
        budget_bytes = self._settings.budget_bytes
        if seen_bytes is None and budget_bytes is not None:
            earlier = self.asked.find(inputs, autocast)
            if (
                earlier is not None
                and isinstance(earlier.captured, CaptureGraph)
                and is_of_own_size(earlier)
                and self._peak_of(earlier, step, inputs, autocast) <= budget_bytes
            ):
                return cache.adopt(earlier, inputs, autocast)
        try:
            return cache.make(inputs, autocast)
        except InfeasibleBudgetError as error:
            if self.asked.find(inputs, autocast) is None:
                self.asked.make(inputs, autocast)  # raises if not even the step asked for keeps the budget
            cache.raise_budget(error.least_bytes)
            seen_bytes = seen_bytes or error.least_bytes
            self._warn(said_of(self._settings.step, step), seen_bytes, error.budget_bytes, least_said(error), step)
            return cache.make(inputs, autocast)

    def _followed(
        self,
        cache: CompileCache,
        compiled: Compiled,
        step: TrainingStep,
        inputs: Inputs,
        autocast: Autocast | None,
    ) -> Compiled:
        """Plan for the way that this call takes, as the one before called parts more often than was planned for."""
        graph = cast(PartsGraph, compiled.captured)
        num_before, num_latest = sum(graph.num_calls), sum(graph.latest_calls)
        graph.latest_calls.clear()
        self._num_ways += 1
        way = cache.follow_way(inputs, autocast) if self._num_ways <= MOST_WAYS else None
        if way is None:
            return compiled
        new, error = cache.make_or_least(inputs, autocast)
        budget_bytes = self._settings.budget_bytes
        if budget_bytes is None or "way" in self._warned:
            return new
        settings = replace(self._settings, step=self.asked.with_targets(step))
        seen_bytes = graph.peak_bytes(CompileContext(self._model, inputs, settings, autocast), way)
        if seen_bytes > budget_bytes:
            self._warned.add("way")
            planned = f"from now on it is planned for, with a peak of {in_mb(new.report.predicted_peak_bytes)}"
            rest = planned if error is None else least_said(error)
            warnings.warn(
                f"{type(self._model).__name__}: parts of it were called {num_latest} times in a forward, planned for were "
                f"{num_before}: values decide that; the step's peak is {seen_bytes} bytes ({in_mb(seen_bytes)}), above the "
                f"budget of {budget_bytes} bytes: {rest}. To plan for it from the first step on, pass an example that "
                "calls them as often.",
                stacklevel=level_of_user(),
            )
        return new

    def _turn_to(self, to: TrainingStep, inputs: Inputs, autocast: Autocast | None) -> None:
        """Plan for step ``to`` from now on; warn if the one that showed it went over the budget."""
        before, self._step = self._step, to
        before, to = self._with_gradients(before), self._with_gradients(to)
        cache = self._caches.get(before, self.asked)
        earlier = cache.find(inputs, autocast)
        if earlier is None:
            return
        peak_bytes = self._peak_of(earlier, to, inputs, autocast)
        budget_bytes = self._settings.budget_bytes
        if budget_bytes is not None and peak_bytes > budget_bytes:
            new = self._compiled(to, inputs, autocast, peak_bytes)
            rest = f"from now on it is planned for, with a peak of {in_mb(new.report.predicted_peak_bytes)}"
            self._warn(said_of(before, to), peak_bytes, budget_bytes, rest, to)

    def _peak_of(self, compiled: Compiled, step: TrainingStep, inputs: Inputs, autocast: Autocast | None) -> int:
        """Return the peak in bytes of ``step`` under what is compiled for another one."""
        settings = replace(self._settings, step=self.asked.with_targets(step))
        context = CompileContext(self._model, inputs, settings, autocast)
        graph: Any = compiled.captured
        return graph.peak_bytes(context) if isinstance(graph, PartsGraph) else peak_of(compiled, context)

    def _look_at_loss(self) -> None:
        """Take note of a loss that was seen in the step before."""
        watch = self._loss_watch
        if watch is None:
            return
        if watch.found is None and not watch.refused:
            watch.begin_step()
            return
        self._loss_watch = None
        if watch.refused:
            self._say_uncounted(watch.refused)
        elif watch.found is not None and not watch.found.is_plain:
            self._loss = watch.found

    def _forget_loss(self, why: str) -> None:
        """Go back to the step asked for, and look at the loss once more: that which was seen is of another size."""
        self._loss = None
        self._step = replace(self._step, loss_fn=self._settings.step.loss_fn, targets=self._settings.step.targets)
        self._num_losses += 1
        if self._num_losses < MOST_LOSSES:
            self._loss_watch = LossWatch()
        else:
            self._say_uncounted(why)

    def _say_uncounted(self, why: str) -> None:
        if "loss" not in self._warned:
            self._warned.add("loss")
            warnings.warn(
                f"{type(self._model).__name__}: the loss is computed outside of the model and could not be followed "
                f"({why}), so its memory is not counted and comes on top of the budget. To plan for it, pass a function of "
                "output and targets that is like it in memory: fxmem.optimize(..., loss_fn=..., targets=...).",
                stacklevel=level_of_user(),
            )

    def _warn(self, what: list[str], peak_bytes: int, budget_bytes: int, rest: str, step: TrainingStep) -> None:
        """Warn, once of each thing seen, of the peak that a step had."""
        if self._warned.issuperset(what):
            return
        self._warned.update(what)
        warnings.warn(
            f"{type(self._model).__name__}: {'; '.join(what)}; the step's peak is {peak_bytes} bytes "
            f"({in_mb(peak_bytes)}), above the budget of {budget_bytes} bytes: {rest}. To plan for it from the first step "
            f"on, pass fxmem.optimize(..., {option_for(self._settings.step, step)}).",
            stacklevel=level_of_user(),
        )

    def _with_gradients(self, step: TrainingStep) -> TrainingStep:
        """Return ``step`` as it is where gradients are there as a call begins."""
        if step.accumulate or not have_gradients(self._trained_parameters()):
            return step
        loop = step.loop
        clears = self._watch.old_gradients.will_be_cleared(
            self._trained_parameters(), is_said=loop.zero_grad_before_backward
        )
        return replace(step, accumulate=not clears, loop=replace(loop, zero_grad_before_backward=clears))

    def _trained_parameters(self) -> tuple[torch.Tensor, ...]:
        """Return the parameters that are trained."""
        latest = self._latest.latest
        if self._trained[0] is not latest and latest is not None:
            self._trained = latest, tuple(p for p in latest.captured.parameters if p.requires_grad)
        return self._trained[1]

    def _room(self, compiled: Compiled) -> int:
        if self._roomy[0] is not compiled:
            most_bytes = self._most_bytes(compiled, in_forward=True)
            self._roomy = compiled, (compiled.report.budget_bytes or 0) - most_bytes
        return self._roomy[1]

    def _most_bytes(self, compiled: Compiled, *, in_forward: bool) -> int:
        """Return the most that its forward takes, or what comes after it."""
        report = report_planned_for(compiled)
        if isinstance(compiled.captured, PartsGraph):  # timelines are those of one part
            return report.predicted_peak_bytes
        steps = (step for step in report.timeline.steps if (step.phase is Phase.FORWARD) == in_forward)
        return max((step.live_bytes for step in steps), default=0)


def _states_of(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the buffers of a model, and tensors that its modules have as attributes."""
    yield from model.buffers()
    for module in model.modules():
        yield from vars(module).values()
