"""Constraints on the plan: what must be saved, what must be recomputed, by module path, op or a function."""

import torch
from torch import nn

import fxmem


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.mix(x))
        return x + self.mlp(x)


def main() -> None:
    model, x = nn.Sequential(*(Block(64) for _ in range(4))), torch.randn(128, 64)
    policy = [
        ("0", "save"),  # the module at path "0", the first block: nothing of it is recomputed
        ("gelu", "recompute"),  # every GELU that may be dropped is
        (lambda node: node.seconds > 1e-3, "save"),  # nothing that takes longer than a millisecond; the first rule wins
    ]
    model = fxmem.optimize(model, x, policy=policy, optimizer="sgd")
    for row in model.fxmem.report.rows:
        print(f"{row.name:12} {row.nbytes:8} bytes  {row.decision:5} {row.reason}")

    decisions = {row.name: row.decision for row in model.fxmem.report.rows}
    assert (decisions["gelu"], decisions["gelu_1"]) == ("keep", "drop")


if __name__ == "__main__":
    main()
