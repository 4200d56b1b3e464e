"""Running a recipe again: the nodes that make a dropped storage anew, bitwise, on fresh memory.

In: the bases (any tensor on each input storage), the random states stashed in forward. Out: one base per product.

NOTE [Same bits on a re-run]

1. Kernels are chosen by layout and by whether autograd is on: a re-run gets arguments of the recorded geometry and of
   the original ``requires_grad``, in grad mode, with saved tensors discarded (or captured, for internals). An elementwise
   op has one kernel, so it runs without autograd, which costs more than a small kernel does.
2. Geometry that comes out is checked against the recorded one (strides of size-1 dimensions do not matter).
3. Random ops run from the generator states of the forward; the generators are put back afterwards.
4. Autocast is as in the forward, but for its cache, which is the whole process's and perhaps in use: only a node that
   reads a leaf's one cast several times has it on, and leaves no cast behind.
5. Switches of kernels are those of the forward (:mod:`fxmem.runtime.backend_flags`).
6. Batch statistics are computed from the batch, so ``batch_norm`` and ``instance_norm`` re-run without their running
   statistics: these are updated once, by the forward. Running statistics of another dtype than the input choose the
   kernel, so a re-run gets scratch ones.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from fxmem.errors import PlanMismatchError
from fxmem.runtime.autocast import NOTHING, Autocast, casts_kept
from fxmem.runtime.layout import View, Views, layout_error
from fxmem.torch_private import TreeSpec, leaves_of, storage_key, tree_map_only, tree_unflatten

RandomStates = tuple[tuple[torch.device, torch.Tensor | tuple[int, int] | None], ...]


@dataclass(frozen=True, slots=True)
class NodeRecompute:
    """How to run one node again."""

    index: int
    name: str
    target: Callable[..., Any]
    leaves: tuple[Any, ...]
    """Flattened (args, kwargs); the places in ``refs`` are overwritten on each run."""
    refs: tuple[tuple[int, View], ...]
    spec: TreeSpec
    writes: frozenset[int]
    """Storages this node writes in place."""
    outputs: tuple[tuple[int, View], ...]
    """(place among the output's leaves, geometry) of those outputs whose storage is a product or is written here."""
    internals: tuple[int, ...]
    """Storages of its fresh internals, in the order in which autograd saves them first; -1 for one that an earlier node
    made (a cast weight in autocast's cache) and a re-run makes anew."""
    random: bool
    elementwise: bool = False
    """Its kernel is the same whether autograd is on or off."""
    identities: tuple[tuple[int, bool], ...] = ()
    """By ref: the first ref that was the same tensor, and whether it was a leaf whose cast autocast keeps."""
    casts_once: bool = False
    """Under autocast it reads a leaf's one cast several times."""
    scratch: tuple[tuple[int, View], ...] = ()
    """(place, geometry) of tensors that it writes and does not read, and that are nobody's."""
    call: Callable[[list[torch.Tensor]], Any] = field(init=False, repr=False, compare=False)
    """Calls the target on the tensors of ``refs``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "call", _caller(self.target, self.leaves, (*self.refs, *self.scratch), self.spec))

    def run(self, bases: dict[int, torch.Tensor], saved: SavedInRerun, views: Views | None = None) -> None:
        """Run the node on ``bases`` and put the bases of what it makes there; internals only if ``saved`` captures.

        ``views``: by place, arguments that lay otherwise in the forward than planned; by ``~place``, outputs.
        """
        refs = self.refs if views is None else [(place, views.get(place, view)) for place, view in self.refs]
        if self.casts_once:
            try:
                with casts_kept(True):
                    self._run(self._as_identified(refs, bases), bases, saved, views)
            finally:
                torch.clear_autocast_cache()
        elif self.elementwise:
            self._run([view.on(bases[view.storage]) for _, view in refs], bases, saved, views)
        else:
            self._run([self.argument(view, bases) for _, view in refs], bases, saved, views)

    def _run(
        self,
        arguments: list[torch.Tensor],
        bases: dict[int, torch.Tensor],
        saved: SavedInRerun,
        views: Views | None,
    ) -> None:
        if self.scratch:
            device = arguments[0].device
            arguments += [torch.empty(view.size, dtype=view.dtype, device=device) for _, view in self.scratch]
        fresh = saved.begin(arguments) if saved.capture else {}
        output = self.call(arguments)
        leaves = [output] if isinstance(output, torch.Tensor) else leaves_of(output)
        for place, view in self.outputs:
            leaf = leaves[place]
            view = view if views is None else views.get(~place, view)
            if not view.same_layout(leaf):
                raise layout_error(self.name, view, leaf)
            bases[view.storage] = leaf.detach() if leaf.requires_grad else leaf
        if saved.capture:
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor):
                    fresh.pop(storage_key(leaf), None)
            self._keep_internals(bases, fresh)

    def argument(self, view: View, bases: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return the tensor of this geometry, requiring grad as in the forward."""
        tensor = view.on(bases[view.storage])
        if not view.requires_grad:
            return tensor
        tensor.requires_grad_()
        return _NonLeaf.apply(tensor) if view.storage in self.writes else tensor  # type: ignore[no-untyped-call]

    def _as_identified(self, refs: Sequence[tuple[int, View]], bases: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Return the arguments, the same tensor where it was the same, and a leaf where it was one."""
        arguments: list[torch.Tensor] = []
        for k, ((_, view), (first, leaf)) in enumerate(zip(refs, self.identities, strict=True)):
            if first < k:
                arguments.append(arguments[first])
                continue
            tensor = self.argument(view, bases)
            if view.requires_grad and view.storage not in self.writes:
                tensor = tensor.detach().requires_grad_() if leaf else tensor.view_as(tensor)
            arguments.append(tensor)
        return arguments

    def _keep_internals(self, bases: dict[int, torch.Tensor], fresh: dict[int, torch.Tensor]) -> None:
        if self.internals and len(fresh) != len(self.internals):
            raise PlanMismatchError(
                f"{self.name} was planned with {len(self.internals)} internal saved tensors, "
                f"its re-run made {len(fresh)}: the model or its device changed after planning"
            )
        bases.update((s, t) for s, t in zip(self.internals, fresh.values(), strict=False) if s >= 0)
        fresh.clear()


class SavedInRerun:
    """What autograd would save during a re-run: discarded, or with ``capture`` collected where it is fresh memory.

    A context manager: in its body autograd is on, and saves to here.
    """

    __slots__ = ("_fresh", "_grad_enabled", "_hooks", "_known", "capture")

    def __init__(self, *, capture: bool = False) -> None:
        self.capture = capture
        self._known: set[int] = set()
        self._fresh: dict[int, torch.Tensor] = {}

    def begin(self, arguments: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return where saved tensors are collected from now on, by storage, save those that lie on ``arguments``."""
        self._known = {storage_key(argument) for argument in arguments}
        self._fresh = {}
        return self._fresh

    def __enter__(self) -> None:
        self._grad_enabled = torch.is_grad_enabled()
        self._hooks = saved_tensors_hooks(self._pack, _never)
        self._hooks.__enter__()
        torch.set_grad_enabled(True)

    def __exit__(self, *exc: object) -> None:
        torch.set_grad_enabled(self._grad_enabled)
        self._hooks.__exit__()
        del self._hooks  # they refer to this

    def _pack(self, tensor: torch.Tensor) -> None:
        if self.capture:
            key = storage_key(tensor)
            if key not in self._known:
                self._fresh.setdefault(key, tensor.detach())


def without_graph() -> AbstractContextManager[object]:
    """Return a context in which autograd is off."""
    return torch.no_grad() if torch.is_grad_enabled() else NOTHING


@dataclass(frozen=True, slots=True)
class Recompute:
    """How to run a recipe again."""

    nodes: tuple[NodeRecompute, ...]
    products: tuple[int, ...]
    autocast: Autocast | None

    @property
    def elementwise(self) -> bool:
        """Whether it may run without autograd."""
        return all(node.elementwise for node in self.nodes)

    def run(
        self,
        bases: dict[int, torch.Tensor],
        random_states: dict[int, replayed],
        saved: SavedInRerun,
        views: dict[int, Views],
    ) -> None:
        """Put a base for each product into ``bases``, which hold the inputs and static tensors.

        ``random_states`` and ``views`` are by node. Internals only if ``saved`` captures. To be called in
        :func:`autocast_as_in_forward` and, but for elementwise nodes, in ``saved``.
        """
        for node in self.nodes:
            if node.random:
                with random_states[node.index]:
                    node.run(bases, saved, views.get(node.index))
            else:
                node.run(bases, saved, views.get(node.index))


def _never(_: object) -> torch.Tensor:
    raise AssertionError("a re-run's saved tensors are never asked for")


def _caller(
    target: Callable[..., Any], leaves: tuple[Any, ...], refs: tuple[tuple[int, View], ...], spec: TreeSpec
) -> Callable[[list[torch.Tensor]], Any]:
    """Return a function that calls ``target`` with the tensors it is given at the places of ``refs``."""
    numbered = list(leaves)
    for number, (place, _) in enumerate(refs):
        numbered[place] = _Ref(number)
    args, kwargs = tree_unflatten(numbered, spec)
    arg_builders = [(i, _builder(arg)) for i, arg in enumerate(args) if _has_ref(arg)]
    kwarg_builders = [(name, _builder(arg)) for name, arg in kwargs.items() if _has_ref(arg)]

    def call(tensors: list[torch.Tensor]) -> Any:
        actual_args, actual_kwargs = list(args), dict(kwargs)
        for i, build in arg_builders:
            actual_args[i] = build(tensors)
        for name, build in kwarg_builders:
            actual_kwargs[name] = build(tensors)
        return target(*actual_args, **actual_kwargs)

    return call


@dataclass(frozen=True, slots=True)
class _Ref:
    """Stands for the tensor of this number."""

    number: int


def _has_ref(tree: Any) -> bool:
    return any(isinstance(leaf, _Ref) for leaf in leaves_of(tree))


def _builder(tree: Any) -> Callable[[list[torch.Tensor]], Any]:
    """Return a function that fills in ``tree``'s refs."""
    if isinstance(tree, _Ref):
        return itemgetter(tree.number)
    if type(tree) is list and all(isinstance(part, _Ref) for part in tree):
        numbers = [part.number for part in tree]
        return lambda tensors: [tensors[number] for number in numbers]
    return lambda tensors: tree_map_only(_Ref, lambda ref: tensors[ref.number], tree)


class _NonLeaf(torch.autograd.Function):
    """An alias that is no leaf and no view, so that in-place ops may write to it in grad mode."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a re-run has no backward")


def stash_random_states(devices: Sequence[torch.device]) -> RandomStates:
    """Return the states of ``devices``' default generators: of CUDA's, which live on the host, seed and offset."""
    return tuple([(d, _state_on_cuda(d) if d.type == "cuda" else torch.get_rng_state()) for d in devices])


def _state_on_cuda(device: torch.device) -> tuple[int, int] | None:
    """Return seed and offset; None for fakes on a device that is not there."""
    generators = torch.cuda.default_generators
    if not generators:
        return None
    generator = generators[torch.cuda.current_device() if device.index is None else device.index]
    return generator.initial_seed(), generator.get_offset()


_generators = threading.RLock()  # backwards on several devices run in several threads


class replayed:
    """Run the body from stashed generator states, and put the present ones back, whatever happens."""

    def __init__(self, states: RandomStates) -> None:
        self._states = states

    def __enter__(self) -> None:
        _generators.acquire()
        try:
            self._present = stash_random_states([device for device, _ in self._states])
            set_random_states(self._states)
        except BaseException:
            _generators.release()
            raise

    def __exit__(self, *exc: object) -> None:
        try:
            set_random_states(self._present)
        finally:
            _generators.release()


def set_random_states(states: RandomStates) -> None:
    """Set default generators to ``states``."""
    for device, state in states:
        if isinstance(state, torch.Tensor):
            torch.set_rng_state(state)
        elif state is not None:
            index = torch.cuda.current_device() if device.index is None else device.index
            generator = torch.cuda.default_generators[index]
            generator.manual_seed(state[0])
            generator.set_offset(state[1])


@contextmanager
def random_states_kept(devices: Sequence[torch.device]) -> Iterator[None]:
    """Put the default generators of ``devices`` back after the body, in which other threads may replay states: those in
    which a backward on a device runs."""
    states = stash_random_states(devices)
    try:
        yield
    finally:
        set_random_states(states)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put the default generators back: reading a dataloader draws from them."""
    devices = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_initialized() else [])]
    own, numpys = random.getstate(), np.random.get_state()
    try:
        with random_states_kept(devices):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(numpys)
