"""``fxmem.watch_graphs``: losses and outputs that are held with their graph from step to step, and the line that does it.

Graphs are marked where they are seen: at the outputs of the outermost modules that are called, and where a backward begins.
Autograd owns the marks, so they are gone when the graph is. At the end of each step the marks are counted, and nothing else
is done, until graphs of several earlier steps are alive. Only then is looked for who holds them.
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fxmem.errors import in_units
from fxmem.ir import PlainData
from fxmem.profiling.storage_tracker import parts_of
from fxmem.torch_patches import graphs_shown_to
from fxmem.torch_private import FakeTensor, storage_key, tree_leaves
from fxmem.user_frames import level_of_user
from fxmem.watching.filling_lines import FillingLine, filling_lines
from fxmem.watching.held_graphs import nodes_of, reached_from, storages_of, tensors_with_graph
from fxmem.watching.holders import Holder, holders_in_python
from fxmem.watching.steps import StepEnds

NUM_STEPS = 5
"""Graphs of so many earlier steps are taken for held: a window of the last few losses, or one graph that is retained, is no
leak."""
CALLS_OF_EVALUATION = 16
"""So many calls in evaluation mode in a row, without a backward: each is then a step of its own."""
MARK = "fxmem's mark"
"""Under what a node holds the :class:`_Mark`."""


class _Mark:
    """When a graph was first seen; autograd owns it."""

    __slots__ = ("__weakref__", "step")

    def __init__(self, step: int) -> None:
        self.step = step


@dataclass(frozen=True, slots=True)
class HeldGraphs(PlainData):
    """Graphs of earlier steps, and who holds them."""

    holder: str
    """The variable, such as ``losses``; empty where none was found."""
    kind: str
    """The class of the container in it, such as ``list``; empty: the tensor itself."""
    where: str
    """``in train (train.py)``."""
    statement: str
    """The line that puts tensors there; empty where none was found."""
    place: str
    """Of that line: ``train.py:31``."""
    num_graphs: int
    """Tensors that are held with graphs of earlier steps; of one tensor, the steps that its graph goes back through."""
    nbytes: int
    """That these graphs and the tensors that hold them keep alive, parameters aside."""
    remedy: str

    def __str__(self) -> str:
        graphs = f"{self.num_graphs} graphs of earlier steps, {in_units(self.nbytes)}"
        what = f"{self.holder}, a {self.kind}" if self.kind else self.holder
        if self.statement:
            return f"{self.statement} at {self.place} keeps {graphs} ({what}, {self.where}): {self.remedy}"
        if self.holder:
            return f"{what}, {self.where}, keeps {graphs}: {self.remedy}"
        return f"{graphs}, are alive, and no variable was found that holds them: {self.remedy}"


class GraphWatch:
    """What :func:`watch_graphs` returns: a watch, on from the start to :meth:`stop`, or to the end of a ``with``."""

    def __init__(self) -> None:
        self.found: tuple[HeldGraphs, ...] = ()
        """What was found last, the most bytes first."""
        self.num_steps = 0
        """That have ended."""
        self._marks: list[weakref.ref[_Mark]] = []
        self._most = NUM_STEPS
        """Steps whose graphs may be alive before somebody looks who holds them."""
        self._calls_without_backward = 0
        self._depth = threading.local()
        self._on = ExitStack()
        for hook in (
            StepEnds(self.step).handle,
            register_module_forward_pre_hook(self._before_call),
            register_module_forward_hook(self._after_call, always_call=True),
        ):
            self._on.callback(hook.remove)
        self._on.enter_context(graphs_shown_to(self._before_backward))

    def __enter__(self) -> GraphWatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the watch; ``found`` stays."""
        self._on.close()

    def step(self) -> None:
        """Say that a step ends. Needed only of loops that neither step an optimizer nor call modules in evaluation mode."""
        self.num_steps += 1
        if len(self._steps_held()) < self._most:
            return
        gc.collect()  # graphs in cycles of references are held by nobody
        if len(steps := self._steps_held()) >= self._most:
            self._tell(steps)
        self._most *= 2

    # -- what happens ------------------------------------------------------------------------------------------------------

    def _before_call(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth.now = getattr(self._depth, "now", 0) + 1

    def _after_call(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth.now = getattr(self._depth, "now", 1) - 1
        if self._depth.now or not torch.is_grad_enabled():
            return
        seen = [leaf.grad_fn for leaf in tree_leaves(output) if _has_graph(leaf)]
        self._mark(seen)
        if seen and not module.training:
            self._calls_without_backward += 1
            if self._calls_without_backward > CALLS_OF_EVALUATION:
                self.step()

    def _before_backward(self, roots: Sequence[Any]) -> None:
        self._calls_without_backward = 0
        self._mark([root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in roots])

    def _mark(self, nodes: Sequence[Any]) -> None:
        for node in nodes:
            if node is not None and MARK not in node.metadata:
                node.metadata[MARK] = mark = _Mark(self.num_steps)
                self._marks.append(weakref.ref(mark))

    def _steps_held(self) -> list[int]:
        """Return the earlier steps whose graphs are alive; the last one's may be, until its names get new values."""
        self._marks = [reference for reference in self._marks if reference() is not None]
        steps = {mark.step for reference in self._marks if (mark := reference()) is not None}
        return sorted(step for step in steps if step < self.num_steps - 1)

    # -- who holds them ----------------------------------------------------------------------------------------------------

    def _tell(self, steps: Sequence[int]) -> None:
        """Look who holds graphs, and warn of each."""
        evaluating = self._calls_without_backward > CALLS_OF_EVALUATION
        self.found = held_graphs(steps, ", or evaluate under torch.no_grad()" if evaluating else "")
        for each in self.found:
            warnings.warn(f"{each}.", stacklevel=level_of_user())


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None and not isinstance(leaf, FakeTensor)


def held_graphs(steps: Sequence[int], or_else: str = "") -> tuple[HeldGraphs, ...]:
    """Return who holds graphs that were marked in these steps, the most bytes first. ``or_else``: more to do about it."""
    tensors, bits = tensors_with_graph(), {step: 1 << place for place, step in enumerate(steps)}
    reached = reached_from(tensors, lambda node: bits.get(node.metadata[MARK].step, 0) if MARK in node.metadata else 0)
    kept = {id(tensor): (tensor, steps) for tensor, steps in zip(tensors, reached, strict=True) if steps}
    holders = holders_in_python([tensor for tensor, _ in kept.values()])
    by_holder: dict[Holder | None, list[int]] = {}
    for key in kept:
        for holder in holders[key] or (None,):
            by_holder.setdefault(holder, []).append(key)
    named = {key for holder, keys in by_holder.items() if holder is not None for key in keys}
    if named and reduce(or_, (kept[key][1] for key in named)) == reduce(or_, (steps for _, steps in kept.values())):
        by_holder.pop(None, None)  # no graphs of their own: what autograd saves, mostly
    found = [_told(holder, [kept[key] for key in keys], or_else) for holder, keys in by_holder.items()]
    return tuple(sorted((each for each in found if each.num_graphs > 1), key=lambda each: -each.nbytes))


def _told(holder: Holder | None, kept: list[tuple[torch.Tensor, int]], or_else: str) -> HeldGraphs:
    tensors, steps = [tensor for tensor, _ in kept], reduce(or_, (steps for _, steps in kept))
    storages = storages_of(nodes_of(tensors))
    storages |= {storage_key(part): part.untyped_storage().nbytes() for t in tensors for part in parts_of(t)}
    num_graphs, nbytes = max(steps.bit_count(), len(tensors)), sum(storages.values())
    line = None if holder is None else _line_of(holder)
    remedy = ("keep tensors by .detach(), numbers by .item()" if line is None else line.remedy) + or_else
    statement, place = ("", "") if line is None else (line.statement, line.place)
    path, kind, where = ("", "", "") if holder is None else (holder.path, holder.kind, holder.where)
    return HeldGraphs(path, kind, where, statement, place, num_graphs, nbytes, remedy)


def _line_of(holder: Holder) -> FillingLine | None:
    """Return the line that fills what ``holder`` names: the first in its function, else in its file."""
    within = filling_lines(holder.filename, holder.name, *holder.lines) or filling_lines(holder.filename, holder.name)
    return within[0] if within else None


def watch_graphs() -> GraphWatch:
    """Return a watch that warns of losses and outputs held with their graph across steps, and names the line that does it.

    A step ends where an optimizer steps; in evaluation, after some calls without a backward, with each call of the model.
    Warned is once graphs of 5 earlier steps are alive, and then at each doubling. ``found`` has the same as data. It costs
    some microseconds for each call of a module, and a second or so where something is found.

    >>> with fxmem.watch_graphs():
    ...     train()

    or ``watch = fxmem.watch_graphs()`` and ``watch.stop()``. Not seen are graphs that neither a module returns nor a
    backward begins from, and holders outside of Python.
    """
    return GraphWatch()
