"""A loss that is computed outside of the model, seen once while it is: a function for steps on fakes.

In: the calls of torch's functions between a training call and the backward that reaches its outputs. Out: a
:class:`SeenLoss`, which makes those of them again that lead from the outputs to the loss, under the same grad mode and
autocast, and holds what the loop still referred to by a name as its backward began. What it reads beside the outputs are
its targets (:mod:`fxmem.profiling.targets`).
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fxmem.capture.side_effects import NONE, SideEffects
from fxmem.errors import InputError, first_lines
from fxmem.profiling.targets import Beside, Like, changed_sizes, resized
from fxmem.torch_private import OF_FAKES, TreeSpec, tree_flatten, tree_leaves, tree_unflatten

MOST_CALLS = 5_000
"""Between a call of the model and its backward; what is longer is not followed."""
TAKES_SIZES = frozenset({"expand", "narrow", "new_empty", "new_full", "new_ones", "new_zeros", "repeat", "reshape",
    "split", "tile", "unflatten", "view"})  # fmt: skip
"""Functions whose integers are sizes, those of a batch perhaps."""


class LossNotSeenError(Exception):
    """The loss cannot be followed; the message says why."""


class OtherSizeError(InputError):
    """A loss that was seen at one size does not run at another."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor among the arguments of a call, by number."""

    number: int


@dataclass(frozen=True, slots=True)
class Given:
    """A value that the model returned."""

    number: int
    call: int
    """Of the model, in the step."""
    place: int
    """Among the leaves of its output; from the end, of what it left in attributes."""
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SeenCall:
    """One call of a torch function."""

    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    """Of its positional and keyword arguments: :class:`Value` for tensors."""
    spec: TreeSpec
    makes: tuple[tuple[int, int, Like], ...]
    """Places among the leaves of its result, the numbers of the values there, and what they were like."""
    grad: bool
    autocast: bool

    @property
    def is_sum(self) -> bool:
        """True of the sum of one tensor over all of it."""
        return self.function.__name__ == "sum" and len(self.leaves) == 1

    @property
    def reads(self) -> set[int]:
        """Numbers of the values among its arguments."""
        return {leaf.number for leaf in self.leaves if isinstance(leaf, Value)}

    def run(self, env: dict[int, Any], changes: dict[int, int]) -> None:
        """Make the call with the values of ``env``, and put there what it makes. ``changes``: sizes that are others now."""
        values = [env[leaf.number] if isinstance(leaf, Value) else leaf for leaf in self.leaves]
        if changes and self.function.__name__ in TAKES_SIZES:
            values = [resized(leaf, changes) if isinstance(leaf, int) else leaf for leaf in values]
        args, kwargs = tree_unflatten(values, self.spec)
        device = next(iter(env.values())).device.type
        with torch.set_grad_enabled(self.grad), _autocast(device, self.autocast):
            try:
                made = tree_leaves(self.function(*args, **kwargs))
            except OF_FAKES:  # sizes that values decide are those that were seen
                given = [value for value in values if isinstance(value, torch.Tensor)]
                made = [_OfSeenSize.apply(like, *given) for _, _, like in self.makes]  # type: ignore[no-untyped-call]
                env.update((number, made[i]) for i, (_, number, _) in enumerate(self.makes))
                return
        for place, number, _ in self.makes:
            env[number] = made[place]


class _OfSeenSize(torch.autograd.Function):
    """Stands for a call whose result's size depends on values, such as ``output[mask]``."""

    @staticmethod
    def forward(ctx: Any, like: Like, *given: torch.Tensor) -> torch.Tensor:
        ctx.given = [(t.size(), t.dtype, t.device) for t in given]
        made = like.blank(given[0].device)
        masks = [t for t in given if t.dtype in (torch.bool, torch.uint8)]  # kept as indices, one for each dimension
        ctx.kept = [made.new_empty(like.size[:1], dtype=torch.int64) for mask in masks for _ in range(mask.dim())]
        if not made.is_floating_point():
            ctx.mark_non_differentiable(made)
        return made

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        made = (
            torch.zeros(size, dtype=dtype, device=device) if wanted else None
            for (size, dtype, device), wanted in zip(ctx.given, ctx.needs_input_grad[1:], strict=True)
        )
        return None, *made


@contextmanager
def _autocast(device_type: str, on: bool) -> Iterator[None]:
    if on or not torch.is_autocast_enabled(device_type):
        yield
    else:
        with torch.autocast(device_type, enabled=False):
            yield


@dataclass(frozen=True, slots=True, eq=False)
class SeenLoss:
    """``loss(*outputs, *targets)``: the calls that were seen, made again.

    Errors: ``OtherSizeError`` where outputs or targets of other sizes do not go through them.
    """

    num_outputs: int
    """Of calls of the model that the loss is made of."""
    given: tuple[Given, ...]
    target_values: tuple[int, ...]
    calls: tuple[SeenCall, ...]
    loss: int
    named: frozenset[int]
    """Values that names referred to as the backward began, beside the loss."""
    perhaps_named: frozenset[int]
    """Values that were there; if the graph of the loss does not keep them, names did."""
    is_plain: bool
    """It takes no more than the loss that is assumed where none is known: that of the model, or the sum of its output."""
    effects: SideEffects = NONE
    """What a call leaves in attributes, where the loss may read it."""
    written: tuple[tuple[int, Like], ...] = ()
    """Values that the loop makes to write items into, and what they are like."""

    def __call__(self, *args: Any) -> torch.Tensor:
        try:
            return self._run(args[: self.num_outputs], args[self.num_outputs :])
        except Exception as error:
            raise OtherSizeError(f"the loss was seen at another size: {first_lines(error)}") from error

    def _run(self, outputs: Sequence[Any], targets: Sequence[Any]) -> torch.Tensor:
        leaves = [tree_leaves(output) for output in outputs]
        leaves[-1] += tree_leaves(self.effects.held())
        env: dict[int, Any] = {each.number: leaves[each.call][each.place] for each in self.given}
        changes = changed_sizes((each.size, tuple(env[each.number].shape)) for each in self.given)
        env |= dict(zip(self.target_values, targets, strict=True))
        device = next(value.device for value in env.values())
        for number, like in self.written:
            env[number] = like.resized(changes).blank(device)
        kept, last_reads = {self.loss, *self.named, *self.perhaps_named}, self._last_reads()
        for index, call in enumerate(self.calls):
            call.run(env, changes)
            for number in last_reads.get(index, ()):
                if number not in kept:
                    del env[number]
        loss: torch.Tensor = env.pop(self.loss)
        held = [env.pop(number) for number in self.named if number in env]
        for number in self.perhaps_named & env.keys():
            value = env.pop(number)
            if sys.getrefcount(value) <= _references_if_alone():
                held.append(value)
        loss.fxmem_held = held  # type: ignore[attr-defined]  # they live as long as the loss does
        return loss

    def _last_reads(self) -> dict[int, list[int]]:
        """Return, by index of a call, the values that are made by calls and that no later call reads."""
        last: dict[int, int] = {}
        for index, call in enumerate(self.calls):
            last.update(dict.fromkeys((number for _, number, _ in call.makes), index))
            last.update((number, index) for number in call.reads if number in last)
        found: dict[int, list[int]] = {}
        for number, index in last.items():
            found.setdefault(index, []).append(number)
        return found


class LossRecorder(TorchFunctionMode):
    """Notes calls of torch's functions while it is on; holds no tensor."""

    def __init__(self, parameters: Sequence[torch.Tensor], leaves: Sequence[Any]) -> None:
        """``parameters`` of the model, ``leaves`` of its inputs: they are in the step already."""
        super().__init__()
        self.refused = ""
        """Why the loss cannot be followed."""
        self._values: list[weakref.ref[torch.Tensor]] = []
        self._strange: dict[int, str] = {}
        """Why values are not what calls made, by their numbers."""
        self._with_grad: list[bool] = []
        """Whether they required grad when they were made: nothing but a call changes that."""
        self._numbers: dict[int, int] = {}
        self._given: list[Given] = []
        self._num_outputs = 0
        self._effects = NONE
        self._targets: dict[int, Any] = {}
        self._calls: list[SeenCall] = []
        self._of_model: set[int] = set()
        """Values that come from the outputs or the parameters."""
        for index, parameter in enumerate(parameters):
            number = self._new(parameter)
            self._targets[number] = Beside(index)
            self._of_model.add(number)
        for index, leaf in enumerate(leaves, start=-len(leaves)):
            if isinstance(leaf, torch.Tensor):
                self._targets[self._new(leaf)] = Beside(index)

    def note_output(self, leaves: Sequence[Any], effects: SideEffects = NONE) -> None:
        """Note the leaves of a call's output, and what it left in attributes."""
        left, self._effects = tree_leaves(effects.held()), effects
        for place, leaf in (*enumerate(leaves), *enumerate(left, start=-len(left))):
            if isinstance(leaf, torch.Tensor) and self._number(leaf) is None:
                number = self._new(leaf)
                self._given.append(Given(number, self._num_outputs, place, tuple(leaf.shape)))
                self._of_model.add(number)
        self._num_outputs += 1

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        numbers = {id(leaf): self._number(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        follows = not self.refused and not self._of_model.isdisjoint(numbers.values())
        if follows and _writes_items(function):
            self._known(leaves[0])  # as it is before
        result = function(*args, **(kwargs or {}))
        if follows:
            self._note(function, leaves, spec, result)
        return result

    def _note(self, function: Callable[..., Any], leaves: list[Any], spec: TreeSpec, result: Any) -> None:
        made = [(place, t) for place, t in enumerate(tree_leaves(result)) if isinstance(t, torch.Tensor)]
        if (not made and not _writes_items(function)) or getattr(function, "__name__", "") == "__set__":
            return
        if len(self._calls) == MOST_CALLS:
            self.refused = f"more than {MOST_CALLS} calls lie between the model and its backward"
            return
        if not made:  # what is written into is of the model from now on
            into = self._numbers[id(leaves[0])]
            self._with_grad[into] = leaves[0].requires_grad
            self._of_model.add(into)
        arguments = tuple(Value(self._known(leaf)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        makes = []
        for place, tensor in made:
            number = self._number(tensor)
            if number is None:
                number = self._new(tensor)
            self._with_grad[number] = tensor.requires_grad
            makes.append((place, number, Like(tuple(tensor.shape), tensor.dtype)))
            self._of_model.add(number)
        device = next((t.device.type for _, t in made), "cpu")
        scope = torch.is_grad_enabled(), torch.is_autocast_enabled(device)
        self._calls.append(SeenCall(function, arguments, spec, tuple(makes), *scope))

    def _known(self, tensor: torch.Tensor) -> int:
        """Return the number of an argument; one that nobody made is a target."""
        number = self._number(tensor)
        if number is None:
            number = self._new(tensor)
            self._targets[number] = Like(tuple(tensor.shape), tensor.dtype, tensor.requires_grad and tensor.is_leaf)
            if tensor.grad_fn is not None:
                self._strange[number] = _not_a_call(tensor)
        elif tensor.requires_grad != self._with_grad[number]:
            self._strange[number] = _not_a_call(tensor)
        return number

    def _new(self, tensor: torch.Tensor) -> int:
        number = self._numbers[id(tensor)] = len(self._values)
        self._values.append(weakref.ref(tensor))
        self._with_grad.append(tensor.requires_grad)
        return number

    def _number(self, tensor: torch.Tensor) -> int | None:
        number = self._numbers.get(id(tensor))
        return number if number is not None and self._values[number]() is tensor else None

    def loss_of(self, roots: Sequence[Any]) -> tuple[SeenLoss, tuple[Any, ...]]:
        """Return the loss that a backward starts from, and its targets. Errors: ``LossNotSeenError``."""
        if self.refused:
            raise LossNotSeenError(self.refused)
        if len(roots) != 1 or roots[0].numel() != 1:
            raise LossNotSeenError("its backward does not start from one number")
        loss = self._number(roots[0])
        if loss is None or not self._with_grad[loss]:
            raise LossNotSeenError(_not_a_call(roots[0]))
        needed, calls = {loss}, []
        for call in reversed(self._calls):
            if any(number in needed for _, number, _ in call.makes) or not call.makes:
                needed |= call.reads
                calls.append(call)
        calls.reverse()
        strange = next((self._strange[number] for number in needed if number in self._strange), None)
        if strange is not None:
            raise LossNotSeenError(strange)
        made = {number for call in calls for _, number, _ in call.makes} - {loss}
        alive = {number: sys.getrefcount(ref()) for number in made if (ref := self._values[number])() is not None}
        named = frozenset(number for number, count in alive.items() if count > _references_if_alone())
        given = tuple(each for each in self._given if each.number in needed)
        if any(each.place < 0 and each.call < self._num_outputs - 1 for each in given):
            raise LossNotSeenError("it reads what an earlier call left in an attribute")
        into = {call.leaves[0].number for call in calls if not call.makes}
        beside = {number: target for number, target in self._targets.items() if number in needed}
        written = {number: like for number, like in beside.items() if number in into and isinstance(like, Like)}
        targets = {number: target for number, target in beside.items() if number not in written}
        seen = SeenLoss(
            num_outputs=self._num_outputs,
            given=given,
            target_values=tuple(targets),
            calls=tuple(calls),
            loss=loss,
            named=named,
            perhaps_named=frozenset(alive) - named,
            is_plain=self._is_plain(calls, given, targets),
            effects=self._effects,
            written=tuple(written.items()),
        )
        return seen, tuple(targets.values())

    def _is_plain(self, calls: Sequence[SeenCall], given: Sequence[Given], targets: dict[int, Any]) -> bool:
        """True if all but perhaps the first call, the sum of the one output, are of single numbers."""
        sums = calls[:1] if calls and calls[0].is_sum and len(self._given) == 1 else ()
        sizes = [each.size for each in given if not sums]
        sizes += [like.size for call in calls for _, _, like in call.makes]
        sizes += [target.size for target in targets.values() if isinstance(target, Like)]
        return all(math.prod(size) == 1 for size in sizes) and not any(isinstance(t, Beside) for t in targets.values())


def _writes_items(function: Callable[..., Any]) -> bool:
    return getattr(function, "__name__", "") == "__setitem__"


def _not_a_call(tensor: torch.Tensor) -> str:
    made_by = "nothing" if tensor.grad_fn is None else tensor.grad_fn.name()
    return f"{made_by} made a tensor of shape {tuple(tensor.shape)} outside of torch's functions"


@functools.cache
def _references_if_alone() -> int:
    """Return what ``sys.getrefcount`` says of a tensor that one name, or the graph alone, refers to."""
    tensor = torch.empty(0)
    return sys.getrefcount(weakref.ref(tensor)())
