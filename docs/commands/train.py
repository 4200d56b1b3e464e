"""A small training script, for the pages of the command line. It keeps its losses with their graphs."""

import sys

import torch
from torch import nn


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(int(sys.argv[1])):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.randn(128, 64)), torch.randint(10, (128,)))
        loss.backward()
        optimizer.step()
        losses.append(loss)
    print(f"{len(losses)} steps")


if __name__ == "__main__":
    main()
