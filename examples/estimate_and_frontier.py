"""Questions before training: how much memory, where, what batch fits, and what does each budget cost."""

import torch
from torch import nn

import fxmem


def main() -> None:
    layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(2))
    model, x = nn.Sequential(*layers), torch.randn(128, 64)
    step = fxmem.TrainingStep(optimizer="adamw")

    estimate = fxmem.estimate(model, x, step=step)
    print(estimate)  # peak, place and kinds
    print("fits 2 MB as it is:", estimate.fits("2MB"))
    print("largest batch in 4 MB:", estimate.max_batch_size("4MB"))
    print("with recomputation:", estimate.max_batch_size("4MB", recompute=True))

    points = fxmem.frontier(model, x, step=step)
    for point in points:
        print(f"budget {point.budget_bytes:9d} bytes: {point.overhead_ratio:6.1%} more time (estimate)")
    assert points[0].budget_bytes > points[-1].budget_bytes == estimate.floor_bytes

    with torch.device("meta"):  # a model that has no memory yet
        large = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(8)))
        needed = fxmem.estimate(large, torch.randn(64, 8192), step=step)
    print(f"a larger model would take {needed.peak_bytes / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
