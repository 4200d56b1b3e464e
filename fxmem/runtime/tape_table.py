"""A plan compiled for the tape: plain data, made when the plan is emitted."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fxmem.runtime.autocast import Autocast
from fxmem.runtime.layout import View
from fxmem.runtime.recompute import Recompute

HOOKED_SECONDS, RERUN_SECONDS = 50e-6, 50e-6
"""Of the tape's Python on the CPU, with caches that kernels have used meanwhile: for a node that runs under hooks in
forward, and to unpack and set up a re-run (``python -m benchmarks.overhead``)."""


@dataclass(frozen=True, slots=True)
class NodeTape:
    """What the tape does at one node of the emitted graph."""

    index: int
    name: str
    draws_on: tuple[torch.device, ...]
    """Devices whose generators are stashed before it runs: a recipe of the plan runs it again."""
    hooked: bool
    """It saves something the plan drops."""
    arguments: tuple[tuple[int, View], ...]
    """(place among the argument leaves, geometry) of tensor arguments."""
    loose: tuple[tuple[int, View], ...]
    """Those arguments, of a node that a recipe runs again, that may lie otherwise than on fakes: an input may be anywhere
    in its storage, and a dimension of one element has any stride, by which a kernel may be chosen."""
    outputs: tuple[tuple[int, View], ...]
    """(place among the output leaves, geometry) of outputs on managed storages."""
    internals: tuple[int, ...]
    """Managed storages of what autograd saves beside arguments and outputs, in order of first appearance."""
    drops_fresh: bool
    """The plan drops something that is saved here and is none of the arguments."""
    holds: tuple[tuple[bool, int, int], ...]
    """(from outputs, place, storage): kept storages, final after this node, that a recomputation reads."""
    connects: tuple[tuple[int, tuple[int, ...]], ...]
    """(recipe, dropped storages that it makes), final after this node: their slots take hold of the recipe's inputs."""
    frees: tuple[int, ...]
    """Storages whose slots have all their owners once this node is done: the forward lets go of them."""
    sends: tuple[tuple[bool, int, int], ...] = ()
    """(from outputs, place, storage): offloaded storages, final after this node, that are copied to host memory then."""
    leaves: tuple[int, ...] = ()
    """Offloaded storages whose copies are waited for once this node is done: the forward lets go of them."""


@dataclass(frozen=True, slots=True)
class TapeTable:
    """A plan compiled for the runtime. Lists are indexed by managed storage."""

    nodes: dict[int, NodeTape]
    recomputes: tuple[Recompute | None, ...]
    """By recipe."""
    elementwise: frozenset[int]
    """Recipes that run without autograd, or are fetched."""
    recipe_inputs: tuple[tuple[int, ...], ...]
    """By recipe: the managed storages it reads."""
    recipe_statics: tuple[tuple[int, ...], ...]
    """By recipe: the static tensors it reads (``~j``)."""
    recipe_of: tuple[int | None, ...]
    """By managed storage."""
    limits: tuple[int, ...]
    dropped: frozenset[int]
    """Dropped storages whose slot can have an owner."""
    from_nothing: frozenset[int]
    """Those whose recipe reads static tensors at most."""
    internal: frozenset[int]
    """Managed storages that are internals."""
    devices: tuple[torch.device, ...]
    autocast: Autocast | None
    """The state recipes run again in."""
    regions_inside: bool
    """Whether some of their ops enter autocast regions of their own."""
    names: tuple[str, ...]
    nbytes: tuple[int, ...] = ()
    """Bytes of the managed storages, as planned."""
    fetched: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Recipes that are fetched from host memory instead of run, with those products that are dropped."""
    ahead: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Storages after whose unpacking others are fetched ahead of their use: those others."""

    def products(self, recipe: int) -> tuple[int, ...]:
        """Return the managed storages that ``recipe`` makes anew."""
        recompute = self.recomputes[recipe]
        return self.fetched[recipe] if recompute is None else recompute.products
