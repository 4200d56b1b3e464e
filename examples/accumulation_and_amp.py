"""Gradient accumulation under autocast with a GradScaler: say so in a TrainingStep, and the bound holds for it."""

import torch
from torch import nn

import fxmem

MICRO_BATCHES = 4


def main() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    batches = torch.randn(MICRO_BATCHES, 128, 64)

    step = fxmem.TrainingStep(
        optimizer=optimizer,
        loss_fn=lambda output: output.float().square().mean(),
        accumulate=True,  # gradients of earlier micro-batches are there when a micro-batch begins
        scaler=scaler,
        autocast=torch.bfloat16,
    )
    needed = fxmem.estimate(model, batches[0], step=step)
    budget = (needed.peak_bytes + needed.floor_bytes) // 2
    model = fxmem.optimize(model, batches[0], budget=budget, step=step)

    for _ in range(2):
        for micro_batch in batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(micro_batch).float().square().mean()
            scaler.scale(loss / MICRO_BATCHES).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        print(f"loss {loss.item():.4f}")
    print(model.fxmem.report)
    assert model.fxmem.report.predicted_peak_bytes <= budget < needed.peak_bytes


if __name__ == "__main__":
    main()
