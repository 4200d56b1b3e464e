"""Python bindings of ATen's ops: ``torch.layer_norm`` for ``torch.ops.aten.layer_norm.default``.

Both run the same op, but the call of an overload from Python costs several microseconds more, which is all that a small
kernel takes: without bindings a step takes 9 % longer on a deep MLP of 64-wide layers, 8 % on a tiny GPT-2, 2 % on a
ResNet-18 of small images (``benchmarks/results/ablation_runtime.json``). In: a captured graph. Out: for each call, what
the emitted graph is to call. A binding resolves its overload anew from the arguments, so it is used only where it was
seen to dispatch the same kernels with the same arguments as the overload (on fakes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import fx

from fxmem.runtime.layout import View
from fxmem.torch_patches import grouped_matmuls
from fxmem.torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    TreeSpec,
    schema_of,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)

Target = Callable[..., Any]

_found: dict[tuple[Target, object], Target] = {}  # by overload and the types it is called with
_bound: dict[tuple[Target, object, object], Target] = {}  # the same, of calls that are written down


def callable_of(node: fx.Node) -> Target:
    """Return what does the same as ``node.target`` in the fewest microseconds."""
    target: Target = node.target  # type: ignore[assignment]
    if not isinstance(target, OpOverload):
        return target
    leaves, spec = tree_flatten((node.args, node.kwargs))
    values = [leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
    tensors = [value for value in values if isinstance(value, FakeTensor)]
    if not tensors or any(isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) for value in values):
        return target
    # A tensor without dimensions passes for a number too.
    kinds = tuple([(v.dtype, v.dim() == 0) if isinstance(v, FakeTensor) else type(v) for v in values])
    key = (target, (str(spec), kinds))
    if key not in _found:
        _found[key] = _binding(target, values, spec)
    return _found[key]


def bound(op: Target, args: Any, kwargs: Any, lies: Callable[[Any], tuple[View, torch.device] | None]) -> Target:
    """As :func:`callable_of`, of a call of whose arguments ``lies`` tells how the tensors lie, and where."""
    if not isinstance(op, OpOverload):
        return op
    key = op, _kind(args, lies), _kind(kwargs, lies)
    if key not in _bound:
        _bound[key] = _bound_anew(op, args, kwargs, lies)
    return _bound[key]


def _kind(argument: Any, lies: Callable[[Any], tuple[View, torch.device] | None]) -> object:
    """Return what of an argument decides about a binding."""
    if isinstance(argument, list | tuple):
        return type(argument), tuple([_kind(part, lies) for part in argument])
    if isinstance(argument, dict):
        return tuple([(name, _kind(part, lies)) for name, part in argument.items()])
    at = lies(argument)
    return type(argument) if at is None else (at[0].dtype, not at[0].size)


def _bound_anew(
    op: OpOverload, args: Any, kwargs: Any, lies: Callable[[Any], tuple[View, torch.device] | None]
) -> Target:
    leaves, spec = tree_flatten((args, kwargs))
    places = [lies(leaf) for leaf in leaves]
    kinds = tuple(
        [type(leaf) if at is None else (at[0].dtype, not at[0].size) for leaf, at in zip(leaves, places, strict=True)]
    )
    key = (op, (str(spec), kinds))
    if key not in _found:
        with FakeTensorMode(allow_non_fake_inputs=True):
            values = [leaf if at is None else _empty(*at) for leaf, at in zip(leaves, places, strict=True)]
        _found[key] = _binding(op, values, spec) if any(isinstance(v, FakeTensor) for v in values) else op
    return _found[key]


def _empty(view: View, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=device)


def _binding(op: OpOverload, values: list[Any], spec: TreeSpec) -> Target:
    args, kwargs = tree_unflatten(values, spec)
    expected = _dispatched(op, args, kwargs)
    return next((c for c in _candidates(op) if expected and _dispatched(c, args, kwargs) == expected), op)


def _candidates(op: OpOverload) -> Iterator[Target]:
    """Yield the functions in C++ that bear the name of ``op``."""
    namespace, _, name = schema_of(op).name.partition("::")
    for module in (torch._C._nn, torch, torch.Tensor) if namespace == "aten" else ():
        candidate = getattr(module, name, None)
        if isinstance(candidate, BuiltinFunctionType | MethodDescriptorType):
            yield candidate


class _Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        self.calls.append((func, str(spec), _described(leaves)))
        return func(*args, **(kwargs or {}))


def _dispatched(target: Target, args: Any, kwargs: Any) -> list[object]:
    """Return the kernels that a call reaches, each with its arguments, and what it returns; nothing if it fails."""
    leaves, spec = tree_flatten((args, kwargs))
    fake_mode = next(leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor))
    try:
        with grouped_matmuls(), fake_mode, _Record() as record:
            args, kwargs = tree_unflatten([_stand_in(leaf) for leaf in leaves], spec)
            output = target(*args, **kwargs)
    except Exception:  # a binding that refuses these arguments, in whatever way, is not the one
        return []
    return [*record.calls, _described(tree_leaves(output))]


def _stand_in(leaf: Any) -> Any:
    if not isinstance(leaf, FakeTensor):
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device)


def _described(leaves: list[Any]) -> tuple[object, ...]:
    return tuple(
        (tuple(leaf.size()), leaf.stride(), leaf.dtype, leaf.device)
        if isinstance(leaf, torch.Tensor)
        else (type(leaf), repr(leaf))
        for leaf in leaves
    )
