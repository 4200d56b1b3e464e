"""Calls that torch.export would look through and change: a custom ``autograd.Function``, hooks of modules and tensors.

While a model is captured, :func:`kept_whole` puts each such call into the graph as one node. Its target becomes an
:class:`Opaque`: a callable of the tensors among the call's arguments, which at run time makes the very call that eager
makes. What it saves, draws or writes is then observed like that of any op.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import (
    PythonKeyTracer,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)
from torch.fx.node import has_side_effect
from torch.utils.hooks import BackwardHook

from fxmem.capture.pytrees import holds_tensors
from fxmem.errors import CaptureError
from fxmem.fake.meta_fixups import MetaFixups
from fxmem.torch_patches import (
    backward_hooks_made_by,
    batch_norms_by,
    forward_hooks_exchanged,
    function_applies_by,
    tensor_hooks_set_by,
)
from fxmem.torch_private import (
    DisableTorchFunction,
    FakeTensor,
    HigherOrderOperator,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)


class Opaque:
    """``function`` with all arguments but its tensors fixed; a target of call_function nodes.

    ``effect``: why it may not run again ("sets a hook"); empty if it may.
    """

    def __init__(self, function: Callable[..., Any], args: Any, effect: str = "") -> None:
        leaves, self.spec = tree_flatten(args)
        _check_leaves(function, leaves)
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.function, self.effect = function, effect
        self.__name__ = self.__qualname__ = "opaque_" + "".join(c if c.isalnum() else "_" for c in name_of(function))
        self.__module__ = __name__

    def __call__(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return self.function(*tree_unflatten(leaves, self.spec))

    def __str__(self) -> str:
        return name_of(self.function)


def _check_leaves(function: Callable[..., Any], leaves: list[Any]) -> None:
    """Raise ``CaptureError`` if a leaf is an object that holds tensors of the forward."""
    for leaf in leaves:
        if holds_tensors(leaf, FakeTensor):
            raise CaptureError(
                f"{name_of(function)} is given a {type(leaf).__name__} that holds tensors, which a captured graph cannot "
                "look into; pass the tensors, or register the class by torch.utils._pytree.register_pytree_node"
            )


class _OpaqueCall(HigherOrderOperator):
    """Stands for ``Opaque`` number ``index`` while torch.export holds the graph: it lets no other callables in."""

    def __init__(self) -> None:
        super().__init__("fxmem_opaque")  # type: ignore[no-untyped-call]

    def __call__(self, index: int, *tensors: torch.Tensor) -> Any:
        raise AssertionError("an opaque call is replaced before it runs")


_opaque_call = has_side_effect(_OpaqueCall())
_TABLE: ContextVar[list[Opaque] | None] = ContextVar("table of opaque calls", default=None)


@contextmanager
def kept_whole(model: torch.nn.Module) -> Iterator[list[Opaque]]:
    """Make opaque nodes of what an export of ``model`` would lose while the body captures; yield their table.

    That is: custom Functions, ``Tensor.register_hook``, the modules' own forward and backward hooks (which may do
    anything, hence run exactly as often as in eager mode), a BatchNorm that averages over all batches.
    """
    table: list[Opaque] = []

    def opaque_apply(cls: Any, args: Any, apply: Callable[[], Any]) -> Any:
        if cls.__module__.startswith("torch."):
            return apply()
        return _emitted(table, Opaque(cls.apply, args), args, apply)

    def opaque_register_hook(tensor: torch.Tensor, hook: Callable[..., Any], register_hook: Any) -> Any:
        _check_closure(hook)
        set_hook = Opaque(_HookSetter(hook), (tensor,), "sets a hook")
        _emitted(table, set_hook, (tensor,), lambda: None)
        with DisableTorchFunction():
            return register_hook(tensor, hook)

    def opaque_batch_norm(module: Any, x: torch.Tensor, batch_norm: Any) -> torch.Tensor:
        averages = module.training and module.momentum is None and module.num_batches_tracked is not None
        if get_proxy_mode() is None or not averages:
            return cast(torch.Tensor, batch_norm(module, x))
        module._check_input_dim(x)
        mean, var, count = module.running_mean, module.running_var, module.num_batches_tracked
        args = (x, mean, var, module.weight, module.bias, count, module.eps)
        whole = Opaque(cumulative_batch_norm, args, "averages over all batches so far")
        on_fakes = functools.partial(torch.nn.functional.batch_norm, *args[:-2], True, 0.5, module.eps)
        return cast(torch.Tensor, _emitted(table, whole, args, on_fakes))

    def opaque_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
        if _of_torch(hook):
            return hook

        def call(module: torch.nn.Module, *args: Any) -> Any:
            whole = Opaque(_ModuleHook(hook, module), args, "runs a module's hook")
            return _emitted(table, whole, args, lambda: hook(module, *args))

        return call

    def opaque_hook_inputs(hook: Any, args: Any, hook_inputs: Any) -> Any:
        hook.whole = _BackwardHooks(hook)
        whole = Opaque(hook.whole.inputs, args, "sets a backward hook")
        return _emitted(table, whole, args, lambda: hook_inputs(hook, args))

    def opaque_hook_outputs(hook: Any, args: Any, hook_outputs: Any) -> Any:
        whole = Opaque(hook.whole.outputs, (args,), "sets a backward hook")
        return _emitted(table, whole, args, lambda: hook_outputs(hook, args))

    with (
        forward_hooks_exchanged(model, opaque_hook),
        backward_hooks_made_by(opaque_hook_inputs, opaque_hook_outputs),
        function_applies_by(opaque_apply),
        tensor_hooks_set_by(opaque_register_hook),
        batch_norms_by(opaque_batch_norm),
        _filling(table),
    ):
        yield table


@contextmanager
def _filling(table: list[Opaque]) -> Iterator[None]:
    """Let :func:`told_in_graph` find ``table`` in the body."""
    token = _TABLE.set(table)
    try:
        yield
    finally:
        _TABLE.reset(token)


def cumulative_batch_norm(
    x: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_batches_tracked: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """What a BatchNorm with ``momentum=None`` computes in training: its momentum is read from a tensor."""
    num_batches_tracked.add_(1)
    momentum = 1.0 / float(num_batches_tracked)
    return torch.nn.functional.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)


def told_in_graph(function: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Put a call of ``function``, which tells somebody of values, into the graph that this thread captures; return whether
    there is one."""
    table = _TABLE.get()
    if table is None or get_proxy_mode() is None:
        return False
    given = (args, kwargs)
    _emitted(table, Opaque(_Telling(function), given, "tells of values"), given, lambda: None)
    return True


class _Telling:
    """Calls ``function`` with positional and keyword arguments."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.__name__ = getattr(function, "func", function).__name__

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function(*args, **kwargs)


def opaque_call(node: fx.Node, table: list[Opaque]) -> Opaque | None:
    """Return what ``node`` of an exported graph stands for, if it is an opaque call; its tensors are ``args[1:]``."""
    return table[int(str(node.args[0]))] if node.target is _opaque_call else None


def _emitted(table: list[Opaque], opaque: Opaque, args: Any, run: Callable[[], Any]) -> Any:
    """Run on fakes, with nothing recorded but one node; outside of a capture, just run."""
    mode = get_proxy_mode()
    if mode is None:
        return run()
    assert isinstance(mode.tracer, PythonKeyTracer)
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    proxies = tuple(mode.tracer.unwrap_proxy(tensor) for tensor in tensors)
    node = mode.tracer.create_proxy("call_function", _opaque_call, (len(table), *proxies), {}, name=opaque.__name__)
    table.append(opaque)
    with disable_proxy_modes_tracing(), DisableTorchFunction(), MetaFixups():  # type: ignore[no-untyped-call]
        output = run()
    return track_tensor_tree(output, node, constant=None, tracer=mode.tracer)


def _of_torch(hook: Any) -> bool:
    """True for torch's own hooks, which export knows, and fxmem's, which only look on."""
    owner = getattr(hook, "__self__", hook)
    module = getattr(owner, "__module__", None) or type(owner).__module__
    return str(module).startswith(("torch.", "fxmem."))


class _ModuleHook:
    """A forward hook (or forward pre hook) of ``module``."""

    def __init__(self, hook: Callable[..., Any], module: torch.nn.Module) -> None:
        self.hook, self.module = hook, module
        self.__name__ = f"hook_{getattr(hook, '__name__', type(hook).__name__)}"

    def __call__(self, *args: Any) -> Any:
        return self.hook(self.module, *args)


class _BackwardHooks:
    """The full backward hooks of one call of a module: set anew in each forward, on its inputs and then its outputs."""

    def __init__(self, hook: Any) -> None:
        self._made_of = (hook.module, hook.user_hooks, hook.user_pre_hooks)
        self._local = threading.local()

    def inputs(self, *args: Any) -> Any:
        self._local.hook = BackwardHook(*self._made_of)
        return self._local.hook.setup_input_hook(args)

    def outputs(self, args: Any) -> Any:
        return self._local.__dict__.pop("hook").setup_output_hook(args)


class _HookSetter:
    """Sets ``hook`` on a tensor."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, tensor: torch.Tensor) -> None:
        tensor.register_hook(self.hook)


def _check_closure(hook: Callable[..., Any]) -> None:
    """Raise ``CaptureError`` if ``hook`` refers to tensors of the forward: at run time these would be other ones."""
    inner = hook.func if isinstance(hook, functools.partial) else hook
    cells = [cell.cell_contents for cell in getattr(inner, "__closure__", None) or ()]
    bound = [*hook.args, *hook.keywords.values()] if isinstance(hook, functools.partial) else []
    held = tree_leaves((cells, bound, getattr(inner, "__defaults__", None)))
    if any(isinstance(leaf, FakeTensor) for leaf in held):
        raise CaptureError(
            f"the tensor hook {name_of(hook)} refers to another tensor of the same forward, which a captured graph "
            "cannot give it; write what it does as a torch.autograd.Function"
        )


def name_of(function: Any) -> str:
    """Return a readable name of a callable: ``Swish.apply`` for a bound method of a class."""
    if isinstance(function, _HookSetter):
        return f"hook {name_of(function.hook)}"
    owner = getattr(function, "__self__", None)
    name = str(getattr(function, "__name__", type(function).__name__))
    return f"{owner.__name__}.{name}" if isinstance(owner, type) else name
