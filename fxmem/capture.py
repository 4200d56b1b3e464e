"""nn.Module and example inputs in, a flat torch.fx graph of ATen calls before autograd out.

The front end is ``torch.export.export(strict=False)``: linear, layer_norm, attention, batch_norm and dropout stay whole,
so autograd and autocast run through the captured graph as through the model. The graph is flattened (leaf inputs to
leaf outputs) and its parameters, the very same objects under the same names, are read where they are first used.

Not kept by the front end: the backward of a custom ``autograd.Function`` and hooks set inside forward. These calls
become opaque nodes (:mod:`fxmem.opaque`), and what was captured is checked: on fakes, the model and the graph must
build the same autograd graph.
"""

from __future__ import annotations

import inspect
import operator
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import fx
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.fx.graph_module import _assign_attr
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from fxmem.effects import OpLog, Place, PythonState
from fxmem.errors import CaptureError, InputError
from fxmem.fake import FakeWorld, ScalarReads, attributes_restored, check_device, no_value_checks
from fxmem.frozen import with_frozen_norms
from fxmem.opaque import Opaque, kept_whole, opaque_call, replaced
from fxmem.regions import Region, Scoped, op_of
from fxmem.replay import Autocast
from fxmem.structures import flattened, outputs_looked_into
from fxmem.types import Source
from fxmem.values import KnownValues, Read, all_hold, answered, seeing_values

Dims = frozenset[tuple[int, int]]
"""Dimensions of input leaves, as (leaf, dimension)."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """A call's arguments, flattened: ``leaves`` in the order of ``spec``; keyword arguments sorted by name."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Return the flattened form of a call ``f(*args, **kwargs)``."""
        leaves, spec = flattened((args, dict(sorted(kwargs.items()))))
        return Inputs(tuple(leaves), spec)

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs)."""
        args, kwargs = tree_unflatten(list(self.leaves), self.spec)
        return tuple(args), kwargs


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured model: ``graph_module`` takes the leaves of ``Inputs`` and returns a tuple of output leaves."""

    graph_module: fx.GraphModule
    out_spec: TreeSpec
    autocast: Autocast | None
    dynamic: Dims = frozenset()
    """Dimensions of input leaves that may have another size."""
    parameters: tuple[torch.Tensor, ...] = ()
    """The model's parameters in its own order, in which an optimizer steps them."""
    autocast_device: str | None = None
    """Device type of the autocast regions inside the model, if there are any."""
    reads: tuple[Read, ...] = ()
    """What the model read of its inputs' values; the graph is that of calls that read the same."""

    def call(self, graph_module: fx.GraphModule, leaves: Sequence[Any]) -> Any:
        """Return the model's output, computed by ``graph_module``: the captured one or one emitted from it.

        After an in-place write, autograd differentiates the views of the written tensor anew: by ``as_strided``, or, as it
        always does on fakes, by the views' own ops. Asking for the latter makes the same tensors as were profiled.
        """
        with self.scope(), _force_original_view_tracking(True):
            return self.unflatten(graph_module(*leaves))

    def serves(self, inputs: Inputs) -> bool:
        """True if the model goes this graph's way where it looks at values of ``inputs``."""
        return all_hold(self.reads, inputs.leaves)

    def unflatten(self, leaves: Any) -> Any:
        """Return the model's own output structure around ``leaves``."""
        return tree_unflatten(list(leaves), self.out_spec)

    def scope(self) -> AbstractContextManager[Any]:
        """Return the context of a whole forward: with autocast regions inside, one cast of a weight serves them all."""
        device_type = self.autocast_device
        if device_type is None:
            return nullcontext()
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        return torch.autocast(device_type, dtype, enabled)


def _autocast_device(graph_module: fx.GraphModule) -> str | None:
    """Return the device type of the autocast regions inside ``graph_module``, if there are any."""
    targets = (node.target for node in graph_module.graph.nodes)
    regions = (t.region.autocast for t in targets if isinstance(t, Scoped))
    return next((autocast[0] for autocast in regions if autocast is not None), None)


def capture(
    model: torch.nn.Module, inputs: Inputs, autocast: Autocast | None = None, dynamic: Dims = frozenset()
) -> Captured:
    """Return the checked graph of ``model`` called with ``inputs`` in its present training mode.

    ``dynamic``: dimensions that stay symbolic, so that the graph serves other sizes of them. Errors: ``InputError`` if
    the model does not take such arguments, ``CaptureError`` when it cannot be captured, when its graph would give other
    gradients, or when it is tied to the size of a dynamic dimension.
    """
    args, kwargs = inputs.call()
    _check_arguments(model, args, kwargs)
    for tensor in (*model.parameters(), *model.buffers(), *inputs.leaves):
        if isinstance(tensor, torch.Tensor):
            check_device(tensor.device)
    try:
        with attributes_restored(model), kept_whole(model) as opaques:
            module, reads = _exported(model, inputs, autocast, dynamic)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} could not be captured by torch.export{_raised_in(error, model)}: "
            f"{_first_lines(error)}. If its control flow depends on the values in tensors, move that part out of the model "
            "or optimize the parts around it."
        ) from error
    assert module._out_spec is not None
    graph_module = with_frozen_norms(with_unused_state(_flat(module, model, opaques), model))
    parameters, device = tuple(model.parameters()), _autocast_device(graph_module)
    captured = Captured(graph_module, module._out_spec, autocast, dynamic, parameters, device, reads)
    _check_scalars(model, captured)
    _check_dynamic(model, captured)
    _check(model, captured, inputs)
    return captured


def _exported(
    model: torch.nn.Module, inputs: Inputs, autocast: Autocast | None, dynamic: Dims
) -> tuple[fx.GraphModule, tuple[Read, ...]]:
    """Export ``model`` along the branches it takes in eager mode; if these cannot be exported, along its own for export.

    Returned with it: what the model read of the inputs' values on its way.
    """
    args, kwargs = inputs.call()
    shapes = _dynamic_shapes(model, inputs, dynamic)

    def export(values: KnownValues | None) -> tuple[fx.GraphModule, tuple[Read, ...]]:
        region = autocast.enter() if autocast else nullcontext()
        scope = nullcontext() if values is None else _as_if_eager(model, values)
        with attributes_restored(model), region, no_value_checks(), scope, outputs_looked_into(model):
            exported = torch.export.export(model, args, kwargs, strict=False, dynamic_shapes=shapes)
        return exported.module(check_guards=False), () if values is None else tuple(values.reads)

    for values in (KnownValues(inputs.leaves, numbers=False), KnownValues(inputs.leaves)):
        try:
            return export(values)
        except CaptureError:
            raise
        except Exception:
            if not values.followed_any:
                break
    return export(None)


def _check_arguments(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"{type(model).__name__}.forward does not take these arguments: {error}") from error


def _dynamic_shapes(model: torch.nn.Module, inputs: Inputs, dynamic: Dims) -> dict[str, Any] | None:
    """Return ``dynamic`` as torch.export wants it: by argument name, in the shape of the arguments."""
    if not dynamic:
        return None
    leaves = []
    for i, leaf in enumerate(inputs.leaves):
        dims = {d: torch.export.Dim.AUTO for j, d in dynamic if j == i}
        leaves.append(dims if isinstance(leaf, torch.Tensor) else None)
    args, kwargs = Inputs(tuple(leaves), inputs.spec).call()
    return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)


def _check_dynamic(model: torch.nn.Module, captured: Captured) -> None:
    """torch.export quietly fixes a dimension the model's code is tied to; say so."""
    placeholders = [node for node in captured.graph_module.graph.nodes if node.op == "placeholder"]
    for i, d in sorted(captured.dynamic):
        if isinstance(placeholders[i].meta["val"].shape[d], int):
            raise CaptureError(
                f"{type(model).__name__} is tied to the size {placeholders[i].meta['val'].shape[d]} of dimension {d} of "
                f"its input {placeholders[i].name}"
            )


def _check_scalars(model: torch.nn.Module, captured: Captured) -> None:
    """A number read from a tensor is known only once the forward runs, so no plan can count on it."""
    for node in captured.graph_module.graph.nodes:
        if op_of(node.target) in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default):
            raise CaptureError(
                f"{type(model).__name__} could not be captured: it reads a number from a tensor ({source_of(node)}). "
                "Compute with the tensor itself instead of .item(), float() or int() of it."
            )


@contextmanager
def _as_if_eager(model: torch.nn.Module, values: KnownValues) -> Iterator[None]:
    """Let the model take the branches it takes in eager mode, where it looks at values or asks if it is being exported."""
    original = torch.compiler.is_exporting

    def stand_in(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values.stand_in(Inputs.of(args, kwargs).leaves)

    hook = model.register_forward_pre_hook(stand_in, prepend=True, with_kwargs=True)
    torch.compiler.is_exporting = lambda: False
    try:
        with answered(values):
            yield
    finally:
        torch.compiler.is_exporting = original
        hook.remove()


def _flat(module: fx.GraphModule, model: torch.nn.Module, opaques: list[Opaque]) -> fx.GraphModule:
    """Return ``module`` with leaf inputs and outputs, regions inlined, each parameter read just before its first use."""
    graph = fx.Graph()
    attributes: dict[str, Any] = {}
    env: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            env[node] = graph.node_copy(node)
    outputs = _inline(graph, module, model, env, Region(), attributes, opaques)
    graph.output(tuple(tree_leaves(outputs)))
    graph.lint()
    return fx.GraphModule(attributes, graph, class_name="Captured")


def _inline(
    graph: fx.Graph,
    module: fx.GraphModule,
    model: torch.nn.Module,
    env: dict[fx.Node, Any],
    region: Region,
    attributes: dict[str, Any],
    opaques: list[Opaque],
) -> Any:
    """Copy ``module``'s calls into ``graph``, each in ``region``; return what its output refers to."""

    def read(node: fx.Node) -> Any:
        if node not in env:  # a get_attr node, read where it is first used
            target = str(node.target)
            attributes[target] = _attribute(model, module, target)
            env[node] = graph.node_copy(node)
        return env[node]

    for node in module.graph.nodes:
        if node.op == "output":
            return fx.map_arg(node.args[0], read)
        if node.op in ("placeholder", "get_attr"):
            continue
        inner = _inner_region(node, region)
        if inner is not None:
            body = getattr(module, str(node.args[inner[1]].target))
            arguments = fx.map_arg(node.args[inner[1] + 1 :], read)
            inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
            bound = dict(zip(inputs, arguments, strict=True))
            env[node] = _inline(graph, body, model, bound, inner[0], attributes, opaques)
        elif node.target is operator.getitem and not isinstance(fx.map_arg(node.args[0], read), fx.Node):
            env[node] = fx.map_arg(node.args[0], read)[node.args[1]]
        else:
            for argument in node.all_input_nodes:
                read(argument)
            env[node] = graph.node_copy(node, read)
            opaque = opaque_call(node, opaques)
            if opaque is not None:
                env[node].target, env[node].args = opaque, env[node].args[1:]
            if region != Region():
                env[node].target = Scoped(env[node].target, region)
    raise CaptureError("a captured graph has no output")


def _inner_region(node: fx.Node, region: Region) -> tuple[Region, int] | None:
    """If ``node`` is an opaque region, return what its body runs in and the place of the body among its arguments."""
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        return replace(region, grad_enabled=bool(node.args[0])), 1
    if node.target is torch.ops.higher_order.wrap_with_autocast:
        return replace(region, autocast=cast(Any, tuple(node.args[:4]))), 4
    return None


def _attribute(model: torch.nn.Module, module: fx.GraphModule, target: str) -> Any:
    """Return the model's own object at ``target``: torch.export copies a parameter that has two names."""
    for root in (model, module):
        value: Any = root
        for part in target.split("."):
            value = getattr(value, part, None)
        if value is not None:
            return value
    raise CaptureError(f"the captured graph reads {target}, which {type(model).__name__} does not have")


def with_unused_state(graph_module: fx.GraphModule, model: torch.nn.Module) -> fx.GraphModule:
    """Give ``graph_module`` those parameters and buffers of ``model`` that its graph does not read: they take memory."""
    known = {id(t) for t in (*graph_module.parameters(), *graph_module.buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in known:
            _assign_attr(tensor, graph_module, name)
    return graph_module


def source_of(node: fx.Node) -> Source:
    """Return the module path and the user's source line of ``node``."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((path for path, _ in reversed(list(stack.values()))), "")
    frames = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if "File" in line]
    user = [frame for frame in frames if "torch/nn/" not in frame] or frames
    if not user:
        return Source(str(path))
    file, _, rest = user[-1].removeprefix('File "').partition('", line ')
    return Source(str(path), f"{file.rsplit('/', 1)[-1]}:{rest.partition(',')[0]}")


def _raised_in(error: BaseException, model: torch.nn.Module) -> str:
    """Return the module of ``model`` whose code raised ``error``, with the source line; empty if none did."""
    names = {id(module): name or "the model" for name, module in model.named_modules()}
    chain: BaseException | None = error
    place = ""
    while chain is not None:  # the first error is the last in the chain
        for frame, line in traceback.walk_tb(chain.__traceback__):
            owner = names.get(id(frame.f_locals.get("self")))
            if owner and not str(frame.f_globals.get("__name__")).startswith("torch."):
                place = f" in {owner} ({frame.f_code.co_filename.rsplit('/', 1)[-1]}:{line})"
        chain = chain.__cause__ or chain.__context__
    return place


def _first_lines(error: Exception, limit: int = 600) -> str:
    return " ".join(str(error).split())[:limit] or type(error).__name__


# -- the check ---------------------------------------------------------------------------------------------------------


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
    ops: list[tuple[str, tuple[str, ...]]]
    ops_again: list[tuple[str, tuple[str, ...]]]


def _check(model: torch.nn.Module, captured: Captured, inputs: Inputs) -> None:
    """Raise ``CaptureError`` if the model does what its graph would not: in autograd, in Python, in its next call."""
    try:
        eager = _run(model, model, captured, inputs, twice=True)
        graph = _run(captured.graph_module, model, captured, inputs, twice=bool(eager.again))
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} could not be run on fake tensors: {_first_lines(error)}. If it reads the values in "
            "tensors, move that part out of the model or optimize the parts around it."
        ) from error
    _check_effects(model, eager, graph)
    _check_autograd(model, eager, graph)


def _check_autograd(model: torch.nn.Module, eager: _Run, graph: _Run) -> None:
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
    "CheckpointFunction": "Reentrant torch.utils.checkpoint does not go into a graph: switch it off "
    "(use_reentrant=False, or gradient_checkpointing_disable()); fxmem recomputes by its own plan.",
    "AccumulateGrad": "A parameter or a tensor that it makes require grad inside forward would get no gradient.",
}
_OTHER_LOSS = "A custom autograd.Function or a module hook in it would be lost, and gradients would be wrong."


def _check_effects(model: torch.nn.Module, eager: _Run, graph: _Run) -> None:
    """Raise ``CaptureError`` for what a forward leaves in Python, or does anew in each call; a cache is neither."""
    name = type(model).__name__
    for place, value in eager.left.items():
        with_grad = isinstance(value, torch.Tensor) and value.requires_grad
        if with_grad and place not in graph.left:
            raise CaptureError(
                f"{name} leaves a tensor that carries gradient in the attribute {place}; a captured graph would not. Let "
                "forward return it instead."
            )
    changed = next((place for place in eager.again if place not in graph.again), None)
    if changed is not None:
        raise CaptureError(
            f"{name} changes {changed} in every forward; a captured graph would not. Keep it in a tensor, by "
            "register_buffer, or do it outside of the model."
        )
    if eager.ops != eager.ops_again:
        first, second = _first_difference(eager.ops, eager.ops_again)
        raise CaptureError(
            f"{name} computes something else when it is called again with the same arguments ({first}, then {second}); a "
            "captured graph would not. If only its first call is special, call it once before fxmem.optimize; if it "
            "depends on Python's random numbers, the time or a counter, draw from torch or keep the number in a buffer."
        )


def _first_difference(first: list[tuple[str, tuple[str, ...]]], second: list[tuple[str, tuple[str, ...]]]) -> list[str]:
    pairs = zip_longest(first, second, fillvalue=("nothing more", ()))
    return [f"{op}({', '.join(scalars)})" for op, scalars in next(pair for pair in pairs if pair[0] != pair[1])]


def _run(module: torch.nn.Module, model: torch.nn.Module, captured: Captured, inputs: Inputs, *, twice: bool) -> _Run:
    """Run ``module``, the model itself or its graph, once or two times on fakes."""
    world = FakeWorld(inputs.leaves)
    fakes = [world.fake_all(leaf) for leaf in inputs.leaves]

    def forward() -> tuple[Any, list[tuple[str, tuple[str, ...]]]]:
        context = captured.autocast.enter() if captured.autocast else nullcontext()
        with context, OpLog([fakes, [world.fake(p) for p in captured.parameters]]) as log:
            if module is model:
                call = Inputs(tuple(fakes), inputs.spec).call()
                with seeing_values(inputs.leaves, fakes):
                    outputs = module(*call[0], **call[1])
                _check_arguments_left(model, call, fakes, inputs.spec)
            else:
                outputs = module(*fakes)
        return outputs, log.ops

    with attributes_restored(model), world.state_of(module), world.active(), ScalarReads():
        before = PythonState(model)
        with _calls_noted() as calls:
            outputs, ops = forward()
        left = before.changes()
        if not twice:
            return _Run(_autograd_nodes(outputs), calls, left, {}, ops, ops)
        between = PythonState(model)
        _, ops_again = forward()
        again = between.changes()
    return _Run(_autograd_nodes(outputs), calls, left, again, ops, ops_again)


def _check_arguments_left(model: torch.nn.Module, call: Any, leaves: Sequence[Any], spec: TreeSpec) -> None:
    """Raise ``CaptureError`` if the call put anything else into the containers it was given."""
    left, left_spec = flattened(call)
    if left_spec != spec or any(a is not b for a, b in zip(left, leaves, strict=True)):
        raise CaptureError(
            f"{type(model).__name__} changes a list, dict or other structure among its arguments; a captured graph would "
            "not. Let forward return what it puts there."
        )


def _autograd_nodes(outputs: Any) -> Counter[str]:
    """Count the autograd nodes that ``outputs`` reach, by name."""
    leaves = tree_leaves(outputs)
    names: Counter[str] = Counter()
    stack = [t.grad_fn for t in leaves if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if not _harmless(node):
            names[node.name()] += 1
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in seen:
                seen.add(next_node)
                stack.append(next_node)
    return names


def _harmless(node: Any) -> bool:
    """Views and copies differ between a model and its graph (``x.T`` or ``permute``) without changing a gradient."""
    return not isinstance(node, torch.autograd.function.BackwardCFunction) and "AccumulateGrad" not in node.name()


_SEEDING = "Draw from a torch.Generator of the model's own instead."
_HOOKING = "Set the hook on a parameter, or outside the model."
_REMEDIES = {
    "Tensor.register_hook": _HOOKING,
    "Tensor.register_post_accumulate_grad_hook": _HOOKING,
    "Tensor.grad_fn": "Write what it does with the autograd graph as a torch.autograd.Function.",
    "torch.manual_seed": _SEEDING,
    "torch.set_rng_state": _SEEDING,
    "torch.random.fork_rng": _SEEDING,
    "torch.inference_mode": "Use torch.no_grad.",
}
"""Calls inside a forward that no graph keeps, and what to do instead."""


class _GradFnReads(TorchFunctionMode):
    """Notes every read of ``grad_fn`` by code that is not torch's own: what is done to it later cannot be seen."""

    def __init__(self, noted: list[str]) -> None:
        super().__init__()
        self._noted = noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is torch.Tensor.grad_fn and _called_by_user():
            self._noted.append("Tensor.grad_fn")
        return func(*args, **(kwargs or {}))


def _called_by_user() -> bool:
    """True if what calls is not torch's own code; fxmem's frames in between do not count."""
    frame = inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("fxmem."):
        frame = frame.f_back
    return frame is None or not str(frame.f_globals.get("__name__", "")).startswith("torch.")


@contextmanager
def _calls_noted() -> Iterator[list[str]]:
    """Note every call while the body runs that ``_REMEDIES`` names."""
    noted: list[str] = []

    def noting(owner: Any, attribute: str, name: str) -> AbstractContextManager[None]:
        original = getattr(owner, attribute)

        def call(*args: Any, **kwargs: Any) -> Any:
            if _called_by_user():
                noted.append(name)
            return original(*args, **kwargs)

        return replaced(owner, attribute, call)

    with ExitStack() as stack:
        stack.enter_context(_GradFnReads(noted))
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            stack.enter_context(noting(torch.Tensor, name, f"Tensor.{name}"))
        stack.enter_context(noting(torch.random, "fork_rng", "torch.random.fork_rng"))
        for module in (torch, torch.random):
            for name in ("manual_seed", "set_rng_state"):
                stack.enter_context(noting(module, name, f"torch.{name}"))
        stack.enter_context(noting(torch.inference_mode, "__enter__", "torch.inference_mode"))
        yield noted
