"""One call of a compiled graph in a training step: the graph with its code, what the call was given, what it made.

In: a graph from Dynamo, the tensors of a call. Out: plain facts for :mod:`fxmem.compiled.calls`, which hold no tensor.
"""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from fxmem.compiled.fakerun import Source
from fxmem.compiled.lower import compiling_alone
from fxmem.compiled.step_planner import PlannedGraph, Variant
from fxmem.errors import in_units
from fxmem.torch_private import keeps_graph, storage_key
from fxmem.user_frames import level_of_user

Compiled = Callable[..., Any]
Compile = Callable[["CompiledGraph", fx.GraphModule, Sequence[Any]], Compiled]
"""Compiles a graph under :attr:`CompiledGraph.wanted`."""

NUMBERS = itertools.count(-1, -1)
"""Of what is no storage that lives."""


class CompiledGraph:
    """A training graph from Dynamo, compiled under the plans of the steps that it is called in."""

    def __init__(self, graph_module: fx.GraphModule, breaks_off: bool) -> None:
        self.breaks_off = breaks_off
        """Whether the graph ends because it breaks."""
        self.planned: PlannedGraph | None = None
        """None until its joint graph was seen."""
        self.wanted: Variant | None = None
        """How it is to be compiled now; None: how is still to be found."""
        self.caller: weakref.ref[Any] | None = None
        """What Dynamo was given; None while the graph is compiled for the first time."""
        self._module, self._graph = graph_module, copy.deepcopy(graph_module.graph)
        self._compiled: dict[Variant, Compiled] = {}

    @property
    def is_dropped(self) -> bool:
        """Whether Dynamo will not call it any more."""
        return self.caller is not None and self.caller() is None

    @property
    def any_compiled(self) -> Compiled:
        return next(iter(self._compiled.values()))

    def keep(self, made: Compiled) -> None:
        """``made``: the graph compiled as :attr:`wanted` says."""
        assert self.wanted is not None
        self._compiled[self.wanted] = made

    def under(self, variant: Variant, inputs: Sequence[Any], compile_it: Compile) -> Compiled:
        if variant not in self._compiled:
            self.wanted = variant
            again = fx.GraphModule(self._module, copy.deepcopy(self._graph))
            again.meta = dict(self._module.meta)
            with compiling_alone():
                self.keep(compile_it(self, again, inputs))
        return self._compiled[variant]


def node_of(tensors: Iterable[torch.Tensor]) -> Any:
    """Return the compiled function's node of autograd, given what a call returned; None where no backward comes. Views that
    the call returns of what the function made have nodes of their own."""
    nodes = [t.grad_fn for t in tensors if t.grad_fn is not None]
    own = next(filter(_is_compiled, nodes), None)
    return own or next(filter(None, map(_compiled_behind, nodes)), None)


def _compiled_behind(node: Any) -> Any:
    while node is not None and not _is_compiled(node):
        node = node.next_functions[0][0] if node.next_functions else None
    return node


def _is_compiled(node: Any) -> bool:
    return type(node).__name__ == "CompiledFunctionBackward"


def tell_of_outside(inputs: Iterable[Any], made: Container[int], budget_bytes: int) -> bool:
    """Warn if a call is given what is computed, with gradients, by other code than compiled functions, of which some
    ``made`` these storages; return whether it is."""
    given = (t for t in inputs if isinstance(t, torch.Tensor) and t.grad_fn is not None)
    if all(storage_key(t) in made or _is_compiled(t.grad_fn) for t in given):
        return False
    warnings.warn(
        "a compiled graph is given what code outside of compiled graphs computes, with gradients: what that code keeps for "
        f"its backward is not seen, and comes on top of the budget of {in_units(budget_bytes)}. Dynamo leaves code out "
        "where a graph breaks in a loop or in a function that is called: torch.compile(..., fullgraph=True) shows where",
        stacklevel=level_of_user(),
    )
    return True


def warn_of_more(num_calls: int, peak_bytes: int, budget_bytes: int) -> None:
    """Warn that the first step of several calls goes over the budget."""
    warnings.warn(
        f"{num_calls} calls of compiled graphs before one backward take {in_units(peak_bytes)} this once, and more with "
        f"those that may follow; the budget is {in_units(budget_bytes)}. The first of them were compiled before the others "
        "were known; from the next step on the budget is over all of them",
        stacklevel=level_of_user(),
    )


class Inputs(NamedTuple):
    """What a graph was called with."""

    sources: tuple[Source | int, ...]
    """As in :class:`GraphCall`; a source's call is its place in the step."""
    nbytes: Mapping[int, int]
    """By storage, of those that no call of the step made."""
    parameters: tuple[weakref.ref[torch.Tensor], ...]
    trained: frozenset[int]
    """The places of those that a backward gives a gradient to keep."""

    def later(self, there: Container[int]) -> Inputs:
        """Return the inputs of a call like this in a later step; what is not ``there`` any more gets a new number, as its
        storage may be another tensor's now."""
        named = {s: s if s in there else next(NUMBERS) for s in self.sources if not isinstance(s, Source)}
        sources = tuple(s if isinstance(s, Source) else named[s] for s in self.sources)
        return self._replace(sources=sources, nbytes={named[s]: nbytes for s, nbytes in self.nbytes.items()})

    def after(self, places: Mapping[int, int]) -> Inputs:
        """Return the same where of the calls before only those at ``places`` still are in the step, by their new place."""
        sources = (s if not isinstance(s, Source) or s.call in places else next(NUMBERS) for s in self.sources)
        moved = (s._replace(call=places[s.call]) if isinstance(s, Source) else s for s in sources)
        return self._replace(sources=tuple(moved))


class Output(NamedTuple):
    """The memory of an output of a call."""

    place: int
    """Of the output."""
    storage: weakref.ref[Any]
    nbytes: int

    @property
    def is_there(self) -> bool:
        """Whether somebody still holds it. Another tensor may have its storage's number where not."""
        return self.storage() is not None


@dataclass(slots=True, eq=False)
class Call:
    """One call of a compiled graph; holds no tensor."""

    graph: CompiledGraph
    variant: Variant
    inputs: Inputs | None = None
    """None: not looked at, as others like it were."""
    made: dict[int, Output] = field(default_factory=dict)
    """By storage."""
    outputs: tuple[weakref.ref[torch.Tensor], ...] = ()
    outputs_stay: bool = True
    node: weakref.ref[Node] | None = None
    """Dead where its backward can no longer come."""

    @property
    def is_pending(self) -> bool:
        node = None if self.node is None else self.node()
        return node is not None and not node.has_run

    @property
    def has_run(self) -> bool:
        """Whether its backward has begun, and its graph is there."""
        node = None if self.node is None else self.node()
        return node is not None and node.has_run

    def look_at_outputs(self) -> None:
        """Note, when its backward is over, whether anybody still holds its outputs."""
        self.outputs_stay = any(ref() is not None for ref in self.outputs)


class Node:
    """Lives as long as a call's node of autograd, which holds it by a hook."""

    def __init__(
        self, begins: Callable[[], None], next_call: Callable[[], Call | None], retained: Callable[[], None]
    ) -> None:
        """``begins``: called before its backward. ``retained``: called where that retains its graph."""
        self._begins, self._next_call, self._retained = begins, next_call, retained
        self.has_run = False

    def runs(self, _: Any) -> None:
        self._begins()
        self.has_run = True
        if keeps_graph():
            self._retained()
        later = self._next_call()
        if later is not None:
            later.look_at_outputs()
