"""The command line answers what the library answers, in every format, with its exit statuses, and explains itself."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fxmem
from fxmem.cli.main import HELP, build_parser, main
from fxmem.cli.values import input_named, optimizer_named, plain_value
from fxmem.errors import InputError
from tests.report.test_page import data_in

NET = Path(__file__).resolve().parents[2] / "docs" / "commands" / "net.py"
CALL = f"{NET}:Net --input 8x3x32x32 --loss cross_entropy"


def run(text: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main(shlex.split(text))
    out, err = capsys.readouterr()
    return status, out, err


def real_net(**arguments: Any) -> torch.nn.Module:
    spec = importlib.util.spec_from_file_location("net", NET)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Net(**arguments).train()


def test_the_estimate_is_the_librarys_on_the_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(f"estimate {CALL} --arg width=24 --optimizer sgd:momentum=0.9 --format json", capsys)
    found, model = json.loads(out), real_net(width=24)
    targets = torch.zeros(8, dtype=torch.long)
    expected = fxmem.estimate(
        model,
        torch.randn(8, 3, 32, 32),
        loss_fn=lambda output: torch.nn.functional.cross_entropy(output, targets.new_zeros(8)),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )
    assert status == 0
    assert (found["schema"], found["command"], found["fits"]) == (1, "estimate", None)
    assert found["peak_bytes"] == expected.peak_bytes
    assert found["breakdown"] == expected.breakdown.to_dict()


@pytest.mark.slow
def test_an_estimate_imports_no_tracer_and_leaves_torch_as_it_was() -> None:
    script = f"""
import sys
from fxmem.cli.main import main
assert main({["estimate", *shlex.split(CALL), "-q"]}) == 0
assert "torch._dynamo" not in sys.modules
import torch
assert torch._dynamo.is_compiling() is False  # imported now, where it is asked for
add = torch.optim.Optimizer.add_param_group.__wrapped__
assert not hasattr(add, "__dynamo_disable")
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_exit_statuses_tell_whether_it_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(f"estimate {CALL} --budget 1GB -q", capsys)[0] == 0
    status, out, _ = run(f"estimate {CALL} --budget 1MB -q", capsys)
    assert status == 1
    assert "does not fit in 1 MB (--budget)" in out
    assert run("estimate nothing", capsys)[0] == 2
    (tmp_path / "unplannable.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(4, 4)\n"
        "    def forward(self, x):\n"
        "        y = self.layer(x)\n"
        "        return y * 2 if y.sum() > 0 else y\n"
    )
    status, _, err = run(f"estimate {tmp_path / 'unplannable.py'}:Net --input 2x4", capsys)
    assert status == 3
    assert "control flow depends on the values in tensors" in err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{NET}:Nett --input 1x3x8x8", "no model of .* is called 'Nett'; known are Net, Block"),
        (f"{NET}:Net --input 3b", "input '3b' is no shape; write 32x3x224x224"),
        (f"{NET}:Net", "say what .*Net is called with: --input"),
        (f"{NET}:Net --input 1x3x8x8 --dtype fp17", "no floating dtype is called 'fp17'; known are fp32, bf16"),
        (f"{NET}:Net --input 1x3x8x8:int63", "no dtype is called 'int63'; known are fp32"),
        (f"{NET}:Net --input 1x3x8x8 --loss own2", "no loss is called 'own2'; known are own, cross_entropy, mse, sum"),
        (f"{NET}:Net --input 1x3x8x8 --optimizer adamx", "unknown optimizer 'adamx'; known: adadelta"),
        (f"{NET}:Net --input 1x3x8x8 --device a200", "no GPU is known as 'a200'; known are h100-80gb"),
        (f"{NET}:Net --input 1x3x8x8 --budget 8GX", "budget '8GX' is not a size"),
        (f"{NET}:Net --input 1x3x8x8 --arg width:3", "'width:3' sets nothing: write name=value"),
        (
            f"{NET}:Net --input 1x3x8x8 --arg widht=3",
            "Net of .* cannot be made with these arguments: .*widht.*; it takes width",
        ),
        (
            f"{NET}:Net --input 1x3x8x8 --optimizer sgd:momentun=1",
            "SGD has no option 'momentun'; known are lr, momentum",
        ),
        (f"{NET}:Net --input 1x3x8x8 --input 4", "too many positional arguments; it takes images"),
        (f"{NET}:Net --input 1x3x8x8 --format yaml", "no format is called 'yaml'; known are text, json"),
        (f"{NET}:Net --input 1x4x8x8", "does not take these arguments, without fxmem either"),
        ("nowhere.py:Net --input 1", "there is no file nowhere.py"),
        ("nowhere:Net --input 1", "no module is called 'nowhere' here"),
        ("Net --input 1", "'Net' names no model: write package.module:factory"),
    ],
)
def test_what_is_written_wrongly_gets_one_sentence(text: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(f"estimate {text}", capsys)
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert re.search(told, err), err


def test_what_is_assumed_is_printed_with_where_it_is_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXMEM_INPUT", "8x3x32x32")
    monkeypatch.setenv("FXMEM_BUDGET", "1GB")
    _, out, _ = run(f"estimate {NET}:Net", capsys)
    assumed = out.split("assumed\n")[1].splitlines()
    assert sorted(assumed) == [
        "  budget 1GB (environment FXMEM_BUDGET)",
        "  device cpu (default)",
        "  dtype fp32 (default)",
        "  input 8x3x32x32 (environment FXMEM_INPUT)",
        "  loss own (the output's loss, else the sum of its floating tensors)",
        "  optimizer adamw (default)",
    ]
    assert "assumed" not in run(f"estimate {NET}:Net --quiet", capsys)[1]


def test_help_comes_without_torch() -> None:
    script = """
import sys
from fxmem.cli.main import HELP, main
for words in (["--help"], *([name, "--help"] for name in HELP)):
    try:
        main(words)
    except SystemExit:
        pass
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "scipy", "networkx", "sympy"}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_help_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [build_parser().format_help()]
    for name in HELP:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        texts.append(capsys.readouterr().out)
    for text in texts:
        assert len(text.splitlines()) <= 50
        assert max(map(len, text.splitlines())) <= 80


def test_formats_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    answers = {style: run(f"estimate {CALL} --format {style}", capsys)[1] for style in ("text", "markdown", "github")}
    headline = answers["text"].splitlines()[0]
    assert answers["markdown"].startswith(f"**{headline}**\n")
    assert answers["github"].splitlines()[0].endswith(f"::{headline}")
    assert all("activations" in answer for answer in answers.values())
    assert "\x1b" not in "".join(answers.values())


@pytest.mark.slow
def test_a_plan_keeps_the_budget_or_says_what_is_least(capsys: pytest.CaptureFixture[str]) -> None:
    eager = json.loads(run(f"estimate {CALL} --format json", capsys)[1])["peak_bytes"]
    status, out, _ = run(f"plan {CALL} --budget {eager - 400_000} --format json --plan-seconds 2", capsys)
    assert status == 0
    assert json.loads(out)["predicted_peak_bytes"] <= eager - 400_000
    assert json.loads(out)["dropped_bytes"] > 0
    status, out, _ = run(f"plan {CALL} --budget 1MB --plan-seconds 2", capsys)
    assert status == 1
    assert "is below the least reachable peak" in out


@pytest.mark.slow
def test_a_page_is_written_of_the_plan_or_of_the_step_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    for budget, status in (("3MB", 0), ("1MB", 1)):
        assert run(f"plan {CALL} --budget {budget} --plan-seconds 1 --html {path}", capsys)[0] == status
        data = data_in(path.read_text(encoding="utf-8"))
        assert data["title"].endswith("net.py:Net")
        assert (data["planned_peak_bytes"] <= data["budget_bytes"]) == (status == 0)
        assert data["sentence"].endswith("which no plan that was found keeps.") == (status == 1)


@pytest.mark.exhaustive
def test_a_page_of_advice_has_its_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    status, out, _ = run(f"advise {CALL} --budget 1MB --plan-seconds 1 --html {path} --format json", capsys)
    found, advice = json.loads(out), data_in(path.read_text(encoding="utf-8"))["advice"]
    assert (status, advice["verdict"]) == (found["status"], found["answer"])
    assert [row[0] for row in advice["rows"]] == [row["label"] for row in found["rows"]]


def test_a_page_that_cannot_be_written_is_told_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, err = run(f"report {CALL} --html {tmp_path}/nowhere/page.html", capsys)
    assert status == 2
    assert err.endswith("page.html: No such file or directory\n")


def test_inputs_settings_and_optimizers_are_read_as_they_are_written() -> None:
    spec = input_named("input_ids=4x512:int64<50257")
    assert (spec.name, spec.shape, spec.dtype, spec.below) == ("input_ids", (4, 512), torch.int64, 50257)
    assert input_named("7").shape == (7,)
    assert input_named("use_cache=false").value is False
    assert input_named("8x3").with_batch(2).shape == (2, 3)
    assert [plain_value(text) for text in ("3", "0.5", "true", "none", "(1, 2)", "relu")] == [
        3,
        0.5,
        True,
        None,
        (1, 2),
        "relu",
    ]
    assert optimizer_named("none") is None
    made = optimizer_named("sgd:momentum=0.9,nesterov=true")
    assert isinstance(made, type)
    assert made([torch.zeros(1, requires_grad=True)]).defaults["nesterov"] is True  # type: ignore[call-arg]
    with pytest.raises(InputError, match="dimension of size 0"):
        input_named("0x3")
