"""What is measured: every storage once, from birth to death, by phase; and the files others read."""

import json
import pickle
from pathlib import Path

import torch
from torch import nn

import fxmem
from fxmem.ir import Phase
from fxmem.profiling.training_step import run_step


def test_views_weigh_nothing_and_storages_count_until_freed() -> None:
    x = torch.empty(1024, dtype=torch.uint8)
    with fxmem.track(x) as memory:
        y = x + 1
        z = y[::2].view(2, -1)
        del y
        w = z.clone()
        del z
        _ = w + 1
    assert memory.start_bytes == 1024
    assert memory.peak_bytes == 1024 + 1024 + 512
    assert [e.nbytes for e in memory.events if e.kind == "alloc"][1:] == [1024, 512, 512]


def test_without_holders_every_tensor_of_the_process_counts() -> None:
    x = torch.empty(4096, dtype=torch.uint8)
    with fxmem.track() as memory:
        pass
    assert memory.start_bytes >= x.nbytes


def test_measured_and_predicted_timelines_have_the_same_phases_and_peaks(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).train()
    x = torch.randn(4, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    predicted = fxmem.estimate(model, x, optimizer=optimizer).timeline
    run_step(lambda: model(x), None, optimizer)
    with fxmem.track(model, optimizer, x) as memory:
        run_step(lambda: model(x), None, optimizer, on_phase=memory.phase)
    measured, start_bytes = memory.timeline, memory.start_bytes
    assert measured.peak_bytes == predicted.peak_bytes
    for phase in Phase:
        of_phase = [[s.live_bytes for s in t.steps if s.phase is phase] for t in (measured, predicted)]
        assert max(of_phase[0]) == max(of_phase[1]), phase
        assert set(of_phase[1]) <= {start_bytes, *of_phase[0]}, phase  # laid over each other, point by point


def test_traces_are_readable_by_other_tools(tmp_path: Path) -> None:
    model, x = nn.Linear(16, 16), torch.randn(2, 16)
    with fxmem.track(model, x) as memory:
        model(x).sum().backward()
    memory.write_chrome_trace(tmp_path / "trace.json")
    memory.write_memory_snapshot(tmp_path / "snapshot.pickle")
    records = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert max(r["args"]["bytes"] for r in records if r["ph"] == "C") == memory.peak_bytes
    assert {r["name"] for r in records if r["ph"] == "X"} == {"forward", "backward"}
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    live = peak = 0
    for entry in snapshot["device_traces"][0]:
        live += entry["size"] if entry["action"] == "alloc" else -entry["size"]
        peak = max(peak, live)
    assert peak == memory.peak_bytes
