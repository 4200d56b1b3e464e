"""Random generators around runs on fakes: their states are kept, and what a forward does to them is seen.

A random op on fakes draws nothing. So a generator whose state is marked before a forward and is another afterwards, or
where the forward draws from it, was seeded by the forward itself, by whatever name that was called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxmem.torch_private import DisableTorchFunction, TorchDispatchMode, without_modes

_MARK = 0x5EED_0F_F00D
"""A seed that no model takes by chance."""


def default_generators() -> tuple[torch.Generator, ...]:
    """Return the generators that are drawn from where none is named."""
    on_cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return (torch.default_generator, *on_cuda)


class GeneratorStates:
    """The states of ``generators``, as they are now."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._states = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        """Put back each state that is another."""
        for generator, state in self._states:
            if not _same(generator.get_state(), state):
                generator.set_state(state)


class Draws(TorchDispatchMode):
    """Notes from which generators a forward on fakes draws, and whether it seeds them.

    ``own``: generators of the model that an earlier run of the same forward drew from; None in a first run.
    """

    def __init__(self, own: Iterable[torch.Generator] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._first = own is None
        self._marked = [*default_generators(), *(own or ())]
        self.own: list[torch.Generator] = []
        """Those drawn from that are no default ones."""
        self._seeded = False

    @contextmanager
    def watching(self) -> Iterator[Draws]:
        """Mark the generators, watch the body, put their states back."""
        states = GeneratorStates(self._marked)
        try:
            for generator in self._marked:
                generator.manual_seed(_MARK)
            with self:
                yield self
            self._seeded = self._seeded or not all(map(_is_marked, self._marked))
        finally:
            states.restore()

    @property
    def seeded(self) -> bool:
        """True if the forward set a generator's state, or drew from one that it made itself."""
        return self._seeded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            named = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
            self._note(named)
        return func(*args, **kwargs)

    def _note(self, named: list[torch.Generator]) -> None:
        known = {id(generator) for generator in self._marked}
        new = [generator for generator in named if id(generator) not in known]
        self.own += new
        drawn_from = [g for g in named if id(g) in known] or list(default_generators() if not named else ())
        self._seeded = self._seeded or not all(map(_is_marked, drawn_from)) or bool(new and not self._first)


def _is_marked(generator: torch.Generator) -> bool:
    marked = torch.Generator(generator.device)
    marked.manual_seed(_MARK)
    return _same(generator.get_state(), marked.get_state())


def _same(state: torch.Tensor, other: torch.Tensor) -> bool:
    with without_modes(), DisableTorchFunction():
        return torch.equal(state, other)
