"""Whether a captured graph does what its model does: both are run on fakes and compared.

In: a model, its :class:`CaptureGraph`, the inputs. Out: nothing, or a ``CaptureError`` that names what a graph would lose:
nodes of autograd, effects in Python, what a second call would do otherwise.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fxmem.capture.graph import CaptureGraph, Inputs
from fxmem.capture.pytrees import flattened
from fxmem.capture.side_effects import NONE, SideEffects, facts_of, side_effects
from fxmem.capture.value_guards import seeing_values
from fxmem.errors import CaptureError, ChangedArgumentError, chain_of, first_lines, raised_in
from fxmem.fake.fake_tensors import FakeWorld, ScalarReads, attributes_restored
from fxmem.fake.generators import Draws, seeds
from fxmem.fake.modes import FewLooks, TooManyLooks
from fxmem.fake.op_log import OpLog
from fxmem.fake.python_state import Place, PythonState
from fxmem.op_facts import names_of
from fxmem.op_facts.kinds import AddedByExport
from fxmem.runtime.autocast import Autocast, casts_kept
from fxmem.runtime.backend_flags import present
from fxmem.torch_patches import calls_told_to
from fxmem.torch_private import DynamicOutputShapeException, graph_nodes, in_transform, tree_leaves, version_of

Ops = list[tuple[str, tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class _Run:
    """What a forward on fakes built and did."""

    nodes: Counter[str]
    """Autograd nodes that the outputs reach, by name; parameters by their own."""
    calls: list[str]
    """Calls it made that a graph would not keep: keys of ``_REMEDIES``."""
    left: dict[Place, Any]
    """Places outside of the graph that it changed, with what they hold."""
    again: dict[Place, Any]
    """The same, for a second forward right after, if there was one."""
    ops: Ops
    repeated: tuple[Ops, Ops]
    """Of two calls after each other: of this one and the next, or of the two after it if this one is a first one."""
    new_buffers: frozenset[str]
    """Buffers of the model that it wrote to, or exchanged for others."""
    arguments: tuple[int | str, ...] = ()
    """Containers among its arguments that it put something else into."""
    moved: tuple[Place, ...] = ()
    """What lay otherwise after the first call, if the second read it or did otherwise."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a model that was not captured, which may wait for values that a run on fakes never gives it."""

    parameters: tuple[torch.Tensor, ...]
    autocast: Autocast | None
    effects: SideEffects = NONE


def check_faithful(model: torch.nn.Module, captured: CaptureGraph, inputs: Inputs) -> SideEffects:
    """Raise ``CaptureError`` if the model does what its graph would not: in autograd, in Python, in its next call. Return
    what it leaves in Python that the graph could leave too, if it were captured for that."""
    try:
        eager = _run(model, model, captured, inputs, twice=True)
        missing = NONE if captured.effects else _left_by(model, eager)
        if missing:
            return missing
        graph = _run(captured.graph_module, model, captured, inputs, twice=bool(eager.again))
    except CaptureError:
        raise
    except Exception as error:
        place = raised_in(error, model.named_modules())
        shapeless = next((cause for cause in chain_of(error) if isinstance(cause, DynamicOutputShapeException)), None)
        if shapeless is not None:
            raise CaptureError(
                f"{type(model).__name__} could not be captured{place}: the shape of what {shapeless.func} returns there (a "
                "tensor indexed by a mask, for one) depends on values, which only a run can tell. Compute it outside and "
                "pass it in, let torch.where or a product with the mask keep the shape, or optimize the parts around it."
            ) from error
        raise CaptureError(
            f"{type(model).__name__} could not be run on fake tensors{place}: {first_lines(error)}. If it reads the values "
            "in tensors, move that part out of the model or optimize the parts around it."
        ) from error
    _check_effects(captured.effects, model, eager, graph)
    _check_autograd(model, eager, graph)
    _check_ops(model, eager, graph)
    captured.effects.check_unread(captured.tensors_read())
    return NONE


def effects_seen(model: torch.nn.Module, autocast: Autocast | None, inputs: Inputs) -> SideEffects:
    """Return what a forward of ``model`` leaves in Python, as a run on fakes shows; nothing where it does not run there."""
    try:
        return _left_by(model, _run(model, model, _Call(tuple(model.parameters()), autocast), inputs, twice=True))
    except (Exception, TooManyLooks):
        return NONE


def _left_by(model: torch.nn.Module, eager: _Run) -> SideEffects:
    return side_effects(model, eager.left, eager.again, eager.arguments, eager.moved)


def _check_ops(model: torch.nn.Module, eager: _Run, graph: _Run) -> None:
    """Raise ``CaptureError`` if the graph computes what the model does not; what it lacks is of no use to its outputs.

    A copy is what becomes of a buffer that the model replaces by another.
    """
    ops = iter(eager.ops)
    foreign = next((op for op in graph.ops if op[0] not in _ADDED and op not in ops), None)
    if foreign is not None:
        raise CaptureError(
            f"the captured graph of {type(model).__name__} computes {_written(foreign)} where the model itself does not. "
            "Its forward may ask whether it is being traced, and take another branch then: let it take the one of eager."
        )


_ADDED = names_of(AddedByExport)


def _check_autograd(model: torch.nn.Module, eager: _Run, graph: _Run) -> None:
    lost_buffers = eager.new_buffers - graph.new_buffers
    if lost_buffers:
        raise CaptureError(
            f"{type(model).__name__} exchanges the buffer {min(lost_buffers)!r} in forward; a captured graph would not. "
            "Write to it in place (copy_), or assign to the attribute."
        )
    lost_calls = Counter(eager.calls) - Counter(graph.calls)
    if lost_calls:
        call = min(lost_calls)
        raise CaptureError(
            f"{type(model).__name__} calls {call} in forward; a captured graph would lose it. {_REMEDIES[call]}"
        )
    lost = {name: n - graph.nodes[name] for name, n in eager.nodes.items() if n > graph.nodes[name]}
    if lost:
        names = ", ".join(f"{name} (x{n})" for name, n in sorted(lost.items())[:5])
        why = next((text for name, text in _KNOWN_LOSSES.items() if any(name in node for node in lost)), _OTHER_LOSS)
        raise CaptureError(
            f"the captured graph of {type(model).__name__} lacks autograd nodes of the model: {names}. {why}"
        )


_KNOWN_LOSSES = {
    "DifferentiableGraph": "A function of torch.jit.script or torch.jit.trace is differentiated by TorchScript's own "
    "rules: call the Python function that it was made from.",
    "CheckpointFunction": "Reentrant torch.utils.checkpoint does not go into a graph: switch it off "
    "(use_reentrant=False, or gradient_checkpointing_disable()); fxmem recomputes by its own plan.",
    "AccumulateGrad": "A parameter or a tensor that it makes require grad inside forward would get no gradient.",
}
_OTHER_LOSS = "A custom autograd.Function or a module hook in it would be lost, and gradients would be wrong."


def _check_effects(effects: SideEffects, model: torch.nn.Module, eager: _Run, graph: _Run) -> None:
    """Raise ``CaptureError`` for what a forward leaves in Python, or does anew in each call; a cache is neither, and the
    graph has the ``effects``."""
    name, kept = type(model).__name__, set(effects.attributes)
    for place, value in eager.left.items():
        with_grad = isinstance(value, torch.Tensor) and value.requires_grad
        if with_grad and place not in graph.left and place not in kept:
            raise CaptureError(
                f"{name} leaves a tensor that carries gradient in the attribute {place}; a captured graph would not. Let "
                "forward return it instead."
            )
    changed = next((place for place in eager.again if place not in graph.again and place not in kept), None)
    if changed is not None:
        raise CaptureError(
            f"{name} changes {changed} in every forward; a captured graph would not. Keep it in a tensor, by "
            "register_buffer, or do it outside of the model."
        )
    first_ops, second_ops = eager.repeated
    special = next((place for place in eager.left if place not in kept), None) if first_ops is not eager.ops else None
    if special is not None:
        second_ops, first_ops = first_ops, eager.ops
    if first_ops != second_ops:
        first, second = _first_difference(first_ops, second_ops)
        raise CaptureError(
            f"{name} computes something else when it is called again with the same arguments ({first}, then {second}); a "
            "captured graph would not. If only its first call is special, call it once before fxmem.optimize; if it "
            "depends on Python's random numbers, the time or a counter, draw from torch or keep the number in a buffer."
        )


def _first_difference(first: list[tuple[str, tuple[str, ...]]], second: list[tuple[str, tuple[str, ...]]]) -> list[str]:
    pairs = zip_longest(first, second, fillvalue=("nothing more", ()))
    return [_written(op) for op in next(pair for pair in pairs if pair[0] != pair[1])]


def _written(op: tuple[str, tuple[str, ...]]) -> str:
    return f"{op[0]}({', '.join(op[1])})"


def _run(
    module: torch.nn.Module, model: torch.nn.Module, captured: CaptureGraph | _Call, inputs: Inputs, *, twice: bool
) -> _Run:
    """Run ``module``, the model itself or its graph, once or two times on fakes."""
    world = FakeWorld(inputs.leaves)
    fakes = [world.fake_all(leaf) for leaf in inputs.leaves]
    arguments: dict[int | str, None] = {}

    def forward() -> tuple[Any, OpLog]:
        with (
            casts_kept(False),  # none is to be at hand when the forward is run again
            captured.autocast.enter() if captured.autocast else nullcontext(),
            OpLog([fakes, [world.fake(p) for p in captured.parameters]]) as log,
        ):
            if module is model:
                args, kwargs = Inputs(tuple(fakes), inputs.spec).call()
                left_in = _arguments_left(model, args, kwargs)
                with left_in as put_into, captured.effects.returned(model), seeing_values(inputs.leaves, fakes):
                    outputs = module(*args, **kwargs)
                arguments.update(put_into)
            else:
                outputs = module(*fakes)
        return outputs, log

    buffers = {name: world.fake(buffer) for name, buffer in model.named_buffers()}
    looks = FewLooks() if isinstance(captured, _Call) else ScalarReads()
    with attributes_restored(model), world.state_of(module), world.active(), looks:
        draws = Draws()
        before, versions = PythonState(model), {name: version_of(buffer) for name, buffer in buffers.items()}
        with _calls_noted() as calls, draws.watching():
            outputs, log = forward()
        exchanged = next(before.exchanged(), None)
        if exchanged is not None:
            raise CaptureError(
                f"{type(model).__name__} makes, removes or exchanges {exchanged} in forward, a parameter, buffer or "
                "submodule; a captured graph would not. If only its first call does so, call it once before fxmem.optimize."
            )
        left = before.changes()
        there = dict(model.named_buffers()) if module is model else buffers
        new_buffers = frozenset(
            name for name, b in buffers.items() if there.get(name) is not b or version_of(b) != versions[name]
        )
        with_grad = _buffers_with_grad(model, buffers) if module is model else {}
        new_buffers -= with_grad.keys()
        left |= dict(with_grad.values())
        nodes, ops = _autograd_nodes(outputs), log.ops
        if not twice:
            return _Run(nodes, calls, left, {}, ops, (ops, ops), new_buffers, tuple(arguments))
        facts = {place: facts_of(place) for place in left}
        between, draws_again = PythonState(model), Draws(draws.own)
        with draws_again.watching():
            _, log_again = forward()
        again = between.changes()
        drawn = draws.moved or draws_again.moved
        if not _SEEDINGS & set(calls) and (draws_again.makes_one or (drawn and seeds(forward))):
            calls.append(_OF_GENERATORS)
        after = (log_again.ops, log_again.ops if ops == log_again.ops else forward()[1].ops)
    moved = tuple(p for p in left if facts[p] != facts_of(p) and (ops != after[0] or log_again.was_given(left[p])))
    repeated = after if moved else (ops, after[0])
    return _Run(nodes, calls, left, again, ops, repeated, new_buffers, tuple(arguments), moved)


def _buffers_with_grad(
    model: torch.nn.Module, before: Mapping[str, torch.Tensor]
) -> dict[str, tuple[Place, torch.Tensor]]:
    """Return, by name, the buffers that were exchanged for tensors with a gradient (NOTE [State between calls], rule 1)."""
    found = {}
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items() if not isinstance(module, torch.jit.ScriptModule) else ():
            name = f"{path}.{key}" if path else key
            if buffer is not None and buffer.requires_grad and before.get(name, buffer) is not buffer:
                found[name] = Place(type(module).__name__, key, id(module._buffers), key, module._buffers), buffer
    return found


@contextmanager
def _arguments_left(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[dict[int | str, None]]:
    """Note the dicts and lists among a call's arguments that the body put anything else into. Errors:
    ``ChangedArgumentError`` of other containers."""
    named: dict[int | str, Any] = dict([*enumerate(args), *kwargs.items()])
    before = {name: flattened(value) for name, value in named.items()}
    put_into: dict[int | str, None] = {}
    yield put_into
    for name, value in named.items():
        (given, given_spec), (left, left_spec) = before[name], flattened(value)
        if left_spec != given_spec or any(a is not b for a, b in zip(left, given, strict=True)):
            if not isinstance(value, dict | list):
                which = f"number {name}" if isinstance(name, int) else repr(name)
                raise ChangedArgumentError(
                    f"{type(model).__name__} changes its argument {which}, a {type(value).__name__}; a captured graph "
                    "would not. Let forward return what it puts there (of a cache of keys and values: use_cache=False)."
                )
            put_into[name] = None


def _autograd_nodes(outputs: Any) -> Counter[str]:
    """Count the autograd nodes that ``outputs`` reach, by name."""
    tensors = (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
    return Counter(node.name() for node in graph_nodes(tensors) if not _harmless(node))


def _harmless(node: Any) -> bool:
    """Views and copies differ between a model and its graph (``x.T`` or ``permute``) without changing a gradient."""
    named = any(name in node.name() for name in ("AccumulateGrad", "DifferentiableGraph"))
    return not isinstance(node, torch.autograd.function.BackwardCFunction) and not named


_SEEDING = "Draw from a torch.Generator of the model's own instead."
_SEEDINGS = frozenset({"torch.manual_seed", "torch.set_rng_state", "torch.random.fork_rng"})
_OF_GENERATORS = "manual_seed or set_state of a torch.Generator"
_CASTING = "Say with torch.autocast(..., cache_enabled=False) where no cast is to be kept."
_HOOKING = "Set the hook on a parameter, or outside the model."
_REMEDIES = {
    "Tensor.register_hook": _HOOKING,
    "Tensor.register_post_accumulate_grad_hook": _HOOKING,
    "requires_grad_ of a parameter": "Set it outside the model; where a part is frozen for one of its uses only, call it "
    "there with detached parameters (torch.func.functional_call).",
    "grad of a parameter": "Read, write or clear gradients outside the model.",
    "Tensor.grad_fn": "Write what it does with the autograd graph as a torch.autograd.Function.",
    "torch.manual_seed": _SEEDING,
    "torch.set_rng_state": _SEEDING,
    "torch.random.fork_rng": _SEEDING,
    _OF_GENERATORS: "Make and seed generators outside the model's forward; keep numbers "
    "that are to be the same in each call in a buffer.",
    "torch.inference_mode": "Use torch.no_grad.",
    "torch.clear_autocast_cache": _CASTING,
    "torch.set_autocast_cache_enabled": _CASTING,
    "a switch of torch.backends": "Set it around the whole step instead.",
}
"""Calls inside a forward that no graph keeps, and what to do instead."""
_grad: Any = torch.Tensor.grad
_requires_grad: Any = torch.Tensor.requires_grad
_OF_PARAMETERS: dict[Any, str] = {
    torch.Tensor.requires_grad_: "requires_grad_ of a parameter",
    _requires_grad.__set__: "requires_grad_ of a parameter",
    **dict.fromkeys((_grad.__get__, _grad.__set__, _grad.__delete__), "grad of a parameter"),
}
"""Functions that :class:`_CallsSeen` is told of, with their names in ``_REMEDIES``; on activations, graphs keep them or
are refused for the nodes they lack."""


class _CallsSeen(TorchFunctionMode):
    """Notes every read of ``grad_fn`` by code that is not torch's own, as what is done to it later cannot be seen, and
    every change of the switches that say which kernels may run. Errors: ``CaptureError`` inside a transform."""

    def __init__(self, noted: list[str]) -> None:
        super().__init__()
        self._noted = noted
        self._switches = present()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if in_transform():
            raise CaptureError(
                "the forward calls a transform of torch.func (vmap, grad, jvp, ...), which a captured graph cannot hold. "
                "Write the same with batched ops, or move it out of the model."
            )
        if getattr(func, "__self__", None) is torch.Tensor.grad_fn and _called_by_user():
            self._noted.append("Tensor.grad_fn")
        if func in _OF_PARAMETERS and isinstance(args[0], torch.nn.Parameter):
            self._noted.append(_OF_PARAMETERS[func])
        switches = present()
        if switches != self._switches:
            self._noted.append("a switch of torch.backends")
            self._switches = switches
        return func(*args, **(kwargs or {}))


def _called_by_user() -> bool:
    """True if what calls is not torch's own code; fxmem's frames in between do not count."""
    frame = inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("fxmem."):
        frame = frame.f_back
    return frame is None or not str(frame.f_globals.get("__name__", "")).startswith("torch.")


@contextmanager
def _calls_noted() -> Iterator[list[str]]:
    """Note every call of this thread while the body runs that ``_REMEDIES`` names."""
    noted: list[str] = []
    thread = threading.get_ident()

    def told(name: str) -> None:
        if threading.get_ident() == thread and _called_by_user():
            noted.append(name)

    with _CallsSeen(noted), calls_told_to(told):
        yield noted
