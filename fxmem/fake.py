"""Fake stand-ins for a model's tensors: sizes, strides and autograd, but no bytes and no arithmetic.

In: real (or meta) parameters, buffers and inputs. Out: fake tensors, one per storage and tensor, so that ties and
aliases are kept. Real tensors are never touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, cast

import torch
import torch._meta_registrations
from torch._prims_common import (
    make_channels_last_strides_for,
    make_contiguous_strides_for,
    suggest_memory_format,
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import _foreach_supported_types
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from fxmem.effects import PythonState, replaced
from fxmem.errors import InputError

aten = torch.ops.aten
_meta: Any = torch._meta_registrations


class FakeWorld:
    """A :class:`FakeTensorMode` and the fakes made in it, remembered by identity.

    ``tensors``: if one of them is fake, its mode is used. ``device``: where tensors of the meta device are taken to be.
    """

    def __init__(self, tensors: Any = (), device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        given = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)
        self.mode = given or FakeTensorMode(allow_non_fake_inputs=True)
        self._shared = given is not None
        """Whether another world's fakes of the same tensors, and casts of them, are known to the mode."""
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the one fake of ``tensor``, without gradient, requiring grad as the original does."""
        known = self._fakes.get(id(tensor))
        if known is not None:
            return known[1]
        fake = self._new_fake(tensor) if tensor.is_leaf else made_outside(self._new_fake(tensor.detach()))
        if isinstance(tensor, torch.nn.Parameter) and not isinstance(fake, torch.nn.Parameter):
            fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        if fake.is_leaf:
            fake.grad = None
        self._fakes[id(tensor)] = (tensor, fake)
        return fake

    def _new_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda:  # an op without a fake kernel would run on the device
            self.mode.allow_fallback_kernels = False
        if isinstance(tensor, FakeTensor):  # an alias, so that its gradient is its own
            return tensor.detach().requires_grad_(tensor.requires_grad)
        if not tensor.is_meta:
            fake = self.mode.from_tensor(tensor, static_shapes=True)
            return fake.detach().requires_grad_(tensor.requires_grad) if self._shared else fake
        with self.mode:
            return torch.empty_strided(
                tensor.size(),
                tensor.stride(),
                dtype=tensor.dtype,
                device=self._device,
                requires_grad=tensor.requires_grad,
            )

    def fake_all(self, tree: Any) -> Any:
        """Return ``tree`` with every tensor in it replaced by its fake."""
        return tree_map_only(torch.Tensor, self.fake, tree)

    @contextmanager
    def state_of(self, module: torch.nn.Module) -> Iterator[None]:
        """Give ``module`` fake parameters and buffers while the body runs."""
        registries = [r for m in module.modules() for r in (m._parameters, m._buffers)]
        saved = [dict(registry) for registry in registries]
        try:
            for registry in registries:
                registry.update((name, self.fake(t)) for name, t in registry.items() if t is not None)  # type: ignore[misc]
            with attributes_restored(module):
                yield
        finally:
            for registry, before in zip(registries, saved, strict=True):
                registry.clear()
                registry.update(before)  # type: ignore[arg-type]

    @contextmanager
    def active(self, *modules: torch.nn.Module) -> Iterator[None]:
        """Run the body on fakes: factory calls make fakes, scalars read as 1. What it does to ``modules`` is undone.

        Optimizers take fakes for what they are, tensors that multi-tensor kernels work on where the device has such; a
        backward on several devices goes one way, by one thread.
        """
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(attributes_restored(module))
            stack.enter_context(self.mode)
            stack.enter_context(TruerFakes())  # type: ignore[no-untyped-call]
            stack.enter_context(no_value_checks())
            stack.enter_context(grouped_matmuls())
            stack.enter_context(_fakes_for_each())
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield


@contextmanager
def _fakes_for_each() -> Iterator[None]:
    """Let the body's optimizers choose multi-tensor kernels for fakes where they do for real parameters."""
    types: list[Any] = _foreach_supported_types
    types.append(FakeTensor)
    try:
        yield
    finally:
        types.remove(FakeTensor)


class _Outside(torch.autograd.Function):
    """Stands for what made a tensor, and takes its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None


def made_outside(fake: torch.Tensor) -> torch.Tensor:
    """Return ``fake`` as a part of an autograd graph that goes on outside: no leaf, but no view of one either."""
    made = _Outside.apply(fake, torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
    return cast(torch.Tensor, made)


def check_device(device: torch.device) -> torch.device:
    """Return ``device``. Errors: ``InputError`` if it is CUDA and there is none: autograd would end the process."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"a tensor is on {device}, but this torch ({torch.__version__}) finds no CUDA device, and autograd cannot run "
            "without one, not even on fakes; make the model on the meta device or the CPU and pass device='cuda' to "
            "fxmem.estimate to have it counted as on CUDA"
        )
    return device


@contextmanager
def attributes_restored(module: torch.nn.Module) -> Iterator[None]:
    """Undo what the body does to Python values ``module`` can reach: a forward that caches a tensor on ``self``, or a
    hook that appends one to a list, would leave a fake one there."""
    state = PythonState(module)
    try:
        yield
    finally:
        state.restore()


@contextmanager
def no_value_checks() -> Iterator[None]:
    """Switch off those checks in ``torch.distributions`` that look at values: on fakes there are none."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)


@contextmanager
def grouped_matmuls() -> Iterator[None]:
    """Let the fake grouped matmul, which insists on bfloat16, take the dtypes that the real one takes."""
    original = _meta._meta_grouped_mm_common

    def of_any_dtype(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if a.dtype == torch.bfloat16 or a.itemsize == 1:
            return cast(torch.Tensor, original(a, b, *args, **kwargs))
        as_bfloat16 = [torch.empty_like(t, dtype=torch.bfloat16) for t in (a, b)]
        dtype = kwargs.pop("out_dtype", None) or a.dtype
        return torch.empty_like(original(*as_bfloat16, *args, **kwargs), dtype=dtype)

    with replaced(_meta, "_meta_grouped_mm_common", of_any_dtype):
        yield


class TruerFakes(TorchDispatchMode):
    """Corrects fake kernels whose outputs differ from the real kernel's, hence in bytes (observed with torch 2.13).

    On CPU the norms take a reduced-precision input beside fp32 parameters; they then keep their statistics in fp32 and
    return gradients in the input's dtype. The backward of layer_norm returns a contiguous gradient, whatever the
    strides of its input; batch and group norm return what is contiguous or has channels last. Dimensions of one element
    have the strides of real tensors, by which kernels choose. The offsets and sizes that embedding_bag saves may have
    room for one element more. Some losses are reduced inside the buffer that held them for every element. Sparse tensors
    keep their entries; coalescing is taken to merge none (the real kernel allocates as if it did not). A recurrent layer
    of oneDNN has a workspace.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return _one(args[0].dtype)
        if func in _SPARSE and args[_SPARSE[func][0]].layout == torch.sparse_coo:
            kwargs = {name: value for name, value in (kwargs or {}).items() if name == "alpha"}
            return _SPARSE[func][1](*args[:2], **kwargs)
        output = func(*args, **(kwargs or {}))
        if func in _FAST and 1 in output.shape and all(map(_strided, (output, *args[:2]))):
            return _strided_as_real(output, func, args)
        first_parameter = _NORMS.get(func)
        if first_parameter is not None and args[0].device.type == "cpu":
            parameters = [t for t in args[first_parameter : first_parameter + 2] if isinstance(t, torch.Tensor)]
            mixed = any(t.dtype != args[0].dtype for t in parameters)
            dtype = torch.float32 if mixed else args[0].dtype
            normed = output[0]
            if func is not aten.native_layer_norm.default:
                batch_norm = func is aten.native_batch_norm.default
                normed = _laid_out(normed, args[0], last=_is_last(args[0], or_contiguous=batch_norm))
            return (normed, *(_as_dtype(t, dtype) for t in output[1:]))
        if func in _NORMS_BACKWARD and output[0] is not None and args[0].device.type == "cpu":
            gradient = _laid_out(output[0], args[1], last=_is_last(args[1]))
            dtype = args[1].dtype if func is aten.native_group_norm_backward.default else gradient.dtype
            return (_as_dtype(gradient, dtype), *output[1:])
        if func is aten.native_layer_norm_backward.default and output[0] is not None:
            return (_contiguous(output[0]), *output[1:])
        if func in _REDUCED_IN_PLACE and output.dim() == 0 and args[0].device.type in _REDUCED_IN_PLACE[func]:
            return output.new_empty(max(1, torch.broadcast_shapes(args[0].shape, args[1].shape).numel()))[0]
        if func is aten.mkldnn_rnn_layer.default:
            inputs = tuple([(a.shape, a.dtype) if isinstance(a, torch.Tensor) else None for a in args])
            others = tuple([None if isinstance(a, torch.Tensor) else tuple(a) if type(a) is list else a for a in args])
            return (*output[:3], output[3].new_empty(_workspace_bytes(inputs, others)))
        if func is aten._embedding_bag.default and args[0].device.type == "cpu":
            with_last = len(args) > 7 and args[7]
            bags, sizes = (_with_room(output[1], output[1].numel() > 0), _with_room(output[2], with_last))
            return (output[0], bags, sizes, output[3])
        return output


_REDUCED_IN_PLACE = {
    aten.binary_cross_entropy.default: ("cpu",),
    aten.soft_margin_loss.default: ("cpu",),
    aten.mse_loss.default: ("cpu", "cuda"),
    aten.smooth_l1_loss.default: ("cpu", "cuda"),
}
"""By loss, the types of devices whose kernels do so."""

_NORMS = {
    aten.native_batch_norm.default: 1,
    aten.native_layer_norm.default: 2,
    aten.native_group_norm.default: 1,
}
"""Forward norms and the place of their first affine parameter."""

_VIEWS = {aten.view.default, aten._unsafe_view.default}
_FAST = _VIEWS | {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
"""Ops whose fakes are made by code of their own, which gives dimensions of one element other strides."""

_NORMS_BACKWARD = {aten.native_batch_norm_backward.default, aten.native_group_norm_backward.default}


@cache
def _workspace_bytes(inputs: tuple[Any, ...], others: tuple[Any, ...]) -> int:
    """Return what oneDNN keeps for the backward of a recurrent layer, of which only a run of it tells."""
    with _disable_current_modes(), torch.enable_grad():  # there is none without
        zeros = [None if like is None else torch.zeros(like[0], dtype=like[1]) for like in inputs]
        args = [other if tensor is None else tensor for tensor, other in zip(zeros, others, strict=True)]
        return int(aten.mkldnn_rnn_layer.default(*args)[3].nbytes)


def _with_room(tensor: torch.Tensor, larger: bool) -> torch.Tensor:
    """Return a vector like this one, with room for one element more if it is the larger one."""
    return tensor.new_empty(tensor.numel() + 1)[:-1] if larger else tensor


def _sparse_clone(tensor: torch.Tensor) -> torch.Tensor:
    return _sparse(tensor, tensor._indices().clone(), tensor._values().clone())


def _sparse_coalesce(tensor: torch.Tensor) -> torch.Tensor:
    return _sparse(tensor, tensor._indices().clone(), tensor._values().clone(), coalesced=True)


def _sparse_mask(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    values = tensor.new_empty(mask._values().shape)
    return _sparse(mask, mask._indices().clone(), values, coalesced=mask.is_coalesced())


def _sparse_add_(tensor: torch.Tensor, other: torch.Tensor, alpha: float = 1) -> torch.Tensor:
    if other.layout != torch.sparse_coo:
        return cast(torch.Tensor, aten.add_.Tensor(tensor, other, alpha=alpha))
    indices = torch.cat([tensor._indices(), other._indices()], 1)
    values = torch.cat([tensor._values(), other._values()])
    return cast(torch.Tensor, aten.copy_sparse_to_sparse_(tensor, _sparse(tensor, indices, values)))


_SPARSE: dict[Any, tuple[int, Any]] = {
    aten.clone.default: (0, _sparse_clone),
    aten._coalesce.default: (0, _sparse_coalesce),
    aten.sparse_mask.default: (1, _sparse_mask),
    aten.add_.Tensor: (0, _sparse_add_),
}
"""Ops whose fakes forget the entries of a sparse tensor: the place of the sparse argument, and what is right."""


def _sparse(
    like: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, *, coalesced: bool = False
) -> torch.Tensor:
    return cast(
        torch.Tensor,
        aten._sparse_coo_tensor_with_dims_and_tensors(
            like.sparse_dim(),
            like.dense_dim(),
            like.size(),
            indices,
            values,
            dtype=values.dtype,
            layout=torch.sparse_coo,
            device=like.device,
            is_coalesced=coalesced,
        ),
    )


def _one(dtype: torch.dtype) -> bool | int | float | complex:
    """What a scalar read from a fake is taken to be."""
    if dtype.is_complex:
        return 1 + 0j
    return 1.0 if dtype.is_floating_point else True if dtype == torch.bool else 1


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _is_last(tensor: torch.Tensor, *, or_contiguous: bool = False) -> bool:
    """True if the CPU's kernels of batch and group norm lay out with channels last what they make of ``tensor``.

    ``or_contiguous``: as batch norm's forward does, also where only dimensions of one element hide that it is so.
    """
    if suggest_memory_format(tensor) in (torch.channels_last, torch.channels_last_3d):
        return True
    if not or_contiguous or tensor.dim() not in (4, 5) or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d)


def _laid_out(fake: torch.Tensor, given: torch.Tensor, *, last: bool) -> torch.Tensor:
    """Return a fake of the shape of ``given`` that is contiguous, or has channels last."""
    stride = (make_channels_last_strides_for if last else make_contiguous_strides_for)(given.shape)
    return fake if fake.stride() == stride else fake.new_empty_strided(given.shape, stride)


def _strided_as_real(fake: torch.Tensor, func: Any, args: Any) -> torch.Tensor:
    """Return ``fake``, what ``func`` returned, with the strides that it has of real tensors."""
    with _disable_current_modes():
        if func in _VIEWS:
            stride = _on_meta(args[0]).view(args[1]).stride()
        else:
            stride = torch.add(*map(_on_meta, args[:2])).stride()
    if fake.stride() == stride:
        return fake
    if func in _VIEWS:
        return cast(torch.Tensor, args[0].as_strided(fake.shape, stride, args[0].storage_offset()))
    return fake.new_empty_strided(fake.shape, stride)


def _strided(operand: Any) -> bool:
    return not isinstance(operand, torch.Tensor) or operand.layout is torch.strided


def _on_meta(operand: Any) -> torch.Tensor:
    """Return a tensor that lies as ``operand`` does; of a number, one without dimensions."""
    if isinstance(operand, torch.Tensor):
        return torch.empty_strided(operand.shape, operand.stride(), device="meta")
    return torch.empty((), device="meta")


def _as_dtype(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if tensor is None or tensor.dtype == dtype:
        return tensor
    return torch.empty_like(tensor, dtype=dtype)


class ScalarReads(TorchFunctionMode):
    """Lets an optimizer or a BatchNorm read its step counter from a fake: every scalar reads as 1, or as 1/2."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.item, torch.Tensor.__float__) and isinstance(args[0], FakeTensor):
            # NAdam divides by 1 less a product that it reads.
            return 0.5 if args[0].dtype.is_floating_point or func is torch.Tensor.__float__ else 1
        return func(*args, **(kwargs or {}))
