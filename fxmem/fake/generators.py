"""Random generators around runs on fakes: their states are kept, and what a forward does to them is seen.

A random op on fakes draws nothing. So a generator that is at one state before a forward and at another afterwards, or
where the forward draws from it, was seeded by the forward itself, by whatever name that was called, or drawn from by
another thread. Which of the two it was, the interpreter tells: it shows this thread's calls only.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxmem.fake.meta_fixups import run_above_fixups
from fxmem.fake.modes import ModeOnFakes
from fxmem.op_facts.lookup import may_draw
from fxmem.torch_private import DisableTorchFunction, without_modes

_SEEDINGS = frozenset({"manual_seed", "seed", "set_state", "set_offset", "graphsafe_set_state"})
"""Methods of a generator that set its state."""


def default_generators() -> tuple[torch.Generator, ...]:
    """Return the generators that are drawn from where none is named."""
    on_cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return (torch.default_generator, *on_cuda)


class GeneratorStates:
    """The states of ``generators``: those they are at now, or ``new`` ones that nothing else puts a generator to."""

    def __init__(self, generators: Collection[torch.Generator], *, new: bool = False) -> None:
        sources = map(_seeded_like, generators) if new else generators
        self._states = [(generator, source.get_state()) for generator, source in zip(generators, sources, strict=True)]

    def restore(self) -> None:
        """Put each generator that is at another state to this one."""
        for generator, state in self._states:
            if not _same(generator.get_state(), state):
                generator.set_state(state)

    def hold_of(self, generators: Iterable[torch.Generator]) -> bool:
        """True if each of those among ``generators`` that are known here is at its state."""
        wanted = set(map(id, generators))
        return all(_same(g.get_state(), state) for g, state in self._states if id(g) in wanted)


class Draws(ModeOnFakes):
    """Notes from which generators a forward on fakes draws, and whether their states change meanwhile.

    ``own``: generators of the model that an earlier run of the same forward drew from; None in a first run.
    """

    def __init__(self, own: Iterable[torch.Generator] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._first = own is None
        self._watched = [*default_generators(), *(own or ())]
        self.own: list[torch.Generator] = []
        """Those drawn from that are no default ones."""
        self.makes_one = False
        """True if a later run draws from a generator that is not the first run's: the forward makes it."""
        self.moved = False
        """True if a state changed, or was another where the forward drew."""

    @contextmanager
    def watching(self) -> Iterator[Draws]:
        """Watch the body, put the states back.

        Each generator is given a state first that nobody else can put it to: not the forward, and no other thread.
        """
        before = GeneratorStates(self._watched)
        with without_modes():
            self._states = GeneratorStates(self._watched, new=True)
        self._states.restore()
        try:
            with self:
                yield self
            self.moved = self.moved or not self._states.hold_of(self._watched)
        finally:
            before.restore()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if may_draw(func):
            self._note([value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)])
        return run_above_fixups(func, args, kwargs)

    def _note(self, named: list[torch.Generator]) -> None:
        known = {id(generator) for generator in self._watched}
        new = [generator for generator in named if id(generator) not in known]
        self.own += new
        self.makes_one = self.makes_one or bool(new and not self._first)
        self.moved = self.moved or not self._states.hold_of(named or default_generators())


def seeds(forward: Callable[[], object]) -> bool:
    """True if ``forward()``, which is called, sets the state of a generator; what other threads do does not count."""
    if sys.getprofile() is not None:  # a profiler's place, which only one can have: another thread is the rarer case
        return True
    seen = False

    def note(_frame: object, event: str, called: Any) -> None:
        nonlocal seen
        if event == "c_call" and called.__name__ in _SEEDINGS and isinstance(called.__self__, torch.Generator):
            seen = True

    sys.setprofile(note)
    try:
        forward()
    finally:
        sys.setprofile(None)
    return seen


def _seeded_like(generator: torch.Generator) -> torch.Generator:
    return torch.Generator(generator.device).manual_seed(secrets.randbits(63))


def _same(state: torch.Tensor, other: torch.Tensor) -> bool:
    with without_modes(), DisableTorchFunction():
        return torch.equal(state, other)
