"""A loss that is computed outside of the model, as memory: seen once, where its backward begins, then stood in for.

In: the tensors that a real backward starts from. Out: a loss function for steps on fakes that saves and allocates what the
graph between them and the model's outputs does: a criterion, another model, both. Nothing real runs: the nodes of that
graph are called with fake gradients. What its forward takes for a moment is not seen.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxmem.profiling.storage_tracker import StorageTracker, has_storage
from fxmem.torch_private import FakeTensorMode, num_gradients_of, storage_key, tree_leaves, without_modes

MOST_NODES = 20_000
"""Of a graph outside of the model; what is larger is not looked at."""
IsOutput = Callable[[Any], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Criterion:
    """What a loss takes, in bytes, for outputs of so many bytes. As a function: a loss that takes as much."""

    output_bytes: int
    """Of the outputs that it is computed from."""
    saved_bytes: int
    """What its graph keeps, beside the outputs and what else was there."""
    peak_bytes: int
    """The most that its backward has, what is saved and the gradients of outputs among it."""
    loss_bytes: int
    """What stays to the end of the step: the storage that the loss lies on, which is a large one for some criteria, and
    targets."""
    left_bytes: int
    """Gradients of other parameters, which stay."""
    saves_outputs: bool
    is_dense: bool
    """Whether the gradients of outputs have elements of their own: that of a sum has one for all."""

    def __call__(self, output: Any) -> torch.Tensor:
        outputs = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        total: torch.Tensor = _StandIn.apply(self, *outputs)  # type: ignore[no-untyped-call]
        return total


class _StandIn(torch.autograd.Function):
    """Takes what a :class:`Criterion` says."""

    @staticmethod
    def forward(ctx: Any, criterion: Criterion, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.criterion, ctx.like = criterion, [(t.size(), t.dtype, t.device) for t in outputs]
        ctx.scale = sum(t.nbytes for t in outputs) / max(1, criterion.output_bytes)
        device = outputs[0].device
        ctx.saved = torch.empty(round(criterion.saved_bytes * ctx.scale), dtype=torch.uint8, device=device)
        if criterion.saves_outputs:
            ctx.save_for_backward(*outputs)
        number = round(criterion.loss_bytes * ctx.scale) // outputs[0].itemsize
        return torch.empty(max(1, number), dtype=outputs[0].dtype, device=device)[0].detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        criterion: Criterion = ctx.criterion
        device = ctx.like[0][2]
        gradients = [
            torch.empty(size if criterion.is_dense else (), dtype=dtype, device=where).expand(size)
            for size, dtype, where in ctx.like
        ]
        rest = round((criterion.peak_bytes - criterion.saved_bytes) * ctx.scale)
        rest -= sum(g.untyped_storage().nbytes() for g in gradients)
        torch.empty(max(0, rest), dtype=torch.uint8, device=device)
        ctx.saved = None
        return None, *gradients


def seen_in(
    roots: Sequence[Any], is_output: IsOutput, output_keys: Collection[int], known: Collection[int]
) -> Criterion | None:
    """Return what lies between ``roots`` and the nodes that ``is_output``; None where nothing does.

    ``output_keys``, ``known``: keys of the outputs' storages, and of others that are counted elsewhere.
    """
    order = nodes_under(roots, is_output)
    inner = [node for node in order if not is_output(node)]
    if not inner or len(inner) == len(order):
        return None
    targets: dict[int, int] = {}
    saved = {node: _saved_by(node, targets) for node in inner}
    sizes = {key: t.untyped_storage().nbytes() for tensors in saved.values() for key, t in tensors.items()}
    losses = {storage_key(root): root.untyped_storage().nbytes() for root in roots if has_storage(root)}
    losses |= {key: nbytes for key, nbytes in targets.items() if key not in output_keys and key not in known}
    counted = {*output_keys, *known, *losses}
    own = {key: nbytes for key, nbytes in sizes.items() if key not in counted}
    with without_modes():  # which would see what is only on fakes
        gradients, peak_bytes = _fake_backward(roots, order, is_output, saved, own)
    of_outputs = [g for node, given in gradients.items() if is_output(node) for g in given if g is not None]
    of_leaves = [g for node, given in gradients.items() if not is_output(node) for g in given if g is not None]
    return Criterion(
        output_bytes=sum(g.numel() * g.itemsize for g in of_outputs),
        saved_bytes=sum(own.values()),
        peak_bytes=peak_bytes,
        loss_bytes=sum(losses.values()),
        left_bytes=sum(g.untyped_storage().nbytes() for g in of_leaves),
        saves_outputs=any(key in output_keys for key in sizes),
        is_dense=any(g.untyped_storage().nbytes() > g.itemsize for g in of_outputs),
    )


Gradients = dict[Any, list[torch.Tensor | None]]
"""By node: those that it is given."""


def _fake_backward(
    roots: Sequence[Any],
    order: Sequence[Any],
    is_output: IsOutput,
    saved: dict[Any, dict[int, torch.Tensor]],
    own: dict[int, int],
) -> tuple[Gradients, int]:
    """Return the gradients that outputs and leaves are given, and the most bytes there are, those of ``own`` among them
    until the last node has run that saved them."""
    holders = Counter(key for tensors in saved.values() for key in tensors)
    live_bytes = peak_bytes = sum(own.values())
    gradients: Gradients = {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad():
        fakes = [mode.from_tensor(tensor.detach()) for tensors in saved.values() for tensor in tensors.values()]
    with torch.no_grad(), mode, StorageTracker() as tracker:
        for fake in fakes:
            tracker.serial(fake)  # weighs nothing here
        for root in roots:
            if isinstance(root, torch.Tensor) and root.grad_fn is not None:
                _add(gradients, root.grad_fn, root.output_nr, torch.empty_like(root))
        for node in order:
            if node not in gradients or is_output(node) or hasattr(node, "variable"):
                continue
            tracker.peak_bytes = tracker.live_bytes
            _run(node, gradients)
            peak_bytes = max(peak_bytes, live_bytes + tracker.peak_bytes)
            for key in saved[node]:
                holders[key] -= 1
                live_bytes -= 0 if holders[key] else own.get(key, 0)
    return gradients, peak_bytes


def _run(node: Any, gradients: Gradients) -> None:
    """Call a node with its gradients, and give those that it makes to the nodes after it."""
    made = node(*gradients.pop(node))
    for gradient, (after, place) in zip(
        made if isinstance(made, tuple) else (made,), node.next_functions, strict=False
    ):
        if gradient is not None and after is not None:
            _add(gradients, after, place, gradient)


def _add(gradients: Gradients, node: Any, place: int, gradient: torch.Tensor) -> None:
    given = gradients.setdefault(node, [None] * num_gradients_of(node))
    before = given[place]
    given[place] = gradient if before is None else before + gradient


def nodes_under(roots: Sequence[Any], is_output: IsOutput) -> list[Any]:
    """Return the nodes from ``roots`` down to the outputs, each before those that it gives gradients; none if too many."""
    starts = [root.grad_fn for root in roots if isinstance(root, torch.Tensor) and root.grad_fn is not None]
    wanted: Counter[Any] = Counter()
    seen, stack = set(starts), list(starts)
    while stack:
        for after in _after(stack.pop(), is_output):
            wanted[after] += 1
            if after not in seen:
                seen.add(after)
                stack.append(after)
        if len(seen) > MOST_NODES:
            return []
    order, ready = [], [node for node in dict.fromkeys(starts) if not wanted[node]]
    while ready:
        order.append(ready.pop())
        for after in _after(order[-1], is_output):
            wanted[after] -= 1
            if not wanted[after]:
                ready.append(after)
    return order


def _after(node: Any, is_output: IsOutput) -> Iterator[Any]:
    return iter(()) if is_output(node) else (after for after, _ in node.next_functions if after is not None)


def _saved_by(node: Any, targets: dict[int, int]) -> dict[int, torch.Tensor]:
    """Return what ``node`` has saved, by key of its storage; add to ``targets`` what the caller refers to as well."""
    names = [name for name in dir(node) if name.startswith("_saved_")]
    found: dict[int, torch.Tensor] = {}
    for name in names or ("saved_tensors",):
        is_known = _references(node, name) > _references_if_alone()
        value = getattr(node, name, None)
        found |= {storage_key(tensor): tensor for tensor in tree_leaves(value) if has_storage(tensor)}
        if is_known and has_storage(value) and value.is_leaf:
            targets[storage_key(value)] = value.untyped_storage().nbytes()
    return found


def _references(node: Any, name: str) -> int:
    """Return how many references Python has to what ``node`` has saved under ``name``."""
    return sys.getrefcount(getattr(node, name, None))


@functools.cache
def _references_if_alone() -> int:
    """Return how many there are where only the node refers to it."""
    with without_modes(), torch.enable_grad():
        node = (torch.zeros(1, requires_grad=True) * torch.ones(1)).grad_fn
    return _references(node, "_saved_other")
