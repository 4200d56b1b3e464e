"""Calls whose backward holds less at once, with the same bits: found from the profile, written into the captured graph.

In: a captured graph. Out: the graph with forms of :mod:`fxmem.runtime.lean_backwards` for

1. convolutions with a large input: their backward lets go of it before its gradient is made. It costs nothing: the kernels
   are eager's.
2. ReLUs before a max pooling that alone reads them: the pooling's result, which is saved anyway, is enough for both. It
   spares time.
3. ReLUs whose result is there at the peak, beside two gradients, of the plan that takes least: bits take time to pack, but
   they are what remains. Repeated until a plan keeps the budget, or the peak falls no more. The plans are kept on disk, so
   that a step's forms are the same each time.
4. max poolings, whose indices of eight bytes can do with two: where casting them there and back takes less time than what
   has to be recomputed otherwise.

Left as they are: convolutions whose input is not contiguous, for then the kernel may depend on how it lies; of a batch that
nobody wants gradients of; under autocast; calls that a policy speaks of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import fx

from fxmem.capture.graph import CaptureGraph, copied, with_graph
from fxmem.ir import FrontierPoint, NodeProfile
from fxmem.op_facts.kinds import LeanBackward, UnreadInput
from fxmem.op_facts.lookup import by_op, resolved
from fxmem.passes.compress_saved import with_forms
from fxmem.passes.compressed_forms import Request
from fxmem.passes.context import CompileContext, Settings
from fxmem.planners import frontier_cache
from fxmem.planners.bound import certain_bytes, lower_bound
from fxmem.planners.pareto import cheapest_within
from fxmem.planners.policy import matches
from fxmem.planners.registry import AT_ONCE, PLANNERS
from fxmem.planners.simulate import simulate, tables_of
from fxmem.profiling.profile import Profiled
from fxmem.runtime.compressed_ops import max_pool_input_unread
from fxmem.runtime.layout import View
from fxmem.runtime.lean_backwards import RELUS, relu_max_pool, relu_of_bits, split_convolution
from fxmem.runtime.scoped_ops import Scoped, op_of, region_of
from fxmem.torch_private import contiguous_strides

LARGE = 0.01
"""Of the bytes that autograd saves: inputs and results of at least that are worth a form."""
PLAN_SECONDS = 0.5
"""For a plan of little memory, each round."""
MOST_ROUNDS = 6
"""In which ReLUs at the peak are looked for; each takes a profile."""

IsFree = Callable[[NodeProfile], bool]
"""Tells which calls no policy speaks of."""

POOLS = (relu_max_pool, max_pool_input_unread)
"""Forms that save indices."""

_FORMS = by_op(LeanBackward)
_UNREAD = by_op(UnreadInput)


class LeanBackwards:
    """Backwards hold less at once."""

    name = "lean_backwards"

    def enabled(self, settings: Settings) -> bool:
        return settings.compress_saved

    def apply(self, graph: CaptureGraph, context: CompileContext) -> CaptureGraph:
        def is_free(node: NodeProfile) -> bool:
            return not any(matches(where, node) for where, _ in context.settings.policy)

        profiled = context.profile_of(graph)
        if len(profiled.devices) != 1:
            return graph
        best = with_forms(profiled, {k: Request(split=True) for k in convolutions(profiled, is_free)})
        best = with_pools(best, before_pools(profiled, is_free))

        def narrow(lean: CaptureGraph) -> CaptureGraph:
            return _cheaper(lean, *with_narrow_indices(context.profile_of(lean), is_free), context)

        first = narrow(best)
        best = _with_bits_at_peaks(first, context, is_free)
        return best if best is first else narrow(best)


def _with_bits_at_peaks(best: CaptureGraph, context: CompileContext, is_free: IsFree) -> CaptureGraph:
    """Return the graph with ReLUs that save bits, until a plan keeps the budget or the peak falls no more."""
    if not relus(context.profile_of(best), is_free) or _kept_by(context.profile_of(best), context) is not None:
        return best
    least = _Least.of(context.profile_of(best), context)
    for _ in range(MOST_ROUNDS):
        profiled = context.profile_of(best)
        names = at_peak(profiled, relus(profiled, is_free), least)
        if not names or least.plan_bytes <= (context.settings.plan_bytes or 0):
            break
        other = with_bits(best, names)
        now = _Least.of(context.profile_of(other), context)
        if not now.is_below(least):
            break
        best, least = other, now
    return best


@dataclass(frozen=True, slots=True)
class _Least:
    """How little memory a step can do with."""

    plan_bytes: int
    """The least peak among plans that the user's planner finds quickly."""
    peak_tick: int
    """Of that plan."""
    held_bytes: int
    """What every plan holds at some time."""

    @staticmethod
    def of(profiled: Profiled, context: CompileContext) -> _Least:
        least = min(_quick_points(profiled, context), key=lambda point: point.peak_bytes)
        timeline = simulate(profiled.profile, least.plan)
        return _Least(timeline.peak_bytes, timeline.peak_step, int(_held(profiled).max(initial=0)))

    def is_below(self, other: _Least) -> bool:
        return self.plan_bytes < other.plan_bytes or self.held_bytes < other.held_bytes


def _quick_points(profiled: Profiled, context: CompileContext) -> tuple[FrontierPoint, ...]:
    """Return a Pareto set that the user's planner finds quickly; it is looked for once."""
    profile, settings = profiled.profile, context.settings
    planner = settings.planner

    def find() -> tuple[FrontierPoint, ...]:
        return PLANNERS[planner](profile, seconds=PLAN_SECONDS)

    if id(profile) not in context.quick_points:
        kept = frontier_cache.kept(profile, planner, PLAN_SECONDS, find) if settings.cache else find()
        context.quick_points[id(profile)] = kept
    return context.quick_points[id(profile)]


def _kept_by(profiled: Profiled, context: CompileContext) -> FrontierPoint | None:
    """Return a plan that keeps the budget, as far as one is found at once or quickly."""
    settings = context.settings
    if settings.plan_bytes is None:
        return None
    at_once = AT_ONCE.get(settings.planner)
    found = () if at_once is None else at_once(profiled.profile, seconds=PLAN_SECONDS)
    point = cheapest_within(found, settings.plan_bytes)
    return point or cheapest_within(_quick_points(profiled, context), settings.plan_bytes)


def _cheaper(graph: CaptureGraph, other: CaptureGraph, cast_bytes: int, context: CompileContext) -> CaptureGraph:
    """Return ``other``, in which indices are cast there and back, ``cast_bytes`` moved each time, if a step within the
    budget takes less time so, as far as bounds tell; where neither keeps it, the one that takes less memory."""
    if other is graph:
        return graph
    wide, narrow = (context.profile_of(each) for each in (graph, other))
    budget_bytes, point = context.settings.plan_bytes, _kept_by(wide, context)
    if budget_bytes is not None and point is not None:  # a plan for the other holds less, so it needs no more
        bounds = [lower_bound(p.profile, budget_bytes, point.recompute_seconds) for p in (wide, narrow)]
        return other if bounds[1] + 2 * context.hardware.seconds(0, cast_bytes) < bounds[0] else graph
    if _kept_by(narrow, context) is not None:
        return other
    return other if _Least.of(narrow, context).is_below(_Least.of(wide, context)) else graph


def _held(profiled: Profiled) -> NDArray[np.float64]:
    """Return for each tick the bytes that are there under every plan."""
    ticks = np.array([tick.peak_bytes for tick in profiled.profile.ticks], dtype=np.float64)
    return certain_bytes(tables_of(profiled.profile)) + ticks


def at_peak(profiled: Profiled, candidates: list[Relu], least: _Least) -> set[str]:
    """Return the names of those whose result is there at the peak of the least plan, or, under every plan, in a tick that
    holds more than all ticks without any of them."""
    held, spans = _held(profiled), _spans(profiled)
    free = np.ones(len(held), dtype=bool)
    for relu in candidates:
        free[spans[relu.storage]] = False
    others = held[free].max(initial=0.0)
    return {
        relu.name
        for relu in candidates
        if held[spans[relu.storage]].max(initial=0.0) > others
        or spans[relu.storage].start <= least.peak_tick < spans[relu.storage].stop
    }


def _spans(profiled: Profiled) -> dict[int, slice]:
    """Return for each saved storage the ticks from its first unpacking to its last release."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for t, tick in enumerate(profiled.profile.ticks):
        for s in tick.unpacks:
            first.setdefault(s, t)
        for s in tick.releases:
            last[s] = t
    return {s: slice(t, last.get(s, t) + 1) for s, t in first.items()}


# -- what is found -----------------------------------------------------------------------------------------------------


def _calls(profiled: Profiled) -> list[fx.Node]:
    return [node for node in profiled.captured.graph_module.graph.nodes if node.op == "call_function"]


def _savers(profiled: Profiled) -> dict[int, set[int]]:
    savers: dict[int, set[int]] = {}
    for node in profiled.profile.nodes:
        for s in node.saves:
            savers.setdefault(s, set()).add(node.index)
    return savers


def _saved_bytes(profiled: Profiled) -> int:
    return sum(profiled.profile.storages[s].nbytes for s in _savers(profiled))


def convolutions(profiled: Profiled, is_free: IsFree, least_share: float = LARGE) -> Iterator[int]:
    """Yield the convolutions that have gradients of input and weight, of which the input is large and contiguous."""
    storages, least = profiled.profile.storages, least_share * _saved_bytes(profiled)
    for call, node in zip(_calls(profiled), profiled.profile.nodes, strict=True):
        fact = _FORMS.get(op_of(call.target))
        if fact is None or fact.form != split_convolution.__name__ or not is_free(node):
            continue
        (_, x), (_, weight), *_ = profiled.arguments[node.index]
        learn = x.requires_grad and weight.requires_grad and x.storage in node.saves
        if learn and x.stride == contiguous_strides(x.size) and storages[x.storage].nbytes >= least:
            yield node.index


@dataclass(frozen=True, slots=True)
class Relu:
    """A call that saves its result."""

    name: str
    index: int
    storage: int
    """Of its result."""


def relus(profiled: Profiled, is_free: IsFree, least_share: float = LARGE) -> list[Relu]:
    """Return the ReLUs that save their result, where that is large and fills its memory."""
    storages, least = profiled.profile.storages, least_share * _saved_bytes(profiled)
    found = []
    for call, node in zip(_calls(profiled), profiled.profile.nodes, strict=True):
        fact = _FORMS.get(op_of(call.target))
        if fact is None or fact.form not in RELUS or not is_free(node):
            continue
        ((_, result),) = profiled.outputs[node.index]
        if result.storage in node.saves and storages[result.storage].nbytes >= least and _fills(profiled, result):
            found.append(Relu(call.name, node.index, result.storage))
    return found


def before_pools(profiled: Profiled, is_free: IsFree) -> set[str]:
    """Return the names of the ReLUs whose result a max pooling reads, and nothing else."""
    found = set()
    numbers = {call: k for k, call in enumerate(_calls(profiled))}
    nodes = profiled.profile.nodes
    for relu in relus(profiled, is_free, 0.0):
        call = next(c for c, k in numbers.items() if k == relu.index)
        (pool, *others) = call.users
        fact = _FORMS.get(pool.target)
        if (
            others
            or fact is None
            or fact.form != relu_max_pool.__name__
            or pool.kwargs
            or isinstance(call.target, Scoped)
        ):
            continue
        ((_, view),) = profiled.outputs[relu.index]
        readers = {n.index for n in nodes[relu.index + 1 :] if relu.storage in n.reads}
        if (
            readers == {numbers[pool]}
            and is_free(nodes[numbers[pool]])
            and view.stride == contiguous_strides(view.size)
        ):
            found.add(call.name)
    return found


def pools(profiled: Profiled, is_free: IsFree) -> dict[int, int]:
    """Return by number the max poolings that save indices, and the bytes of these."""
    found = {}
    for call, node in zip(_calls(profiled), profiled.profile.nodes, strict=True):
        fact, op = _UNREAD.get(op_of(call.target)), op_of(call.target)
        if (op in POOLS or (fact is not None and fact.saves_indices)) and not call.kwargs and is_free(node):
            storages = [profiled.profile.storages[s] for s in node.saves]
            sizes = [s.nbytes for s in storages if s.internal and s.creator == node.index]
            if sizes:
                found[node.index] = max(sizes)
    return found


def _fills(profiled: Profiled, view: View) -> bool:
    """True of what lies alone and without gaps on its memory."""
    lengths = sorted((stride, n) for n, stride in zip(view.size, view.stride, strict=True) if n != 1)
    expected = 1
    for stride, n in lengths:
        if stride != expected:
            return False
        expected *= n
    return profiled.profile.storages[view.storage].nbytes == expected * view.dtype.itemsize


# -- what is written ---------------------------------------------------------------------------------------------------


def with_bits(captured: CaptureGraph, names: Collection[str]) -> CaptureGraph:
    """Return the captured graph with ReLUs of these names that save bits; the very same object if there are none."""
    if not names:
        return captured
    graph, _ = copied(captured)
    for node in graph.nodes:
        if node.name in names:
            form = RELUS[_FORMS[op_of(node.target)].form]
            node.target = Scoped(form, region_of(node.target)) if isinstance(node.target, Scoped) else form
    return with_graph(captured, graph)


def with_pools(captured: CaptureGraph, names: Collection[str]) -> CaptureGraph:
    """Return the captured graph with ReLUs of these names as one op with the pooling that reads them."""
    if not names:
        return captured
    graph, _ = copied(captured)
    for node in list(graph.nodes):
        if node.name in names:
            (pool,) = node.users
            pool_of = resolved(_FORMS[pool.target].of)
            in_place = _FORMS[op_of(node.target)].form != relu_of_bits.__name__
            pool.args = (pool_of, in_place, *node.args, *pool.args[1:])
            pool.target = relu_max_pool
            graph.erase_node(node)
    return with_graph(captured, graph)


def with_narrow_indices(profiled: Profiled, is_free: IsFree) -> tuple[CaptureGraph, int]:
    """Return the captured graph with max poolings that save indices in few bytes, and the bytes that a cast of all indices
    moves; the very same graph if there are none."""
    calls, found = _calls(profiled), pools(profiled, is_free)
    if not found:
        return profiled.captured, 0
    whole = {k: Request(input=True) for k in found if op_of(calls[k].target) not in POOLS}
    others = {node.name for node in profiled.captured.graph_module.graph.nodes} - {calls[k].name for k in found}
    graph, _ = copied(with_forms(profiled, whole))
    for node in graph.nodes:
        if op_of(node.target) in POOLS and node.name not in others:  # in one dimension, a part of the call
            node.kwargs = {"narrow": True}
    moved_bytes = sum(nbytes + nbytes // 4 for nbytes in found.values())  # eight bytes are read, two are written
    return with_graph(profiled.captured, graph), moved_bytes


def notes_of(captured: CaptureGraph) -> Iterator[str]:
    """Say how many calls hold less in their backward than eager's."""
    nodes = list(captured.graph_module.graph.nodes)
    ops = [op_of(node.target) for node in nodes]
    num_split, num_bits = ops.count(split_convolution), sum(op in RELUS.values() for op in ops)
    if num_split:
        yield f"{num_split} convolutions let go of their input before its gradient is made"
    num_narrow = sum(bool(node.kwargs) for node, op in zip(nodes, ops, strict=True) if op in POOLS)
    if num_narrow:
        yield f"{num_narrow} max poolings save their indices in few bytes"
    num_pooled = ops.count(relu_max_pool)
    if num_pooled:
        yield f"{num_pooled} ReLUs before max poolings save nothing of their own"
    if num_bits:
        yield f"{num_bits} ReLUs save a bit an element"
