"""What a training step really is, seen while it runs: which graphs of the model are alive, and how backwards go.

In: the outputs of training calls, and backwards that reach them. Out: a :class:`~fxmem.profiling.training_step.Loop`, and
what becomes of gradients that are there as a call begins. It costs a few microseconds a call and nothing per op: one hook
on the nodes of the output, and weak references.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fxmem.profiling.training_step import ONCE, Loop
from fxmem.runtime.old_gradients import OldGradients, have_gradients
from fxmem.runtime.old_outputs import Held, OldOutputs
from fxmem.torch_private import current_backward, keeps_graph

MOST_OUTPUTS = 16
"""Of one call that are looked at: of a model that returns more, the first."""
MOST_BACKWARDS = 2
"""Through one graph that are told apart: what retains it is there in each after the first."""

CALL = "fxmem's call"
"""Under what an output's node holds the :class:`Call`."""


class Call:
    """One training call, for as long as its graph is there: autograd owns it."""

    __slots__ = (
        "__weakref__",
        "_latest",
        "_note",
        "begins_with_gradients",
        "held",
        "is_released",
        "keeps_output",
        "num_backwards",
        "parameters",
    )

    def __init__(self, note: Callable[[Call], None], parameters: Sequence[torch.Tensor]) -> None:
        """``note`` is told of each backward. ``parameters``: those trained, asked whether they have a gradient, and let go
        of then: a graph may outlive what FSDP2 has gathered."""
        self._note, self.parameters = note, parameters
        self.begins_with_gradients = have_gradients(parameters)
        self.num_backwards = 0
        self.keeps_output = True
        """All its outputs were there as the latest backward began."""
        self.is_released = False
        """A backward that lets go of the graph has begun."""
        self.held: list[Held] = []
        """Storages of its outputs, and their bytes."""
        self._latest = -1

    def begin(self, _: object) -> None:
        """A backward has reached an output."""
        backward = current_backward()
        if backward == self._latest:
            return
        self._latest = backward
        self.num_backwards += 1
        self.keeps_output = all(storage() is not None for storage, _ in self.held)
        self.is_released = not keeps_graph()
        self._note(self)


class StepWatch:
    """What the steps of one model's training loop have been so far."""

    def __init__(self) -> None:
        self.loop = ONCE
        """The most that a step was, ``carried`` only as far as a retained graph is."""
        self._calls: list[weakref.ref[Call]] = []
        self._knows_output = False
        self._num_forwards = 0
        """Of the present step."""
        self._latest_backward = -1
        self.old_gradients, self.old_outputs = OldGradients(), OldOutputs()
        self._outputs: list[Held] = []
        """Of the present step."""

    @property
    def is_new_step(self) -> bool:
        """True if the call that was looked at last is the first of its step."""
        return self._num_forwards == 1

    def look(self) -> int:
        """Look at what is there as a call begins; return the bytes of the outputs of the call before that are alive."""
        held_bytes, waiting, alive = 0, 0, []
        for reference in self._calls:
            call = reference()
            if call is None:
                continue
            held_bytes = sum(nbytes for storage, nbytes in call.held if storage() is not None)
            if not call.is_released:
                alive.append(reference)
                waiting += not call.num_backwards
                if call.num_backwards:  # all retained it, and it is still there
                    self.loop = _with(self.loop, lets_go=False, carried=True)
        if not waiting:
            if self._num_forwards > self.loop.forwards:
                self.loop = _with(self.loop, forwards=self._num_forwards)
            self._num_forwards = 0
            self._calls = alive
            self.old_outputs.add(self._outputs)
            self._outputs = []
        self._num_forwards += 1
        return held_bytes

    def _note_backward(self, call: Call) -> None:
        backward = current_backward()
        if backward != self._latest_backward and call.num_backwards == 1:
            self.old_gradients.note_backward(call.parameters, were_there=call.begins_with_gradients)
            self.old_outputs.note_backward()
        self._latest_backward, call.parameters = backward, ()
        keeps_output = call.keeps_output or (self._knows_output and self.loop.keeps_output)
        self._knows_output = True
        backwards = max(self.loop.backwards, min(call.num_backwards, MOST_BACKWARDS))
        within = self.loop.within_autocast or any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        self.loop = _with(self.loop, backwards=backwards, keeps_output=keeps_output, within_autocast=within)

    def note(self, leaves: Iterable[Any], parameters: Sequence[torch.Tensor]) -> Call:
        """Note the outputs of a call. ``parameters``: those that are trained."""
        self.old_gradients.note_call(parameters)
        call, nodes = Call(self._note_backward, parameters), set()
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                node: Any = leaf.grad_fn
                if node not in nodes:
                    nodes.add(node)
                    node.register_prehook(call.begin)
                    node.metadata[CALL] = call
                    storage = leaf.untyped_storage()
                    call.held.append((weakref.ref(storage), storage.nbytes()))
                if len(nodes) == MOST_OUTPUTS:
                    break
        if nodes:
            self._calls.append(weakref.ref(call))
            self._outputs += call.held
        return call


def grown(planned: Loop, seen: Loop) -> Loop:
    """Return ``planned`` with what was ``seen`` beyond it. That outputs are let go counts only beside other things: alone
    it lowers a peak."""
    whole = replace(
        planned,
        forwards=max(planned.forwards, seen.forwards),
        backwards=max(planned.backwards, seen.backwards),
        lets_go=planned.lets_go and seen.lets_go,
        carried=planned.carried or seen.carried,
        within_autocast=planned.within_autocast or seen.within_autocast,
    )
    return replace(
        whole, keeps_output=seen.keeps_output if whole != planned else planned.keeps_output or seen.keeps_output
    )


def _with(loop: Loop, **changes: Any) -> Loop:
    """Return ``loop`` with these changes, the same object where there are none."""
    changed = {name: value for name, value in changes.items() if getattr(loop, name) != value}
    return Loop(**{name: changed.get(name, getattr(loop, name)) for name in loop.__slots__}) if changed else loop
