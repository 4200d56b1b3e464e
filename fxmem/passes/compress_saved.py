"""Calls that are to save less than they do: found from the profile, seen on fakes, written into the captured graph.

In: a profiled graph. Out: the captured graph in which dropouts (attentions with one inside too) and ops whose backward
does not read their input are exchanged for those of :mod:`fxmem.runtime.compressed_ops`. A call is taken apart on fakes
into the ops it consists of, below autocast, so the forms need to be written for ATen's own ops only. These ops then stand
in the graph one by one, each for a plan to keep or to run again: what becomes of an attention's scores is made anew
without drawing its mask anew, and their softmax goes over them less often. An input is left unsaved where no other op
saves it; all its savers may be such ops. Masks stay what they are on CUDA: they have one byte there. Dropouts in place
stay what they are.

Why, on the CPU (``benchmarks/results/ablation_runtime.json``; medians of a noisy machine): byte masks take 18 % off the
peak of an MLP-Mixer for 4 % of its step's time, where recomputing to that peak takes 19 %; attentions taken apart 6 %
off BERT's for 0 %, beside 2 %; unread inputs 1.3 % off a DenseNet's for 2 %, beside 3 %. Pooling indices in fewer bytes
took 1 to 6 % off, for as much time as recomputing: :mod:`fxmem.passes.lean_backwards` weighs the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxmem.capture.graph import CaptureGraph, copied, with_graph
from fxmem.fake.fake_tensors import FakeWorld, made_outside
from fxmem.ir import NodeProfile
from fxmem.op_facts.kinds import UnreadInput
from fxmem.op_facts.lookup import by_op
from fxmem.passes.compressed_forms import Request, exchanged, may_narrow_masks
from fxmem.passes.context import CompileContext, Settings
from fxmem.planners.policy import matches
from fxmem.profiling.profile import Profiled
from fxmem.runtime.autocast import Autocast
from fxmem.runtime.compressed_ops import (
    frozen_convolution,
    input_unread,
    masked_dropout,
    max_pool_input_unread,
)
from fxmem.runtime.layout import View
from fxmem.runtime.scoped_ops import Region, Scoped, op_of, region_of
from fxmem.torch_private import OpOverload, has_kernel, is_composite, tree_flatten, tree_unflatten

Target = Callable[..., Any]

MOST_PARTS = 60
"""An attention has about 30; what has many more (an RNN's time steps) runs faster whole."""

LEAST_SHARE = 0.02
"""Of the bytes that autograd saves: what unread inputs must be worth, since another graph is profiled anew."""

EVERYTHING = Request(masks=True, input=True)

_UNREAD = by_op(UnreadInput)


class CompressSaved:
    """Calls save less than autograd's own; those that a policy speaks of stay as they are."""

    name = "compress_saved"

    def enabled(self, settings: Settings) -> bool:
        return settings.compress_saved

    def apply(self, graph: CaptureGraph, context: CompileContext) -> CaptureGraph:
        policy = context.settings.policy
        return with_compressed_saves(
            context.profile_of(graph), lambda node: any(matches(where, node) for where, _ in policy)
        )


def with_compressed_saves(
    profiled: Profiled,
    stays_as_is: Callable[[NodeProfile], bool],
    least_share: float = LEAST_SHARE,
    forms: Request = EVERYTHING,
) -> CaptureGraph:
    """Return the captured graph with calls that save less; the very same object if there are none.

    ``stays_as_is``: calls to leave alone. ``forms``: what may be saved no longer.
    """
    captured, profile = profiled.captured, profiled.profile
    if len(profiled.devices) != 1:
        return captured
    calls = [node for node in captured.graph_module.graph.nodes if node.op == "call_function"]
    free = [not stays_as_is(node) for node in profile.nodes]
    requests = _masks(profiled, free) if forms.masks else {}
    requests |= _unread_inputs(profiled, calls, free, least_share) if forms.input else {}
    return with_forms(profiled, requests)


def with_forms(profiled: Profiled, requests: Mapping[int, Request]) -> CaptureGraph:
    """Return the captured graph with forms for calls, by number; the very same object if there are none."""
    captured = profiled.captured
    calls = [node for node in captured.graph_module.graph.nodes if node.op == "call_function"]
    known: dict[object, fx.Graph | None] = {}
    leaner: dict[fx.Node, fx.Graph] = {}
    for k, request in requests.items():
        node, views = calls[k], dict(profiled.arguments[k])
        call = request, _call_of(node, views)
        if call not in known:
            known[call] = _leaner(node, views, request, profiled.devices[0], captured.autocast)
        if (parts := known[call]) is not None:
            leaner[node] = parts
    if not leaner:
        return captured
    graph, env = copied(captured)
    for node, parts in leaner.items():
        _write(parts, env[node])
    return with_graph(captured, graph)


def _write(parts: fx.Graph, call: fx.Node) -> None:
    """Write ``parts`` for ``call``: the last op takes its place and name, the others stand before it."""
    given = (value for value in (*call.args, *call.kwargs.values()) if isinstance(value, fx.Node))
    inner = {part: next(given) for part in parts.nodes if part.op == "placeholder"}
    *ops, last = (part for part in parts.nodes if part.op == "call_function")
    for part in ops:
        args, kwargs = fx.map_arg((part.args, part.kwargs), inner.__getitem__)
        with call.graph.inserting_before(call):
            name = f"{call.name}_{part.name}"
            inner[part] = call.graph.create_node("call_function", part.target, args, kwargs, name)
        inner[part].meta = call.meta | {"val": part.meta["val"]}
    call.target = last.target
    call.args, call.kwargs = fx.map_arg((last.args, last.kwargs), inner.__getitem__)


def notes_of(captured: CaptureGraph) -> Iterator[str]:
    """Say how many calls save less than autograd's own."""
    calls = [op_of(node.target) for node in captured.graph_module.graph.nodes]
    num_masks = sum(op is masked_dropout for op in calls)
    if num_masks:
        yield f"dropout masks of {num_masks} calls have one byte an element; the estimate leaves out what narrowing takes"
    num_inputs = sum(op in (input_unread, frozen_convolution, max_pool_input_unread) for op in calls)
    if num_inputs:
        yield f"inputs that no backward reads are not saved by {num_inputs} calls"


def _masks(profiled: Profiled, free: list[bool]) -> dict[int, Request]:
    """Return the calls that may draw a mask and save it."""
    if not may_narrow_masks(profiled.devices[0].type):
        return {}
    return {
        node.index: Request(masks=True)
        for node in profiled.profile.nodes
        if node.random and _internals(profiled, node) and free[node.index]
    }


def _internals(profiled: Profiled, node: NodeProfile) -> list[int]:
    """Return the saved storages that only the autograd of ``node`` holds."""
    storages = profiled.profile.storages
    return [s for s in node.saves if storages[s].internal and storages[s].creator == node.index]


def _unread_inputs(
    profiled: Profiled, calls: list[fx.Node], free: list[bool], least_share: float
) -> dict[int, Request]:
    """Return the calls whose input need not be saved; none if they are worth little."""
    nodes, storages = profiled.profile.nodes, profiled.profile.storages
    savers: dict[int, set[int]] = {}
    for node in nodes:
        for s in node.saves:
            savers.setdefault(s, set()).add(node.index)
    unread = {
        k: _inputs(profiled, call, k) for k, call in enumerate(calls) if free[k] and _is_unread(call, profiled, k)
    }
    requests, spared_bytes = {}, 0.0
    for k, inputs in unread.items():
        if inputs and all(savers[s] <= unread.keys() and not storages[s].why_kept for s in inputs):
            requests[k] = Request(input=True)
            spared_bytes += sum(storages[s].nbytes / len(savers[s]) for s in inputs)
    return requests if spared_bytes >= least_share * sum(storages[s].nbytes for s in savers) else {}


def _is_unread(call: fx.Node, profiled: Profiled, k: int) -> bool:
    """True if the backward of ``call``, the ``k``-th, only looks at its input's geometry."""
    fact = _UNREAD.get(op_of(call.target))
    if fact is not None and fact.if_others_frozen:
        return not any(view.requires_grad for place, view in profiled.arguments[k] if place)
    return fact is not None


def _inputs(profiled: Profiled, call: fx.Node, k: int) -> list[int]:
    """Return the saved storage that the first argument of ``call``, the ``k``-th, lies on, or that of its copy of it."""
    node = profiled.profile.nodes[k]
    (place, view), *_ = profiled.arguments[k] or ((1, None),)
    if view is None or place:
        return []
    if view.storage in node.saves:
        return [view.storage]
    internals = _internals(profiled, node)
    return internals[:-1] if _UNREAD[op_of(call.target)].saves_indices else internals[:1]


def _call_of(node: fx.Node, views: dict[int, View]) -> object:
    """Return what calls that consist of the same ops have in common."""
    leaves, spec = tree_flatten((node.args, node.kwargs))
    described = [views[k]._replace(storage=0) if k in views else (type(leaf), leaf) for k, leaf in enumerate(leaves)]
    symbolic = [str(made.meta["val"].stride()) for made in leaves if _is_symbolic(made)]
    return op_of(node.target), region_of(node.target), str(spec), tuple(described), str(symbolic)


def _leaner(
    node: fx.Node, views: dict[int, View], request: Request, device: torch.device, autocast: Autocast | None
) -> fx.Graph | None:
    """Return ops that do the same as ``node`` and save what is wished less; None where they are no others.

    Out: the graph of a function of the tensors among the call's arguments, in order, that returns one tensor.
    ``views``: geometry of its tensor arguments, by place.
    """
    region = region_of(node.target)
    if not isinstance(op_of(node.target), OpOverload):
        return None
    device_type = region.autocasts[-1][0] if region.autocasts else autocast.device_type if autocast else None
    if device_type is not None and any(view.storage < 0 and view.requires_grad for view in views.values()):
        return None  # autocast casts a leaf once for all its uses, so their gradients add up before they are cast back
    graph = _parts(node, views, device, autocast)
    if graph is None or not exchanged(graph, request):
        return None
    *parts, output = graph.nodes
    if output.args[0] is not parts[-1] or any(part.op not in ("placeholder", "call_function") for part in parts):
        return None
    for part in parts:
        if part.op == "call_function":
            part.target = _in_region(part.target, region, device_type)
    return graph


def _in_region(target: Target, region: Region, device_type: str | None) -> Target:
    """Return ``target`` in ``region``, but below autocast, if that is on for ``device_type``: so it was seen."""
    if device_type is not None and _is_cast(target, device_type):
        region = replace(region, autocasts=(*region.autocasts, (device_type, None, False, None)))
    return target if region == Region() else Scoped(target, region)


def _is_cast(target: Target, device_type: str) -> bool:
    """Tell if autocast may change what ``target`` does."""
    if not isinstance(target, OpOverload):
        return True
    return is_composite(target) or has_kernel(target, f"Autocast{device_type.upper()}")


def _parts(node: fx.Node, views: dict[int, View], device: torch.device, autocast: Autocast | None) -> fx.Graph | None:
    """Return the few ops that ``node`` consists of; None where they are many, or not to be seen.

    Where the graph is for many sizes, so are they.
    """
    leaves, spec = tree_flatten((node.args, node.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
    if len(places) != sum(isinstance(value, fx.Node) for value in (*node.args, *node.kwargs.values())):
        return None  # lists of tensors: no such op is known to save more than it must
    if places != sorted(views) or any(view.conj or view.neg for view in views.values()):
        return None
    symbolic = next((leaf.meta["val"].fake_mode for leaf in leaves if _is_symbolic(leaf)), None)
    if symbolic is not None and not all(_lies_as_planned(leaves[place].meta["val"], views[place]) for place in places):
        return None
    with symbolic or FakeWorld().mode:
        geometries = [leaves[place].meta["val"] if symbolic else views[place] for place in places]
        fakes = [_fake(views[p], geometry, device) for p, geometry in zip(places, geometries, strict=True)]
    conditions = symbolic.shape_env.guards if symbolic is not None else []
    num_conditions = len(conditions)

    def call(*tensors: torch.Tensor) -> Any:
        left = iter(tensors)
        args, kwargs = tree_unflatten([next(left) if isinstance(x, fx.Node) else x for x in leaves], spec)
        return op_of(node.target)(*args, **kwargs)

    try:
        with (
            autocast.enter() if autocast else nullcontext(),
            region_of(node.target).enter(),
            torch.enable_grad(),
            symbolic or nullcontext(),
        ):
            graph = make_fx(call)(*fakes).graph
    except Exception:  # an op may refuse to be traced in any way; then it stays what it is
        return None
    if len(conditions) > num_conditions:  # at other sizes it may consist of other ops
        return None
    return graph if len(graph.nodes) <= MOST_PARTS else None


def _fake(view: View, geometry: Any, device: torch.device) -> torch.Tensor:
    size, stride = (view.size, view.stride) if geometry is view else (geometry.shape, geometry.stride())
    fake = torch.empty_strided(size, stride, dtype=view.dtype, device=device)
    return made_outside(fake) if view.requires_grad else fake


def _is_symbolic(leaf: Any) -> bool:
    """True of a node whose tensor has symbolic sizes."""
    made = leaf.meta.get("val") if isinstance(leaf, fx.Node) else None
    return isinstance(made, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in made.shape)


def _lies_as_planned(made: torch.Tensor, view: View) -> bool:
    """True if ``made``, of symbolic sizes, lies as ``view`` at the sizes planned for."""
    numbers: tuple[Any, ...] = (*made.shape, *made.stride())
    expressions = [n.node.expr if isinstance(n, torch.SymInt) else n for n in numbers]
    planned = (*view.size, *view.stride)
    symbols = {e: n for e, n in zip(expressions[: made.dim()], view.size, strict=True) if not isinstance(e, int)}
    if not all(symbol.is_symbol or symbol.is_number for symbol in symbols):
        return False
    return all((e if isinstance(e, int) else e.subs(symbols)) == n for e, n in zip(expressions, planned, strict=True))
