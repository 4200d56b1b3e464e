"""How tensors lie: fakes as real ones do, and a run that goes on where a kernel lays out otherwise than its fake."""

import copy
import random
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxmem
from fxmem.fake.meta_fixups import MetaFixups
from tests.exactness import same_bits
from tests.tiers import diagonal

WIDTH = 16

# -- fakes lie as real tensors -----------------------------------------------------------------------------------------


def both(run: Callable[..., Any], *tensors: Tensor) -> tuple[Any, Any]:
    """Return what ``run`` makes of the tensors and of fakes of them."""
    real = run(*tensors)
    with FakeTensorMode() as mode, MetaFixups():
        return real, run(*[mode.from_tensor(t) for t in tensors])


def lying(sizes: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield dense tensors of these sizes, their dimensions in memory in every order."""
    for order in permutations(range(len(sizes))):
        yield torch.randn([sizes[p] for p in order]).permute([order.index(i) for i in range(len(sizes))])


def any_sizes(draw: random.Random) -> tuple[int, ...]:
    return tuple(draw.choice([1, 1, 2, 4, 6]) for _ in range(draw.randint(2, 4)))


@pytest.mark.slow
def test_views_with_dimensions_of_one_element() -> None:
    draw, num_seen = random.Random(0), 0
    for _ in range(300):
        x = draw.choice(list(lying(any_sizes(draw))))
        factor = draw.choice([n for n in (1, 2, 3, 4, 6) if x.numel() % n == 0])
        shapes = [(factor, x.numel() // factor), (1, factor, -1, 1), x.shape, (x.numel(), 1)]
        for shape in shapes:
            real, fake = both(lambda t, shape=shape: t.reshape(shape), x)
            assert (real.shape, real.stride()) == (fake.shape, fake.stride()), (x.shape, x.stride(), shape)
            num_seen += 1 in real.shape
    assert num_seen > 300


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "dtype"), diagonal([torch.add, torch.sub, torch.mul, torch.div], [torch.float32, torch.bfloat16])
)
def test_ops_on_two_operands_with_expanded_dimensions_and_of_one_element(
    op: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    draw = random.Random(0)
    for _ in range(200):
        sizes = any_sizes(draw)
        x, y = (draw.choice(list(lying(sizes))).to(dtype) for _ in range(2))
        few = y.narrow(draw.randrange(len(sizes)), 0, 1)
        spread = torch.ones((), dtype=dtype).expand(sizes)
        for pair in ((x, y), (x, few), (few.expand(sizes), x), (spread, x), (x, spread)):
            real, fake = both(op, *pair)
            assert (real.shape, real.stride()) == (fake.shape, fake.stride()), [t.stride() for t in pair]
        real, fake = both(lambda t: op(t, 2.0), x)
        assert real.stride() == fake.stride()


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["batch", "group", "layer"])
@pytest.mark.parametrize("sizes", [(1, 4, 3, 3), (2, 4, 3, 3), (2, 4, 1, 3), (2, 4, 5, 1), (2, 3, 4)])
def test_norms_and_their_gradients(norm: str, sizes: tuple[int, ...]) -> None:
    def run(x: Tensor, weight: Tensor, bias: Tensor) -> list[tuple[int, ...]]:
        x = x.detach().requires_grad_()
        if norm == "batch":
            y = torch.batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5, False)
        elif norm == "group":
            y = F.group_norm(x, 1, weight, bias)
        else:
            y = F.layer_norm(x, (sizes[-1],), weight, bias)
        if 1 in sizes[1:]:  # what a backward makes of such dimensions, no plan goes by
            return [y.stride()]
        channels_last = torch.ones(y.transpose(1, -1).shape).transpose(1, -1)
        gradients = [
            torch.autograd.grad(y, x, grad, retain_graph=True)[0] for grad in (torch.ones_like(y), channels_last)
        ]
        return [y.stride(), *(gradient.stride() for gradient in gradients)]

    channels = sizes[-1] if norm == "layer" else sizes[1]
    for x in lying(sizes):
        real, fake = both(run, x, torch.ones(channels), torch.zeros(channels))
        assert real == fake, x.stride()


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "constant"])
@pytest.mark.parametrize("sizes", [(2, 3, 5, 4), (2, 3, 5, 4, 6)])
def test_paddings_and_their_gradients(mode: str, sizes: tuple[int, ...]) -> None:
    def run(x: Tensor) -> list[tuple[int, ...]]:
        x = x.detach().requires_grad_()
        y = F.pad(x, (1, 2) * (len(sizes) - 2), mode=mode)
        gradients = [torch.autograd.grad(y, x, grad, retain_graph=True)[0] for grad in (y, y.contiguous())]
        return [t.stride() for t in (y, *gradients)]

    channels_last = torch.channels_last if len(sizes) == 4 else torch.channels_last_3d
    for memory_format in (torch.contiguous_format, channels_last):
        real, fake = both(run, torch.randn(sizes).contiguous(memory_format=memory_format))
        assert real == fake, memory_format


# -- kernels that lay out otherwise than their fakes -------------------------------------------------------------------


@torch.library.custom_op("fxmem_tests::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """2 x, laid out with the last two dimensions in turn; its fake says otherwise."""
    result = torch.empty_strided(x.shape, x.mT.contiguous().mT.stride())
    return torch.mul(x, 2.0, out=result)


@turned.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


turned.register_autograd(lambda ctx, grad: grad * 2.0)


class Turning(nn.Module):
    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), last

    def forward(self, x: Tensor) -> Tensor:
        x = turned(self.first(x).tanh()).exp()
        return self.last(self.second(x + x.mT).sin()).exp()


@pytest.mark.slow
def test_a_kernel_that_lays_out_otherwise_than_its_fake_is_followed() -> None:
    def last(y: Tensor) -> Tensor:
        first, second = turned(y).sigmoid().chunk(2, dim=-1)
        return torch.cat([first * second.cos(), turned(second)], dim=1)

    model, x = Turning(last).train(), torch.randn(3, WIDTH, WIDTH)
    eager, copied = copy.deepcopy(model), copy.deepcopy(model)
    optimized = fxmem.optimize(copied, policy=[(lambda node: True, "recompute")], planner="chen", optimizer=None)
    with pytest.warns(UserWarning, match="was planned as .* re-runs follow it, the peak may be above"):
        output = optimized(x)
    assert same_bits(eager(x), output)
    output.sum().backward()
    eager(x).sum().backward()
    for expected, ours in zip(eager.parameters(), copied.parameters(), strict=True):
        assert same_bits(expected.grad, ours.grad)


@pytest.mark.slow
def test_what_is_written_in_part_after_a_layout_that_no_fake_foresaw() -> None:
    class Written(nn.Module):
        def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.first, self.second, self.view = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), view

        def forward(self, x: Tensor) -> Tensor:
            y = turned(self.first(x))
            self.view(y).mul_(2.0)
            return F.linear(y, self.second.weight).exp().sin()

    saved = ("turned", "mul_", "reshape")
    policy = [(lambda node: any(name in node.name for name in saved), "save"), (lambda node: True, "recompute")]
    x = torch.randn(3, WIDTH, WIDTH)
    eager = Written(lambda y: y[:, 0, 0])
    model = copy.deepcopy(eager)
    with pytest.warns(UserWarning, match="re-runs follow it"):
        fxmem.optimize(model, optimizer=None, policy=policy)(x).sum().backward()
    eager(x).sum().backward()
    for expected, ours in zip(eager.parameters(), model.parameters(), strict=True):
        assert same_bits(expected.grad, ours.grad)
    copied = Written(lambda y: y.reshape(3, WIDTH * WIDTH))
    with (
        pytest.warns(UserWarning, match="follow"),
        pytest.raises(fxmem.PlanMismatchError, match="other memory than planned"),
    ):
        fxmem.optimize(copied, optimizer=None, policy=policy)(x)


@torch.library.custom_op("fxmem_tests::conjugated", mutates_args=())
def conjugated(x: Tensor) -> Tensor:
    return torch.mul(x, 2.0).conj()


conjugated.register_fake(torch.empty_like)
conjugated.register_autograd(lambda ctx, grad: grad.conj() * 2.0)


def test_a_conjugate_that_its_fake_is_not_is_refused() -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return conjugated(torch.complex(x, x.sin())).mul(torch.complex(x.cos(), x)).abs().sin()

    optimized = fxmem.optimize(Waves(), policy=[(lambda node: True, "recompute")], planner="chen", optimizer=None)
    with pytest.raises(fxmem.PlanMismatchError, match="conjugate"):
        optimized(torch.randn(3, WIDTH))


def test_a_view_that_turns_out_a_copy_is_refused_before_the_backward() -> None:
    model = Turning(lambda y: turned(y).flatten(1).sin()).train()
    optimized = fxmem.optimize(model, policy=[(lambda node: True, "recompute")], planner="chen", optimizer=None)
    with (
        pytest.warns(UserWarning, match="was planned as"),
        pytest.raises(
            fxmem.PlanMismatchError, match=r"works on other memory than planned: .* a view turned out a copy"
        ),
    ):
        optimized(torch.randn(3, WIDTH, WIDTH))
