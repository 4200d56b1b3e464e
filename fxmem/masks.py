"""Dropout whose mask takes one byte an element, where eager's takes the input's own dtype.

On the CPU a dropout draws zeros and ones into a tensor of its input's dtype, divides that by their probability, multiplies
and saves the quotient: two to eight bytes for one bit. In: a profiled graph. Out: the captured graph in which each call
that does so, a dropout or an attention with one inside, saves what was drawn as bytes, and its backward makes the
quotient again (Jain et al. 2018, Gist, keep the masks of ReLUs so). The generator gives the same numbers for either dtype
and the same kernels go on from there, so the bits are the same. Whether a call does so is seen on fakes. Only models that
lie on the CPU are concerned: CUDA's masks have one byte. Dropouts in place stay what they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, cast

import torch
from torch import fx
from torch._prims_common import make_contiguous_strides_for
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from fxmem.autocast import Autocast
from fxmem.bindings import callable_of
from fxmem.captured import Captured, with_unused_state
from fxmem.fake import FakeWorld, made_outside
from fxmem.profile import Profiled
from fxmem.regions import Region, Scoped, op_of, region_of
from fxmem.replay import in_batched_backward
from fxmem.types import NodeProfile
from fxmem.views import View

aten = torch.ops.aten
Target = Callable[..., Any]

MOST_PARTS = 60
"""An attention has about 30; what has many more (an RNN's time steps) runs faster whole."""


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, probability: float) -> torch.Tensor:
        drawn = torch.empty_like(x, dtype=torch.int8).bernoulli_(probability)  # the CPU widens int8 faster than bool
        ctx.save_for_backward(drawn)
        ctx.probability = probability
        return _product(drawn, probability, x, in_place=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (drawn,) = ctx.saved_tensors
        in_place = not (torch.is_grad_enabled() or in_batched_backward())
        return _product(drawn, ctx.probability, grad, in_place=in_place), None


def _product(drawn: torch.Tensor, probability: float, x: torch.Tensor, *, in_place: bool) -> torch.Tensor:
    """Return ``x * (drawn / probability)``, in one pass over both where they lie alike."""
    ones = drawn.to(x.dtype)
    quotient = _quotient(probability, x.dtype)
    if not (in_place and math.isfinite(quotient) and _laid_out_alike(ones, x)):
        return x * ones.div_(probability)
    return torch.addcmul(x.new_full((), -0.0), ones, x, value=quotient, out=ones)  # -0.0 + y is y, zeros included


@cache
def _quotient(probability: float, dtype: torch.dtype) -> float:
    """Return one over ``probability`` as the kernel divides in this dtype, whatever modes are on."""
    with torch._C._DisableTorchDispatch():
        return float(torch.ones((), dtype=dtype, device="cpu") / probability)


def _laid_out_alike(dense: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell for certain that the product of both, the first dense, would be laid out as the first is."""
    if dense.stride() == other.stride():
        return 1 not in dense.shape or dense.stride() == make_contiguous_strides_for(dense.shape)
    places = sorted(zip(dense.stride(), other.stride(), strict=True), reverse=True)
    strides = [stride for _, stride in places if stride]  # a kernel lets dimensions of stride 0 go by
    falling = all(a > b for a, b in pairwise(strides))
    return falling and 1 not in dense.shape and dense.shape == other.shape


def kept_with(x: torch.Tensor, probability: float) -> torch.Tensor:
    """Return ``x`` with each element zero or, with this probability, divided by it; the mask saved has bytes."""
    return cast(torch.Tensor, _Dropout.apply(x, probability))  # type: ignore[no-untyped-call]


def byte_dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Return what ``aten.dropout`` returns for these arguments, 0 < p < 1 and ``train`` true; the mask saved has bytes."""
    return kept_with(input, 1 - p)


class Composite:
    """A call of ``op`` as the ops it consists of, its dropouts with masks of bytes; a target of call_function nodes.

    ``parts`` takes the tensors among the arguments, in order.
    """

    def __init__(self, op: torch._ops.OpOverload, parts: fx.GraphModule) -> None:
        self.parts = parts
        self.__name__ = self.__qualname__ = f"{op._schema.name.partition('::')[2]}_with_byte_masks"
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.parts(*[value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)])

    def __str__(self) -> str:
        return self.__name__


def with_byte_masks(profiled: Profiled, stays_as_is: Callable[[NodeProfile], bool]) -> Captured:
    """Return the captured graph with masks of one byte; the very same object if it has no wider ones.

    ``stays_as_is``: calls to leave alone.
    """
    captured, profile = profiled.captured, profiled.profile
    if any(device.type != "cpu" for device in profiled.devices):
        return captured
    calls = [node for node in captured.graph_module.graph.nodes if node.op == "call_function"]
    known: dict[object, Target | None] = {}
    targets: dict[fx.Node, Target | None] = {}
    for node, seen in zip(calls, profile.nodes, strict=True):
        saved = (profile.storages[s] for s in seen.saves)
        if seen.random and any(s.internal and s.creator == seen.index for s in saved) and not stays_as_is(seen):
            views = dict(profiled.arguments[seen.index])
            call = _call_of(node, views)
            if call not in known:
                known[call] = _narrowed(node, views, captured.autocast)
            targets[node] = known[call]
    if not any(targets.values()):
        return captured
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in captured.graph_module.graph.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
        env[node].target = targets.get(node) or node.target
    graph.lint()
    module = fx.GraphModule(captured.graph_module, graph, class_name="Captured")
    return replace(captured, graph_module=with_unused_state(module, captured.graph_module))


def num_byte_masks(captured: Captured) -> int:
    """Return the number of calls whose masks have bytes."""
    targets = [op_of(node.target) for node in captured.graph_module.graph.nodes]
    return sum(target is byte_dropout or isinstance(target, Composite) for target in targets)


def _call_of(node: fx.Node, views: dict[int, View]) -> object:
    """Return what calls that consist of the same ops have in common."""
    leaves, spec = tree_flatten((node.args, node.kwargs))
    described = [views[k]._replace(storage=0) if k in views else (type(leaf), leaf) for k, leaf in enumerate(leaves)]
    return op_of(node.target), region_of(node.target), str(spec), tuple(described)


def _narrowed(node: fx.Node, views: dict[int, View], autocast: Autocast | None) -> Target | None:
    """Return what does the same as ``node`` with masks of bytes; None where that is no other.

    ``views``: geometry of its tensor arguments, by place.
    """
    op, region = op_of(node.target), region_of(node.target)
    if not isinstance(op, torch._ops.OpOverload):
        return None
    device_type = region.autocasts[-1][0] if region.autocasts else autocast.device_type if autocast else None
    if device_type is not None and any(view.storage < 0 and view.requires_grad for view in views.values()):
        return None  # autocast casts a leaf once for all its uses, so their gradients add up before they are cast back
    parts = _parts(node, views, autocast)
    if parts is None or not _with_byte_masks(parts):
        return None
    target = byte_dropout if op is aten.dropout.default else Composite(op, parts)
    if device_type is not None:  # the parts were seen below autocast
        region = replace(region, autocasts=(*region.autocasts, (device_type, None, False, None)))
    return target if region == Region() else Scoped(target, region)


def _parts(node: fx.Node, views: dict[int, View], autocast: Autocast | None) -> fx.GraphModule | None:
    """Return the few ops that ``node`` consists of; None where they are many, or not to be seen."""
    leaves, spec = tree_flatten((node.args, node.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
    if len(leaves) != len(node.args) + len(node.kwargs):  # lists of tensors: no such op is known to drop out
        return None
    if places != sorted(views) or any(view.conj or view.neg for view in views.values()):
        return None
    with FakeWorld().mode:
        fakes = [_fake(views[place]) for place in places]

    def call(*tensors: torch.Tensor) -> Any:
        left = iter(tensors)
        args, kwargs = tree_unflatten([next(left) if isinstance(x, fx.Node) else x for x in leaves], spec)
        return op_of(node.target)(*args, **kwargs)

    try:
        with autocast.enter() if autocast else nullcontext(), region_of(node.target).enter(), torch.enable_grad():
            parts = make_fx(call)(*fakes)
    except Exception:  # an op may refuse to be traced in any way; then it stays what it is
        return None
    *_, output = parts.graph.nodes
    return parts if len(parts.graph.nodes) <= MOST_PARTS and isinstance(output.args[0], fx.Node) else None


def _fake(view: View) -> torch.Tensor:
    fake = torch.empty_strided(view.size, view.stride, dtype=view.dtype, device="cpu")
    return made_outside(fake) if view.requires_grad else fake


def _with_byte_masks(parts: fx.GraphModule) -> bool:
    """Write :func:`kept_with` for the ops of a dropout, wherever ``parts`` has them; tell if it has."""
    found = False
    for product in list(parts.graph.nodes):
        dropped = _dropout_of(product)
        if dropped is not None:
            with parts.graph.inserting_before(product):
                product.replace_all_uses_with(parts.graph.call_function(kept_with, dropped))
            *_, noise = product.args
            for node in (product, noise, *noise.all_input_nodes, *noise.args[0].all_input_nodes):
                parts.graph.erase_node(node)
            found = True
    for node in parts.graph.nodes:
        node.target = callable_of(node) if node.op == "call_function" else node.target
    parts.recompile()
    return found


_OPS_OF_A_DROPOUT = (
    (aten.mul.Tensor, 1),
    (aten.div_.Scalar, 0),
    (aten.bernoulli_.float, 0),
    (aten.empty_like.default, 0),
)
"""From the last to the first, with the place of the argument that the one before makes."""


def _dropout_of(product: fx.Node) -> tuple[fx.Node, float] | None:
    """Return the input of the dropout whose last op is ``product``, and the probability to be kept; None if it is none."""
    chain: list[Any] = [product]
    for target, place in _OPS_OF_A_DROPOUT:
        if chain[-1].target is not target:
            return None
        chain.append(chain[-1].args[place])
    _, division, draw, empty, x = chain
    alone = all(len(node.users) == 1 for node in (division, draw, empty))
    _, probability = (*draw.args, 0.5)[:2]  # a trace leaves out what is the default
    same = product.args[0] is x and division.args[1] == probability and empty.kwargs == {}
    wide = product.meta["val"].dtype.itemsize > 1
    return (x, probability) if alone and same and wide else None
