"""Fake kernels made true: the ops whose fakes differ from what the real kernels return.

In: an op, its arguments, and what its fake returned. Out: a fake with the bytes, dtypes and strides of the real one
(observed with torch 2.13): bytes are what is planned, and by strides the kernels after it choose. Which ops, where and
why is in :mod:`fxmem.op_facts.fakes`, which names the functions here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import torch

from fxmem.fake.modes import ModeOnFakes
from fxmem.fake.op_memo import UNKNOWN, recall, run_or_recall
from fxmem.op_facts.kinds import FakeOfSparse, FakeResult, OnlyWrites, ReadsScalar
from fxmem.op_facts.lookup import by_op
from fxmem.torch_private import (
    FakeTensor,
    channels_last_strides,
    contiguous_strides,
    device_behind,
    is_channels_last,
    storage_key,
    told_once,
    topmost_mode,
    without_modes,
)

aten = torch.ops.aten


class MetaFixups(ModeOnFakes):
    """Corrects what fake kernels return.

    Scalars read as 1. Sparse tensors keep their entries; sums and coalescing are taken to merge none, as many as there
    may be.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = _known_of(func)
        if known.is_special:
            if func is _DEVICE and type(args[0]) is FakeTensor:
                return args[0].fake_device
            if func in _READ_AS_ONE and isinstance(args[0], FakeTensor):
                return _one(args[0].dtype)
            if func in _ONLY_WRITES:
                return None
            sparse = _SPARSE.get(func)
            if sparse is not None and getattr(args[sparse.place], "layout", None) == torch.sparse_coo:
                kwargs = {name: value for name, value in (kwargs or {}).items() if name == "alpha"}
                return _REPLACEMENTS[sparse.replacement](*args[:2], **kwargs)
        output = run_or_recall(func, args, kwargs or {})
        return _corrected(func, args, output) if known.is_corrected else output


def run_above_fixups(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return ``func(*args, **kwargs)`` for a mode above. Where :class:`MetaFixups` comes next and the result is known
    again, torch's way there, which takes longer than the rest, is spared; and so it is where a fake is asked for its
    device, as autograd does at each step."""
    if func is _DEVICE and type(args[0]) is FakeTensor:
        return args[0].fake_device
    known = _known_of(func)
    if not known.is_special and type(topmost_mode()) is MetaFixups:
        output = recall(func, args, kwargs)
        if output is not UNKNOWN:
            return _corrected(func, args, output) if known.is_corrected else output
    return func(*args, **kwargs)


def _corrected(func: Any, args: Any, output: Any) -> Any:
    device_type = next(device_behind(a).type for a in args if isinstance(a, torch.Tensor))
    fact = by_op(FakeResult, device_type).get(func)
    return output if fact is None else _CORRECTIONS[fact.correction](output, args)


class _Known(NamedTuple):
    """What is known of an op."""

    is_special: bool
    """Whether it may not even be run."""
    is_corrected: bool


@told_once
def _known_of(func: Any) -> _Known:
    special = func is _DEVICE or any(func in table for table in (_READ_AS_ONE, _ONLY_WRITES, _SPARSE))
    return _Known(special, func in _RESULTS)


_DEVICE = torch.ops.prim.device.default
_READ_AS_ONE = {op for op, fact in by_op(ReadsScalar).items() if fact.what == "op" and fact.stand_in}
_ONLY_WRITES = by_op(OnlyWrites)
_SPARSE = by_op(FakeOfSparse)
_RESULTS = by_op(FakeResult)


# -- ops whose fakes differ in what they return: each correction takes the fake's output and the op's arguments -----------


def viewed(output: torch.Tensor, args: Any) -> torch.Tensor:
    """The fake of a view is made by code of its own, which gives dimensions of one element other strides."""
    given, shape = args
    if 1 not in output.shape or given.layout is not torch.strided:
        return output
    with without_modes():
        stride = _on_meta(given).view(shape).stride()
    if output.stride() == stride:
        return output
    return cast(torch.Tensor, given.as_strided(output.shape, stride, given.storage_offset()))


def computed(output: torch.Tensor, args: Any) -> torch.Tensor:
    """As :func:`viewed`, of an op on two operands, tensors or numbers; expanded ones of low precision are laid out anew
    by code that computes in a higher one."""
    operands = [t for t in args[:2] if isinstance(t, torch.Tensor)]
    if any(t.layout is not torch.strided for t in (output, *operands)):
        return output
    if 1 not in output.shape and all(0 not in t.stride() for t in operands):
        return output
    alike = [t for t in operands if t.shape == output.shape and t.is_contiguous()]
    if len(alike) == 2:  # a shortcut that meta tensors do not take
        return _laid_out(output, output, last=False)
    with without_modes():
        stride = torch.add(*[_on_meta(operand) for operand in args[:2]]).stride()
    return output if output.stride() == stride else output.new_empty_strided(output.shape, stride)


def _on_meta(operand: Any) -> torch.Tensor:
    """Return a tensor that lies as ``operand`` does; of a number, one without dimensions."""
    if isinstance(operand, torch.Tensor):
        return torch.empty_strided(operand.shape, operand.stride(), device="meta")
    return torch.empty((), device="meta")


def written_into_a_copy(output: torch.Tensor, args: Any) -> torch.Tensor:
    """The result is a view of a copy of all the memory that the first argument is a view of; not of an expanded one."""
    given = args[0]
    if given.layout is not torch.strided or 0 in given.stride():
        return output
    nbytes = given.untyped_storage().nbytes()
    if nbytes in (0, output.untyped_storage().nbytes()):
        return output
    whole = given.new_empty(nbytes // given.element_size())
    return cast(torch.Tensor, whole.as_strided(given.shape, given.stride(), given.storage_offset()))


def batch_normed(output: Any, args: Any) -> Any:
    """Channels are last also where only dimensions of one element hide that they are so in the input."""
    last = _is_last(args[0])
    if args[0].dim() in (4, 5) and not args[0].is_contiguous():
        last = last or args[0].is_contiguous(memory_format=_LAST[args[0].dim()])
    return (_laid_out(output[0], args[0], last=last), *_statistics(output[1:], args[0], args[1:5]))


def group_normed(output: Any, args: Any) -> Any:
    return (_laid_out(output[0], args[0], last=_is_last(args[0])), *_statistics(output[1:], args[0], args[1:3]))


def layer_normed(output: Any, args: Any) -> Any:
    """The result is contiguous, and so is the gradient, whatever the strides of the input."""
    normed, *statistics = output
    if args[0].device.type == "cpu":
        statistics = _statistics(statistics, args[0], args[2:4])
    return (_laid_out(normed, normed, last=False), *statistics)


def _statistics(fakes: Any, given: torch.Tensor, parameters: Any) -> list[Any]:
    """Beside parameters, or running statistics, of another dtype than ``given`` the CPU's kernels keep them in fp32."""
    mixed = any(isinstance(t, torch.Tensor) and t.dtype != given.dtype for t in parameters)
    return [_as_dtype(fake, torch.float32 if mixed else given.dtype) for fake in fakes]


def batch_norm_backward(output: Any, args: Any) -> Any:
    if output[0] is None:
        return output
    if not args[-1][0]:  # of what is not asked for there is nothing
        return (None, *output[1:])
    return (_laid_out(output[0], args[1], last=_is_last(args[1])), *output[1:])


def group_norm_backward(output: Any, args: Any) -> Any:
    gradient, *others = batch_norm_backward(output, args)
    return (_as_dtype(gradient, args[1].dtype), *others)


def layer_norm_backward(output: Any, args: Any) -> Any:
    gradient, *others = output
    return output if gradient is None else (_laid_out(gradient, gradient, last=False), *others)


def reduced_in_place(output: torch.Tensor, args: Any) -> torch.Tensor:
    """The loss is reduced inside the buffer that held it for every element."""
    if output.dim() > 0:
        return output
    return output.new_empty(max(1, torch.broadcast_shapes(args[0].shape, args[1].shape).numel()))[0]


def recurrent(output: Any, args: Any) -> Any:
    """A recurrent layer of oneDNN has a workspace."""
    inputs = tuple([(a.shape, a.dtype) if isinstance(a, torch.Tensor) else None for a in args])
    others = tuple([None if isinstance(a, torch.Tensor) else tuple(a) if type(a) is list else a for a in args])
    return (*output[:3], output[3].new_empty(_workspace_bytes(inputs, others)))


def recurrent_backward(output: Any, args: Any) -> Any:
    """The gradients of both biases are tensors of their own."""
    first, second = output[3:5]
    apart = torch.empty_like(second) if storage_key(first) == storage_key(second) else second
    return (*output[:4], apart, *output[5:])


def convolution_backward(output: Any, args: Any) -> Any:
    """oneDNN makes the weight's gradient beside the bias's, wanted or not. cuDNN's have channels last if the input
    or the weight does."""
    if args[1].device.type == "cuda":
        last = args[1].dim() in (4, 5) and any(map(_is_last, args[1:3]))
        return (*(_laid_out(g, g, last=True) if last and g is not None else g for g in output[:2]), output[2])
    if output[1] is not None or output[2] is None:
        return output
    (_, given, weight, bias_sizes, *others), bias = args[:-1], output[2]
    backend = _backend(given, weight, bias, *others, bias_sizes)
    return (output[0], torch.empty_like(weight), bias) if "Mkldnn" in backend else output


def convolution(output: torch.Tensor, args: Any) -> torch.Tensor:
    """The kernel of a transposed convolution in three dimensions makes a result as large as its input, then resizes it:
    the storage stays as large."""
    given, transposed = args[0], args[6]
    if not transposed or given.numel() <= output.numel():
        return output
    if _backend(*args[:9], None) != "SlowTranspose3d":
        return output
    return cast(torch.Tensor, given.new_empty(given.numel()).as_strided(output.shape, output.stride()))


def _backend(*args: Any) -> str:
    """Return the name of the kernels that run a convolution."""
    name = str(torch._C._select_conv_backend(*args)).rpartition(".")[2]
    return "MkldnnTranspose" if name == "???" else name  # the one that torch gives no name


def padded(output: torch.Tensor, args: Any) -> torch.Tensor:
    """Channels are last in the result if they are in the input."""
    return _laid_out(output, output, last=_is_last(args[0]))


def padding_backward(output: torch.Tensor, args: Any) -> torch.Tensor:
    """Channels are last in the gradient if they are in the input."""
    return _laid_out(output, output, last=_is_last(args[1]))


def embedded_bags(output: Any, args: Any) -> Any:
    """What offsets and sizes are saved may have room for one element more."""
    with_last = len(args) > 7 and args[7]
    bags, sizes = (_with_room(output[1], output[1].numel() > 0), _with_room(output[2], with_last))
    return (output[0], bags, sizes, output[3])


def cudnn_attention(output: tuple[Any, ...], args: Any) -> tuple[Any, ...]:
    """Without a gradient there is no logsumexp."""
    attended, logsumexp, *others = output
    needs_logsumexp = args[4]
    return attended, logsumexp if needs_logsumexp else None, *others


def efficient_attention(output: tuple[Any, ...], args: Any) -> tuple[Any, ...]:
    """The seed and the offset of a dropout are numbers of the CPU's."""
    dropout = args[5] if len(args) > 5 else 0.0
    if not dropout:
        return output
    return (*output[:2], *(torch.empty((), dtype=torch.int64, device="cpu") for _ in output[2:]))


_CORRECTIONS: dict[str, Callable[[Any, Any], Any]] = {
    function.__name__: function
    for function in (
        viewed,
        computed,
        written_into_a_copy,
        batch_normed,
        group_normed,
        layer_normed,
        batch_norm_backward,
        group_norm_backward,
        layer_norm_backward,
        convolution,
        convolution_backward,
        padded,
        padding_backward,
        reduced_in_place,
        recurrent,
        recurrent_backward,
        embedded_bags,
        cudnn_attention,
        efficient_attention,
    )
}


@cache
def _workspace_bytes(inputs: tuple[Any, ...], others: tuple[Any, ...]) -> int:
    """Return what oneDNN keeps for the backward of a recurrent layer, of which only a run of it tells."""
    with without_modes(), torch.enable_grad():  # there is none without
        zeros = [None if like is None else torch.zeros(like[0], dtype=like[1]) for like in inputs]
        args = [other if tensor is None else tensor for tensor, other in zip(zeros, others, strict=True)]
        return int(aten.mkldnn_rnn_layer.default(*args)[3].nbytes)


def _with_room(tensor: torch.Tensor, larger: bool) -> torch.Tensor:
    """Return a vector like this one, with room for one element more if it is the larger one."""
    return tensor.new_empty(tensor.numel() + 1)[:-1] if larger else tensor


def sparse_clone(tensor: torch.Tensor) -> torch.Tensor:
    return _sparse(tensor, aten._indices.default(tensor).clone(), aten._values.default(tensor).clone())


def sparse_coalesce(tensor: torch.Tensor) -> torch.Tensor:
    return _sparse(tensor, aten._indices.default(tensor).clone(), aten._values.default(tensor).clone(), coalesced=True)


def sparse_mask(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    values = tensor.new_empty(aten._values.default(mask).shape)
    return _sparse(mask, aten._indices.default(mask).clone(), values, coalesced=mask.is_coalesced())


def sparse_add(tensor: torch.Tensor, other: torch.Tensor, alpha: float = 1) -> torch.Tensor:
    if other.layout != torch.sparse_coo:
        return cast(torch.Tensor, aten.add.Tensor(tensor, other, alpha=alpha))
    indices = torch.cat([aten._indices.default(tensor), aten._indices.default(other)], 1)
    return _sparse(tensor, indices, torch.cat([aten._values.default(tensor), aten._values.default(other)]))


def sparse_add_(tensor: torch.Tensor, other: torch.Tensor, alpha: float = 1) -> torch.Tensor:
    if other.layout != torch.sparse_coo:
        return cast(torch.Tensor, aten.add_.Tensor(tensor, other, alpha=alpha))
    return cast(torch.Tensor, aten.copy_sparse_to_sparse_(tensor, sparse_add(tensor, other)))


_REPLACEMENTS: dict[str, Callable[..., torch.Tensor]] = {
    function.__name__: function for function in (sparse_clone, sparse_coalesce, sparse_mask, sparse_add, sparse_add_)
}


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


_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _is_last(tensor: torch.Tensor) -> bool:
    """True if channels are last in ``tensor`` for most kernels."""
    return tensor.layout is torch.strided and is_channels_last(tensor)


def _laid_out(fake: torch.Tensor, given: torch.Tensor, *, last: bool) -> torch.Tensor:
    """Return a fake of the shape of ``given`` that is contiguous, or has channels last."""
    stride = (channels_last_strides if last else contiguous_strides)(given.shape)
    return fake if fake.stride() == stride else fake.new_empty_strided(given.shape, stride)


def _as_dtype(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if tensor is None or tensor.dtype == dtype:
        return tensor
    return torch.empty_like(tensor, dtype=dtype)
