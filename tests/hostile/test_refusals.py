"""What a graph would lose is refused by name, and refusing leaves no trace."""

import random
import re
import time
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn

import fxmem
from fxmem.planners.simulate import drop_all
from tests.exactness import check
from tests.hostile.models import LINEAR, WIDTH, Body, Model, _assert_same_step, _pair, batch, model_of

# -- refused by name ---------------------------------------------------------------------------------------------------


def branches_on_a_value(m: Any, x: Tensor) -> Tensor:
    return x.exp() if x.sum() > 0 else x.sin()


def shape_from_a_value(m: Any, x: Tensor) -> Tensor:
    return x[x > 0].exp()


def uses_numpy(m: Any, x: Tensor) -> Tensor:
    return x * torch.from_numpy(x.detach().numpy().copy())


@pytest.mark.slow
@pytest.mark.parametrize("body", [branches_on_a_value, shape_from_a_value, uses_numpy])
def test_control_flow_on_values_is_refused(body: Body) -> None:
    with pytest.raises(fxmem.FxMemError, match=r"Model could not be captured|could not run on fake"):
        fxmem.optimize(model_of(body)(), batch())


def test_a_layer_skipped_by_chance_is_refused_in_one_message_and_nothing_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class LayerDrop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.layer_drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 0.1

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return x if torch.rand([]) < self.layer_drop else self.second(x)

    with pytest.raises(fxmem.CaptureError, match=r"in the model \(\w+\.py:\d+\).*skipping a layer \(LayerDrop\) to 0"):
        fxmem.optimize(LayerDrop(), batch())
    assert capfd.readouterr() == ("", "")


def test_a_nested_tensor_is_refused_by_its_layout() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, WIDTH), torch.randn(3, WIDTH)], layout=torch.jagged)
    with pytest.raises(fxmem.CaptureError, match=r"layout torch\.jagged"):
        fxmem.optimize(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nested)


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(fxmem.InputError, match=r"lazy.*run one forward"):
        fxmem.optimize(nn.Sequential(nn.LazyLinear(3)), batch())


def calls_counted_in_a_dict(m: Any, x: Tensor) -> Tensor:
    m.state["calls"] += 1
    return x * m.state["calls"]


def activations_logged(m: Any, x: Tensor) -> Tensor:
    m.log.append(x.mean())
    return x.exp()


def python_random(m: Any, x: Tensor) -> Tensor:
    return x * random.random()


def numpy_random(m: Any, x: Tensor) -> Tensor:
    return x * float(numpy.random.rand())


def the_time(m: Any, x: Tensor) -> Tensor:
    return x * time.perf_counter()


def mask_drawn_once(m: Any, x: Tensor) -> Tensor:
    if m.mask is None:
        m.mask = torch.rand(WIDTH) > 0.5
    return x * m.mask


def initialized_from_the_first_batch(m: Any, x: Tensor) -> Tensor:
    if not m.ready:
        m.mean.copy_(x.detach().mean(0))
        m.ready = True
    return x - m.mean


NUM_CALLS = 0


def counts_in_a_global(m: Any, x: Tensor) -> Tensor:
    global NUM_CALLS
    NUM_CALLS += 1
    return x.exp()


def seeds_torch(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return x * torch.rand_like(x)


def forks_the_generator(m: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return x * torch.rand_like(x)


def inference_mode(m: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = m.first(x)
    return x * y.clone()


def hook_on_an_autograd_node(m: Any, x: Tensor) -> Tensor:
    y = x.exp()
    y.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
    return y


def reads_a_number(m: Any, x: Tensor) -> Tensor:
    return x * x.detach().abs().max().item()


def reentrant_checkpoint(m: Any, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(m.last, x.exp(), use_reentrant=True)


def grad_inside(m: Any, x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(m.first(x).sum(), m.first.weight, create_graph=True)
    return x * grad[0]


def freezes_a_part_for_one_use(m: Any, x: Tensor) -> Tensor:
    m.last.requires_grad_(False)
    score = m.last(x)
    m.last.requires_grad_(True)
    return score + m.last(x.detach())


def freezes_by_attribute(m: Any, x: Tensor) -> Tensor:
    m.first.weight.requires_grad = False
    return m.first(x)


def clears_gradients(m: Any, x: Tensor) -> Tensor:
    m.zero_grad()
    return x.exp()


def looks_at_gradients(m: Any, x: Tensor) -> Tensor:
    return x.exp() if m.scale.grad is None else x * m.scale.grad


def exchanges_a_buffer(m: Any, x: Tensor) -> Tensor:
    m._buffers["mean"] = x.detach().mean(0)
    return x + m.mean


def vmap_inside(m: Any, x: Tensor) -> Tensor:
    return x * torch.vmap(torch.dot)(m.first(x), x)[:, None]


def jacobian_inside(m: Any, x: Tensor) -> Tensor:
    return x * torch.func.jacrev(torch.sin)(m.first(x)).sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (calls_counted_in_a_dict, r"'state' of Model in every forward"),
        (activations_logged, r"'log' of Model in every forward"),
        (python_random, r"'random' of Python in every forward"),
        (numpy_random, r"'numpy\.random' of Python in every forward"),
        (the_time, r"computes something else when it is called again"),
        (mask_drawn_once, r"rand.*call it once before fxmem\.optimize"),
        (initialized_from_the_first_batch, r"call it once before fxmem\.optimize"),
        (counts_in_a_global, r"'NUM_CALLS' of tests\.hostile\.test_refusals in every forward"),
        (seeds_torch, r"torch\.manual_seed in forward.*Generator"),
        (forks_the_generator, r"torch\.random\.fork_rng in forward"),
        (inference_mode, r"torch\.inference_mode in forward.*no_grad"),
        (hook_on_an_autograd_node, r"Tensor\.grad_fn in forward"),
        (reads_a_number, r"reads a number from a tensor .*\w+\.py"),
        (reentrant_checkpoint, r"use_reentrant=False"),
        (grad_inside, r"could not be captured"),
        (freezes_a_part_for_one_use, r"requires_grad_ of a parameter in forward.*functional_call"),
        (freezes_by_attribute, r"requires_grad_ of a parameter in forward.*outside the model"),
        (clears_gradients, r"grad of a parameter in forward.*outside the model"),
        (looks_at_gradients, r"grad of a parameter in forward.*outside the model"),
        (exchanges_a_buffer, r"exchanges the buffer 'mean' in forward.*copy_"),
        (vmap_inside, r"transform of torch\.func .*batched ops"),
        (jacobian_inside, r"transform of torch\.func .*batched ops"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_graph_would_lose_is_refused_by_name_and_leaves_no_trace(body: Body, message: str) -> None:
    model = model_of(body)()
    model.state, model.log, model.mask, model.ready = {"calls": 0}, [], None, False
    before = NUM_CALLS, random.getstate(), numpy.random.get_state()[1].tolist()
    with pytest.raises(fxmem.CaptureError, match=message):
        fxmem.optimize(model, batch())
    assert (model.state, model.log, model.mask, model.ready) == ({"calls": 0}, [], None, False)
    assert (NUM_CALLS, random.getstate(), numpy.random.get_state()[1].tolist()) == before


@pytest.mark.parametrize("body", [mask_drawn_once, initialized_from_the_first_batch])
def test_what_is_special_in_the_first_call_only_works_after_one_call(body: Body) -> None:
    eager, model = _pair(body, LINEAR)
    for m in (eager, model):
        m.mask, m.ready = None, False
        torch.manual_seed(0)
        m(batch())
    optimized = fxmem.optimize(model, batch())
    _assert_same_step(eager, model, optimized)
    _assert_same_step(eager, model, optimized)


def test_numbers_from_a_generator_of_ones_own_are_drawn_once() -> None:
    def build() -> nn.Module:
        generator = torch.Generator().manual_seed(3)
        return Model(lambda m, x: (x.exp() * torch.rand(x.shape, generator=generator)).sin())

    if torch.__version__ < (2, 12):  # whose export takes no generators
        with pytest.raises(fxmem.CaptureError, match=r"torch\._C\.Generator"):
            fxmem.optimize(build(), batch())
        return
    check(build, batch(), plans=(drop_all,))


@pytest.mark.parametrize(
    ("wrapper", "instead"),
    [
        (nn.DataParallel, "DataParallel(fxmem.optimize(model"),
        (nn.parallel.DistributedDataParallel, "DistributedDataParallel(fxmem.optimize(model"),
        (torch.distributed.fsdp.FullyShardedDataParallel, "fully_shard(fxmem.optimize(module"),
    ],
)
def test_a_model_wrapped_for_data_parallelism_is_refused_with_the_right_order(wrapper: Any, instead: str) -> None:
    wrapped = wrapper.__new__(wrapper)
    nn.Module.__init__(wrapped)
    wrapped.module = nn.Linear(2, 2)
    with pytest.raises(fxmem.InputError, match=re.escape(instead)):
        fxmem.optimize(nn.Sequential(wrapped), torch.randn(1, 2))
