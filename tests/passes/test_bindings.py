"""What the emitted graph calls for an op: the binding that dispatches the same kernels, or the overload itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import fxmem
from fxmem.runtime.op_bindings import callable_of

aten = torch.ops.aten
X = torch.zeros(2, 3, 4)
LABELS = torch.zeros(2, 4, dtype=torch.long)


def name_of(value: Any) -> str:
    return str(value) if isinstance(value, torch._ops.OpOverload) else ""


def called_for(op: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return what stands for a call of `op` in an emitted graph."""
    graph, fakes = fx.Graph(), FakeTensorMode()

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        node = graph.placeholder("x")
        node.meta["val"] = fakes.from_tensor(leaf)
        return node

    args, kwargs = torch.utils._pytree.tree_map(put, (args, kwargs))
    return callable_of(graph.call_function(op, args, kwargs))


@pytest.mark.parametrize(
    ("op", "args", "binding"),
    [
        (aten.linear.default, (X, torch.empty(5, 4), torch.empty(5)), torch._C._nn.linear),
        (aten.layer_norm.default, (X, [4]), torch.layer_norm),
        (aten.add.Tensor, (X, X), torch.add),
        (aten.mul.Tensor, (X, 2.0), torch.mul),
        (aten.view.default, (X, [6, 4]), torch.Tensor.view),
        (aten.to.dtype, (X, torch.bfloat16), torch.Tensor.to),
        (aten.sum.dim_IntList, (X, [1], True), torch.sum),
        (aten.cat.default, ([X, X], 1), torch.cat),
        (aten.relu_.default, (X,), torch.relu_),
        (aten.dropout.default, (X, 0.1, True), torch.dropout),
    ],
    ids=name_of,
)
def test_an_op_is_called_by_its_binding(op: Any, args: tuple[Any, ...], binding: object) -> None:
    assert called_for(op, *args) == binding


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.add.Scalar, (X, 2)),  # torch.add(x, 2) is add.Tensor
        (aten.index.Tensor, (X, [None, LABELS[0]])),  # no function bears the name
        (aten.zeros.default, ([2],)),  # a torch.device("...") context would change what torch.zeros makes
        (torch.ops.prims.sin.default, (X,)),  # not ATen's
    ],
    ids=name_of,
)
def test_an_op_without_a_binding_that_does_the_same_stays(op: Any, args: tuple[Any, ...]) -> None:
    assert called_for(op, *args) is op


def test_what_an_emitted_graph_calls_is_seen_in_its_code() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    optimized = fxmem.optimize(model, torch.randn(4, 8))
    assert isinstance(optimized.graph_module, fx.GraphModule)
    assert "torch.ops.aten" not in optimized.graph_module.code
    assert optimized.graph_module.code.count("torch._C._nn.linear(") == 2
