"""A compiled step under a budget: what torch.compile takes, what the least is, and one plan between.

Gradients are those of the same compiler with nothing recomputed, not eager's bits. The other way in, for a function that
returns its loss: ``torch.compile(loss_of, backend=fxmem.backend(budget=...), dynamic=False)``.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import fxmem


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


def gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters())))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(64), Block(64), nn.Linear(64, 10))
    x, y = torch.randn(256, 64), torch.randint(10, (256,))
    options = {"backend": "inductor", "optimizer": "adamw", "loss_fn": F.cross_entropy, "targets": y}

    print(fxmem.estimate(model, x, **options))  # with nothing recomputed
    costs = fxmem.frontier(model, x, **options)  # what every budget costs, before any kernel is compiled
    middle = costs[len(costs) // 2].budget_bytes
    compiled = fxmem.optimize(copy.deepcopy(model), x, budget=middle, **options)
    print(compiled.fxmem.report)
    assert compiled.fxmem.report.predicted_peak_bytes <= middle

    plain = fxmem.optimize(copy.deepcopy(model), x, **options)  # no budget: the same compiler keeps all
    torch.testing.assert_close(gradients(compiled, x, y), gradients(plain, x, y), rtol=1e-5, atol=1e-7)

    optimizer = torch.optim.AdamW(compiled.parameters())
    for _ in range(3):
        loss = F.cross_entropy(compiled(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("loss", loss.item())


if __name__ == "__main__":
    main()
