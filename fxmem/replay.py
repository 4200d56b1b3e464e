"""Running a recipe again: the nodes that make a dropped storage anew, bitwise, on fresh memory.

In: the bases (any tensor on each input storage), the random states stashed in forward. Out: one base per product.

NOTE [Same bits on a re-run]

1. Kernels are chosen by layout and by whether autograd is on: a re-run gets arguments of the recorded geometry and of
   the original ``requires_grad``, in grad mode, with saved tensors discarded (or captured, for internals).
2. Geometry that comes out is checked against the recorded one (strides of size-1 dimensions do not matter).
3. Random ops run from the generator states of the forward; the generators are put back afterwards.
4. Autocast is entered as in the forward, without its cache: the same casts, but none that outlives the re-run.
5. Batch statistics are computed from the batch, so ``batch_norm`` and ``instance_norm`` re-run without their running
   statistics: these are updated once, by the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fxmem.errors import PlanMismatchError

RandomStates = tuple[tuple[torch.device, torch.Tensor], ...]


@dataclass(frozen=True, slots=True)
class View:
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
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def on(self, base: torch.Tensor) -> torch.Tensor:
        """Return the tensor of this geometry on ``base``'s storage, cut off from autograd."""
        if base.dtype == self.dtype and not (self.conj or self.neg or base.is_conj() or base.is_neg()):
            return torch.as_strided(base, self.size, self.stride, self.offset)
        tensor = torch.as_strided(_elements(base, self.dtype), self.size, self.stride, self.offset)
        tensor = torch._conj(tensor) if self.conj else tensor
        return torch._neg_view(tensor) if self.neg else tensor

    def same_layout(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` has this dtype, size, offset and, where a dimension is longer than 1, stride."""
        if tensor.dtype != self.dtype or tuple(tensor.size()) != self.size or tensor.storage_offset() != self.offset:
            return False
        stride = tuple(tensor.stride())
        return stride == self.stride or all(
            n <= 1 or a == b for n, a, b in zip(self.size, stride, self.stride, strict=True)
        )


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

    def enter(self, *, cache_enabled: bool = True) -> torch.autocast:
        return torch.autocast(self.device_type, self.dtype, cache_enabled=cache_enabled)


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

    def run(self, bases: dict[int, torch.Tensor], *, capture: bool) -> None:
        """Run the node on ``bases`` and put the bases of what it makes there."""
        leaves = list(self.leaves)
        known = set()
        for place, view in self.refs:
            leaves[place] = argument = _argument(view, bases[view.storage], view.storage in self.writes)
            known.add(argument.untyped_storage()._cdata)
        args, kwargs = tree_unflatten(leaves, self.spec)
        fresh: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> None:
            key = tensor.untyped_storage()._cdata
            if capture and key not in known:
                fresh.setdefault(key, tensor.detach())

        with saved_tensors_hooks(pack, _never):
            output = self.target(*args, **kwargs)
        output_leaves = [output] if isinstance(output, torch.Tensor) else tree_flatten(output)[0]
        for leaf in output_leaves:
            if isinstance(leaf, torch.Tensor):
                fresh.pop(leaf.untyped_storage()._cdata, None)
        for place, view in self.outputs:
            if not view.same_layout(output_leaves[place]):
                raise PlanMismatchError(_layout_message(self.name, view, output_leaves[place]))
            bases[view.storage] = output_leaves[place].detach()
        if capture and self.internals:
            if len(fresh) != len(self.internals):
                raise PlanMismatchError(
                    f"{self.name} was planned with {len(self.internals)} internal saved tensors, "
                    f"its re-run made {len(fresh)}: the model or its device changed after planning"
                )
            bases.update((s, t) for s, t in zip(self.internals, fresh.values(), strict=True) if s >= 0)


@dataclass(frozen=True, slots=True)
class Replay:
    """How to run a recipe again."""

    nodes: tuple[NodeReplay, ...]
    products: tuple[int, ...]
    autocast: Autocast | None

    def run(
        self, bases: dict[int, torch.Tensor], random_states: dict[int, RandomStates], *, capture: bool
    ) -> dict[int, torch.Tensor]:
        """Return a base for each product (internals only with ``capture``). ``bases``: inputs and static tensors."""
        context = self.autocast.enter(cache_enabled=False) if self.autocast else _no_autocast(bases)
        with torch.enable_grad(), context:
            for node in self.nodes:
                if node.random:
                    with replayed(random_states[node.index]):
                        node.run(bases, capture=capture)
                else:
                    node.run(bases, capture=capture)
        return {s: bases[s] for s in self.products if s in bases}


def _no_autocast(bases: dict[int, torch.Tensor]) -> Any:
    """A backward may run inside the user's autocast region; a graph planned without autocast re-runs without."""
    device_type = next((base.device.type for base in bases.values()), "cpu")
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _never(_: object) -> torch.Tensor:
    raise AssertionError("a re-run's saved tensors are never asked for")


class _NonLeaf(torch.autograd.Function):
    """An alias that is no leaf and no view, so that in-place ops may write to it in grad mode."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a re-run has no backward")


def _argument(view: View, base: torch.Tensor, written: bool) -> torch.Tensor:
    tensor = view.on(base)
    if not view.requires_grad:
        return tensor
    tensor.requires_grad_()
    return _NonLeaf.apply(tensor) if written else tensor  # type: ignore[no-untyped-call]


def _layout_message(name: str, view: View, tensor: torch.Tensor) -> str:
    return (
        f"{name} was planned as {view.dtype} {view.size} with strides {view.stride}, but gave {tensor.dtype} "
        f"{tuple(tensor.size())} with strides {tuple(tensor.stride())}; plan again on this device"
    )


def check_layout(name: str, view: View, tensor: torch.Tensor) -> None:
    """Raise ``PlanMismatchError`` if ``tensor`` does not lie as planned."""
    if not view.same_layout(tensor):
        raise PlanMismatchError(_layout_message(name, view, tensor))


def stash_random_states(devices: Sequence[torch.device]) -> RandomStates:
    """Return the states of the CPU generator and of ``devices``' default generators."""
    states = [(torch.device("cpu"), torch.get_rng_state())]
    states += [(device, torch.cuda.get_rng_state(device)) for device in devices if device.type == "cuda"]
    return tuple(states)


class replayed:
    """Run the body from stashed generator states, and put the present ones back, whatever happens."""

    def __init__(self, states: RandomStates) -> None:
        self._states = states

    def __enter__(self) -> None:
        self._present = stash_random_states([device for device, _ in self._states])
        _set_random_states(self._states)

    def __exit__(self, *exc: object) -> None:
        _set_random_states(self._present)


def _set_random_states(states: RandomStates) -> None:
    for device, state in states:
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
