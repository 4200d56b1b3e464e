"""Random functions of a few matrices, whose steps read any values before them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

WIDTH = 64

STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": lambda x, y, w: x @ w,
    "attention": lambda x, y, w: torch.softmax(x @ y.T, -1) @ w,
    "gelu": lambda x, y, w: F.gelu(x),
    "dropout": lambda x, y, w: F.dropout(x, 0.3),
    "norm": lambda x, y, w: F.layer_norm(x + y, (WIDTH,)),
    "gate": lambda x, y, w: torch.sigmoid(x) * y,
    "turn": lambda x, y, w: x.T.contiguous().tanh(),
    "sum": lambda x, y, w: x + y.sum(0, keepdim=True),
    "view": lambda x, y, w: x.view(2, -1).relu().view(WIDTH, WIDTH) + w,
}

WITHOUT_RANDOM = tuple(kind for kind in STEPS if kind != "dropout")
"""Kinds that draw no random numbers."""


def random_function(
    seed: int, num_steps: tuple[int, int] = (4, 14), kinds: Sequence[str] = tuple(STEPS)
) -> Callable[..., torch.Tensor]:
    """Return a function of an input and parameters, all of one size, of random steps that read any values before them.

    ``num_steps``: how many there are at least and at most. ``kinds``: names of :data:`STEPS`.
    """
    draw = random.Random(seed)
    steps = [(draw.choice(kinds), draw.random(), draw.random()) for _ in range(draw.randint(*num_steps))]

    def function(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        values = [x, *weights]
        for i, (name, first, second) in enumerate(steps):
            one, other = values[-1 - int(3 * first)], values[int(len(values) * second)]
            values.append(STEPS[name](one, other, weights[i % len(weights)]))
        return sum(value.square().mean() for value in values[-3:])  # type: ignore[return-value]

    return function


def inputs() -> list[torch.Tensor]:
    """Return an input and three parameters."""
    x, *weights = (torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(4))
    return [x, *(w.requires_grad_() for w in weights)]
