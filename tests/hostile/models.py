"""The frame of the hostile models, and what several files of tests here use."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp
from torch import Tensor, nn

from tests.hostile.module_models import LoRA, first_part
from tests.hostile.sizes import WIDTH


class Model(nn.Module):
    """Two linear layers around ``body(model, hidden)``, with some spare parameters and buffers for it to use."""

    def __init__(self, body: Callable[[Any, Tensor], Any], *modules: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.parts = nn.ModuleList(modules)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.body = body

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(self, self.first(x).tanh())
        return self.last(hidden.sin()) if isinstance(hidden, Tensor) and hidden.shape[-1:] == (WIDTH,) else hidden


def batch(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, WIDTH)), generator=torch.Generator().manual_seed(3))


Body = Callable[[Any, Tensor], Any]


def model_of(body: Body, *makers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Model(body, *(make() for make in makers))

    return build


LINEAR, NORM = (lambda: nn.Linear(WIDTH, WIDTH)), (lambda: nn.BatchNorm1d(WIDTH))


# -- what a plan depends on --------------------------------------------------------------------------------------------


def _pair(body: Body = first_part, *makers: Any) -> tuple[nn.Module, nn.Module]:
    return model_of(body, *makers or (LoRA,))(), model_of(body, *makers or (LoRA,))()


def _assert_same_step(eager: nn.Module, model: nn.Module, optimized: nn.Module) -> None:
    for m, run in ((eager, eager), (model, optimized)):
        torch.manual_seed(1)
        m.zero_grad()
        run(batch()).sum().backward()
    for (name, p), q in zip(eager.named_parameters(), model.named_parameters(), strict=True):
        assert (p.grad is None) == (q[1].grad is None), name
        assert p.grad is None or torch.equal(p.grad, q[1].grad), name
