"""Measure any block of code, with or without fxmem: peak, timeline and files for Perfetto and torch's visualizer."""

import tempfile
from pathlib import Path

import torch
from torch import nn

import fxmem


def main() -> None:
    model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(128, 64)
    optimizer = torch.optim.AdamW(model.parameters())

    with fxmem.track(model, optimizer, x) as memory:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()

    steps = memory.timeline.steps
    print(f"peak {memory.peak_bytes} bytes at {steps[memory.timeline.peak_step].label}, {len(steps)} events")
    for phase in fxmem.Phase:
        print(f"{phase:10} {max((s.live_bytes for s in steps if s.phase is phase), default=0):8} bytes at most")

    with tempfile.TemporaryDirectory() as folder:
        memory.write_chrome_trace(Path(folder) / "trace.json")  # for Perfetto
        memory.write_memory_snapshot(Path(folder) / "snapshot.pickle")  # for torch's memory visualizer
        print(sorted(path.name for path in Path(folder).iterdir()))
    assert memory.peak_bytes > memory.start_bytes


if __name__ == "__main__":
    main()
