"""Ops on fakes that have run before on tensors that lie like these: their results are made anew without running them.

In: an op and its arguments, on top of a fake mode or on meta tensors. Out: what it returns. The mode has a memory of its
own, which knows more cases than fxmem has; here an op is known again in a fifth of the time. A model's layers are alike,
and its step is run several times, so that nearly all ops are known.

NOTE [Which results are known again]

1. Three kinds, told by the schema: a *new* tensor that lies on memory of its own; a *view* of the first argument; an
   argument *written* in place, which lies as before. The first result is looked at: what lies on the first argument's
   memory is a view, whatever the schema says (``_unsafe_view``); where it is not of its kind, or sparse, conjugated, part
   of an autograd graph or a constant, the mode runs the op each time.
2. What a result depends on is in the key: the op, all that is no tensor with its type, of each tensor where and how it
   lies, its dtype and device, and the default dtype.
3. Never known are ops whose results depend on values, that are not torch's own, that have symbolic sizes, or that run in
   inference mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fxmem.torch_private import (
    DisableTorchDispatch,
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    active_fake_mode,
    schema_of,
    storage_key,
    told_once,
)

MOST_KNOWN = 100_000
"""Results that are kept; a large model's step has some thousands."""

NEW, VIEW, WRITTEN = "new", "view", "written"
_Key = tuple[Any, ...]
_Asked = tuple[_Key, FakeTensorMode | None]
_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, int]
_PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, complex}
)
_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_META = torch.device("meta")
_TENSORS = (FakeTensor, torch.Tensor, torch.nn.Parameter)
"""Fakes and, where they are on the meta device, plain tensors."""


class _Known(NamedTuple):
    """What an op returned."""

    kind: str
    container: type[Any] | None
    """That of several results."""
    layouts: tuple[_Layout | None, ...]


_known: dict[_Key, _Known | None] = {}
"""None where the mode is to run the op."""


@dataclass(frozen=True, slots=True, eq=False)
class _Op:
    """An op, with what its schema promises. Keys hold it in place of the op, whose hash is computed in Python."""

    func: Any
    kind: str | None
    """None if it is none of the kinds."""
    written: int | str = 0
    """The place or the name of the argument that is written."""


class _Unknown(Exception):
    """Raised of arguments for which nothing is known."""


UNKNOWN = object()
"""In place of a result that is not known."""


def run_or_recall(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what ``func(*args, **kwargs)`` returns in the present fake mode (NOTE [Which results are known again])."""
    op, asked = _asked(func, args, kwargs)
    if asked is None:
        return func(*args, **kwargs)
    key, _ = asked
    if key in _known:
        found = _recalled(op, asked, args, kwargs)
        return func(*args, **kwargs) if found is UNKNOWN else found
    output = func(*args, **kwargs)
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    with DisableTorchFunction():
        unmoved = op.kind != WRITTEN or _key_of(op, args, kwargs) == asked
        _known[key] = _described(op, output, args, kwargs) if unmoved else None
    return output


def recall(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what :func:`run_or_recall` does if that is known, else ``UNKNOWN``."""
    op, asked = _asked(func, args, kwargs)
    return UNKNOWN if asked is None else _recalled(op, asked, args, kwargs)


def _asked(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[_Op, _Asked | None]:
    """Return the op and what :func:`_key_of` returns."""
    op = _op_of(func)
    if op.kind is None or not args or torch.is_inference_mode_enabled():
        return op, None
    with DisableTorchFunction():
        return op, _key_of(op, args, kwargs)


def _recalled(op: _Op, asked: _Asked, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    key, mode = asked
    found = _known.get(key)
    if found is None:
        return UNKNOWN
    return _argument(op.written, args, kwargs) if found.kind == WRITTEN else _made(found, args[0], mode)


def _argument(place: int | str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return kwargs.get(place) if isinstance(place, str) else args[place]


@told_once
def _op_of(func: Any) -> _Op:
    """Return what kind of result the schema of ``func`` promises."""
    if not isinstance(func, OpOverload) or func.namespace != "aten" or _BY_VALUE & set(func.tags):
        return _Op(func, None)
    schema = schema_of(func)
    aliases = [argument.alias_info for argument in schema.arguments]
    results = [result.alias_info for result in schema.returns]
    types = [str(result.type) for result in schema.returns]
    if types == ["List[Tensor]"] and func.is_view and not any(aliases[1:]):
        return _Op(func, VIEW)
    if not types or any(each not in ("Tensor", "Optional[Tensor]") for each in types):
        return _Op(func, None)
    if not any(aliases) and not any(results):
        return _Op(func, NEW)
    places = [place for place, alias in enumerate(aliases) if alias is not None]
    if len(results) != 1 or results[0] is None or len(places) != 1:
        return _Op(func, None)
    (place,) = places
    if aliases[place].is_write:
        argument = schema.arguments[place]
        return _Op(func, WRITTEN, argument.name if argument.kwarg_only else place)
    return _Op(func, VIEW if func.is_view and place == 0 else None)


def _key_of(op: _Op, args: Sequence[Any], kwargs: dict[str, Any]) -> _Asked | None:
    """Return what the result depends on, and the mode that it is made in, if any; None if that cannot be told."""
    parts: list[Any] = [op, torch.get_default_dtype()]
    modes: set[Any] = set()
    try:
        _note_all(args, parts, modes)
        for name, value in kwargs.items():
            parts.append(name)
            _note_all((value,), parts, modes)
    except _Unknown:
        return None
    (mode, *others) = modes or (active_fake_mode(),)
    if others or getattr(mode, "shape_env", None) is not None:
        return None
    parts.append(mode is None)
    if op.kind == VIEW:
        if type(args[0]) not in _TENSORS:  # the conjugate of a number
            return None
        parts.append(args[0].untyped_storage().nbytes())
    return tuple(parts), mode


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


def _described(op: _Op, output: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Known | None:
    """Return how a result lies that was made now; None if it is not of its kind."""
    if op.kind == WRITTEN:
        return _Known(WRITTEN, None, ()) if output is _argument(op.written, args, kwargs) else None
    container = type(output) if type(output) in (tuple, list) else None
    outputs = output if container else (output,)
    if not all(each is None or _is_plain(each) for each in outputs):
        return None
    places, first = [storage_key(each) for each in outputs if each is not None], args[0]
    on_first = isinstance(first, torch.Tensor) and set(places) == {storage_key(first)}
    if op.kind == VIEW or on_first:
        kind, own = VIEW, on_first and not any(each is first for each in outputs)
    else:
        given = {storage_key(each) for each in _tensors_in((*args, *kwargs.values()))}
        alone = len(set(places)) == len(places) and given.isdisjoint(places)
        kind, own = NEW, alone and all(map(_fills_storage, outputs))
    layouts = tuple(None if each is None else _layout_of(each) for each in outputs)
    return _Known(kind, container, layouts) if own else None


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


def _made(found: _Known, first: Any, mode: FakeTensorMode | None) -> Any:
    """Return a result that lies as ``found`` says. ``first``: the first argument."""
    made: list[Any] = []
    with DisableTorchFunction(), DisableTorchDispatch():
        for layout in found.layouts:
            if layout is None:
                made.append(None)
                continue
            size, stride, dtype, device, offset = layout
            if found.kind == VIEW:
                element = torch.empty(0, dtype=dtype, device=_META)
                element.set_(first.untyped_storage(), offset, size, stride)
            else:
                element = torch.empty_strided(size, stride, dtype=dtype, device=_META)
            made.append(element if mode is None else FakeTensor(mode, element, device))
    return made[0] if found.container is None else found.container(made)
