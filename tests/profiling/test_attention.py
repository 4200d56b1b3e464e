"""The attention kernel that fakes on a GPU choose, and its arguments, against what torch's own CUDA host code did
(``tests/cuda_stub/probe_attention.py``)."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fxmem.devices import device_named
from fxmem.errors import InputError
from fxmem.fake.attention import batch_of_one, call_of, settings
from fxmem.fake.fake_tensors import FakeWorld
from fxmem.fake.stand_in import standing_in
from fxmem.op_facts.attention import attention_kernel
from tests.cuda_stub.attention_cases import (
    LETTERS,
    AttentionCase,
    blocks,
    module_traces,
    name_of,
    setting_of,
    tensors_of,
    trace_of,
    traced,
)
from tests.cuda_stub.probe_attention import table

FILE = Path(__file__).parents[1] / "data/attention_torch2.14.1.json"
RECORDED: dict[str, Any] = json.loads(FILE.read_text())


@pytest.fixture(autouse=True)
def as_in_the_recorded_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxmem.fake.attention.torch_release", lambda: (2, 14))


@cache
def calls() -> dict[str, list[tuple[AttentionCase, Any, Any]]]:
    """Every call with what the choice looks at: the same on all devices."""
    return {name: [(case, *looked_at(case)) for case in cases] for name, cases in blocks().items()}


def looked_at(case: AttentionCase) -> tuple[Any, Any]:
    with setting_of(case):
        tensors = tensors_of(case, "meta")
        q, k, v, mask = batch_of_one(*tensors) if case.layout == "3d" else tensors
        return call_of(q, k, v, mask, case.dropout, case.causal, case.grouped), settings()


@pytest.mark.slow
@pytest.mark.parametrize("device", RECORDED["choices"])
def test_the_kernel_is_the_one_that_torch_chose(device: str) -> None:
    capability, recorded = device_named(device).capability, RECORDED["choices"][device]
    assert recorded.keys() == calls().keys()
    for block, letters in recorded.items():
        found = "".join(LETTERS[attention_kernel(call, capability, allowed)] for _, call, allowed in calls()[block])
        assert len(found) == len(letters)
        wrong = [i for i, (a, b) in enumerate(zip(found, letters, strict=True)) if a != b]
        assert not wrong, [(name_of(calls()[block][i][0]), found[i], letters[i]) for i in wrong[:5]]


@pytest.mark.slow
def test_capabilities_that_share_a_column_of_the_table_choose_alike() -> None:
    chosen = RECORDED["choices"]
    assert chosen["a10g"] == chosen["l4"]
    for device, letters in chosen.items():
        by_case = {name_of(c): found for c, found in zip(blocks()["widths"], letters["widths"], strict=True)}
        for name, found in by_case.items():
            if name.startswith("dtype=float16"):
                of_bfloat16 = by_case[name.removeprefix("dtype=float16").strip() or "plain"]
                assert of_bfloat16 == ("m" if device == "t4" else found), (device, name)


def test_the_documentation_has_the_table_that_was_recorded() -> None:
    lines = table(RECORDED)
    assert len(lines) <= 25
    assert "\n".join(lines) in (Path(__file__).parents[2] / "docs/limits.md").read_text()


@contextmanager
def fakes_on(device: str) -> Iterator[None]:
    with standing_in(device_named(device)), FakeWorld().active():
        yield


def forward_only(case: AttentionCase, trace: list[str]) -> bool:
    """Before 2.14, fakes of the efficient kernel's backward know no grouped queries, which it did not take."""
    grouped = case.heads[1] != case.heads[0] and "efficient" in trace[0] and "backward" in trace
    return grouped and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)


@pytest.mark.slow
@pytest.mark.parametrize("device", RECORDED["traces"])
def test_fakes_dispatch_what_torch_did_forward_and_backward(device: str) -> None:
    recorded, lines = RECORDED["traces"][device], RECORDED["lines"]
    assert recorded.keys() == traced().keys()
    for name, case in traced().items():
        wanted = [lines[place] for place in recorded[name]]
        with fakes_on(device):
            found = trace_of(case)
        if forward_only(case, wanted):
            found, wanted = (trace[: trace.index("backward")] for trace in (found, wanted))
        assert found == wanted, name


@pytest.mark.slow
@pytest.mark.parametrize("device", RECORDED["modules"])
def test_modules_with_attention_dispatch_what_torch_did(device: str) -> None:
    recorded, lines = RECORDED["modules"][device], RECORDED["lines"]
    with fakes_on(device):
        found = module_traces()
    assert found == {name: [lines[place] for place in trace] for name, trace in recorded.items()}


def test_a_call_that_no_enabled_kernel_takes_is_refused() -> None:
    only_flash = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION)
    with fakes_on("a100-80gb"), only_flash:
        q = torch.empty(2, 4, 16, 64, device="cuda")
        with pytest.raises(
            InputError, match=r"no attention kernel that is enabled takes this call on a100-80gb \(float32"
        ):
            torch.nn.functional.scaled_dot_product_attention(q, q, q)


def test_before_torch_2_14_grouped_queries_and_three_dimensions_go_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxmem.fake.attention.torch_release", lambda: (2, 13))
    grouped = AttentionCase("float32", heads=(4, 2, 2), grouped=True)
    wide = AttentionCase(width=256)
    with fakes_on("h100-80gb"):
        assert not any("efficient" in line for line in trace_of(grouped))
        assert not any("efficient" in line for line in trace_of(AttentionCase("float32", layout="3d")))
        assert "flash" in trace_of(wide)[0]
        assert "cudnn" in trace_of(AttentionCase())[0]
