"""The forms that save less, written into the graph of the ops that one call consists of.

In: such a graph, with the fakes its ops made, and what is wished. Out: the same graph with ops, or runs of ops, exchanged
for those of :mod:`fxmem.runtime.compressed_ops`; which for which is in :mod:`fxmem.op_facts.saving`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxmem.op_facts.kinds import CompressedForm, LeanBackward, PartOf
from fxmem.op_facts.lookup import by_op, resolved
from fxmem.runtime.compressed_ops import (
    BACKWARDS,
    POOL_BACKWARDS,
    dropout_mask,
    frozen_convolution,
    input_unread,
    masked_dropout,
    max_pool_input_unread,
    safe_softmax,
)
from fxmem.runtime.lean_backwards import split_convolution

Target = Callable[..., Any]

_FORMS = by_op(CompressedForm)
_PARTS = by_op(PartOf)
_LEAN = by_op(LeanBackward)


@dataclass(frozen=True, slots=True)
class Request:
    """What a call is to save no longer."""

    masks: bool = False
    """Masks wider than a byte."""
    input: bool = False
    """Its input."""
    split: bool = False
    """Nothing, but to let go of its input within its backward."""


def may_narrow_masks(device_type: str) -> bool:
    """True where a dropout's mask has more than a byte an element."""
    return any(fact.form == masked_dropout.__name__ for fact in by_op(CompressedForm, device_type).values())


def _has_form(node: fx.Node, form: Target) -> bool:
    fact = _FORMS.get(node.target)
    return fact is not None and fact.form == form.__name__


def exchanged(graph: fx.Graph, request: Request) -> bool:
    """Write the forms that save less into ``graph``; tell if there are any."""
    exchange = (
        _exchange_dropout if request.masks else _exchange_unread_input if request.input else _exchange_convolution
    )
    found = [exchange(node) for node in list(graph.nodes)]
    if any(found):
        _join_matmuls(graph)
        for node in list(graph.nodes):
            _exchange_softmax(node)
        graph.eliminate_dead_code()  # what a trace notes for autograd
    return any(found)


def _join_matmuls(graph: fx.Graph) -> None:
    """Write ``matmul`` for the ops that it consists of: it runs the same ones, in C++."""
    nodes = _without_sizes(graph)
    for k, product in enumerate(nodes):
        fact = _PARTS.get(product.target)
        if fact is None:
            continue
        inputs = [node for operand in product.args if (node := _expanded(operand, fact)) is not None]
        if len(inputs) != 2 or any(node.meta["val"].dim() < 3 for node in inputs):
            continue  # with fewer dimensions it depends on autograd which ops it consists of
        traced = _without_sizes(make_fx(resolved(fact.whole))(*[node.meta["val"] for node in inputs]).graph)
        pattern = [node for node in traced if node.op == "call_function"]
        start = k - [node.target for node in pattern].index(product.target)
        found = nodes[start : start + len(pattern)]
        if _is_same(pattern, found, dict(zip(traced, inputs, strict=False))):
            *others, last = found
            _exchange(last, resolved(fact.whole), tuple(inputs), *reversed(others))


def _without_sizes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of ``graph`` but those that compute sizes."""
    return [node for node in graph.nodes if not _is_size(node)]


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _expanded(operand: Any, fact: PartOf) -> fx.Node | None:
    """Return what ``operand``, of a batched product, is an expanded view or copy of."""
    while str(operand.target) in fact.through:
        operand = operand.args[0]
    return operand.args[0] if str(operand.target) == fact.start else None


def _is_same(pattern: list[fx.Node], found: list[fx.Node], known: dict[fx.Node, fx.Node]) -> bool:
    """Tell if ``found`` does what ``pattern`` does, and nobody else needs what is between.

    ``known``: nodes of ``found`` by those of ``pattern`` they stand for; what ``pattern`` makes is added.
    """
    if [node.target for node in pattern] != [node.target for node in found]:
        return False
    for expected, node in zip(pattern, found, strict=True):
        if _arguments(expected, known.__getitem__) != _arguments(node, lambda given: given):
            return False
        known[expected] = node
    return all(user in found for node in found[:-1] for user in node.users)


def _arguments(node: fx.Node, stands_for: Callable[[fx.Node], fx.Node]) -> Any:
    """Return the arguments of ``node``, sizes as what they are, tensors as ``stands_for`` says."""
    return fx.map_arg(
        (node.args, node.kwargs), lambda given: str(given.meta["val"]) if _is_size(given) else stands_for(given)
    )


def _exchange(last: fx.Node, form: Target, args: tuple[Any, ...], *others: fx.Node) -> bool:
    """Write ``form(*args)`` for ``last`` and for what only it needs: ``others``, from the last to the first."""
    with last.graph.inserting_before(last):
        call = last.graph.call_function(form, args)
    call.meta = dict(last.meta)
    last.replace_all_uses_with(call)
    for node in (last, *others):
        last.graph.erase_node(node)
    return True


def _exchange_unread_input(node: fx.Node) -> bool:
    if node.kwargs:
        return False
    if node.target in POOL_BACKWARDS:
        result, indices = node.users
        return _exchange(result, max_pool_input_unread, (node.target, *node.args), *indices.users, indices, node)
    if node.target in BACKWARDS:
        return _exchange(node, input_unread, (node.target, *node.args))
    if _has_form(node, frozen_convolution):
        return _exchange(node, frozen_convolution, node.args)
    return False


def _exchange_convolution(node: fx.Node) -> bool:
    fact = _LEAN.get(node.target)
    splits = fact is not None and fact.form == split_convolution.__name__
    return splits and not node.kwargs and _exchange(node, split_convolution, node.args)


def _exchange_softmax(node: fx.Node) -> bool:
    if not _has_form(node, safe_softmax) or len(node.args) != 2:
        return False
    scores, dim = cast(Any, node.args)
    result = torch.ops.aten._softmax.default(scores.meta["val"], dim, False)
    return result.stride() == node.meta["val"].stride() and _exchange(node, safe_softmax, node.args)


def _exchange_dropout(product: fx.Node) -> bool:
    dropped = _dropout_of(product)
    if dropped is None:
        return False
    *_, noise = product.args
    assert isinstance(noise, fx.Node)
    x, probability = dropped
    draw = noise.all_input_nodes[0]
    with product.graph.inserting_before(product):
        mask = product.graph.create_node("call_function", dropout_mask, dropped, name="mask")
    mask.meta = {"val": x.meta["val"].to(torch.int8)}
    return _exchange(product, masked_dropout, (x, mask, probability), noise, draw, *draw.all_input_nodes)


def _dropout_of(product: fx.Node) -> tuple[fx.Node, float] | None:
    """Return the input of the dropout whose last op is ``product``, and the probability to be kept; None if it is none."""
    if not _has_form(product, masked_dropout):
        return None
    chain: list[Any] = [product]
    for target, place in _FORMS[product.target].preceded_by:
        chain.append(chain[-1].args[place])
        if str(getattr(chain[-1], "target", "")) != target:
            return None
    chain.append(chain[-1].args[0])
    _, division, draw, empty, x = chain
    alone = all(len(node.users) == 1 for node in (division, draw, empty))
    _, probability = (*draw.args, 0.5)[:2]  # a trace leaves out what is the default
    same = product.args[0] is x and division.args[1] == probability and empty.kwargs == {}
    wide = product.meta["val"].dtype.itemsize > 1
    return (x, probability) if alone and same and wide else None
