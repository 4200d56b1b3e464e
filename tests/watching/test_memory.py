"""What is watched is what is measured; a budget is warned of before it is reached, once; a script runs as by itself."""

from __future__ import annotations

import io
import json
import shlex
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.cli.main import main
from fxmem.watching.gauges import Reading
from fxmem.watching.live_line import line_of

MIB = 1 << 20


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_the_peak_is_the_one_that_track_measures() -> None:
    (model, optimizer), x = model_and_optimizer(), torch.randn(128, 64)
    step(model, optimizer, x)
    with fxmem.track(model, optimizer, x) as measured:
        step(model, optimizer, x)
    with fxmem.watch(model, optimizer, x, live=False) as memory:
        step(model, optimizer, x)
    (reading,) = memory.readings()
    assert (reading.device, reading.peak_bytes) == ("cpu", measured.peak_bytes)
    assert memory.budgets == {}


def test_a_callback_is_given_numbers_at_the_end_of_each_step() -> None:
    (model, optimizer), x = model_and_optimizer(), torch.randn(128, 64)
    records: list[dict[str, float]] = []
    with fxmem.watch(model, optimizer, x, budget="1GB", callback=records.append, live=False) as memory:
        for _ in range(3):
            step(model, optimizer, x)
    assert [record["step"] for record in records] == [1, 2, 3] == list(range(1, memory.num_steps + 1))
    assert {name for record in records for name in record} == {
        "step",
        "seconds",
        "cpu/allocated_bytes",
        "cpu/reserved_bytes",
        "cpu/peak_bytes",
        "cpu/budget_bytes",
    }
    assert records[-1]["cpu/budget_bytes"] == 10**9
    assert records[1]["cpu/allocated_bytes"] == records[2]["cpu/allocated_bytes"]
    assert records[0]["cpu/peak_bytes"] <= records[1]["cpu/peak_bytes"] == memory.readings()[0].peak_bytes


def test_a_gan_has_one_step_for_two_optimizers() -> None:
    (model, optimizer), (other, second) = model_and_optimizer(), model_and_optimizer()
    steps: list[float] = []
    with fxmem.watch(callback=lambda record: steps.append(record["step"]), devices=["cpu"], live=False):
        for _ in range(3):
            step(model, optimizer, torch.randn(4, 64))
            step(other, second, torch.randn(4, 64))
    assert steps == [1, 2, 3]


def test_the_budget_is_warned_of_once_before_it_is_reached() -> None:
    held: list[Tensor] = []
    with warnings.catch_warnings(record=True) as told, fxmem.watch(held, budget=10 * MIB, live=False):
        warnings.simplefilter("always")
        while len(held) < 9:
            assert not told
            held.append(torch.zeros(MIB, dtype=torch.uint8))
        assert len(told) == 1
        held += [torch.zeros(MIB, dtype=torch.uint8) for _ in range(2)]
    (one,) = told
    assert str(one.message).startswith(
        f"in step 1 9.437 MB ({9 * MIB} bytes) were allocated on cpu, which is 90% of the budget of 10.49 MB: "
        f"fxmem.optimize(model, budget={10 * MIB}) plans a step that keeps it"
    )
    assert one.filename == __file__


def test_an_optimized_models_budget_is_watched() -> None:
    model = fxmem.optimize(model_and_optimizer()[0], torch.randn(128, 64), budget="2MB")
    assert fxmem.watch(model, live=False).budgets == {"cpu": 2_000_000}


def test_what_is_no_device_is_refused() -> None:
    with pytest.raises(fxmem.InputError, match="devices are cpu, cuda:0"):
        fxmem.watch(devices=["meta"])


def test_the_live_line_names_every_device_and_its_share() -> None:
    readings = [Reading("cuda:0", 10**9, 2 * 10**9, 4 * 10**9), Reading("cuda:1", 10**9, 2 * 10**9, 8 * 10**9)]
    assert line_of(7, readings, {"cuda:0": 8 * 10**9}) == (
        "fxmem: step 7 | cuda:0 1 GB, reserved 2 GB, peak 4 GB of 8 GB [==========          ] 50% | "
        "cuda:1 1 GB, reserved 2 GB, peak 8 GB"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_is_written_to_terminals_only_and_goes_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxmem.watching.live_line.TURN_SECONDS", 0.01)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with fxmem.watch(devices=["cpu"]):
        time.sleep(0.1)
    assert "fxmem: step 0 | cpu" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    with fxmem.watch(devices=["cpu"]):
        time.sleep(0.05)
    assert pipe.getvalue() == ""


# -- the command -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
print(sys.argv[1:], __name__)
parameter = torch.nn.Parameter(torch.zeros(1 << 20))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for _ in range(3):
    parameter.sum().backward()
    optimizer.step()
sys.exit(int(sys.argv[1]))
"""


def run(text: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    return main(shlex.split(text)), capsys.readouterr().out


def test_a_script_runs_as_by_itself_and_is_told_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script, log, before = tmp_path / "script.py", tmp_path / "log.jsonl", (sys.argv, list(sys.path))
    script.write_text(SCRIPT)
    status, out = run(f"watch --budget 1GB --log {log} --format json {script} 0 --lr 3", capsys)
    said, _, answer = out.partition("\n")
    found: dict[str, Any] = json.loads(answer)
    assert (status, said) == (0, "['0', '--lr', '3'] __main__")
    assert (found["num_steps"], found["script_status"], found["fits"]) == (3, 0, True)
    (device,) = found["devices"]
    assert device["peak_bytes"] == 2 * 4 * MIB + 8  # parameter and sum, and the gradient of each
    assert device["budget_bytes"] == 10**9
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2, 3]
    assert (sys.argv, sys.path) == before


def test_exit_statuses_are_the_scripts_or_the_budgets(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert run(f"watch -q {script} 7", capsys)[0] == 7
    with pytest.warns(UserWarning, match="is over the budget of 1 MB"):
        status, out = run(f"watch -q --budget 1MB {script} 0", capsys)
    assert (status, out.splitlines()[-1]) == (1, "peak 8.389 MB on cpu in 3 steps; over the budget")
    assert main(["watch", "nowhere.py"]) == 2
    assert "no script is at nowhere.py" in capsys.readouterr().err
