"""The way that a call takes where a model looks at values is noted in a real forward, and taken again on fakes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxmem.capture.graph import Inputs
from fxmem.capture.ways import GUESSES, OtherWayError, Way, ways_of
from fxmem.fake.fake_tensors import FakeWorld, ScalarReads
from fxmem.torch_private import tree_leaves

X = torch.tensor([[1.0, -2.0], [3.0, 4.0], [-5.0, 6.0]])


class Looks(nn.Module):
    """Looks at values in every way that there is, and leaves traces of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(2))
        self.calls = 0

    def forward(self, x: Tensor) -> list[Any]:
        self.calls += 1
        with torch.no_grad():
            self.seen += x.mean(0)
        y = self.inner(x) + torch.rand(())
        many = y[x > 0] if x.sum() > 0 else y
        y = y.clone()
        y[x < 0] = self.inner.bias[0]
        found = [many, x.nonzero(), x.masked_select(x > 2), x.unique(), y]
        read = [x[0, 0].item(), int(x.max()), float(x.min()), x[0].tolist(), x.numpy().sum()]
        return [found, read]


class Anchored(nn.Module):
    """Takes numbers out of a tensor that is neither its input nor its state, as detection heads do of their strides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.strides = nn.Linear(2, 2), torch.tensor([4.0, 8.0])

    def forward(self, x: Tensor) -> Tensor:
        width, height = self.strides.tolist()
        return self.inner(x)[x > width / height].sum() * width


def way_of(model: nn.Module) -> Way:
    return ways_of(model, Inputs.of((X,), {}), None)[0]


def on_fakes(model: nn.Module, way: Way, without: Any = ()) -> Any:
    world = FakeWorld([X])
    fake = world.fake(X)
    with world.state_of(model), world.active(model), ScalarReads(), way.taken([X], [fake], without):
        return model(fake)


def test_lists_of_tensors_beside_inputs_and_state_are_read_where_they_were() -> None:
    model = Anchored()
    assert on_fakes(model, way_of(model)).shape == ()


def test_a_forward_on_fakes_reads_what_was_noted_and_makes_tensors_of_the_same_sizes() -> None:
    model = Looks()
    (found, read), (expected, expected_read) = on_fakes(model, way_of(model)), model(X)
    assert read == expected_read
    assert [t.shape for t in tree_leaves(found)] == [t.shape for t in tree_leaves(expected)]


def test_the_real_forward_leaves_no_trace() -> None:
    model, generator = Looks(), torch.get_rng_state()
    x = X.clone()
    way = way_of(model)
    assert way.looks
    assert model.calls == 0
    assert not model.seen.any()
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(X, x)


def test_looks_of_a_part_that_does_not_run_are_passed_over() -> None:
    class Part(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0]

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.scale = Part(), nn.Parameter(torch.ones(()))
            self.replaced = False

        def forward(self, x: Tensor) -> Tensor:
            y = x.sum() if self.replaced else self.part(x).sum()
            return y * self.scale * int(x.max())

    model = Whole()
    way = way_of(model)
    model.replaced = True
    assert on_fakes(model, way, [model.part]).shape == ()
    way = way_of(model)
    model.replaced = False
    with pytest.raises(OtherWayError, match="looks at values where nothing did"):
        on_fakes(model, way)


def test_a_forward_that_looks_less_is_answered_by_place() -> None:
    class Whole(nn.Module):
        largest: int | None = None

        def forward(self, x: Tensor) -> Tensor:
            factor = self.largest or int(x.max())
            return x.repeat(int((x > 0).sum()), 1) * factor

    model = Whole()
    way = way_of(model)
    expected = on_fakes(model, way).shape
    model.largest = 1
    assert on_fakes(model, way).shape == expected == model(X).shape


def test_indices_that_are_numbers_are_no_look_at_values() -> None:
    """As many elements are taken as there are numbers: graphs of parts may take them too, whose looks are none's."""

    class Whole(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[[1, 0]] * int(x.max())

    way = way_of(Whole())
    assert way.looks is not None
    assert len(way.looks) == 1
    assert on_fakes(Whole(), way).shape == (2, 2)


def test_without_values_a_way_is_a_guess() -> None:
    model = Looks().to("meta")
    assert ways_of(model, Inputs.of((X.to("meta"),), {}), None) == GUESSES
    assert ways_of(Looks(), Inputs.of((X[:, :1],), {}), None) == GUESSES, "its real forward fails"
