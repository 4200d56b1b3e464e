"""What a model reads of its inputs' values: answered while it is captured, and written down as a condition of its graph.

A model may look at values to choose a way: transformers leaves out an attention mask that is all ones, and takes another
kernel. A graph has one way, so it holds for those calls only that take it; likewise where a tensor begins on its storage,
if a graph has that as a constant. In: a call's real leaves and the fakes that stand for them. Out: :class:`ValueGuard`,
what was read and how to read it from another call's leaves. Values are known of integer and bool inputs, of constants
the model makes, and of whatever is computed from these alone; not of parameters or floats, which change in every step.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fxmem.fake.stand_in import original_of
from fxmem.op_facts.kinds import MakesConstant, ReadsScalar
from fxmem.op_facts.lookup import by_op, may_draw
from fxmem.torch_patches import tracing_answered_by
from fxmem.torch_private import (
    DisableTorchFunction,
    FakeTensor,
    TorchDispatchMode,
    leaves_of,
    storage_key,
    tree_map,
    without_modes,
)

MOST_ELEMENTS = 1 << 22
"""Of a tensor whose values are followed."""


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A tensor computed from a call's leaves: the ``place``-th tensor of ``func(*args, **kwargs)``."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    """With ``Value``, ``Leaf`` and ``Size`` in the places of tensors and symbolic sizes."""
    kwargs: dict[str, Any]
    place: int


@dataclass(frozen=True, slots=True)
class Leaf:
    """An input leaf itself."""

    index: int


@dataclass(frozen=True, slots=True)
class Size:
    """A number that follows from sizes of leaves, such as ``4 * leaves[0].shape[1]``."""

    expression: Any
    """Of sympy."""
    dims: tuple[tuple[Any, int, int], ...]
    """(symbol, leaf, dimension) of the sizes that it names."""

    def of(self, leaves: Sequence[Any]) -> int:
        """Return the number as a call with ``leaves`` has it."""
        return int(self.expression.subs({symbol: leaves[leaf].shape[dim] for symbol, leaf, dim in self.dims}))


@dataclass(frozen=True, slots=True, eq=False)
class ValueGuard:
    """One look at values: ``kind`` (such as ``Tensor.__bool__``) of ``value`` was ``seen``."""

    kind: Callable[..., Any]
    value: Value | Leaf
    seen: Any


def all_hold(reads: Sequence[ValueGuard], leaves: Sequence[Any]) -> bool:
    """True if a call with ``leaves`` sees what ``reads`` saw."""
    if not reads:
        return True
    values = _Values(leaves)
    try:
        with torch.no_grad():
            return all(read.kind(values.of(read.value)) == read.seen for read in reads)
    except RuntimeError:  # leaves of sizes that these reads are not for
        return False


class _Values:
    """What was read, as a call with ``leaves`` has it. (A class: functions that call each other would keep the leaves.)"""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._leaves = leaves
        self._known: dict[int, torch.Tensor] = {}

    def of(self, value: Value | Leaf) -> torch.Tensor:
        if isinstance(value, Leaf):
            tensor: torch.Tensor = self._leaves[value.index]
            return tensor
        if id(value) not in self._known:
            args, kwargs = tree_map(self._given, (value.args, value.kwargs))
            self._known[id(value)] = _tensors(value.func(*args, **kwargs))[value.place]
        return self._known[id(value)]

    def _given(self, leaf: Any) -> Any:
        if isinstance(leaf, Value | Leaf):
            return self.of(leaf)
        return leaf.of(self._leaves) if isinstance(leaf, Size) else leaf


def places_of(leaves: Sequence[Any]) -> Iterator[ValueGuard]:
    """Yield looks at where each of ``leaves`` begins on its storage."""
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            yield ValueGuard(torch.Tensor.storage_offset, Leaf(i), int(leaf.storage_offset()))


_BRANCHES = frozenset(function for function, fact in by_op(ReadsScalar).items() if fact.what == "branch")
_NUMBERS = frozenset(function for function, fact in by_op(ReadsScalar).items() if fact.what == "number")
_ASSIGNMENTS = frozenset({"__setitem__", *(n for n in dir(operator) if n.startswith("__i"))}) - {
    "__index__",
    "__inv__",
    "__invert__",
}
_CONSTANTS = by_op(MakesConstant)


class KnownValues(TorchFunctionMode):
    """Follows the values of ``leaves`` through the body and answers reads of them; ``reads`` has what was read.

    ``numbers``: answer ``item()`` and the like too. Without, only branches are decided, and a number that is read stays
    a value of the graph where the front end can do that.
    """

    def __init__(self, leaves: Sequence[Any], *, numbers: bool = True) -> None:
        super().__init__()
        self.reads: list[ValueGuard] = []
        self._leaves = [original_of(leaf) for leaf in leaves]
        self._kinds = _BRANCHES | _NUMBERS if numbers else _BRANCHES
        self._known = WeakTensorKeyDictionary()
        """By fake, (how its values follow from the leaves, a real tensor that has them)."""
        self._sizes: dict[str, tuple[int, int]] = {}
        """By symbol, the (leaf, dimension) that has this size."""

    def stand_in(self, fakes: Sequence[Any]) -> None:
        """Say which fakes stand for the leaves."""
        for i, (leaf, fake) in enumerate(zip(self._leaves, fakes, strict=True)):
            if not isinstance(leaf, torch.Tensor) or not isinstance(fake, torch.Tensor):
                continue
            self._sizes.update((str(n), (i, d)) for d, n in enumerate(fake.shape) if isinstance(n, torch.SymInt))
            has_values = not isinstance(leaf, FakeTensor) and not leaf.is_meta and leaf.layout == torch.strided
            if has_values and not leaf.is_floating_point() and not leaf.is_complex():
                self._known[fake] = (Leaf(i), leaf)

    @property
    def followed_any(self) -> bool:
        """True if the values of any tensor are known."""
        return len(self._known) > 0

    def knows(self, tensor: object) -> bool:
        """True if the values of ``tensor`` are known."""
        return isinstance(tensor, torch.Tensor) and tensor in self._known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._kinds and self.knows(args[0]):
            value, real = self._known[args[0]]
            seen = _without_modes(func, (real,), {})
            if _varies(value):
                self.reads.append(ValueGuard(func, value, seen))
            return seen
        if not _writes(func, kwargs):
            output = func(*args, **kwargs)
            if isinstance(output, torch.Tensor | tuple | list):
                self._note(output, self._computed(func, args, kwargs, fresh=_tensors(output)))
            return output
        out, target = kwargs.get("out"), args[0] if args else None
        computed = None if out is not None else self._computed(_written, (func, *args), kwargs, fresh=[target])
        output = func(*args, **kwargs)
        self._forget(target, out)
        self._note(target, computed)
        return output

    def _computed(
        self, func: Any, args: Any, kwargs: Any, fresh: Sequence[Any]
    ) -> list[tuple[Value | Leaf, torch.Tensor]] | None:
        """Return how the values of ``fresh``, which the call makes, follow from its arguments'; None if they do not."""
        tensors = _tensors((args, kwargs))
        if not (tensors or func in _CONSTANTS) or not all(map(self.knows, tensors)):
            return None
        if any(not isinstance(t, torch.Tensor) or _known_size(t.numel()) > MOST_ELEMENTS for t in fresh):
            return None
        try:
            value_args, value_kwargs = tree_map(self._value, (args, kwargs))
            results = _tensors(_without_modes(func, *tree_map(self._real, (args, kwargs))))
        except Exception:  # a random op, a size that is no input's: what it computes stays unknown
            return None
        return [(Value(func, value_args, value_kwargs, place), real) for place, real in enumerate(results)]

    def _note(self, output: Any, computed: list[tuple[Value | Leaf, torch.Tensor]] | None) -> None:
        if computed is not None:
            self._known.update(zip(_tensors(output), computed, strict=True))

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._known[leaf][0]
        return self._size(leaf) if isinstance(leaf, torch.SymInt) else leaf

    def _size(self, size: torch.SymInt) -> Size:
        """Errors: ``KeyError`` if it is no matter of the leaves' sizes alone."""
        expression = size.node.expr
        symbols = sorted(expression.free_symbols, key=str)
        return Size(expression, tuple((symbol, *self._sizes[str(symbol)]) for symbol in symbols))

    def _real(self, leaf: Any) -> Any:
        value = self._value(leaf)
        if isinstance(value, Size):
            return value.of(self._leaves)
        if isinstance(value, torch.device) and value.type == "cuda" and not torch.cuda.is_available():
            return torch.device("cpu")  # fakes lie on a GPU that is not here
        return self._known[leaf][1] if isinstance(leaf, torch.Tensor) else leaf

    def _forget(self, *written: object) -> None:
        storages = {storage_key(t) for t in written if isinstance(t, torch.Tensor)}
        for fake in [fake for fake in self._known if storage_key(fake) in storages]:
            del self._known[fake]


@contextmanager
def answered(values: KnownValues) -> Iterator[None]:
    """Run the body with reads of known values answered.

    transformers asks whether a tensor is being traced before it looks at its values; here it hears that it is where they
    are not known.
    """
    with tracing_answered_by(lambda tensor: tensor is not None and not values.knows(tensor)), values:
        yield


@contextmanager
def seeing_values(leaves: Sequence[Any], fakes: Sequence[Any]) -> Iterator[None]:
    """Run the body, a call of a model on ``fakes``, as a call on ``leaves`` runs where the model looks at values."""
    values = KnownValues(leaves)
    values.stand_in(fakes)
    with answered(values):
        yield


def _known_size(size: int | torch.SymInt) -> float:
    """Return a size as it is in this call, without end where nobody can tell; a condition on it would tie the graph."""
    known = size if isinstance(size, int) else size.node.hint
    return math.inf if known is None else int(known)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor)]


def _varies(value: Value | Leaf) -> bool:
    """True if another call can have another value: it is computed from a leaf, or has the size of one."""
    if isinstance(value, Leaf):
        return True
    parts = leaves_of((value.args, value.kwargs))
    return any(isinstance(p, Size) or (isinstance(p, Value | Leaf) and _varies(p)) for p in parts)


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _ASSIGNMENTS
    return in_place or kwargs.get("out") is not None


def _written(func: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return what ``func``, which writes to it, makes of ``tensor``."""
    after = tensor.clone()
    func(after, *args, **kwargs)
    return after


def _without_modes(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return ``func(*args, **kwargs)`` of real tensors, unseen by whoever traces. Errors: if it draws random numbers."""
    with without_modes(), DisableTorchFunction(), torch.no_grad(), _NothingRandom():  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


class _NothingRandom(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if may_draw(func):
            raise RuntimeError(f"{func} may be random")
        return func(*args, **(kwargs or {}))
