"""Which way a call takes through a model that looks at values: noted from one real forward, taken again on fakes.

In: a model and a call's real inputs. Out: a :class:`Way`, what followed from values in the order in which it did: numbers
and conditions read from tensors, and the shapes of what is chosen by a mask, each with the place in the code that looked. A
forward on fakes that is answered alike takes the same branches, runs its loops as often and makes tensors of the same
sizes. It may look less: not for padding while it is traced, nor to make what an earlier forward has made. The real forward
runs without grad, and what it writes is put back. Where there are no values, or the real forward fails, a way is a guess:
every number reads as 1, and every condition has one answer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fxmem.capture.graph import Inputs
from fxmem.capture.value_guards import seeing_values
from fxmem.capture.written_state import UNSAID
from fxmem.fake.fake_tensors import BranchReads, attributes_restored
from fxmem.fake.modes import FROM_VALUES
from fxmem.fake.python_state import tensors_restored
from fxmem.op_facts.kinds import ByIndices, MissingFake, ReadsScalar
from fxmem.op_facts.lookup import by_op
from fxmem.runtime.autocast import Autocast, casts_kept
from fxmem.torch_patches import quiet, tracing_answered_by
from fxmem.torch_private import (
    DisableTorchFunction,
    FakeTensor,
    TorchDispatchMode,
    leaves_of,
    schema_of,
    storage_key,
    tree_map_only,
)
from fxmem.user_frames import modules_called, place_of_user

MOST_NOTED = 100_000
"""Looks at values in one forward; what has more is not followed."""
MOST_GIVEN = 16
"""Calls of one submodule whose integers are kept."""
_COPIED = (torch.Tensor.numpy, torch.Tensor.__array__)
"""Functions that hand out values without an op."""
(_READ_OF_ONE,) = (op for op, fact in by_op(ReadsScalar).items() if fact.what == "op" and fact.stand_in)
"""By which fakes read each element of what a list is made of."""
_BY_INDICES = by_op(ByIndices)
_SIZED = frozenset(op for op, fact in by_op(MissingFake).items() if fact.bounds)
"""Ops whose results have sizes that follow from values, which their fakes bound: the table of the CTC loss."""
_READS = frozenset(function for function, fact in by_op(ReadsScalar).items() if fact.what != "op")


class OtherWayError(Exception):
    """A forward on fakes looks at other values than were noted."""


@dataclass(frozen=True, slots=True)
class _Blank:
    """A tensor of a shape that followed from values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class _Look:
    """One look at values: ``what`` looked, at ``place`` in the user's code, and returned ``made``; ``inside``: the ids of
    modules that ran."""

    what: Any
    place: Any
    made: Any
    inside: frozenset[int]


@dataclass(frozen=True, slots=True)
class Way:
    """What follows from values in a forward, seen or guessed."""

    looks: tuple[_Look, ...] | None = None
    """None: a guess."""
    answer: bool = False
    """What each condition is guessed to be."""
    given: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    """By the path of a submodule, the leaves of its first calls: tensors of integers and flags, None for others."""

    def given_to(self, path: str, number: int) -> tuple[Any, ...]:
        """Return what is known of the arguments of the call of this number; nothing of many, and where it is a guess."""
        calls = self.given.get(path, [])
        return calls[number] if number < len(calls) else ()

    @contextmanager
    def taken(
        self,
        leaves: Sequence[Any],
        fakes: Sequence[Any],
        without: Sequence[torch.nn.Module] = (),
        masks: Masks | None = None,
    ) -> Iterator[None]:
        """Let a forward on ``fakes`` of a call's ``leaves`` take this way. ``without``: modules that do not run; ``masks``:
        those of the step that the forward is a part of. Errors: ``OtherWayError`` if it looks where nothing did."""
        if self.looks is None:
            with seeing_values(leaves, fakes), BranchReads(self.answer):
                yield
            return
        absent = {id(module) for module in without}
        answers = _Answers([look for look in self.looks if absent.isdisjoint(look.inside)], masks or Masks())
        with tracing_answered_by(lambda _: False), answers, _CopiesAnswered(answers):
            yield


GUESSES = Way(), Way(answer=True)


def ways_of(model: torch.nn.Module, inputs: Inputs, autocast: Autocast | None) -> tuple[Way, ...]:
    """Return the way that a call of ``model`` takes, before what else it may be guessed to be."""
    seen = _seen(model, inputs, autocast)
    return GUESSES if seen is None else (seen, *GUESSES)


def _seen(model: torch.nn.Module, inputs: Inputs, autocast: Autocast | None) -> Way | None:
    """Run the real forward; None where there are no values, or it fails as it would in training."""
    state = [*model.parameters(), *model.buffers(), *inputs.tensors]
    if any(t.is_meta or isinstance(t, FakeTensor) or t.layout is not torch.strided for t in state):
        return None
    noted, given = _Noted(state), dict[str, list[tuple[Any, ...]]]()
    args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, inputs.call())
    with ExitStack() as stack:
        for scope in (quiet(), tensors_restored(model), attributes_restored(model), torch.no_grad()):
            stack.enter_context(scope)
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                hook = module.register_forward_pre_hook(_noting(given, path), with_kwargs=True)
                stack.callback(hook.remove)
        stack.callback(noted.put_back)
        stack.enter_context(autocast.enter() if autocast else nullcontext())
        stack.enter_context(casts_kept(False))
        stack.enter_context(noted)
        stack.enter_context(_CopiesNoted(noted))
        stack.enter_context(suppress(Exception))
        model(*args, **kwargs)
        return Way(tuple(noted.looks), given=given) if len(noted.looks) < MOST_NOTED else None
    return None


def _noting(given: dict[str, list[tuple[Any, ...]]], path: str) -> Any:
    def note(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        calls = given.setdefault(path, [])
        if len(calls) < MOST_GIVEN:
            leaves = Inputs.of(args, kwargs, module).leaves
            calls.append(tuple(leaf.detach().clone() if is_of_integers(leaf) else None for leaf in leaves))

    return note


def is_of_integers(leaf: object) -> TypeGuard[torch.Tensor]:
    """True of tensors of integers and flags."""
    return isinstance(leaf, torch.Tensor) and not (leaf.is_floating_point() or leaf.is_complex())


# -- noting ----------------------------------------------------------------------------------------------------------------


class _Noted(TorchDispatchMode):
    """Notes looks at values, and keeps what is written of ``state``."""

    def __init__(self, state: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.looks: list[_Look] = []
        self._state = {storage_key(tensor): tensor.untyped_storage() for tensor in state}
        self._written: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if schema_of(func).is_mutable or func in UNSAID:
            self._keep(leaves_of((args, kwargs)))
        made = func(*args, **kwargs)
        if _writes_by_mask(func, args):
            self.note(func, tuple(int(mask.count_nonzero()) for mask in _masks(args)))
        elif _follows_from_values(func, args):
            self.note(func, tree_map_only(torch.Tensor, _blank, made))
        return made

    def note(self, what: Any, made: Any) -> None:
        if len(self.looks) < MOST_NOTED:
            self.looks.append(_Look(what, place_of_user(), made, frozenset(map(id, modules_called()))))

    def _keep(self, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                key = storage_key(leaf)
                if key in self._state and key not in self._written:
                    self._written[key] = self._state[key].clone()

    def put_back(self) -> None:
        """Undo what was written."""
        for key, before in self._written.items():
            self._state[key].copy_(before)


def _masks(args: Any) -> list[torch.Tensor]:
    """Return the masks among the indices of a call that reads or writes by indices."""
    return [i for i in args[1] if isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)]


def _writes_by_mask(func: Any, args: Any) -> bool:
    fact = _BY_INDICES.get(func)
    return fact is not None and fact.writes and bool(_masks(args))


def _reads_by_mask(func: Any, args: Any) -> bool:
    fact = _BY_INDICES.get(func)
    return fact is not None and not fact.writes and bool(_masks(args))


def _follows_from_values(func: Any, args: Any) -> bool:
    if func in _BY_INDICES:  # by numbers it takes as many elements as there are numbers
        return _reads_by_mask(func, args)
    return func in _SIZED or not FROM_VALUES.isdisjoint(func.tags)


def _blank(tensor: torch.Tensor) -> _Blank:
    return _Blank(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class _CopiesNoted(TorchFunctionMode):
    """Notes lists and arrays of values."""

    def __init__(self, noted: _Noted) -> None:
        super().__init__()
        self._noted = noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _COPIED:
            self._noted.note(func, copy.deepcopy(made))
        elif func is torch.Tensor.tolist:
            for value in args[0].flatten().tolist():
                self._noted.note(_READ_OF_ONE, value)
        return made


# -- answering -------------------------------------------------------------------------------------------------------------


class _Answers(TorchDispatchMode):
    """Answers looks at values as was noted."""

    def __init__(self, looks: Sequence[_Look], masks: Masks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left, self._masks = iter(looks), masks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _writes_by_mask(func, args):
            self._masks.counts.update(zip(_masks(args), self.next(func), strict=True))
            return func(*args, **(kwargs or {}))
        if not _follows_from_values(func, args):
            return func(*args, **(kwargs or {}))
        device = next(t.device for t in leaves_of((args, kwargs or {})) if isinstance(t, torch.Tensor))
        return tree_map_only(_Blank, lambda blank: blank.made(device), self.next(func))

    def next(self, what: Any) -> Any:
        """Return what ``what`` returned there. Errors: ``OtherWayError`` if no look that is left was from there."""
        place = place_of_user()
        for look in self._left:
            if look.what is what and look.place == place:
                return look.made
        where = "" if place is None else f" ({place[0].co_qualname}, {place[0].co_filename})"
        raise OtherWayError(f"{what} looks at values where nothing did{where}")


class Masks(TorchDispatchMode):
    """Masks by which a forward on fakes wrote, and how many of each are true: a backward takes as many of a gradient."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _reads_by_mask(func, args) and any(mask in self.counts for mask in _masks(args)):
            indices = [index for given in args[1] for index in self._chosen(given)]
            return func(args[0], indices)
        return func(*args, **(kwargs or {}))

    def _chosen(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Return indices of as many elements as ``index``, if it is a known mask, chooses."""
        if index is None or index not in self.counts:
            return [index]
        return [index.new_empty(self.counts[index], dtype=torch.int64) for _ in range(index.dim())]


class _CopiesAnswered(TorchFunctionMode):
    """Answers what hands out lists and arrays; lets no stand-in answer what reads a number."""

    def __init__(self, answers: _Answers) -> None:
        super().__init__()
        self._answers = answers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _COPIED:
            return copy.deepcopy(self._answers.next(func))
        if func is torch.Tensor.tolist and not isinstance(args[0], FakeTensor):  # which no op reads
            for _ in range(args[0].numel()):
                self._answers.next(_READ_OF_ONE)
        if func in _READS and isinstance(args[0], FakeTensor):
            with DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
