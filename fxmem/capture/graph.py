"""The nouns of a capture: a call's arguments, and the graph that stands for the model called with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch.autograd.grad_mode import _force_original_view_tracking

from fxmem.capture.pytrees import flattened_call
from fxmem.capture.side_effects import NONE, SideEffects
from fxmem.capture.value_guards import ValueGuard, all_hold
from fxmem.errors import InputError
from fxmem.ir import ChoiceMade, InplaceDecision, Source
from fxmem.runtime.autocast import Autocast
from fxmem.torch_private import TreeSpec, tree_unflatten

Dims = frozenset[tuple[int, int]]
"""Dimensions of input leaves, as (leaf, dimension)."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """A call's arguments, flattened: ``leaves`` in the order of ``spec``."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any], model: torch.nn.Module | None = None) -> Inputs:
        """Return the flattened form of a call ``model(*args, **kwargs)``.

        Keyword arguments are sorted by name, but for those that the model's forward takes as ``**kwargs``: it sees their
        order.
        """
        if kwargs:
            extra = () if model is None else _extra_names(model, kwargs)
            names = (*sorted(name for name in kwargs if name not in extra), *extra)
            kwargs = {name: kwargs[name] for name in names}
        leaves, spec = flattened_call(args, kwargs)
        return Inputs(tuple(leaves), spec)

    @staticmethod
    def of_example(example_args: Any, example_kwargs: dict[str, Any] | None, model: torch.nn.Module) -> Inputs:
        """Return the inputs that a user gives as an example: a tensor, or a tuple or list of arguments.

        Errors: ``InputError`` if there is no tensor among them, if it is a dict of the model's arguments by name, or if
        ``example_kwargs`` is no such dict.
        """
        if not isinstance(example_kwargs, Mapping | None):
            raise InputError(
                f"example_kwargs must be a dict of arguments by name, not {type(example_kwargs).__name__}; pass several "
                "arguments as one tuple: (first, second)"
            )
        names = _named(getattr(model.forward, "__func__", model.forward)) - {"self"}
        if isinstance(example_args, Mapping) and example_args and names.issuperset(example_args):
            raise InputError(
                f"example_args holds arguments of {type(model).__name__}.forward by name "
                f"({', '.join(list(example_args)[:3])}); pass it as example_kwargs=dict(...), "
                "or as (it,) if it is one argument"
            )
        args = tuple(example_args) if isinstance(example_args, tuple | list) else (example_args,)
        inputs = Inputs.of(() if example_args is None else args, example_kwargs or {}, model)
        if not inputs.tensors:
            raise InputError(
                "the example holds no tensor; pass one call's arguments as example_args and example_kwargs"
            )
        return inputs

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The leaves that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs)."""
        args, kwargs = tree_unflatten(list(self.leaves), self.spec)
        return tuple(args), kwargs


def order_of_dims(tensor: torch.Tensor) -> list[int]:
    """Return a tensor's dimensions, the one of the largest stride first."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))


def _extra_names(model: torch.nn.Module, kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Return those names that the model's forward does not name itself, in the order given."""
    forward = model.forward
    named = _named(getattr(forward, "__func__", forward))
    return tuple(name for name in kwargs if name not in named)


@lru_cache(maxsize=1_000)
def _named(forward: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's parameters; none where they cannot be told."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class SizeGuards:
    """What sizes a graph with symbolic dimensions is for: the branches its model took on them."""

    conditions: tuple[str, ...]
    """Of torch.export: expressions of ``L``, the arguments by name."""
    signature: inspect.Signature
    """Of the model's forward."""

    def hold(self, inputs: Inputs) -> bool:
        args, kwargs = inputs.call()
        try:
            scope = {"L": dict(self.signature.bind(*args, **kwargs).arguments)}
            return all(eval(condition, {}, scope) for condition in self.conditions)
        except Exception:  # a condition on something that is no argument
            return False


@dataclass(frozen=True, slots=True)
class CaptureGraph:
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
    reads: tuple[ValueGuard, ...] = ()
    """What the model read of its inputs' values; the graph is that of calls that read the same."""
    guards: SizeGuards | None = None
    """What other sizes of the dynamic dimensions the graph is for."""
    inplace: tuple[InplaceDecision, ...] = ()
    """What was decided of each op that has an in-place form, once that pass has run."""
    choices: tuple[ChoiceMade, ...] = ()
    """What opt-in choices did to it."""
    made_from: CaptureGraph | None = None
    """Of an emitted graph: the one that its plan was made for."""
    state: tuple[torch.Tensor, ...] = ()
    """The model's parameters and buffers in the order in which ``model.to(device)`` moves them."""
    effects: SideEffects = NONE
    """What a call leaves in Python beside what it returns: the graph returns it too."""

    @property
    def input_names(self) -> list[str]:
        """The names of the input leaves."""
        return [node.name for node in self.graph_module.graph.nodes if node.op == "placeholder"]

    def fits(self, inputs: Inputs) -> bool:
        """True if the graph is the model's for the sizes of ``inputs``, as far as dynamic dimensions have others.

        torch.export takes a symbolic size to be 2 at least.
        """
        sizes = (inputs.leaves[i].shape[d] for i, d in self.dynamic)
        return all(size > 1 for size in sizes) and (self.guards is None or self.guards.hold(inputs))

    def call(self, graph_module: fx.GraphModule, leaves: Sequence[Any]) -> Any:
        """Return the model's output, computed by ``graph_module``: the captured one or one emitted from it."""
        return self.run(graph_module, leaves)[0]

    def run_in_training(self, graph_module: fx.GraphModule, leaves: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """As :meth:`run`, of a call that is no run on fakes: it goes on from what earlier calls left."""
        with self.effects.read_by(graph_module):
            return self.run(graph_module, leaves)

    def run(self, graph_module: fx.GraphModule, leaves: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """Return the model's output, computed by ``graph_module``, and its leaves."""
        outputs = self.leaves_of(graph_module, leaves)
        return self.unflatten(outputs), outputs

    def leaves_of(self, graph_module: Callable[..., Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the leaves of the model's output, computed by ``graph_module``.

        After an in-place write, autograd differentiates the views of the written tensor anew: by ``as_strided``, or, as it
        always does on fakes, by the views' own ops. Asking for the latter makes the same tensors as were profiled.
        """
        with self.scope(), _force_original_view_tracking(True):
            outputs: Sequence[Any] = graph_module(*leaves)
            return outputs

    def serves(self, inputs: Inputs) -> bool:
        """True if the model goes this graph's way where it looks at values of ``inputs``."""
        return all_hold(self.reads, inputs.leaves)

    def unflatten(self, leaves: Any) -> Any:
        """Return the model's own output structure around ``leaves``, and leave what a call leaves in attributes."""
        return self.effects.output_of(tree_unflatten(list(leaves), self.out_spec))

    def returned(self, call: tuple[tuple[Any, ...], dict[str, Any]], leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the leaves of the model's own output, of ``leaves`` that its graph returned, and put into the arguments of
        ``call`` what the model puts there."""
        self.effects.write_arguments(call, leaves, self.out_spec)
        return leaves[: self.effects.num_leaves(self.out_spec)]

    def tensors_read(self) -> Iterator[torch.Tensor]:
        """Yield what the graph reads that is neither parameter nor buffer nor input: constants."""
        module = self.graph_module
        own = {id(t) for t in self.state}
        for node in module.graph.nodes:
            value = attribute_of(module, str(node.target)) if node.op == "get_attr" else None
            if isinstance(value, torch.Tensor) and id(value) not in own:
                yield value

    def scope(self) -> AbstractContextManager[Any]:
        """Return the context of a whole forward: inside, an op's own autocast region forgets no casts."""
        device_type = self.autocast_device
        if device_type is None:
            return nullcontext()
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        return torch.autocast(device_type, dtype, enabled)


def state_as_moved(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters and buffers in the order in which ``module.to(device)`` moves them: children first."""
    for child in module.children():
        yield from state_as_moved(child)
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor


def with_unused_state(graph_module: fx.GraphModule, model: torch.nn.Module) -> fx.GraphModule:
    """Give ``graph_module`` those parameters and buffers of ``model`` that its graph does not read: they take memory."""
    known = {id(t) for t in (*graph_module.parameters(), *graph_module.buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in known:
            path, _, attribute = name.rpartition(".")
            _place(tensor, graph_module, path, attribute)
    return graph_module


def copied(captured: CaptureGraph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return a copy of the graph, to be written into, and of each node its copy."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in captured.graph_module.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    return graph, env


def with_graph(captured: CaptureGraph, graph: fx.Graph) -> CaptureGraph:
    """Return ``captured`` with another graph over the same state, which is checked. Errors: those of ``graph.lint``."""
    graph.lint()
    module = fx.GraphModule(captured.graph_module, graph, class_name="CaptureGraph")
    return replace(captured, graph_module=with_unused_state(module, captured.graph_module))


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of the first parameter: of a model on several, where most of the work begins."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _place(tensor: torch.Tensor, graph_module: fx.GraphModule, path: str, name: str) -> None:
    """Register ``tensor`` as ``name`` of the submodule at ``path``, which is made where there is none."""
    owner: torch.nn.Module = graph_module
    for part in path.split(".") if path else ():
        if getattr(owner, part, None) is None:
            owner.add_module(part, torch.nn.Module())
        owner = getattr(owner, part)
    if isinstance(tensor, torch.nn.Parameter):
        owner.register_parameter(name, tensor)
    else:
        owner.register_buffer(name, tensor)


def attribute_of(module: torch.nn.Module, target: str) -> Any:
    """Return what a get_attr node of this target reads."""
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


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


def count_of_batches(graph_module: fx.GraphModule, node: fx.Node) -> torch.Tensor | None:
    """Return what a batch norm raises whenever it updates the running statistics that ``node`` reads; None of others."""
    path, _, name = str(node.target).rpartition(".")
    if node.op != "get_attr" or name not in ("running_mean", "running_var"):
        return None
    count = getattr(attribute_of(graph_module, path) if path else graph_module, "num_batches_tracked", None)
    return count if isinstance(count, torch.Tensor) else None
