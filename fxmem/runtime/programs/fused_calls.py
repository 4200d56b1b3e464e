"""Chains of elementwise calls as one call each, of a kernel that reads once what they read and makes nothing between.

In: a recording, and a maker of kernels for its chains. Out: a recording in which such a chain is one call, wherever there
is room for what the chain then holds: all that it reads, to its end.

NOTE [Chains]

1. A chain is calls that follow each other, of operators whose fused kernels have eager's bits
   (:class:`~fxmem.op_facts.kinds.FusedRole`), whose results are of one size. Views of other values may be made between.
   Sums of an argument's gradients are in none: autograd makes them, in an order of its own (NOTE [Parts], 1).
2. Values that nobody reads but the chain itself are not made. The others are results of the call.
3. A call of fakes makes results that lie as the real ones do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxmem.op_facts.kinds import FusedRole
from fxmem.op_facts.lookup import with_role
from fxmem.runtime.layout import View
from fxmem.runtime.programs.gradient_parts import made_by, sums_of_arguments
from fxmem.runtime.programs.instructions import Instruction, Recording, Ref, device_bytes
from fxmem.runtime.programs.joined_calls import room_in
from fxmem.torch_private import FakeTensor, tree_map_only

ELEMENTWISE = with_role(FusedRole, "elementwise")

Lies = tuple[View, torch.device]


def nbytes_at(lies: Lies) -> int:
    view, device = lies
    return device_bytes(math.prod(view.size) * view.dtype.itemsize, device)


@dataclass(frozen=True, slots=True)
class Chain:
    """Calls to be made one, as a function of what they read; two that do the same are equal."""

    calls: tuple[tuple[Callable[..., Any], tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]
    """In args a ref is to what is read, by place, and after these to results of the calls, in order."""
    reads: tuple[Lies, ...]
    results: tuple[int, ...]
    """Which of the calls make what is read elsewhere."""
    makes: tuple[Lies, ...]
    """How that lies."""
    spared_bytes: int
    """What kernels of their own read and write beside."""
    numbers: str = field(init=False, repr=False)
    """Of all calls, as they are written: 0.0 equals -0.0, and a kernel has one of them in it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", repr([(args, kwargs) for _, args, kwargs in self.calls]))

    def graph(self) -> fx.GraphModule:
        """Return the chain as a graph that returns what is read elsewhere."""
        graph = fx.Graph()
        values = [graph.placeholder(f"x{place}") for place in range(len(self.reads))]

        def given(tree: Any) -> Any:
            return tree_map_only(Ref, lambda ref: values[ref.value], tree)

        for op, args, kwargs in self.calls:
            values.append(graph.call_function(op, given(args), given(dict(kwargs))))
        graph.output(tuple(values[len(self.reads) + place] for place in self.results))
        return fx.GraphModule({}, graph)


class FusedCall:
    """Stands for an operator in a recording."""

    __name__ = "fused"

    def __init__(self, kernel: Callable[..., Sequence[torch.Tensor]], makes: tuple[Lies, ...]) -> None:
        self.kernel, self.makes = kernel, makes

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        if isinstance(tensors[0], FakeTensor):  # all are, or none
            return [
                torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=device)
                for view, device in self.makes
            ]
        return self.kernel(*tensors)


Kernels = Callable[[Sequence[Chain]], dict[Chain, FusedCall]]
"""Makes what runs these chains, each as often as it is in the list, of those for which it is worth it."""


def fused(recording: Recording, kernels: Kernels) -> Recording:
    """Return the recording with chains as one call; the very same object if there are none."""
    given = {value for value in (*recording.gradients, *recording.tangents) if value is not None}
    returned = {leaf.value for leaf in recording.outputs if isinstance(leaf, Ref)}
    later = {value for call in recording.backward for value in call.reads} | given | returned
    both = (recording.forward, later), (recording.backward, given)
    apart = set[int](), sums_of_arguments(recording)
    found = [[*_Chains(recording, *each, sums).found()] for each, sums in zip(both, apart, strict=True)]
    made = kernels([each.chain for part in found for each in part])
    if not made:
        return recording
    forward, backward = (_with_fused(calls, part, made) for (calls, _), part in zip(both, found, strict=True))
    return replace(recording, forward=forward, backward=backward)


@dataclass(frozen=True, slots=True)
class _Found:
    """A chain among calls."""

    places: tuple[int, ...]
    chain: Chain
    call: Instruction
    """What stands for them, at the place of the last, but for its target."""


class _Chains:
    """The chains among the calls of a forward or a backward."""

    def __init__(
        self, recording: Recording, calls: Sequence[Instruction], read_later: set[int], apart: set[int]
    ) -> None:
        """``read_later``: values that are read when all of them have run. ``apart``: places of calls in no chain."""
        self._recording, self._calls, self._has_room, self._apart = recording, calls, room_in(calls), apart
        self._readers: dict[int, list[float]] = {value: [math.inf] for value in read_later}
        for place, call in enumerate(calls):
            for value in call.reads:
                self._readers.setdefault(value, []).append(place)
        lasting = (*recording.arguments, *recording.constants)
        self._lasting = {recording.views[value].storage for value in lasting}

    def found(self) -> Iterator[_Found]:
        """Yield those that there is room for."""
        for places in self._runs():
            found = self._of(places)
            if found is not None and self._has_room(found.call):
                yield found

    def _runs(self) -> Iterator[tuple[int, ...]]:
        """Yield the places of calls that follow each other (NOTE [Chains], 1), where they are more than one."""
        run: list[int] = []
        made = set[int]()
        for place, call in enumerate(self._calls):
            if self._is_elementwise(call) and place not in self._apart:
                if run and self._kind(call) != self._kind(self._calls[run[0]]):
                    yield tuple(run)
                    run, made = [], set()
                run.append(place)
                made.update(value for value in call.outputs if value is not None)
            elif run and not (self._only_views(call) and made.isdisjoint(call.reads)):
                yield tuple(run)
                run, made = [], set()
        yield tuple(run)

    def _is_elementwise(self, call: Instruction) -> bool:
        if call.target not in ELEMENTWISE or call.writes or call.random or call.replays or not call.reads:
            return False
        result, devices = call.outputs[0], self._recording.devices
        if result is None or not self._recording.views[result].dtype.is_floating_point:
            return False
        return all(devices[value] == devices[result] for value in call.reads)

    def _kind(self, call: Instruction) -> object:
        result = call.outputs[0]
        assert result is not None
        return self._recording.views[result].size, self._recording.devices[result]

    def _only_views(self, call: Instruction) -> bool:
        """Whether it makes nothing but views of what it reads."""
        if call.target is None or call.writes or call.random or not call.reads:
            return False
        views = self._recording.views
        read = {views[value].storage for value in call.reads}
        return all(value is not None and views[value].storage in read for value in call.outputs)

    def _of(self, places: tuple[int, ...]) -> _Found | None:
        calls = [self._calls[place] for place in places]
        made = [value for call in calls for value in call.outputs if value is not None]
        reads = list(dict.fromkeys(value for call in calls for value in call.reads if value not in made))
        results = [value for value in made if not set(self._readers.get(value, ())) <= set(places)]
        if len(calls) < 2 or not results:
            return None
        numbers = {value: number for number, value in enumerate((*reads, *made))}

        def numbered(tree: Any) -> Any:
            return tree_map_only(Ref, lambda ref: Ref(numbers[ref.value]), tree)

        alone = sum(self._nbytes(value) for call in calls for value in (*call.reads, *made_by(call)))
        chain = Chain(
            tuple((_op(call), numbered(call.args), tuple(numbered(call.kwargs).items())) for call in calls),
            tuple(map(self._lies, reads)),
            tuple(made.index(value) for value in results),
            tuple(map(self._lies, results)),
            alone - sum(map(self._nbytes, (*reads, *results))),
        )
        return _Found(places, chain, self._call(calls[-1], places[-1], reads, results))

    def _call(self, last: Instruction, place: int, reads: Sequence[int], results: Sequence[int]) -> Instruction:
        """Return what stands for a chain that ends at ``place``: meanwhile all that it reads is there."""
        views = self._recording.views
        ending = {views[value].storage for value in reads if max(self._readers[value]) <= place} - self._lasting
        return replace(
            last,
            args=tuple(map(Ref, reads)),
            kwargs={},
            outputs=tuple(results),
            is_single=False,
            live_bytes=last.live_bytes + sum(self._recording.nbytes[storage] for storage in ending),
            inside_bytes=0,
        )

    def _lies(self, value: int) -> Lies:
        return self._recording.views[value]._replace(storage=0), self._recording.devices[value]

    def _nbytes(self, value: int) -> int:
        return nbytes_at(self._lies(value))


def _op(call: Instruction) -> Callable[..., Any]:
    assert call.target is not None
    return call.target


def _with_fused(
    calls: Sequence[Instruction], found: Sequence[_Found], made: dict[Chain, FusedCall]
) -> list[Instruction]:
    by_place: dict[int, Instruction | None] = {}
    for each in found:
        if each.chain in made:
            by_place.update(dict.fromkeys(each.places))
            by_place[each.places[-1]] = replace(each.call, target=made[each.chain])
    run = (by_place.get(place, call) for place, call in enumerate(calls))
    return [call for call in run if call is not None]
