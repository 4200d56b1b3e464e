"""Writing a plan into a new torch.fx graph.

In: a :class:`Profiled` and a :class:`Plan`. Out: a flat GraphModule that computes the same leaves from the same leaves.
Nodes the plan does not touch are copied as they are; the others run through :class:`fxmem.runtime.tape.TapedCall`. With
nothing dropped the graph is the captured one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxmem.capture.graph import CaptureGraph, attribute_of, count_of_batches
from fxmem.ir import KEEP, Plan
from fxmem.passes.context import CompileContext, Settings
from fxmem.planners.offload.recipes import fetched_ahead, with_offloads
from fxmem.profiling.profile import Profiled
from fxmem.runtime.op_bindings import callable_of
from fxmem.runtime.other_sizes import Sizes, TapeOpener
from fxmem.runtime.recompute import Recompute
from fxmem.runtime.tape import TapedCall, close_tape
from fxmem.runtime.tape_table import NodeTape, TapeTable

CodeTransformer = Callable[[list[str]], list[str]]


@dataclass(frozen=True, slots=True)
class _Live:
    """What of a plan can matter at run time."""

    dropped: frozenset[int]
    """Dropped storages whose slot can have an owner: saved, or read by the recipe of such a one."""
    held: frozenset[int]
    """Kept storages that such a recipe reads."""
    recipes: frozenset[int]
    """Those that run again."""
    fetched: frozenset[int]
    """Those whose products are fetched from host memory."""


@dataclass(frozen=True, slots=True)
class Emit:
    """Write ``plan`` into the graph that it was made for."""

    plan: Plan
    name = "emit"

    def enabled(self, settings: Settings) -> bool:
        return True

    def apply(self, graph: CaptureGraph, context: CompileContext) -> CaptureGraph:
        sizes = Sizes(
            tuple(sorted(graph.dynamic)),
            tuple(context.inputs.leaves[i].shape[d] for i, d in sorted(graph.dynamic)),
            bounded=context.settings.budget_bytes is not None,
        )
        return replace(graph, graph_module=rewrite(context.profile_of(graph), self.plan, sizes), made_from=graph)


def rewrite(profiled: Profiled, plan: Plan, sizes: Sizes | None = None) -> fx.GraphModule:
    """Return the GraphModule that trains under ``plan``; its parameters are the captured module's own objects.

    ``sizes``: what other sizes of the graph's inputs the plan may serve.
    """
    profiled = replace(profiled, profile=with_offloads(profiled.profile, plan))
    live = _live(profiled, plan)
    captured = profiled.captured.graph_module
    tapes = _node_tapes(profiled, plan, live)
    statics = sorted({j for r in live.recipes for j in _statics_of(profiled.recomputes[r])}, reverse=True)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    tape: fx.Node | None = None
    by_name = {node.name: node for node in captured.graph.nodes}
    placeholders = [node for node in captured.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        env[node] = graph.node_copy(node)
    if live.dropped:
        inputs = [_read_static(graph, env, by_name[profiled.static_names[~j]]) for j in statics]
        free = [env[placeholders[i]] for i in dict.fromkeys(i for i, _ in sizes.dims)] if sizes else []
        tape = graph.call_module("fxmem_tape", (*inputs, *free))
        tape.name = "tape"
    calls = iter(range(len(profiled.profile.nodes)))
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            if tape is not None:
                graph.call_function(close_tape, (tape,))
            graph.output(fx.map_arg(node.args[0], lambda n: env[n]))
            continue
        index = next(calls) if node.op == "call_function" else -1
        if index in tapes and tape is not None:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
            call = TapedCall(callable_of(node))
            env[node] = graph.create_node("call_function", call, (tape, index, *args), kwargs, name=node.name)
            env[node].meta = dict(node.meta)
        else:
            env[node] = graph.node_copy(node, lambda n: env[n])
            if index >= 0:
                env[node].target = callable_of(node)
    attributes = {
        n.name: (str(n.target), attribute_of(captured, str(n.target))) for n in graph.find_nodes(op="get_attr")
    }
    reads = {
        name: _read(target, value) for name, (target, value) in attributes.items() if isinstance(value, torch.Tensor)
    }
    comments = _comments(profiled, plan, live)
    graph.on_generate_code(lambda current: _with_lines(current, reads, comments))
    graph.lint()
    counters = {
        j: count
        for j in statics
        if (count := count_of_batches(captured, by_name[profiled.static_names[~j]])) is not None
    }
    opener = TapeOpener(_table(profiled, plan, live, tapes), tuple(statics), counters, sizes)
    return fx.GraphModule({**dict(attributes.values()), "fxmem_tape": opener}, graph, class_name="Optimized")


def _read_static(graph: fx.Graph, env: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    return env[node] if node in env else graph.node_copy(node)


def _statics_of(recompute: Recompute | None) -> tuple[int, ...]:
    assert recompute is not None
    return tuple(dict.fromkeys(view.storage for node in recompute.nodes for _, view in node.refs if view.storage < 0))


def _live(profiled: Profiled, plan: Plan) -> _Live:
    storages, recipes = profiled.profile.storages, profiled.profile.recipes
    stack = [s.index for s in storages if plan.limits[s.index] != KEEP and s.num_saves]
    dropped, held, used = set(stack), set(), set()
    while stack:
        recipe = storages[stack.pop()].recipe
        assert recipe is not None
        used.add(recipe)
        for i in recipes[recipe].inputs:
            if plan.limits[i] == KEEP:
                held.add(i)
            elif i not in dropped:
                dropped.add(i)
                stack.append(i)
    fetched = used & plan.fetched
    return _Live(frozenset(dropped), frozenset(held), frozenset(used - fetched), frozenset(fetched))


def _node_tapes(profiled: Profiled, plan: Plan, live: _Live) -> dict[int, NodeTape]:
    """Return what the tape does, for those nodes where it does anything."""
    profile = profiled.profile
    replayed = {k for r in live.recipes for k in profile.recipes[r].nodes}
    holds: dict[int, list[int]] = {}
    for s in live.held:
        holds.setdefault(profiled.last_writer[s], []).append(s)
    makers = {profile.storages[s].creator for s in live.held}
    sends, leaves = _sent(profiled, live)
    connects, frees = _connections(profiled, live)
    inputs = _inputs(profiled)
    tapes = {}
    for node in profile.nodes:
        hooked = any(s in live.dropped for s in node.saves)
        given = {view.storage for _, view in profiled.arguments[node.index]}
        moved = node.index in sends or node.index in leaves
        if hooked or moved or node.index in holds or node.index in replayed or node.index in makers:
            tapes[node.index] = NodeTape(
                index=node.index,
                name=node.name,
                draws_on=profiled.draws_on[node.index] if node.index in replayed else (),
                hooked=hooked,
                arguments=profiled.arguments[node.index],
                loose=tuple(
                    (p, v)
                    for p, v in profiled.arguments[node.index]
                    if node.index in replayed and (1 in v.size or v.storage in inputs)
                ),
                outputs=tuple((p, v) for p, v in profiled.outputs[node.index] if v.storage >= 0),
                internals=profiled.internals[node.index],
                drops_fresh=any(s in live.dropped and s not in given for s in node.saves),
                holds=tuple(_hold(profiled, node.index, s) for s in sorted(holds.get(node.index, ()))),
                connects=tuple((r, tuple(made)) for r, made in connects.get(node.index, {}).items()),
                frees=tuple(frees.get(node.index, ())),
                sends=tuple(_hold(profiled, node.index, s) for s in sends.get(node.index, ())),
                leaves=tuple(leaves.get(node.index, ())),
            )
    return tapes


def _sent(profiled: Profiled, live: _Live) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Say, by node, what is copied to host memory once it is done, and what the forward lets go of then. Internals are
    copied as they are saved."""
    profile = profiled.profile
    sends: dict[int, list[int]] = {}
    leaves: dict[int, list[int]] = {}
    moved = [s for s in sorted(live.dropped) if profile.storages[s].recipe in live.fetched]
    last_used = {s: tick.node for tick in profile.ticks for s in tick.last_used}
    for s in moved:
        if not profile.storages[s].internal:
            sends.setdefault(profiled.last_writer[s], []).append(s)
        node = last_used.get(s)
        assert node is not None, "what the forward lets go of after its end is an output"
        leaves.setdefault(node, []).append(s)
    return sends, leaves


def _inputs(profiled: Profiled) -> frozenset[int]:
    """Return the static tensors (``~j``) that a call brings along."""
    names = {node.name for node in profiled.captured.graph_module.graph.nodes if node.op == "placeholder"}
    return frozenset(~j for j, name in enumerate(profiled.static_names) if name in names)


def _connections(profiled: Profiled, live: _Live) -> tuple[dict[int, dict[int, list[int]]], dict[int, list[int]]]:
    """Say, by node, which slots take hold of their recipe's inputs there, and which have all their owners from there on."""
    profile = profiled.profile
    connects: dict[int, dict[int, list[int]]] = {}
    last_owner: dict[int, int] = {}
    for s in sorted(live.dropped):
        recipe = profile.storages[s].recipe
        assert recipe is not None
        node = profile.recipes[recipe].nodes[-1]
        connects.setdefault(node, {}).setdefault(recipe, []).append(s)
        for i in (s, *profile.recipes[recipe].inputs):
            last_owner[i] = max(last_owner.get(i, 0), node)
    for profiled_node in profile.nodes:
        for s in live.dropped.intersection(profiled_node.saves):
            last_owner[s] = max(last_owner[s], profiled_node.index)
    frees: dict[int, list[int]] = {}
    for s, node in last_owner.items():
        frees.setdefault(node, []).append(s)
    return connects, frees


def _hold(profiled: Profiled, node: int, storage: int) -> tuple[bool, int, int]:
    """Say where at ``node`` a tensor on ``storage`` is to be found: (from outputs, place, storage)."""
    for place, view in profiled.outputs[node]:
        if view.storage == storage:
            return (True, place, storage)
    return (False, next(p for p, v in profiled.arguments[node] if v.storage == storage), storage)


def _table(profiled: Profiled, plan: Plan, live: _Live, tapes: dict[int, NodeTape]) -> TapeTable:
    profile = profiled.profile
    fetched = {r: tuple(s for s in profile.recipes[r].products if s in live.dropped) for r in sorted(live.fetched)}
    ahead: dict[int, tuple[int, ...]] = {}
    for offload in plan.offloads:
        if offload.after is not None and offload.recipe in live.fetched:
            ahead[offload.after] = (*ahead.get(offload.after, ()), *fetched_ahead(profile, plan, offload.recipe))
    used = [r if r in live.recipes else None for r in range(len(profile.recipes))]
    return TapeTable(
        nodes=tapes,
        recomputes=tuple(None if r is None else profiled.recomputes[r] for r in used),
        elementwise=frozenset(
            r for r in live.recipes if (recompute := profiled.recomputes[r]) and recompute.elementwise
        )
        | live.fetched,
        recipe_inputs=tuple(recipe.inputs for recipe in profile.recipes),
        recipe_statics=tuple(() if r is None else _statics_of(profiled.recomputes[r]) for r in used),
        recipe_of=tuple(s.recipe for s in profile.storages),
        limits=plan.limits,
        dropped=live.dropped,
        from_nothing=frozenset(
            s
            for s in live.dropped
            if (r := profile.storages[s].recipe) in live.recipes and r is not None and not profile.recipes[r].inputs
        ),
        internal=frozenset(s.index for s in profile.storages if s.internal),
        devices=profiled.devices,
        autocast=profiled.captured.autocast,
        regions_inside=profiled.captured.autocast_device is not None,
        names=tuple(s.name for s in profile.storages),
        nbytes=tuple(s.nbytes for s in profile.storages),
        fetched=fetched,
        ahead=ahead,
    )


# -- readable code -----------------------------------------------------------------------------------------------------


def _comments(profiled: Profiled, plan: Plan, live: _Live) -> dict[str, str]:
    """Say, by node name, what the plan does with what the node makes."""
    comments: dict[str, list[str]] = {}
    for s in profiled.profile.storages:
        if not s.num_saves and s.index not in live.held | live.dropped:
            continue
        verb = "offload" if s.recipe in live.fetched else "drop"
        verb = verb if s.index in live.dropped else "keep"
        what = f" {s.name.rpartition('.')[2]}" if "." in s.name else ""
        name = profiled.profile.nodes[s.creator].name
        comments.setdefault(name, []).append(f"{verb}{what} {s.nbytes / 1e6:.3f} MB")
    return {name: ", ".join(parts) for name, parts in comments.items()}


def _read(target: str, tensor: torch.Tensor) -> str:
    """Return the code that reads a tensor of a GraphModule, in a fraction of the time that ``Module.__getattr__`` takes,
    which comes after a vain search at each level."""
    *path, name = target.split(".")
    registry = "_parameters" if isinstance(tensor, torch.nn.Parameter) else "_buffers"
    return "self" + "".join(f"._modules[{part!r}]" for part in path) + f".{registry}[{name!r}]"


def _with_lines(current: CodeTransformer | None, reads: dict[str, str], comments: dict[str, str]) -> CodeTransformer:
    """Compose with the transformer already there: by the node that a line makes, what it reads, and a comment after it."""

    def transform(lines: list[str]) -> list[str]:
        code = "".join(current(lines) if current is not None else lines)
        return [_line(line, reads, comments) for line in code.splitlines(keepends=True)]

    return transform


def _line(line: str, reads: dict[str, str], comments: dict[str, str]) -> str:
    left, equals, right = line.partition(" = ")
    name = left.strip().partition(" :")[0]
    if name in reads:
        _, semicolon, rest = right.rstrip("\n").partition(";")
        line = f"{left}{equals}{reads[name]}{semicolon}{rest}\n"
    comment = comments.get(name)
    return line if comment is None else f"{line.rstrip()}  # {comment}\n"
