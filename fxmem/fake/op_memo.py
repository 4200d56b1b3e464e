"""Ops on fakes that have run before on tensors that lie like these: their results are made anew without running them.

In: an op and its arguments, on top of a fake mode or on meta tensors. Out: what it returns. The mode has a memory of its
own, which knows more cases than fxmem has; here an op is known again in a fifth of the time. A model's layers are alike,
and its step is run several times, so that nearly all ops are known.

NOTE [Which results are known again]

1. Three kinds, told by the schema: a *new* tensor that lies on memory of its own; a *view* of the first argument; the first
   argument, *written* in place. The first result is looked at: where it is not of its kind, or sparse, conjugated, part of
   an autograd graph or a constant, the mode runs the op each time.
2. What a result depends on is in the key: the op, all that is no tensor with its type, of each tensor where and how it
   lies, its dtype and device, and the default dtype.
3. Never known are ops whose results depend on values, that are not torch's own, that have symbolic sizes, or that run in
   inference mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from fxmem.torch_private import (
    DisableTorchDispatch,
    DisableTorchFunction,
    FakeTensor,
    OpOverload,
    schema_of,
    storage_key,
)

MOST_KNOWN = 100_000
"""Results that are kept; a large model's step has some thousands."""

NEW, VIEW, WRITTEN = "new", "view", "written"
_Key = tuple[Any, ...]
_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, int]
_PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, complex}
)
_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_META = torch.device("meta")
_TENSORS = (FakeTensor, torch.Tensor, torch.nn.Parameter)
"""Fakes and, where they are on the meta device, plain tensors."""
_known: dict[_Key, tuple[bool, tuple[_Layout | None, ...]] | None] = {}
"""Whether the result is a tuple, and how its tensors lie; None where the mode is to run the op."""


class _Unknown(Exception):
    """Raised of arguments for which nothing is known."""


def run_or_recall(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what ``func(*args, **kwargs)`` returns in the present fake mode (NOTE [Which results are known again])."""
    kind = _kind_of(func)
    if kind is None or not args or torch.is_inference_mode_enabled():
        return func(*args, **kwargs)
    with DisableTorchFunction():
        key = _key_of(func, kind, args, kwargs)
    if key is None:
        return func(*args, **kwargs)
    if key in _known:
        found = _known[key]
        if found is None:
            return func(*args, **kwargs)
        return args[0] if kind == WRITTEN else _made(kind, found, args[0])
    output = func(*args, **kwargs)
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    with DisableTorchFunction():
        _known[key] = _described(kind, output, args)
    return output


@cache
def _kind_of(func: Any) -> str | None:
    """Return what kind of result the schema of ``func`` promises; None if it is none of these."""
    if not isinstance(func, OpOverload) or func.namespace != "aten" or _BY_VALUE & set(func.tags):
        return None
    schema = schema_of(func)
    aliases = [argument.alias_info for argument in schema.arguments]
    results = [result.alias_info for result in schema.returns]
    if not results or any(str(result.type) not in ("Tensor", "Optional[Tensor]") for result in schema.returns):
        return None
    if not any(aliases) and not any(results):
        return NEW
    if len(results) != 1 or results[0] is None or aliases[0] is None or any(aliases[1:]):
        return None
    if aliases[0].is_write:
        return WRITTEN
    return VIEW if func.is_view else None


def _key_of(func: Any, kind: str, args: Sequence[Any], kwargs: dict[str, Any]) -> _Key | None:
    """Return what the result depends on; None if that cannot be told."""
    first = args[0]
    if type(first) not in _TENSORS and type(first) is not list:
        return None
    parts: list[Any] = [func, torch.get_default_dtype()]
    modes: set[Any] = set()
    try:
        _note_all(args, parts, modes)
        for name, value in kwargs.items():
            parts.append(name)
            _note_all((value,), parts, modes)
    except _Unknown:
        return None
    if len(modes) != 1 or getattr(next(iter(modes)), "shape_env", None) is not None:
        return None
    if kind == VIEW:
        parts.append(first.untyped_storage().nbytes())
    return tuple(parts)


def _note_all(values: Sequence[Any], parts: list[Any], modes: set[Any]) -> None:
    for value in values:
        kind = type(value)
        if kind in _TENSORS:
            fake = kind is FakeTensor
            plain = value.constant is None if fake else value.is_meta
            if not plain or value.layout is not torch.strided or value.is_neg() or value.is_conj():
                raise _Unknown
            modes.add(value.fake_mode if fake else None)
            parts += (
                value.shape,
                value.stride(),
                value.dtype,
                value.fake_device if fake else _META,
                value.storage_offset(),
                value.requires_grad,
            )
        elif kind in _PLAIN:
            parts += (kind, value)
        elif kind is list or kind is tuple:
            parts += (kind, len(value))
            _note_all(value, parts, modes)
        else:
            raise _Unknown


def _described(kind: str, output: Any, args: Sequence[Any]) -> tuple[bool, tuple[_Layout | None, ...]] | None:
    """Return how a result lies that was made now; None if it is not of its kind."""
    if kind == WRITTEN:
        return (False, ()) if output is args[0] else None
    several = type(output) is tuple
    outputs = output if several else (output,)
    if not all(each is None or _is_plain(each) for each in outputs):
        return None
    places = [storage_key(each) for each in outputs if each is not None]
    if kind == VIEW:
        own = output is not args[0] and places == [storage_key(args[0])]
    else:
        given = {storage_key(each) for each in _tensors_in(args)}
        own = len(set(places)) == len(places) and given.isdisjoint(places) and all(map(_fills_storage, outputs))
    return (several, tuple(None if each is None else _layout_of(each) for each in outputs)) if own else None


def _tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    flat = [each for value in values for each in (value if isinstance(value, list | tuple) else (value,))]
    return [each for each in flat if isinstance(each, torch.Tensor)]


def _is_plain(tensor: Any) -> bool:
    """True of a fake or a meta tensor that is no more than its layout says."""
    if type(tensor) is FakeTensor:
        plain = tensor.constant is None
    else:
        plain = type(tensor) in _TENSORS and tensor.is_meta
    if not plain or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_neg() or tensor.is_conj() or tensor.requires_grad or tensor.is_inference())


def _fills_storage(tensor: torch.Tensor | None) -> bool:
    if tensor is None:
        return True
    last = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = last * tensor.itemsize if tensor.numel() else 0
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == nbytes


def _layout_of(tensor: Any) -> _Layout:
    device = tensor.fake_device if type(tensor) is FakeTensor else _META
    return tensor.shape, tensor.stride(), tensor.dtype, device, tensor.storage_offset()


def _made(kind: str, found: tuple[bool, tuple[_Layout | None, ...]], first: Any) -> Any:
    """Return a result that lies as ``found`` says. ``first``: the first argument, or a list of tensors."""
    several, layouts = found
    mode = getattr(first[0] if isinstance(first, list) else first, "fake_mode", None)
    made: list[Any] = []
    with DisableTorchFunction(), DisableTorchDispatch():
        for layout in layouts:
            if layout is None:
                made.append(None)
                continue
            size, stride, dtype, device, offset = layout
            if kind == VIEW:
                element = torch.empty(0, dtype=dtype, device=_META)
                element.set_(first.untyped_storage(), offset, size, stride)
            else:
                element = torch.empty_strided(size, stride, dtype=dtype, device=_META)
            made.append(element if mode is None else FakeTensor(mode, element, device))
    return tuple(made) if several else made[0]
