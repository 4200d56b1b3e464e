"""A plain training loop inside a memory budget: one line more than without fxmem."""

import torch
from torch import nn

import fxmem


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def main() -> None:
    model = nn.Sequential(*(block(64) for _ in range(6)), nn.Linear(64, 10))
    x, target = torch.randn(256, 64), torch.randint(10, (256,))
    loss_fn = nn.CrossEntropyLoss()

    model = fxmem.optimize(model, budget="5MB", optimizer="adamw", loss_fn=lambda output: loss_fn(output, target))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(3):
        with fxmem.track(model, optimizer, x) as memory:  # only to show the peak
            output = model(x)  # the first call plans
            loss = loss_fn(output, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        print(f"step {step}: loss {loss.item():.4f}, peak {memory.peak_bytes} bytes")

    report = model.fxmem.report
    print(f"predicted {report.predicted_peak_bytes} bytes, eager {report.eager_peak_bytes} bytes")
    assert memory.peak_bytes == report.predicted_peak_bytes <= 5_000_000 < report.eager_peak_bytes


if __name__ == "__main__":
    main()
