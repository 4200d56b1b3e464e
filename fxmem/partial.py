"""Models that cannot be captured as a whole: their largest parts that can be, planned under one budget.

In: a model, one call's inputs, settings, and why the whole was refused. Out: a :class:`Compiled` whose call runs the model
itself, with its parts on emitted graphs. One budget bounds the whole step, the rest of the model, its gradients and the
optimizer included: that step is run on fakes for each plan that is tried. Where the model looks at values, it is counted
along the way that the call takes (:mod:`fxmem.capture.ways`); a call that goes on to more calls of parts is noticed.

The parts' plans are chosen by one price of a byte: at price L each part takes the point of its frontier that is cheapest
in seconds + L * weight. The weight is the point's peak, and what it keeps as often as other calls of parts wait for their
backward meanwhile. The least price whose step fits is searched for by bisection over all prices at which some part changes
its plan.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import fx

from fxmem.capture.advice import Part, capturable_parts, followed, light, num_elements
from fxmem.capture.graph import CaptureGraph, Dims, Inputs
from fxmem.capture.side_effects import NONE, SideEffects
from fxmem.capture.ways import Way
from fxmem.emitted import Emitted, bound_bytes, emit_point
from fxmem.errors import CaptureError, ChangedArgumentError, InfeasibleBudgetError
from fxmem.frontiers import frontier_of
from fxmem.ir import FrontierPoint, Launches, StaticBytes
from fxmem.passes.context import CompileContext, Settings
from fxmem.pipeline import Compiled, profile_for_short_memory
from fxmem.planners.simulate import drop_all, simulate
from fxmem.profiling.profile import Profiled
from fxmem.profiling.training_step import BARE
from fxmem.profiling.verify import EmittedPart, FakeStep, step_in_parts
from fxmem.progress import stage
from fxmem.report.text import Report, build_report
from fxmem.runtime.autocast import Autocast
from fxmem.torch_patches import calls_run_by
from fxmem.torch_private import tree_leaves

RunPart = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Serve = Callable[[Part, Settings, Compiled], RunPart]
"""Return what runs a part in training: the compiled one, and others for calls that it does not serve."""


@dataclass(frozen=True, slots=True)
class PartsGraph:
    """Stands for the graph of a model that runs in parts (as :class:`CaptureGraph` does for one that was captured)."""

    model: torch.nn.Module
    runs: tuple[tuple[torch.nn.Module, RunPart], ...]
    autocast: Autocast | None
    parameters: tuple[torch.nn.Parameter, ...]
    emitted: tuple[EmittedPart, ...]
    way: Way
    num_calls: tuple[int, ...]
    """Of each part in one forward, as planned for."""
    dynamic: Dims = frozenset()
    effects: SideEffects = NONE
    """What graphs leave: here the model itself runs."""
    latest_calls: list[int] = field(default_factory=list)
    """Of each part in the latest forward."""

    @property
    def went_further(self) -> bool:
        """True if the latest forward called a part more often than was planned for."""
        return any(latest > planned for latest, planned in zip(self.latest_calls, self.num_calls, strict=False))

    def run_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Sequence[Any]]:
        """Return the model's output and its leaves. It is the model that runs, which may change its arguments."""
        self.latest_calls[:] = [0] * len(self.runs)
        with self._running():
            output = self.model(*args, **kwargs)
        return output, tree_leaves(output)

    def peak_bytes(self, context: CompileContext, way: Way | None = None) -> int:
        """Return the peak of ``context``'s step under these plans, along ``way``, by default the one planned for."""
        step, on_cuda = context.step, any(p.is_cuda for p in self.parameters)
        ran = step_in_parts(self.model, self.emitted, context.inputs, step, self.autocast, way or self.way)
        return bound_bytes(ran.peak_bytes, ran.events.peaks() if on_cuda else None, context.settings)

    def serves(self, inputs: Inputs) -> bool:
        """True: the model itself looks at values."""
        return True

    @contextmanager
    def _running(self) -> Iterator[None]:
        with ExitStack() as stack:
            for index, (module, run) in enumerate(self.runs):
                stack.enter_context(calls_run_by(module, partial(self._counted, index, run)))
            yield

    def _counted(self, index: int, run: RunPart, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.latest_calls[index] += 1
        return run(args, kwargs)


@dataclass(frozen=True, slots=True)
class _PlannedPart:
    part: Part
    context: CompileContext
    profiled: Profiled
    points: tuple[FrontierPoint, ...]

    def weight(self, point: FrontierPoint, num_others: int) -> int:
        """Return what ``point`` weighs beside ``num_others`` other calls of parts, in bytes."""
        dropped = set(point.plan.dropped)
        kept_bytes = sum(s.nbytes for s in self.profiled.profile.storages if s.num_saves and s.index not in dropped)
        return point.peak_bytes + num_others * kept_bytes

    def choices(self, num_others: int) -> list[tuple[int, FrontierPoint]]:
        """Return points with falling weights and rising times."""
        choices: list[tuple[int, FrontierPoint]] = []
        weighed = [(self.weight(point, num_others), point) for point in self.points]
        for weight, point in sorted(weighed, key=lambda choice: (choice[1].recompute_seconds, choice[0])):
            if not choices or weight < choices[-1][0]:
                choices.append((weight, point))
        return choices


@dataclass(slots=True)
class _Search:
    """Steps of the whole model, by price of a byte."""

    context: CompileContext
    parts: tuple[_PlannedPart, ...]
    on_cuda: bool
    way: Way
    """That the model goes where it looks at values."""
    _known: dict[float, tuple[list[Emitted], FakeStep]] = field(default_factory=dict)

    def choices(self) -> list[list[tuple[int, FrontierPoint]]]:
        """Return each part's points to choose from, with their weights."""
        num_calls = sum(p.part.num_calls for p in self.parts)
        return [p.choices(num_calls - 1) for p in self.parts]

    def prices(self) -> list[float]:
        """Return prices of a byte, rising, between which no part changes its plan."""
        steps = [pair for choices in self.choices() for pair in pairwise(choices)]
        spared = {(b.recompute_seconds - a.recompute_seconds) / (heavy - light) for (heavy, a), (light, b) in steps}
        return [0.0, *sorted(1.001 * price for price in spared), math.inf]

    def emitted_at(self, price: float) -> list[Emitted]:
        """Return the parts with the plans that are cheapest where a byte costs ``price`` seconds."""

        def cost(choice: tuple[int, FrontierPoint]) -> float:
            weight, point = choice
            return weight if price == math.inf else point.recompute_seconds + price * weight

        chosen = [min(choices, key=cost)[1] for choices in self.choices()]
        return [emit_point(p.profiled, p.context, point) for p, point in zip(self.parts, chosen, strict=True)]

    def at(self, price: float) -> tuple[list[Emitted], FakeStep]:
        """Return the parts where a byte costs ``price`` seconds, and the step with them."""
        if price not in self._known:
            emitted = self.emitted_at(price)
            self._known[price] = emitted, self.step_of(emitted)
        return self._known[price]

    def step_of(self, emitted: Sequence[Emitted]) -> FakeStep:
        """Return the step of the whole; of the model as it is, where nothing is ``emitted``."""
        context, parts = self.context, self.emitted_parts(emitted)
        return step_in_parts(context.model, parts, context.inputs, context.step, context.autocast, self.way)

    def emitted_parts(self, emitted: Sequence[Emitted]) -> tuple[EmittedPart, ...]:
        """Return the parts as they run what is ``emitted``."""
        pairs = zip(self.parts, emitted, strict=False)
        return tuple(EmittedPart(p.part.module, p.part.inputs, p.profiled.captured, e.graph_module) for p, e in pairs)

    def bound_of(self, ran: FakeStep) -> int:
        """Return what a budget bounds of a step."""
        return bound_bytes(ran.peak_bytes, ran.events.peaks() if self.on_cuda else None, self.context.settings)

    def cheapest_within(self, budget_bytes: int | None) -> tuple[list[Emitted], FakeStep]:
        """Return the parts at the least price whose step fits. Errors: ``InfeasibleBudgetError``."""
        prices = self.prices()

        def fits(place: int) -> bool:
            stage("checking plans of parts")
            return budget_bytes is None or self.bound_of(self.at(prices[place])[1]) <= budget_bytes

        low, high = 0, len(prices) - 1
        if fits(low):
            return self.at(prices[low])
        if low == high or not fits(high):
            assert budget_bytes is not None
            least = min(self.bound_of(ran) for _, ran in self._known.values())
            num_parts = len({p.part.path for p in self.parts})
            place = f"the step of {type(self.context.model).__name__}, of which {num_parts} parts are planned"
            raise InfeasibleBudgetError(budget_bytes, least, (), place)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return self.at(prices[high])


@dataclass(frozen=True, slots=True)
class FoundParts:
    """What of a model can be planned for one kind of call, whatever the step is."""

    parts: tuple[_PlannedPart, ...]
    way: Way
    said: str
    """To the user, once."""

    @property
    def graphs(self) -> tuple[CaptureGraph, ...]:
        """Those that were captured."""
        return tuple(planned.profiled.captured for planned in self.parts)


def find_parts(context: CompileContext, refused: CaptureError) -> FoundParts:
    """Return the largest parts of ``context``'s model, of which the whole was ``refused``, with their plans.

    Errors: ``refused``, where no part can be captured and spares memory, or the model does not run on fakes to its end, so
    that nothing bounds its step.
    """
    strided = all(tensor.layout is torch.strided for tensor in context.inputs.tensors)
    found, way = capturable_parts(context.model, context.inputs, context.autocast) if strided else ((), None)
    if not found or isinstance(refused, ChangedArgumentError):
        raise refused
    if way is None:
        raise CaptureError(f"{refused} {_advice(context.model, found)}") from refused
    parts = tuple(planned for part in found if len((planned := _planned(part, context)).choices(1)) > 1)
    if not parts:  # nothing in them can be dropped
        raise refused
    return FoundParts(parts, way, _said(context.model, parts, refused))


def along_way_of(context: CompileContext, found: FoundParts) -> FoundParts | None:
    """Return what was ``found``, along the way that ``context``'s call takes; None where that cannot be told."""
    parts = followed(context.model, context.inputs, context.autocast, [planned.part for planned in found.parts])
    if parts is None:
        return None
    planned = (replace(planned, part=part) for planned, part in zip(found.parts, parts[0], strict=True))
    return replace(found, parts=tuple(planned), way=parts[1])


def compile_in_parts(context: CompileContext, found: FoundParts, serve: Serve) -> Compiled:
    """Return ``context``'s model with the parts that were ``found`` planned under one budget. Errors:
    ``InfeasibleBudgetError``."""
    start = time.perf_counter()
    parts, on_cuda = found.parts, any(p.is_cuda for p in context.model.parameters())
    search = _Search(context, parts, on_cuda, found.way)
    eager = search.step_of(())
    if context.settings.budget_share is not None:
        context = context.with_settings(budget_bytes=int(context.settings.budget_share * search.bound_of(eager)))
        search.context = context
    emitted, ran = search.cheapest_within(context.settings.budget_bytes)
    runs: dict[torch.nn.Module, RunPart] = {}
    calls: Counter[torch.nn.Module] = Counter()
    whole, reports = fx.GraphModule(torch.nn.Module(), fx.Graph()), []
    for number, (planned, chosen) in enumerate(zip(parts, emitted, strict=True)):
        report = _report_of_part(planned, chosen)
        compiled = Compiled(chosen.graph_module, planned.profiled.captured, chosen.point.plan, report)
        settings = replace(planned.context.settings, budget_bytes=chosen.point.peak_bytes)
        runs[planned.part.module] = serve(planned.part, settings, compiled)
        calls[planned.part.module] += planned.part.num_calls
        reports.append(report)
        whole.add_module(f"{planned.part.path.replace('.', '_')}_{number}", chosen.graph_module)
    graph = PartsGraph(
        model=context.model,
        runs=tuple(runs.items()),
        autocast=context.autocast,
        parameters=tuple(context.model.parameters()),
        emitted=search.emitted_parts(emitted),
        way=found.way,
        num_calls=tuple(calls[module] for module in runs),
    )
    report = _report(search, reports, ran, eager, found.said, time.perf_counter() - start)
    return Compiled(whole, cast(CaptureGraph, graph), emitted[0].point.plan, report)


def _said(model: torch.nn.Module, parts: Sequence[_PlannedPart], refused: CaptureError) -> str:
    share = num_elements(*(p.part.module for p in parts)) / num_elements(model)
    paths = list(dict.fromkeys(p.part.path for p in parts))
    named = ", ".join(paths[:6]) + (", ..." if len(paths) > 6 else "")
    why = str(refused).partition(". ")[0].rstrip(".")
    return (
        f"{type(model).__name__} is planned in parts, not as a whole: {len(paths)} with {share:.0%} of its parameters "
        f"({named}), under one budget for all of the step; the rest runs as it is. Why: {why}."
    )


def _planned(part: Part, context: CompileContext) -> _PlannedPart:
    own = replace(
        context,
        model=part.module,
        inputs=part.inputs,
        base=None,
        _profiles={},
        settings=replace(context.settings, step=BARE),
    ).with_settings(budget_bytes=None, budget_share=None)
    profiled = profile_for_short_memory(part.captured, own)
    plan, profile = drop_all(profiled.profile), profiled.profile
    timeline = simulate(profile, plan)
    least_kept = FrontierPoint(plan, timeline.peak_bytes, timeline.recompute_seconds)
    points = frontier_of(profile, own)
    if "recompute" in own.settings.allow:
        points = (*points, least_kept)
    part = replace(part, inputs=light(part.inputs))  # what is found stays
    return _PlannedPart(part, replace(own, inputs=part.inputs), profiled, points)


def _launches_of(parts: Sequence[_PlannedPart]) -> Launches | None:
    """Return what host and device take for all parts; None where that is not known of each."""
    known = [(launches, p.part.num_calls) for p in parts if (launches := p.profiled.profile.launches) is not None]
    if len(known) < len(parts):
        return None
    host_seconds = sum(launches.host_seconds * count for launches, count in known)
    return Launches(host_seconds, sum(launches.device_seconds * count for launches, count in known))


def _report_of_part(planned: _PlannedPart, chosen: Emitted) -> Report:
    return build_report(
        planned.profiled.profile,
        chosen.point,
        chosen.verification,
        budget_bytes=None,
        eager_peak_bytes=max(point.peak_bytes for point in planned.points),
        least_bytes=min(point.peak_bytes for point in planned.points),
        peak_step=chosen.timeline.peak_step,
        bound_seconds=chosen.point.recompute_seconds,
        plan_seconds=0.0,
        notes=(),
        inplace=(),
    )


def _report(
    search: _Search, reports: Sequence[Report], ran: FakeStep, eager: FakeStep, said: str, plan_seconds: float
) -> Report:
    """Return the report of the whole: its own peaks; times and rows of all parts; timelines of the largest part."""
    model, inputs = search.context.model, search.context.inputs
    least = search.at(math.inf)[1]
    step_seconds = sum(p.profiled.profile.step_seconds for p in search.parts)
    overhead_seconds = sum(report.overhead_seconds for report in reports)
    rows = [
        replace(row, name=f"{p.part.path}.{row.name}")
        for p, report in zip(search.parts, reports, strict=True)
        for row in report.rows
    ]
    return replace(
        reports[0],
        planner="parts",
        budget_bytes=search.context.settings.budget_bytes,
        predicted_peak_bytes=ran.peak_bytes,
        eager_peak_bytes=eager.peak_bytes,
        overhead_seconds=overhead_seconds,
        overhead_ratio=overhead_seconds / step_seconds if step_seconds else 0.0,
        gap_ratio=1.0,
        plan_seconds=plan_seconds,
        launches=_launches_of(search.parts),
        static=StaticBytes(
            parameters_bytes=sum(p.nbytes for p in model.parameters()),
            buffers_bytes=sum(b.nbytes for b in model.buffers()),
            inputs_bytes=sum(t.nbytes for t in inputs.tensors),
            optimizer_state_bytes=ran.optimizer_state_bytes,
        ),
        peak_at="the step as a whole, along the way that the call takes through the model",
        rows=tuple(rows),
        notes=(said, f"timelines and graph are those of the part {search.parts[0].part.path}"),
        _least_bytes=search.bound_of(least),
    )


def _advice(model: torch.nn.Module, found: Sequence[Part]) -> str:
    share = num_elements(*(part.module for part in found)) / num_elements(model)
    paths = ", ".join(list(dict.fromkeys(part.path for part in found))[:3])
    return (
        f"Its parts {paths} can be captured ({share:.0%} of its parameters), but it does not run on fakes to its end: "
        "nothing bounds the step as a whole: optimize them one by one with fxmem.optimize; each budget then bounds a "
        "step of that part alone."
    )


def run_part(part: torch.nn.Module, compiled_for: Callable[[Inputs], Compiled]) -> RunPart:
    """Return what runs ``part`` on what is compiled for each of its calls in training, else as it is."""
    return partial(_run_part, part, compiled_for)


def _run_part(
    part: torch.nn.Module, compiled_for: Callable[[Inputs], Compiled], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not (part.training and torch.is_grad_enabled()):
        return part(*args, **kwargs)
    inputs = Inputs.of(args, kwargs, part)
    compiled = compiled_for(inputs)
    output, leaves = compiled.captured.run_in_training(compiled.graph_module, inputs.leaves)
    compiled.captured.returned((args, kwargs), leaves)
    return output
