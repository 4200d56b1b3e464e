"""What goes in and out of a model: nested, hidden, shared, written in place."""

import collections
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn

import fxmem
from tests.exactness import check
from tests.hostile.models import LINEAR, WIDTH, batch, model_of
from tests.hostile.module_models import Pair, first_part

# -- arguments and outputs ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    x: Tensor
    weight: Tensor | None = None
    scale: float = 1.0


torch.export.register_dataclass(Batch)


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, first: Any, *rest: Any, mode: str = "a", **others: Any) -> Any:
        leaves = [t for t in torch.utils._pytree.tree_leaves((first, rest, others)) if isinstance(t, Tensor)]
        total = self.linear(sum(t for t in leaves if t.is_floating_point()))
        if mode == "a":
            return {"y": (total.exp(), [total.sin(), None]), "mode": mode}
        return Pair(total.tanh(), first if isinstance(first, Tensor) else total)


def structured() -> nn.Module:
    torch.manual_seed(0)
    return Structured()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((batch(),), {}),
        ((batch(), None, 3, "text", True), {"mode": "b"}),
        (({"a": batch(), "b": [batch(), (batch(), None)]},), {"more": {"c": batch()}}),
        ((Pair(batch(), batch()),), {"mode": "b", "flag": False, "number": 0.5}),
        ((Batch(batch(), scale=2.0),), {}),
        ((batch().requires_grad_(),), {"mode": "b", "again": batch().requires_grad_()}),
        ((batch(), torch.arange(3)), {"mode": "b"}),
    ],
)
def test_nested_arguments_and_outputs(args: Any, kwargs: Any) -> None:
    check(structured, *args, kwargs=kwargs)


@dataclasses.dataclass
class Settled:
    """As unlike a dict as a dataclass may be: its ``__init__`` takes one argument and computes the rest."""

    y: Tensor
    mean: Tensor = dataclasses.field(init=False)
    count: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        self.mean, self.count = self.y.mean(), self.count + len(self.y)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    rest: dict[str, Settled]


class TakesDataclasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = model_of(first_part, LINEAR)()

    def forward(self, example: Frozen) -> Settled:
        return Settled(self.inner(example.x) * example.rest["a"].count + example.rest["a"].mean)


@pytest.mark.slow
def test_dataclasses_go_in_and_out_as_they_are() -> None:
    example = Frozen(batch(), {"a": Settled(batch(3, 2))})
    check(TakesDataclasses, example)
    output = fxmem.optimize(TakesDataclasses(), (example,), optimizer=None)(example)
    assert type(output) is Settled
    assert output.count == 4
    assert output.mean.requires_grad


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_an_argument_that_hides_tensors_is_refused() -> None:
    model = Structured()
    with pytest.raises(fxmem.InputError, match=r"holds tensors in a Opaque.*dataclass.*register_pytree_node"):
        fxmem.optimize(model, (batch(), Opaque(batch())))
    with pytest.raises(fxmem.InputError, match=r"holds tensors in a UserDict"):
        fxmem.optimize(model, collections.UserDict(x=batch()))


def test_an_output_that_is_not_looked_into_is_refused() -> None:
    with pytest.raises(fxmem.CaptureError, match=r"Model returns a set.*dataclass.*register_pytree_node"):
        fxmem.optimize(model_of(lambda m, x: {"y": x.exp(), "names": {"a"}})(), batch())


class Returned:
    def __init__(self, *parts: Any) -> None:
        self.parts, self.dtype, self.note = list(parts), torch.float32, "as it was"


def test_an_object_that_holds_tensors_in_objects_is_returned_as_in_eager() -> None:
    model = model_of(lambda m, x: Returned(x.exp(), Returned(x.sin() * 2, None)))()
    expected, found = model(batch()), fxmem.optimize(model, batch())(batch())
    assert type(found) is type(found.parts[1]) is Returned
    assert torch.equal(found.parts[0], expected.parts[0])
    assert torch.equal(found.parts[1].parts[0], expected.parts[1].parts[0])
    assert vars(found.parts[1]).keys() == vars(expected.parts[1]).keys()
    assert (found.dtype, found.note, found.parts[1].parts[1]) == (torch.float32, "as it was", None)


def test_a_container_of_the_caller_that_forward_fills_is_filled() -> None:
    class Collects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of(first_part, LINEAR)()

        def forward(self, x: Tensor, features: list[Tensor]) -> Tensor:
            features.append(x.exp())
            return self.inner(features[-1])

    model, features, found = Collects().train(), [], []
    expected, optimized = model(batch(), features), fxmem.optimize(model, (batch(), []))(batch(), found)
    assert torch.equal(optimized, expected)
    assert len(found) == 1
    assert torch.equal(found[0], features[0])


def test_one_tensor_passed_twice() -> None:
    x = batch().requires_grad_()
    eager, model = structured(), structured()
    optimized = fxmem.optimize(model, (x, x))
    grads = []
    for m in (eager, optimized):
        x.grad = None
        m(x, x)["y"][0].sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_inputs_written_in_place() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return x.exp() * m.scale

    class WritesInput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of(body)()

        def forward(self, x: Tensor, state: Tensor) -> Tensor:
            state.mul_(0.5).add_(x.detach().sum())
            return self.inner(x) + state.clone()

    check(WritesInput, batch(), torch.ones(WIDTH))
