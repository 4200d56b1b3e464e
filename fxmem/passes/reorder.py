"""Another order of independent ops, in which less is alive at the peak.

In: a captured graph and its profile. Out: the same calls in another order, if the step of the reordered graph, profiled and
simulated without recomputation, has a lower peak.

The backward runs in reverse, so an order is chosen from its end: of the ops whose readers all stand already, the one
whose backward leaves the fewest bytes behind. It makes the gradients of what the op reads and of its parameters, and lets
go of the gradient of what it made and of what it saved. Runs of ops with one reader each stand together, for their bytes
rise before they fall: those that lower what is alive come first, by what they need meanwhile (Liu 1987, for trees). No
order brings a step below what is saved at the end of its forward.

NOTE [What keeps its order]

1. What reads a value stands after what makes it; what writes a storage, or one that views it, after all that used it
   before, and before all that use it later. Buffers count as written by whoever touches them: a norm's statistics are.
2. Random ops keep their order, so each draws the numbers that it drew; so do ops that may never run again.
3. Where three or more ops read one value, they keep their order: its gradients are summed in it, and the sum of three
   depends on it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import fx

from fxmem.capture.graph import CaptureGraph, with_graph
from fxmem.ir import ChoiceMade
from fxmem.passes.context import CompileContext, Settings
from fxmem.planners.simulate import keep_all, simulate
from fxmem.profiling.profile import Profiled


@dataclass(frozen=True, slots=True)
class Order:
    """Ops by number: what each must stand after, and the bytes that its backward moves."""

    after: tuple[frozenset[int], ...]
    """For each op, those that it must stand after."""
    reads: tuple[tuple[int, ...], ...]
    """Values that it reads: before it they are alive, or where they are saved, their gradients are in the backward."""
    makes: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    """Of each value, and of its gradient."""
    saved_bytes: tuple[int, ...]
    """By op: what its backward lets go of."""
    kept_bytes: tuple[int, ...]
    """By op: gradients of parameters that its backward leaves."""


class Reorder:
    """Independent ops stand in the order in which least is alive at the peak."""

    name = "reorder"

    def enabled(self, settings: Settings) -> bool:
        return "reorder" in settings.allow

    def apply(self, graph: CaptureGraph, context: CompileContext) -> CaptureGraph:
        profiled = context.profile_of(graph)
        order = schedule(order_of(profiled))
        if order == list(range(len(order))):
            return graph
        other = in_order(graph, order)
        before, after = (_peak_bytes(p) for p in (profiled, context.profile_of(other)))
        if after >= before:
            return graph
        moved = sum(k != place for place, k in enumerate(order))
        what = f"{moved} of {len(order)} ops stand in another order, by which the peak without recomputation falls"
        return replace(other, choices=(*graph.choices, ChoiceMade(self.name, what, before - after)))


def _peak_bytes(profiled: Profiled) -> int:
    return simulate(profiled.profile, keep_all(profiled.profile)).peak_bytes


# -- what must stand after what ----------------------------------------------------------------------------------------


def order_of(profiled: Profiled) -> Order:
    """Return what is known of the calls of a graph for their order (NOTE [What keeps its order])."""
    profile = profiled.profile
    calls = [node for node in profiled.captured.graph_module.graph.nodes if node.op == "call_function"]
    after = _after(profiled, calls)
    saves: set[int] = set()
    saved_bytes = []
    for node in profile.nodes:
        new = set(node.saves) - saves
        saves |= new
        saved_bytes.append(sum(profile.storages[s].nbytes for s in new))
    learned: set[int] = set()
    kept_bytes = []
    for views in profiled.arguments:
        weights = {v.storage: v for _, v in views if v.storage < 0 and v.requires_grad and v.storage not in learned}
        learned |= weights.keys()
        kept_bytes.append(sum(_nbytes(v.size) * v.dtype.itemsize for v in weights.values()))
    return Order(
        after=after,
        reads=tuple(
            tuple({v.storage for _, v in views if v.storage >= 0} - set(node.creates))
            for views, node in zip(profiled.arguments, profile.nodes, strict=True)
        ),
        makes=tuple(node.creates for node in profile.nodes),
        nbytes=tuple(s.nbytes for s in profile.storages),
        saved_bytes=tuple(saved_bytes),
        kept_bytes=tuple(kept_bytes),
    )


def _nbytes(size: Sequence[int]) -> int:
    count = 1
    for n in size:
        count *= n
    return count


def _after(profiled: Profiled, calls: Sequence[fx.Node]) -> tuple[frozenset[int], ...]:
    number = {node: k for k, node in enumerate(calls)}
    after = [{number[n] for n in node.all_input_nodes if n in number} for node in calls]
    for chain in _chains(profiled, calls, number):
        for first, second in pairwise(chain):
            after[second].add(first)
    touched = _touched(profiled)
    for k, written in enumerate(_written(profiled)):
        for first, second in (sorted((k, other)) for s in written for other in touched[s] if other != k):
            after[second].add(first)
    return tuple(map(frozenset, after))


def _chains(profiled: Profiled, calls: Sequence[fx.Node], number: dict[fx.Node, int]) -> list[list[int]]:
    """Return numbers of ops that keep their order (rules 2 and 3)."""
    nodes = profiled.profile.nodes
    chains = [[n.index for n in nodes if n.random or n.why_not]]
    for node in profiled.captured.graph_module.graph.nodes:
        readers = sorted(number[user] for user in node.users if user in number)
        if len(readers) + (len(readers) < len(node.users)) >= 3:
            chains.append(readers)
    return chains


def _touched(profiled: Profiled) -> dict[int, list[int]]:
    """Return the ops that read or return what lies on each storage."""
    found: dict[int, list[int]] = {}
    for k, (arguments, outputs) in enumerate(zip(profiled.arguments, profiled.outputs, strict=True)):
        for s in {v.storage for _, v in (*arguments, *outputs)}:
            found.setdefault(s, []).append(k)
    return found


def _written(profiled: Profiled) -> list[set[int]]:
    """Return the storages that each op may write: managed ones as seen, and of statics whatever is no parameter."""
    return [
        set(node.writes) | {v.storage for _, v in arguments if v.storage < 0 and not v.requires_grad}
        for node, arguments in zip(profiled.profile.nodes, profiled.arguments, strict=True)
    ]


# -- the order ---------------------------------------------------------------------------------------------------------


def schedule(order: Order) -> list[int]:
    """Return the ops in an order that keeps ``order.after``, chosen from its end."""
    num_ops = len(order.after)
    before: list[set[int]] = [set() for _ in range(num_ops)]
    for k, earlier in enumerate(order.after):
        for e in earlier:
            before[e].add(k)
    open_readers = [len(later) for later in before]
    runs = _runs(order, before)
    crossing: set[int] = set()
    ready = [(_rank(order, runs[k], crossing), -k) for k in range(num_ops) if not open_readers[k] and k in runs]
    heapq.heapify(ready)
    placed: list[int] = []
    while ready:
        rank, k = heapq.heappop(ready)
        now = _rank(order, runs[-k], crossing)
        if now > rank:  # it was cheaper when it was looked at
            heapq.heappush(ready, (now, k))
            continue
        for op in runs[-k]:
            placed.append(op)
            crossing.difference_update(order.makes[op])
            crossing.update(order.reads[op])
            for e in order.after[op]:
                open_readers[e] -= 1
                if not open_readers[e] and e in runs:
                    heapq.heappush(ready, (_rank(order, runs[e], crossing), -e))
    assert len(placed) == num_ops, "orders have no cycles"
    return placed[::-1]


def _runs(order: Order, before: Sequence[set[int]]) -> dict[int, list[int]]:
    """Return runs of ops, each by its last: an op and what only it stands after, which stands before only it."""
    inner = {
        e for e in range(len(before)) if len(before[e]) == 1 and order.after[next(iter(before[e]))] == frozenset({e})
    }
    runs = {}
    for last in (k for k in range(len(before)) if k not in inner):
        run = [last]
        while len(order.after[run[-1]]) == 1 and (earlier := next(iter(order.after[run[-1]]))) in inner:
            run.append(earlier)
        runs[last] = run
    return runs


def _rank(order: Order, run: Sequence[int], crossing: set[int]) -> tuple[int, int]:
    """Return what puts a run of ops, from its last to its first, before others: the lower, the nearer to the end."""
    level, hump, there = 0, 0, set(crossing)
    for op in run:
        new = [s for s in order.reads[op] if s not in there]
        there.update(new)
        level += order.kept_bytes[op] + sum(order.nbytes[s] for s in new)
        hump = max(hump, level)
        gone = [s for s in order.makes[op] if s in there]
        there.difference_update(gone)
        level -= order.saved_bytes[op] + sum(order.nbytes[s] for s in gone)
    return (0, hump) if level < 0 else (1, level - hump)


def in_order(captured: CaptureGraph, order: Sequence[int]) -> CaptureGraph:
    """Return ``captured`` with its calls in another order; parameters are read where they are used first."""
    old = captured.graph_module.graph
    calls = [node for node in old.nodes if node.op == "call_function"]
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {n: graph.node_copy(n) for n in old.nodes if n.op == "placeholder"}
    for call in (*(calls[k] for k in order), next(n for n in old.nodes if n.op == "output")):
        for read in call.all_input_nodes:
            if read not in env:
                assert read.op == "get_attr", "what an op reads stands before it"
                env[read] = graph.node_copy(read)
        env[call] = graph.node_copy(call, env.__getitem__)
    return with_graph(captured, graph)
