"""Saving and loading: an optimized module has the keys and the parameters of its original."""

import tempfile
from pathlib import Path

import torch
from torch import nn

import fxmem


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Linear(128, 8))


def main() -> None:
    x = torch.randn(64, 32)
    trained = fxmem.optimize(build(), budget="1MB", optimizer="adamw")
    optimizer = torch.optim.AdamW(trained.parameters())
    trained(x).square().mean().backward()
    optimizer.step()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"
        torch.save({"model": trained.state_dict(), "optimizer": optimizer.state_dict()}, path)
        state = torch.load(path)

    plain = build()  # no fxmem needed to load it
    plain.load_state_dict(state["model"])
    resumed = fxmem.optimize(build(), budget="1MB", optimizer="adamw")  # or into an optimized module
    resumed.load_state_dict(state["model"])

    trained.eval(), plain.eval(), resumed.eval()
    assert torch.equal(trained(x), plain(x))
    assert torch.equal(trained(x), resumed(x))
    assert list(plain.state_dict()) == list(resumed.state_dict())
    print("same keys, same values:", ", ".join(state["model"]))


if __name__ == "__main__":
    main()
