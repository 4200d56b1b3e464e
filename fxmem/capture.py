"""nn.Module and example inputs in, a flat torch.fx graph of ATen calls before autograd out.

The front end is ``torch.export.export(strict=False)``: linear, layer_norm, attention, batch_norm and dropout stay whole,
so autograd and autocast run through the captured graph as through the model. The graph is flattened (leaf inputs to
leaf outputs) and its parameters, the very same objects under the same names, are read where they are first used.

Not kept by the front end: the backward of a custom ``autograd.Function`` and hooks set inside forward. So what was
captured is checked: on fakes, the model and the graph must build the same autograd graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.graph_module import _assign_attr
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from fxmem.errors import CaptureError
from fxmem.fake import FakeWorld, no_value_checks
from fxmem.replay import Autocast
from fxmem.types import Source


@dataclass(frozen=True, slots=True)
class Inputs:
    """A call's arguments, flattened: ``leaves`` in the order of ``spec``; keyword arguments sorted by name."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Return the flattened form of a call ``f(*args, **kwargs)``."""
        leaves, spec = tree_flatten((args, dict(sorted(kwargs.items()))))
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

    def unflatten(self, leaves: Any) -> Any:
        """Return the model's own output structure around ``leaves``."""
        return tree_unflatten(list(leaves), self.out_spec)


def capture(model: torch.nn.Module, inputs: Inputs, autocast: Autocast | None = None) -> Captured:
    """Return the checked graph of ``model`` called with ``inputs`` in its present training mode.

    Errors: ``CaptureError`` when the model cannot be captured, or when its graph would give other gradients.
    """
    args, kwargs = inputs.call()
    try:
        with autocast.enter() if autocast else nullcontext(), no_value_checks():
            exported = torch.export.export(model, args, kwargs, strict=False)
        module = exported.module(check_guards=False)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} could not be captured by torch.export: {_first_lines(error)}. If its control flow "
            "depends on the values in tensors, move that part out of the model or optimize the parts around it."
        ) from error
    assert module._out_spec is not None
    captured = Captured(_with_unused_state(_flat(module), model), module._out_spec, autocast)
    _check(model, captured, inputs)
    return captured


def _flat(module: fx.GraphModule) -> fx.GraphModule:
    """Return ``module`` with leaf inputs and outputs and each parameter read just before its first use."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}

    def read(node: fx.Node) -> fx.Node:
        if node not in env:
            env[node] = graph.node_copy(node, lambda n: env[n])
        return env[node]

    for node in module.graph.nodes:
        if node.op == "output":
            graph.output(fx.map_arg(tuple(tree_leaves(node.args[0])), read))
        elif node.op != "get_attr":
            for argument in node.all_input_nodes:
                read(argument)
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.lint()
    return fx.GraphModule(module, graph, class_name="Captured")


def _with_unused_state(graph_module: fx.GraphModule, model: torch.nn.Module) -> fx.GraphModule:
    """Give ``graph_module`` those parameters and buffers of ``model`` that its graph does not read: they take memory too."""
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


def _first_lines(error: Exception, limit: int = 600) -> str:
    return " ".join(str(error).split())[:limit] or type(error).__name__


# -- the check ---------------------------------------------------------------------------------------------------------


def _check(model: torch.nn.Module, captured: Captured, inputs: Inputs) -> None:
    """Raise ``CaptureError`` if the model's autograd graph holds what the captured graph's does not."""
    eager, hooks = _autograd_nodes(model, inputs, captured, original=True)
    graph, _ = _autograd_nodes(captured.graph_module, inputs, captured, original=False)
    if hooks:
        raise CaptureError(
            f"{type(model).__name__} sets a tensor hook in forward ({hooks[0]}); a captured graph would lose it and "
            "give other gradients. Set the hook on a parameter or outside the model."
        )
    lost = {name: n - graph[name] for name, n in eager.items() if n > graph[name]}
    if lost:
        names = ", ".join(f"{name} (x{n})" for name, n in sorted(lost.items())[:5])
        raise CaptureError(
            f"the captured graph of {type(model).__name__} lacks autograd nodes of the model: {names}. A custom "
            "autograd.Function or a module hook in it would be lost, and gradients would be wrong."
        )


def _autograd_nodes(
    module: torch.nn.Module, inputs: Inputs, captured: Captured, *, original: bool
) -> tuple[Counter[str], list[str]]:
    """Count the autograd nodes that ``module``'s outputs on fakes reach, by name; parameters by their own."""
    world = FakeWorld(inputs.leaves)
    fakes = [world.fake_all(leaf) for leaf in inputs.leaves]
    context = captured.autocast.enter() if captured.autocast else nullcontext()
    with world.state_of(module), world.active(), context, _tensor_hooks_noted() as hooks:
        if original:
            args, kwargs = Inputs(tuple(fakes), inputs.spec).call()
            outputs = tree_leaves(module(*args, **kwargs))
        else:
            outputs = tree_leaves(module(*fakes))
    names: Counter[str] = Counter()
    stack = [t.grad_fn for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if not _harmless(node):
            names[node.name()] += 1
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in seen:
                seen.add(next_node)
                stack.append(next_node)
    return names, hooks


def _harmless(node: Any) -> bool:
    """Views and copies differ between a model and its graph (``x.T`` or ``permute``) without changing a gradient."""
    return not isinstance(node, torch.autograd.function.BackwardCFunction) and "AccumulateGrad" not in node.name()


@contextmanager
def _tensor_hooks_noted() -> Iterator[list[str]]:
    """Note every ``Tensor.register_hook`` while the body runs."""
    noted: list[str] = []
    original = torch.Tensor.register_hook

    def register_hook(self: torch.Tensor, hook: Any) -> Any:
        noted.append(getattr(hook, "__qualname__", repr(hook)))
        return original(self, hook)  # type: ignore[no-untyped-call]

    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        torch.Tensor.register_hook = original  # type: ignore[method-assign]
