"""nn.Module and example inputs in, a flat torch.fx graph of ATen calls before autograd out.

The front end is ``torch.export.export(strict=False)``: linear, layer_norm, attention, batch_norm and dropout stay whole,
so autograd and autocast run through the captured graph as through the model. The graph is flattened (leaf inputs to
leaf outputs) and its parameters, the very same objects under the same names, are read where they are first used.

Not kept by the front end: the backward of a custom ``autograd.Function`` and hooks set inside forward. These calls
become opaque nodes (:mod:`fxmem.capture.opaque_calls`), and what was captured is checked (:mod:`fxmem.capture.validate`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from fxmem.capture.causes import cause_of
from fxmem.capture.dynamic_shapes import dynamic_shapes_of, extras_named, signature_of, tied_dims
from fxmem.capture.frozen_norms import with_frozen_norms
from fxmem.capture.graph import (
    CaptureGraph,
    Dims,
    Inputs,
    SizeGuards,
    source_of,
    state_as_moved,
    with_unused_state,
)
from fxmem.capture.node_notes import NOTED, noted_in_nodes
from fxmem.capture.opaque_calls import Opaque, kept_whole, opaque_call
from fxmem.capture.pytrees import outputs_looked_into
from fxmem.capture.side_effects import NONE, SideEffects
from fxmem.capture.validate import check_faithful, effects_seen
from fxmem.capture.value_guards import KnownValues, ValueGuard, answered, places_of, seeing_values
from fxmem.errors import CaptureError, InputError, first_lines, raised_in
from fxmem.fake.fake_tensors import FakeWorld, attributes_restored, check_device
from fxmem.fake.modes import DataRead, FewLooks, MemoryLooks, TooManyLooks
from fxmem.fake.python_state import tensors_restored
from fxmem.op_facts.kinds import ReadsScalar, SavesUnseen, TakesStorageOffset
from fxmem.op_facts.lookup import by_op
from fxmem.progress import stage
from fxmem.runtime.autocast import Autocast
from fxmem.runtime.scoped_ops import AutocastArguments, Region, Scoped, forget_casts, op_of, region_of
from fxmem.torch_patches import compiler_says_eager, ctc_losses, grouped_matmuls, no_value_checks, quiet, regions_left
from fxmem.torch_private import OF_FAKES, TreeSpec, tree_leaves

_OFFSETS = by_op(TakesStorageOffset)
_READING = {op for op, fact in by_op(ReadsScalar).items() if fact.what == "op"}
_SAVING_UNSEEN = by_op(SavesUnseen, "cuda")


def _autocast_device(graph_module: fx.GraphModule) -> str | None:
    """Return the device type of the autocast regions inside ``graph_module``, if there are any."""
    autocasts = (region_of(node.target).autocasts for node in graph_module.graph.nodes)
    return next((of_node[0][0] for of_node in autocasts if of_node), None)


def capture(
    model: torch.nn.Module,
    inputs: Inputs,
    autocast: Autocast | None = None,
    dynamic: Dims = frozenset(),
    *,
    partly: bool = False,
) -> CaptureGraph:
    """Return the checked graph of ``model`` called with ``inputs`` in its present training mode.

    ``dynamic``: dimensions that stay symbolic, so that the graph serves other sizes of them. ``partly``: those that the
    model ties to one size are left out. Errors: ``InputError`` if the model does not take such arguments,
    ``CaptureError`` when it cannot be captured, when its graph would give other gradients, or, unless ``partly``, when it
    is tied to the size of a dynamic dimension.
    """
    stage("capturing the graph")
    check_call(model, inputs)
    with quiet(), tensors_restored(model) as written:
        captured = _captured(model, inputs, autocast, dynamic, partly)
    if written:
        raise CaptureError(
            f"{type(model).__name__} writes in forward to the tensor {written[0]}, which is no buffer; a captured graph "
            "would take it for a constant. Make it one (register_buffer, persistent=False if no state_dict is to have it)."
        )
    return captured


def check_call(model: torch.nn.Module, inputs: Inputs) -> None:
    """Errors: ``InputError``, ``CaptureError`` if the model, or what it is called with, shows that no step can be told."""
    args, kwargs = inputs.call()
    _check_arguments(model, args, kwargs)
    _check_parameters(model)
    _check_scripted(model)
    for tensor in (*model.parameters(), *model.buffers(), *inputs.leaves):
        if isinstance(tensor, torch.Tensor):
            check_device(tensor.device)
            _check_dense(model, tensor)


def _captured(
    model: torch.nn.Module,
    inputs: Inputs,
    autocast: Autocast | None,
    dynamic: Dims,
    partly: bool,
    effects: SideEffects = NONE,
) -> CaptureGraph:
    try:
        with (
            attributes_restored(model),
            kept_whole(model) as opaques,
            effects.returned(model),
            effects.as_plain_attributes(model),
        ):
            module, out_spec, reads, conditions = _exported(model, inputs, autocast, dynamic)
    except CaptureError:
        raise
    except Exception as error:
        missing = NONE if effects else effects_seen(model, autocast, inputs)
        if missing:
            return _captured(model, inputs, autocast, dynamic, partly, missing)
        own = _own_error(model, inputs, autocast)
        if own is not None:
            raise InputError(
                f"{type(model).__name__} does not take these arguments, without fxmem either, as a run on fake tensors "
                f"shows: {type(own).__name__}: {first_lines(own)}"
            ) from own
        place = raised_in(error, model.named_modules())
        raise CaptureError(
            f"{type(model).__name__} could not be captured by torch.export{place}: {cause_of(error, model)}"
        ) from error
    graph_module = with_frozen_norms(with_unused_state(_flat(module, model, opaques), model))
    parameters, device = tuple(model.parameters()), _autocast_device(graph_module)
    guards = SizeGuards(conditions, signature_of(model, inputs)) if dynamic else None
    if _has_places(graph_module):
        reads += tuple(places_of(inputs.leaves))
    effects, state = effects.with_stand_ins(graph_module, tuple(state_as_moved(model)))
    captured = CaptureGraph(
        graph_module, out_spec, autocast, dynamic, parameters, device, reads, guards, state=state, effects=effects
    )
    _check_scalars(model, captured)
    _check_recurrent(model, captured)
    tied = tied_dims(captured)
    if partly:
        captured = replace(captured, dynamic=dynamic - tied)
    elif tied:
        i, d = min(tied)
        raise CaptureError(
            f"{type(model).__name__} is tied to the size {inputs.leaves[i].shape[d]} of dimension {d} of its input "
            f"{captured.input_names[i]}"
        )
    missing = check_faithful(model, captured, inputs)
    return _captured(model, inputs, autocast, dynamic, partly, missing) if missing else captured


def _check_parameters(model: torch.nn.Module) -> None:
    """Errors: ``InputError`` if what stands for a parameter is none, or has a gradient of a shape it had before."""
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            where = f"{path}.{name}" if path else name
            if parameter is None:
                continue
            if not isinstance(parameter, torch.nn.Parameter):
                raise InputError(
                    f"{where} is a plain tensor where a parameter was, as torch.func.functional_call leaves it: give it "
                    "torch.nn.Parameter objects, or call the unoptimized model, model.fxmem.original"
                )
            if parameter.grad is not None and parameter.grad.shape != parameter.shape:
                raise InputError(
                    f"the gradient of {where} has shape {tuple(parameter.grad.shape)}, the parameter itself "
                    f"{tuple(parameter.shape)}: call zero_grad() after a parameter is resized"
                )


def _check_scripted(model: torch.nn.Module) -> None:
    """Errors: ``CaptureError`` if a submodule is TorchScript's, whose interpreter differentiates by rules of its own."""
    scripted = next((path for path, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise CaptureError(
            f"{type(model).__name__} holds the torch.jit.ScriptModule {scripted!r}, which runs in TorchScript's own "
            "interpreter and goes into no graph. Put the nn.Module that it was made from in its place, or optimize the "
            "parts around it."
        )


def _own_error(model: torch.nn.Module, inputs: Inputs, autocast: Autocast | None) -> Exception | None:
    """Return what the model raises when it is merely run on fakes of these arguments; None where that may be fakes' fault:
    where it looked at values, which these do not have, or where an op has none for fakes."""
    world = FakeWorld(inputs.leaves)
    fakes = [world.fake_all(leaf) for leaf in inputs.leaves]
    args, kwargs = Inputs(tuple(fakes), inputs.spec).call()
    region = autocast.enter() if autocast else nullcontext()
    on_fakes = attributes_restored(model), world.state_of(model), world.active(model)
    try:
        with ExitStack() as stack:
            for context in (*on_fakes, region, seeing_values(inputs.leaves, fakes)):
                stack.enter_context(context)
            stack.enter_context(FewLooks())
            memory = stack.enter_context(MemoryLooks())
            model(*args, **kwargs)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        of_the_fakes = isinstance(error, (*OF_FAKES, torch.jit.Error)) or "fake" in str(error).lower()
        return None if memory.any or of_the_fakes else error
    except (Exception, TooManyLooks):
        return None
    return None


def _check_dense(model: torch.nn.Module, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise CaptureError(
            f"{type(model).__name__} takes or holds a tensor of layout {tensor.layout} and shape {tuple(tensor.shape)}, "
            "whose memory cannot be told on fakes. Pass its indices and values and multiply by index_add, make it dense, "
            "or optimize the parts of the model that do not use it"
        )


def fitting(captured: CaptureGraph, model: torch.nn.Module, inputs: Inputs) -> CaptureGraph:
    """Return ``captured`` if it is the graph of ``model`` for the sizes of ``inputs``, else that of these sizes."""
    return captured if captured.fits(inputs) else capture(model, inputs, captured.autocast)


_Exported = tuple[fx.GraphModule, TreeSpec, tuple[ValueGuard, ...], tuple[str, ...]]


def _exported(model: torch.nn.Module, inputs: Inputs, autocast: Autocast | None, dynamic: Dims) -> _Exported:
    """Export ``model`` along the branches it takes in eager mode; if these cannot be exported, along its own for export.

    Returned with it: what the model read of the inputs' values on its way, and the sizes' conditions.
    """
    args, kwargs = inputs.call()
    shapes = dynamic_shapes_of(model, inputs, dynamic)

    def export(values: KnownValues | None) -> _Exported:
        region = autocast.enter() if autocast else nullcontext()
        scope = nullcontext() if values is None else _as_if_eager(model, values)
        with (
            attributes_restored(model),
            extras_named(model, signature_of(model, inputs)),
            region,
            no_value_checks(),
            grouped_matmuls(),
            ctc_losses(),
            scope,
            outputs_looked_into(model),
            DataRead(),
            regions_left(),
            noted_in_nodes(model),
        ):
            exported = torch.export.export(model, args, kwargs, strict=False, dynamic_shapes=shapes)
        reads = () if values is None else tuple(values.reads)
        module = exported.module(check_guards=False)
        return module, exported.call_spec.out_spec, reads, tuple(getattr(exported, "_guards_code", ()))

    for values in (KnownValues(inputs.leaves, numbers=False), KnownValues(inputs.leaves)):
        try:
            return export(values)
        except CaptureError:
            raise
        except Exception:
            if not values.followed_any:
                break
    return export(None)


def _has_places(graph_module: fx.GraphModule) -> bool:
    """True if ops are told, as a constant, where on a storage to begin: that of an input may be otherwise next time."""
    offsets = ((node, _OFFSETS.get(node.target)) for node in graph_module.graph.nodes)
    return any(offset is not None and len(node.args) > offset.place for node, offset in offsets)


def _check_arguments(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(signature.parameters)
        raise InputError(
            f"{type(model).__name__}.forward does not take these arguments: {error}; it takes {takes or 'none'}"
        ) from error


def _check_scalars(model: torch.nn.Module, captured: CaptureGraph) -> None:
    """A number read from a tensor is known only once the forward runs, so no plan can count on it."""
    for node in captured.graph_module.graph.nodes:
        if op_of(node.target) in _READING:
            raise CaptureError(
                f"{type(model).__name__} could not be captured: it reads a number from a tensor ({source_of(node)}). "
                "Compute with the tensor itself instead of .item(), float() or int() of it."
            )


def _check_recurrent(model: torch.nn.Module, captured: CaptureGraph) -> None:
    """What cuDNN's recurrent layers save is not seen on fakes, and their dropout has a state that no re-run can restore."""
    if not torch.backends.cudnn.enabled or not any(p.is_cuda for p in model.parameters()):
        return
    for node in captured.graph_module.graph.nodes:
        if op_of(node.target) in _SAVING_UNSEEN:
            raise CaptureError(
                f"{type(model).__name__} runs a recurrent layer in cuDNN ({source_of(node)}), and what cuDNN saves cannot "
                "be predicted. Optimize the parts around it, or set torch.backends.cudnn.enabled = False, which is slower."
            )


@contextmanager
def _as_if_eager(model: torch.nn.Module, values: KnownValues) -> Iterator[None]:
    """Let the model take the branches it takes in eager mode, where it looks at values or asks if it is being compiled."""

    with compiler_says_eager() as begin, answered(values):

        def stand_in(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            values.stand_in(Inputs.of(args, kwargs, model).leaves)
            begin()

        hook = model.register_forward_pre_hook(stand_in, prepend=True, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


def _flat(module: fx.GraphModule, model: torch.nn.Module, opaques: list[Opaque]) -> fx.GraphModule:
    """Return ``module`` with leaf inputs and outputs, each op in its region, each parameter read just before its first
    use."""
    graph = fx.Graph()
    attributes: dict[str, Any] = {}
    env: dict[fx.Node, Any] = {}
    region = Region()
    entered: dict[fx.Node, AutocastArguments] = {}

    def read(node: fx.Node) -> Any:
        if node not in env:  # a get_attr node, read where it is first used
            target = str(node.target)
            attributes[target] = _attribute(model, module, target)
            env[node] = graph.node_copy(node)
        return env[node]

    for node in module.graph.nodes:
        if node.op == "placeholder":
            env[node] = graph.node_copy(node)
        elif node.op == "output":
            graph.output(tuple(tree_leaves(fx.map_arg(node.args[0], read))))
        elif node.target is torch._C._set_grad_enabled:
            region = replace(region, grad_enabled=None if node.args[0] else False)
        elif node.target is torch.amp.autocast_mode._enter_autocast:
            device_type, dtype, enabled, cache_enabled = cast(Any, node.args)
            as_around = None if cache_enabled else False
            entered[node] = (device_type, dtype, enabled, as_around)
            region = replace(region, autocasts=tuple(entered.values()))
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            del entered[cast(fx.Node, node.args[0])]
            region = replace(region, autocasts=tuple(entered.values()))
            if not entered:
                graph.call_function(forget_casts)
        elif node.op != "get_attr":
            for argument in node.all_input_nodes:
                read(argument)
            env[node] = graph.node_copy(node, read)
            opaque = opaque_call(node, opaques)
            if opaque is not None:
                env[node].target, env[node].args = opaque, env[node].args[1:]
            own = replace(region, switches=node.meta.get(NOTED))
            if own != Region():
                env[node].target = Scoped(env[node].target, own)
    graph.lint()
    return fx.GraphModule(attributes, graph, class_name="CaptureGraph")


def _attribute(model: torch.nn.Module, module: fx.GraphModule, target: str) -> Any:
    """Return the model's own object at ``target``: torch.export copies a parameter that has two names."""
    for root in (model, module):
        value: Any = root
        for part in target.split("."):
            value = getattr(value, part, None)
        if value is not None:
            return value
    raise CaptureError(f"the captured graph reads {target}, which {type(model).__name__} does not have")
