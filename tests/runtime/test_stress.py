"""A thousand steps with random errors in them: the numbers stay eager's, and nothing grows."""

import gc
import random
import resource
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from tests.exactness import same_bits

WIDTH, NUM_STEPS = 8, 1000


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.2)
        return self.norm(x).exp()


class Bomb(torch.utils._python_dispatch.TorchDispatchMode):
    """Raises at the n-th dispatched op."""

    def __init__(self, countdown: int) -> None:
        super().__init__()
        self.countdown = countdown

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.countdown -= 1
        if self.countdown == 0:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def _failing_step(optimized: nn.Module, x: Tensor, countdown: int) -> None:
    """A step that is interrupted, and undone: gradients, statistics and generator as before."""
    state = {name: t.clone() for name, t in optimized.state_dict().items()}
    random_state = torch.get_rng_state()
    try:
        with Bomb(countdown):
            optimized(x).sum().backward()
    except KeyboardInterrupt:
        pass
    optimized.zero_grad()
    optimized.load_state_dict(state)
    torch.set_rng_state(random_state)


def _num_live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


def _resident_bytes() -> int:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


@pytest.mark.slow
def test_a_thousand_steps_with_interrupts_stay_bitwise_and_grow_nothing() -> None:
    torch.manual_seed(0)
    eager = Net()
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(4, WIDTH)
    with pytest.raises(fxmem.InfeasibleBudgetError) as info:
        fxmem.optimize(model, x, budget="1B", optimizer=None)
    optimized = fxmem.optimize(model, x, budget=info.value.least_bytes, optimizer=None)
    assert optimized.plan.dropped
    draw = random.Random(0)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (eager, model)]
    num_tensors, resident_bytes = 0, 0
    for step in range(NUM_STEPS):
        if draw.random() < 0.5:
            _failing_step(optimized, x, draw.randint(1, 140))
        for m, optimizer in zip((eager, optimized), optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            m(x).mean().backward()
            optimizer.step()
        if step == 100:
            num_tensors, resident_bytes = _num_live_tensors(), _resident_bytes()
    assert all(same_bits(a, b) for a, b in zip(eager.state_dict().values(), model.state_dict().values(), strict=True))
    assert _num_live_tensors() <= num_tensors
    assert _resident_bytes() - resident_bytes < 4 * 2**20
