"""Running a recipe again: the nodes that make a dropped storage anew, bitwise, on fresh memory.

In: the bases (any tensor on each input storage), the random states stashed in forward. Out: one base per product.

NOTE [Same bits on a re-run]

1. Kernels are chosen by layout and by whether autograd is on: a re-run gets arguments of the recorded geometry and of
   the original ``requires_grad``, in grad mode, with saved tensors discarded (or captured, for internals).
2. Geometry that comes out is checked against the recorded one (strides of size-1 dimensions do not matter).
3. Random ops run from the generator states of the forward; the generators are put back afterwards.
4. Autocast is as in the forward, but for its cache, which is the whole process's and perhaps in use: only a node that
   reads a leaf's one cast several times has it on, and leaves no cast behind.
5. Switches of kernels are those of the forward (:mod:`fxmem.switches`).
6. Batch statistics are computed from the batch, so ``batch_norm`` and ``instance_norm`` re-run without their running
   statistics: these are updated once, by the forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map_only, tree_unflatten

from fxmem.errors import PlanMismatchError

RandomStates = tuple[tuple[torch.device, torch.Tensor], ...]


class View(NamedTuple):
    """Where a tensor lies. ``storage``: a managed storage's index, or ``~j`` for the graph's j-th static tensor."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool = False
    conj: bool = False
    neg: bool = False

    @staticmethod
    def of(tensor: torch.Tensor, storage: int) -> View:
        """Return the geometry of ``tensor``, which lies on ``storage``."""
        return View(
            storage,
            tensor.dtype,
            tuple(tensor.size()),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def on(self, base: torch.Tensor) -> torch.Tensor:
        """Return the tensor of this geometry on ``base``'s storage, cut off from autograd."""
        plain = base.dtype is self.dtype and not (self.conj or self.neg or base.is_conj() or base.is_neg())
        if plain and self.lies_as(base):
            return base.detach()  # cheaper than as_strided
        base = base.detach() if base.requires_grad else base
        if plain:
            return torch.as_strided(base, self.size, self.stride, self.offset)
        tensor = torch.as_strided(_elements(base, self.dtype), self.size, self.stride, self.offset)
        tensor = torch._conj(tensor) if self.conj else tensor
        return torch._neg_view(tensor) if self.neg else tensor

    def lies_as(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` has this very size, stride and offset."""
        return tensor.size() == self.size and tensor.stride() == self.stride and tensor.storage_offset() == self.offset

    def is_of(self, tensor: torch.Tensor) -> bool:
        """True if this is ``View.of(tensor)``, whatever storage that is."""
        return self.lies_as(tensor) and self.is_alike(tensor)

    def is_alike(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` is like this but perhaps for stride and offset."""
        same = tensor.dtype is self.dtype and tensor.size() == self.size
        return same and tensor.is_conj() == self.conj and tensor.is_neg() == self.neg

    def fills_as(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor``, of the same size, begins and ends where this does."""
        end, own_end = (
            sum((n - 1) * k for n, k in zip(self.size, s, strict=True)) for s in (tensor.stride(), self.stride)
        )
        return tensor.storage_offset() == self.offset and end == own_end

    def same_layout(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` is alike, with this offset and, where a dimension is longer than 1, stride."""
        if not self.is_alike(tensor) or tensor.storage_offset() != self.offset:
            return False
        stride = tensor.stride()
        return stride == self.stride or all(
            n <= 1 or a == b for n, a, b in zip(self.size, stride, self.stride, strict=True)
        )


Views = dict[int, View]
"""By place among a call's leaves; by ``~place`` among its output's."""


def _elements(base: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``base``'s whole storage as a vector of ``dtype``, neither conjugate nor negative."""
    base = torch._conj(base) if base.is_conj() else base
    base = torch._neg_view(base) if base.is_neg() else base
    nbytes = base.untyped_storage().nbytes()
    count = nbytes - nbytes % max(base.itemsize, dtype.itemsize)
    return torch.as_strided(base, (count // base.itemsize,), (1,), 0).view(dtype)


@dataclass(frozen=True, slots=True)
class Autocast:
    """The autocast state a graph runs under."""

    device_type: str
    dtype: torch.dtype

    @staticmethod
    def of(device_type: str, dtype: torch.dtype | None = None) -> Autocast | None:
        """Return the region of ``dtype``; None: the one there is around the call, if there is any."""
        if dtype is None and torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        return None if dtype is None else Autocast(device_type, dtype)

    def enter(self) -> torch.autocast:
        return torch.autocast(self.device_type, self.dtype)


@dataclass(frozen=True, slots=True)
class NodeReplay:
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
    identities: tuple[tuple[int, bool], ...] = ()
    """By ref: the first ref that was the same tensor, and whether it was a leaf whose cast autocast keeps."""
    casts_once: bool = False
    """Under autocast it reads a leaf's one cast several times."""
    call: Callable[[list[torch.Tensor]], Any] = field(init=False, repr=False, compare=False)
    """Calls the target on the tensors of ``refs``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "call", _caller(self.target, self.leaves, self.refs, self.spec))

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
        else:
            self._run([self.argument(view, bases) for _, view in refs], bases, saved, views)

    def _run(
        self,
        arguments: list[torch.Tensor],
        bases: dict[int, torch.Tensor],
        saved: SavedInRerun,
        views: Views | None,
    ) -> None:
        fresh = saved.begin(arguments) if saved.capture else {}
        output = self.call(arguments)
        leaves = [output] if isinstance(output, torch.Tensor) else leaves_of(output)
        for place, view in self.outputs:
            leaf = leaves[place]
            view = view if views is None else views.get(~place, view)
            if not view.same_layout(leaf):
                raise layout_error(self.name, view, leaf)
            bases[view.storage] = leaf.detach()
        if saved.capture:
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor):
                    fresh.pop(leaf.untyped_storage()._cdata, None)
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
    """What autograd would save during a re-run: discarded, or with ``capture`` collected where it is fresh memory."""

    __slots__ = ("_fresh", "_known", "capture")

    def __init__(self, *, capture: bool = False) -> None:
        self.capture = capture
        self._known: set[int] = set()
        self._fresh: dict[int, torch.Tensor] = {}

    def begin(self, arguments: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return where saved tensors are collected from now on, by storage, save those that lie on ``arguments``."""
        self._known = {argument.untyped_storage()._cdata for argument in arguments}
        self._fresh = {}
        return self._fresh

    def hooks(self) -> saved_tensors_hooks:
        """Return the context in which this is what autograd saves to."""
        return saved_tensors_hooks(self._pack, _never)

    def _pack(self, tensor: torch.Tensor) -> None:
        if self.capture:
            key = tensor.untyped_storage()._cdata
            if key not in self._known:
                self._fresh.setdefault(key, tensor.detach())


@dataclass(frozen=True, slots=True)
class Replay:
    """How to run a recipe again."""

    nodes: tuple[NodeReplay, ...]
    products: tuple[int, ...]
    autocast: Autocast | None

    def run(
        self,
        bases: dict[int, torch.Tensor],
        random_states: dict[int, RandomStates],
        saved: SavedInRerun,
        views: dict[int, Views],
    ) -> None:
        """Put a base for each product into ``bases``, which hold the inputs and static tensors.

        ``random_states`` and ``views`` are by node. Internals only if ``saved`` captures. To be called in grad mode, under
        ``saved.hooks()`` and :func:`autocast_as_in_forward`.
        """
        for node in self.nodes:
            if node.random:
                with replayed(random_states[node.index]):
                    node.run(bases, saved, views.get(node.index))
            else:
                node.run(bases, saved, views.get(node.index))


_NOTHING = nullcontext()


def autocast_as_in_forward(
    autocast: Autocast | None, devices: Sequence[torch.device], *, regions_inside: bool = False
) -> AbstractContextManager[object]:
    """Return a context in which autocast is as in the forward, without its cache, which it leaves alone.

    A backward may run inside the user's autocast region; a graph planned without autocast re-runs without.
    ``regions_inside``: some ops enter regions of their own.
    """
    in_region: bool = torch._C._is_any_autocast_enabled()
    enabled = {device.type for device in devices if torch.is_autocast_enabled(device.type)} if in_region else set()
    if autocast is None and not enabled and not regions_inside:
        return _NOTHING
    return _as_in_forward(autocast, enabled)


@contextmanager
def _as_in_forward(autocast: Autocast | None, enabled: set[str]) -> Iterator[None]:
    torch.autocast_increment_nesting()  # no region inside is the outermost then, which would clear the cache
    try:
        with casts_kept(False), ExitStack() as stack:
            for device_type in enabled:
                stack.enter_context(torch.autocast(device_type, enabled=False))
            if autocast is not None:
                stack.enter_context(autocast.enter())
            yield
    finally:
        torch.autocast_decrement_nesting()


@contextmanager
def casts_kept(kept: bool) -> Iterator[None]:
    """Switch autocast's cache on or off in the body; regions inside that do not say otherwise follow."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(kept)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def in_batched_backward() -> bool:
    """True inside a backward that computes many gradients at once (``is_grads_batched``) from one forward's tensors."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(_BATCHING))


@contextmanager
def outside_of_batch() -> Iterator[None]:
    """Run the body, in which no tensor stands for many, as outside of such a backward."""
    torch._C._dispatch_tls_set_dispatch_key_included(_BATCHING, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(_BATCHING, True)


_BATCHING: Any = "VmapMode"


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


def layout_message(name: str, view: View, tensor: torch.Tensor) -> str:
    return (
        f"{name} was planned as {view.dtype} {view.size} with strides {view.stride}, but gave {tensor.dtype} "
        f"{tuple(tensor.size())} with strides {tuple(tensor.stride())}"
    )


def layout_error(name: str, view: View, tensor: torch.Tensor) -> PlanMismatchError:
    """Return the error to raise where no re-run could follow."""
    return PlanMismatchError(
        f"{layout_message(name, view, tensor)}; plan again on this device, or optimize the parts around"
    )


def memory_error(name: str) -> PlanMismatchError:
    """Return the error to raise where what was planned as a view turned out a copy, or the other way round."""
    return PlanMismatchError(
        f"{name} works on other memory than planned: since a kernel before it lays out otherwise than its fake says, a "
        "view turned out a copy, or a copy a view; mend the op's fake, or optimize the parts around"
    )


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of ``tree`` as pytree does, quickly where it is made of tuples, lists and dicts."""
    leaves: list[Any] = []
    _append_leaves(tree, leaves)
    return leaves


def _append_leaves(tree: Any, leaves: list[Any]) -> None:
    kind = type(tree)
    if kind is tuple or kind is list or kind is dict:
        if not tree:
            return
        for part in tree.values() if kind is dict else tree:
            if type(part) in _LEAVES:
                leaves.append(part)
            else:
                _append_leaves(part, leaves)
    else:
        leaves += tree_leaves(tree)


_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device})


def stash_random_states(devices: Sequence[torch.device]) -> RandomStates:
    """Return the states of ``devices``' default generators."""
    return tuple([(d, torch.cuda.get_rng_state(d) if d.type == "cuda" else torch.get_rng_state()) for d in devices])


_generators = threading.RLock()  # backwards on several devices run in several threads


class replayed:
    """Run the body from stashed generator states, and put the present ones back, whatever happens."""

    def __init__(self, states: RandomStates) -> None:
        self._states = states

    def __enter__(self) -> None:
        _generators.acquire()
        try:
            self._present = stash_random_states([device for device, _ in self._states])
            _set_random_states(self._states)
        except BaseException:
            _generators.release()
            raise

    def __exit__(self, *exc: object) -> None:
        try:
            _set_random_states(self._present)
        finally:
            _generators.release()


def _set_random_states(states: RandomStates) -> None:
    for device, state in states:
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
