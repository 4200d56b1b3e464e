"""Numbers and strings that a call is given and its forward makes no use of, as ``training_step(batch, batch_idx)``.

A captured graph holds a call's numbers as constants, so each other value is another kind of call. A number that comes anew
with each step and is not used would cost planning in each. In: a model and its calls. Out: calls in which such numbers are
those of the first call of their kind.

NOTE [How use is noticed]

The model is run on fakes once for each kind of call, with an object in place of each number that raises whatever is asked
of it. Used is what raises, what is still held when the forward is over, and all in a forward that fails or looks at the
values of tensors, whose way through the model the next call may not take. What is told by identity alone, as ``batch_idx is
None``, is the same for all numbers.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NoReturn

import torch

from fxmem.capture.graph import Inputs
from fxmem.capture.guards import NUMBERS, constant
from fxmem.fake.fake_tensors import FakeWorld
from fxmem.fake.modes import FewLooks, TooManyLooks
from fxmem.fake.python_state import tensors_restored
from fxmem.runtime.autocast import Autocast
from fxmem.torch_patches import quiet

MOST_TRIED = 4
"""Numbers that are each looked at alone, where some of a call's are used."""

Kind = Callable[[Inputs, Autocast | None], Any]
"""Tells of a call what a plan depends on."""


class UsedError(Exception):
    """A number is used."""


class Untouchable:
    """Stands for a number."""

    __slots__ = ("__weakref__",)
    num_uses = 0
    """Of all of them: a forward may catch what is raised."""

    def use(self, *_: object) -> NoReturn:
        Untouchable.num_uses += 1
        raise UsedError

    __getattribute__ = use


_OF_OBJECTS = (
    "eq ne lt le gt ge hash bool repr str format index int float add radd sub rsub mul rmul mod rmod truediv len"
)
for _name in (*_OF_OBJECTS.split(), "rtruediv", "floordiv", "rfloordiv", "pow", "rpow", "neg", "abs", "round", "iter"):
    setattr(Untouchable, f"__{_name}__", Untouchable.use)


class UnusedNumbers:
    """Knows, by kind of call, which numbers ``model`` makes no use of."""

    def __init__(self, model: torch.nn.Module, kind_of: Kind) -> None:
        """``kind_of`` is asked of calls without numbers."""
        self._model, self._kind_of = model, kind_of
        self._unused: dict[Any, frozenset[int]] = {}
        """By kind: places of those that are not used."""
        self._first: dict[Any, tuple[Any, ...]] = {}
        """By structure: the numbers of the first call."""

    def settled(self, inputs: Inputs, autocast: Autocast | None) -> Inputs:
        """Return ``inputs`` with the first call's numbers, where they make no difference."""
        values = _numbers_of(inputs)
        places = [place for place, value in enumerate(values) if value is not None]
        if not places:
            return inputs
        first = self._first.setdefault((inputs.spec, tuple(map(type, values))), values)
        if all(constant(values[place]) == constant(first[place]) for place in places):
            return inputs
        kind = self._kind_of(_with(inputs, dict.fromkeys(places)), autocast)
        if kind not in self._unused:
            self._unused[kind] = self._look(inputs, autocast, places)
        return _with(inputs, {place: first[place] for place in self._unused[kind]})

    def _look(self, inputs: Inputs, autocast: Autocast | None, places: list[int]) -> frozenset[int]:
        if self._runs_without(inputs, autocast, places):
            return frozenset(places)
        if len(places) == 1:
            return frozenset()
        return frozenset(place for place in places[:MOST_TRIED] if self._runs_without(inputs, autocast, [place]))

    def _runs_without(self, inputs: Inputs, autocast: Autocast | None, places: list[int]) -> bool:
        """Return whether no number at these places is used (NOTE [How use is noticed])."""
        model, world = self._model, FakeWorld(inputs.leaves)
        marks, num_uses = [Untouchable() for _ in places], Untouchable.num_uses
        left = list(map(weakref.ref, marks))
        given = {place: world.fake_all(leaf) for place, leaf in enumerate(inputs.leaves)}
        args, kwargs = _with(inputs, {**given, **dict(zip(places, marks, strict=True))}).call()
        marks.clear()
        region = nullcontext() if autocast is None else autocast.enter()
        with quiet(), tensors_restored(model), world.state_of(model), world.active(model), region, FewLooks():
            try:
                output = model(*args, **kwargs)
            except (Exception, TooManyLooks):
                return False
            del args, kwargs
            if any(mark() is not None for mark in left):
                gc.collect()
            is_held = any(mark() is not None for mark in left)  # perhaps by the output
            del output
            return not is_held and Untouchable.num_uses == num_uses


def _numbers_of(inputs: Inputs) -> tuple[Any, ...]:
    return tuple(leaf if type(leaf) in NUMBERS else None for leaf in inputs.leaves)


def _with(inputs: Inputs, leaves: dict[int, Any]) -> Inputs:
    """Return ``inputs`` with other leaves at these places."""
    return Inputs(tuple(leaves.get(place, leaf) for place, leaf in enumerate(inputs.leaves)), inputs.spec)
