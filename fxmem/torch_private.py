"""What fxmem reads of torch that torch does not call public: imported and asked for here, and nowhere else.

The rest of fxmem takes these names from here, so that a change in torch is met in one place. What fxmem *replaces* of
torch's is in :mod:`fxmem.torch_patches`. Each name has a row in docs/architecture.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, TypeVar, cast

import torch
from torch._C import DisableTorchFunction, DispatchKey
from torch._C import _DisableTorchDispatch as DisableTorchDispatch
from torch._C._acc import DeviceGuard as PythonDeviceGuard
from torch._C._acc import register_python_privateuseone_device_guard as register_device_guard
from torch._C._autograd import DeviceType as device_types
from torch._C._dynamo.guards import TensorGuards
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as topmost_mode
from torch.utils._pytree import GetAttrKey, TreeSpec, register_pytree_node, tree_flatten, tree_leaves

__all__ = [
    "ALONE_IN_DISPATCH",
    "OF_FAKES",
    "DisableTorchDispatch",
    "DisableTorchFunction",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GetAttrKey",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "PythonDeviceGuard",
    "TorchDispatchMode",
    "TreeSpec",
    "active_fake_mode",
    "arguments_by_name",
    "at_end_of_backward",
    "attention_order",
    "channels_last_strides",
    "contiguous_strides",
    "current_backward",
    "current_backward_node",
    "device_behind",
    "device_types",
    "grad_reaches_all",
    "guard_of",
    "has_kernel",
    "graph_nodes",
    "has_saved_tensor_hooks",
    "holders_of",
    "in_dual_level",
    "in_transform",
    "is_channels_last",
    "is_composite",
    "is_traceable_wrapper",
    "is_view",
    "keeps_graph",
    "leaves_of",
    "register_device_guard",
    "register_pytree_node",
    "saved_tensor_hooks_allowed",
    "schema_of",
    "sequence_of",
    "storage_key",
    "topmost_mode",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "told_once",
    "tree_unflatten",
    "version_of",
    "without_modes",
]

# -- trees ---------------------------------------------------------------------------------------------------------------


def tree_unflatten(leaves: list[Any], spec: TreeSpec) -> Any:
    """Return the tree of this structure with these leaves."""
    return spec.unflatten(leaves)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return ``tree`` with each leaf replaced by what ``function`` makes of it."""
    leaves, spec = tree_flatten(tree)
    return spec.unflatten([function(leaf) for leaf in leaves])


def tree_map_only(kind: type[Any], function: Callable[[Any], Any], tree: Any) -> Any:
    """As :func:`tree_map`, of the leaves of class ``kind`` only."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, kind) else leaf, tree)


# -- tensors -------------------------------------------------------------------------------------------------------------

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Return how often a tensor's memory was written in place, as autograd counts."""


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that no other living storage has: its address. The address of its data would not do, as all fakes
    have the same, nor the id of its Python object, which comes and goes while the storage lives."""
    return cast(int, tensor.untyped_storage()._cdata)


def device_behind(tensor: torch.Tensor) -> torch.device:
    """Return the device of ``tensor``: of a fake, without the dispatch that its own attribute takes."""
    return tensor.fake_device if type(tensor) is FakeTensor else tensor.device


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of ``tree`` as :func:`tree_leaves` does, quickly where it is made of tuples, lists and dicts."""
    leaves: list[Any] = []
    _append_leaves(tree, leaves)
    return leaves


def _append_leaves(tree: Any, leaves: list[Any]) -> None:
    kind = type(tree)
    if kind is tuple or kind is list or kind is dict:
        if not tree:
            return
        for part in tree.values() if kind is dict else tree:
            if type(part) in _LEAVES:
                leaves.append(part)
            else:
                _append_leaves(part, leaves)
    elif kind in _LEAVES:
        leaves.append(tree)
    else:
        leaves += tree_leaves(tree)


_LEAVES = frozenset(
    {torch.Tensor, torch.nn.Parameter, FakeTensor, int, float, bool, str, type(None), torch.dtype, torch.device}
)


def is_view(tensor: torch.Tensor) -> bool:
    """True if autograd takes ``tensor`` for a view of another."""
    return tensor._is_view()


def guard_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return what tells, called with these strided tensors, whether class, dtype, device, shape, strides and
    ``requires_grad`` of each are still the same, and autocast and modes around: in C++, at a tenth of Python's time."""
    if not tensors:
        return lambda: True
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def is_traceable_wrapper(value: object) -> bool:
    """True for a tensor that other tensors make up, which says so by torch's protocol for them."""
    if not isinstance(value, torch.Tensor) or type(value) is torch.Tensor:
        return False
    return hasattr(value, "__tensor_flatten__") and hasattr(value, "__tensor_unflatten__")


OF_FAKES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""Errors that only fake tensors raise."""


# -- layouts, as ATen lays out; torch's own functions for them are in torch._prims_common ---------------------------------


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    strides: list[int] = []
    below: Any = 1
    for size in reversed(shape):
        strides.append(below)
        below = below * torch.sym_max(size, 1)
    return tuple(reversed(strides))


def channels_last_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor of this shape, (N, C, H, W) or (N, C, D, H, W), with channels last."""
    strides: list[Any] = [0] * len(shape)
    below: Any = 1
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        strides[dim] = below
        below = below * shape[dim]  # of an empty tensor, strides of 0, unlike a contiguous one's
    return tuple(strides)


def is_channels_last(tensor: torch.Tensor) -> bool:
    """True if ATen takes channels to be last in ``tensor``, of 4 or 5 dimensions: from the innermost of N, spaces, C
    outwards its strides never fall. Where batch and channels both have one stride it is not told."""
    shape, strides = tensor.shape, tensor.stride()
    if len(shape) not in (4, 5) or strides[1] == 0:
        return False
    least = 0
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * max(shape[dim], 1)
    return True


# -- operators -----------------------------------------------------------------------------------------------------------

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Return the schema of an operator: its arguments, which of them it writes, its results."""


def arguments_by_name(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of an op by the names of its schema, with defaults of those not given."""
    declared = schema_of(op).arguments
    defaults = {a.name: a.default_value for a in declared if a.has_default_value()}
    return defaults | {a.name: value for a, value in zip(declared, args, strict=False)} | dict(kwargs)


T = TypeVar("T")


def told_once(tell: Callable[[Any], T]) -> Callable[[Any], T]:
    """Return ``tell``, which says something of an operator, with a memory. It goes by identity, since an operator's own
    hash is computed in Python, and keeps operators alive."""
    told: dict[int, tuple[Any, T]] = {}

    @functools.wraps(tell)
    def of(op: Any) -> T:
        found = told.get(id(op))
        if found is None:
            found = told[id(op)] = op, tell(op)
        return found[1]

    return of


def has_kernel(op: OpOverload, key: str) -> bool:
    """True if ``op`` has a kernel of its own for the dispatch key of this name."""
    return bool(op.has_kernel_for_dispatch_key(getattr(DispatchKey, key)))


def is_composite(op: OpOverload) -> bool:
    """True if ``op`` is made of other operators, whose backward is its own."""
    return has_kernel(op, "CompositeImplicitAutograd")


# -- graphs of autograd --------------------------------------------------------------------------------------------------


def graph_nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield each node of the graph under ``roots``, tensors or edges, once."""
    starts = (getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots)
    pending = list(dict.fromkeys(node for node in starts if node is not None))
    known = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in known:
                known.add(following)
                pending.append(following)


# -- what is going on around ---------------------------------------------------------------------------------------------


def in_transform() -> bool:
    """True inside a transform of torch.func (vmap, grad, jvp, ...)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def active_fake_mode() -> FakeTensorMode | None:
    """Return the mode that makes fakes of what is made at present; None outside of all."""
    return cast(FakeTensorMode | None, torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE))


def in_dual_level() -> bool:
    """True inside ``torch.autograd.forward_ad.dual_level``."""
    return torch.autograd.forward_ad._current_level >= 0


def current_backward_node() -> object | None:
    """Return the autograd node that runs at present; None outside of a backward."""
    return cast(object, torch._C._current_autograd_node())


keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""True in a backward that retains its graph, and outside of any."""

grad_reaches_all: Callable[[], bool] = torch.autograd._is_checkpoint_valid
"""True in a backward that is not told which leaves to reach."""

current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward that runs in this thread; -1 outside of any."""


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have ``call`` called when the backward that runs in this thread has ended, and let go of it then, or where that
    backward fails."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def sequence_of(node: Any) -> int | None:
    """Return the number of an autograd node in its graph; None for the node that accumulates into a leaf."""
    return None if "AccumulateGrad" in node.name() else int(node._sequence_nr())


def holders_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how many C++ owners a tensor and its storage have."""
    return int(tensor._use_count()), int(  # type: ignore[attr-defined]
        torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    )


ALONE_IN_DISPATCH = (4, 2)
"""What :func:`holders_of` is, in the uppermost dispatch mode, for an argument that only autograd's buffer holds."""


def attention_order() -> list[str]:
    """Return the names of ``SDPBackend`` in the order in which attention tries them."""
    backends: Any = torch.nn.attention.SDPBackend
    names = {int(backend): name for name, backend in backends.__members__.items()}
    return [names[place] for place in torch._C._get_sdp_priority_order()]


def has_saved_tensor_hooks() -> bool:
    """True if somebody's hooks are given what autograd saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


without_autocast: Callable[[], AbstractContextManager[object]] = torch._C._DisableAutocast
"""A context in which no op is cast, whatever region it is in."""

saved_tensor_hooks_allowed: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
"""False inside ``torch.autograd.graph.disable_saved_tensors_hooks``; asked at each call of an optimized module."""
