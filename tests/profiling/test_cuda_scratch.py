"""Rules of what CUDA ops take inside, against figures that torch's own CUDA host code gave (``tests/cuda_stub``)."""

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fxmem.devices import DEVICES, rounded
from fxmem.profiling import (
    cuda_scratch_libraries,  # noqa: F401  (its rules)
    cudnn_workspace,
    device_memory,
)
from fxmem.profiling.cuda_reduction import TensorRecord, contiguous, reduction_blocks
from fxmem.profiling.cuda_scratch import RULES, Scratch, scratch_of
from fxmem.profiling.cudnn_workspace import (
    ALIGNING_BYTES,
    MOST_PARTS_BYTES,
    PARTS,
    measured_workspaces,
    workspace_bound,
)

DATA = Path(__file__).parents[1] / "data"
RECORDED = {device: f"cuda_scratch_{device}_torch2.14.1.json" for device in ("h100-80gb", "a100-80gb")}
SMALL_BOUND_BYTES = 6 << 20
"""An upper bound may lie this far above what was measured, or half as much again."""


def reduced_bytes(*args: Any) -> int:
    return sum(reduction_blocks(*args))


@cache
def recorded(device: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / RECORDED[device]).read_text())
    return found


def as_argument(value: Any) -> Any:
    if isinstance(value, dict):
        return TensorRecord(tuple(value["shape"]), tuple(value["strides"]), value["dtype"], value.get("offset", 0))
    return [as_argument(v) for v in value] if isinstance(value, list) else value


def predicted(record: dict[str, Any], device: str) -> Scratch:
    args = {name: as_argument(value) for name, value in record["args"].items()}
    return scratch_of(record["op"], args, DEVICES[device])


NOT_RECORDED = frozenset(
    ("_addmm_activation", "_scaled_mm", "_int_mm", "addbmm", "addmv", "vdot", "_index_put_impl_")
    + ("_embedding_bag_dense_backward", "index_put_")
)
"""Ops that no case calls by this name; their rules are those of others."""


@pytest.mark.parametrize("device", RECORDED)
@pytest.mark.parametrize("op", sorted(RULES.keys() - NOT_RECORDED))
def test_a_rule_gives_what_was_recorded_or_says_that_it_is_a_bound(op: str, device: str) -> None:
    by_device = {each: [r for r in recorded(each)["ops"] if r["op"].split(".")[1] == op] for each in RECORDED}
    assert any(by_device.values())  # an A100 never chooses cuDNN's attention
    records = by_device[device]
    for record in records:
        found, seen = predicted(record, device), (record["scratch"], max(0, record["kept"]))
        if found.exact:
            assert (found.transient_bytes, found.kept_bytes) == seen, record
        else:
            assert seen[0] <= found.transient_bytes <= max(1.5 * seen[0], seen[0] + SMALL_BOUND_BYTES), record
            assert seen[1] == found.kept_bytes, record


@pytest.mark.parametrize("device", RECORDED)
def test_every_op_that_took_scratch_has_a_rule(device: str) -> None:
    took = {r["op"].split(".")[1] for r in recorded(device)["ops"] if r["scratch"] or r["kept"] > 0}
    assert took <= RULES.keys()
    assert len(recorded(device)["take_nothing"]) > 60
    assert not {op.split(".")[1] for op in recorded(device)["take_nothing"]} & RULES.keys()


def test_most_figures_are_exact_and_the_large_families_rest_on_ten_shapes() -> None:
    exact, shapes = Counter[bool](), Counter[str]()
    for device in RECORDED:
        for record in recorded(device)["ops"]:
            if record["op"].split(".")[1] in RULES:
                exact[predicted(record, device).exact] += 1
                shapes[record["op"].split(".")[1]] += 1
    assert exact[True] > 0.8 * exact.total()
    for op in (
        "sum",
        "mean",
        "var",
        "std",
        "amax",
        "_softmax_backward_data",
        "embedding_dense_backward",
        "sort",
        "topk",
    ):
        assert shapes[op] >= 20, op  # on two devices


@pytest.mark.parametrize("device", RECORDED)
def test_fakes_with_the_rules_are_never_below_the_device(device: str) -> None:
    """But for the 16 bytes of seed and offset that attention's fakes hold in the forward and the device in the backward."""
    for case in recorded(device)["cases"]:
        for direction, seen in case["stub"].items():
            assert case["fakes_and_rules"][direction] >= seen - 16, case


def test_nineteen_of_twenty_cases_are_put_right_to_the_byte_and_the_rest_is_known() -> None:
    """A product's gradient goes another way where a value is zero, which fakes cannot tell; large sorts are bounds."""
    cases = recorded("h100-80gb")["cases"]
    wrong = [case["case"] for case in cases if case["fakes_and_rules"] != case["stub"]]
    assert len(cases) >= 200
    assert len(wrong) <= 0.05 * len(cases)
    assert {name.split()[1] for name in wrong} == {"prod", "sort"}


def test_the_bias_gradient_of_a_linear_takes_a_third_of_its_budget_more() -> None:
    rows = contiguous((16384, 512), "float32")
    assert reduced_bytes(rows, (0,), DEVICES["h100-80gb"], 4) == 67_108_880
    assert reduced_bytes(rows, (1,), DEVICES["h100-80gb"], 4) == 0  # along rows no two blocks share an output
    assert reduced_bytes(contiguous((2048, 513), "float32"), (0,), DEVICES["h100-80gb"], 4) == 0


def test_scratch_grows_with_the_number_of_sms_and_falls_with_smaller_ones() -> None:
    rows = contiguous((16384, 2048), "float32")
    by_name = {name: reduced_bytes(rows, (0,), DEVICES[name], 4) for name in ("h100-80gb", "a100-80gb", "t4")}
    assert by_name["h100-80gb"] > by_name["a100-80gb"] > by_name["t4"] > 0


def test_an_op_without_a_rule_takes_nothing() -> None:
    assert scratch_of("aten.relu.default", {}, DEVICES["h200"]) == Scratch()


IMAGES = contiguous((4, 32, 64, 64), "float32")
KERNEL = contiguous((64, 32, 3, 3), "float32")
GRADIENT = contiguous((4, 64, 64, 64), "float32")
PART = TensorRecord((4, 64, 64, 64), (2 * 64**3, 64**2, 64, 1), "float32")
"""The gradient of one part of a concatenation: with gaps."""
LAST = TensorRecord((4, 64, 64, 64), (64**3, 1, 64**2, 64), "float32")


@pytest.mark.parametrize(
    ("grad", "x", "mask", "taken"),
    [
        (GRADIENT, IMAGES, (True, True, True), 0),
        (PART, IMAGES, (True, True, True), GRADIENT.nbytes - 256),  # copied before the bias's gradient is made
        (LAST, IMAGES, (True, True, True), GRADIENT.nbytes - 256),
        (PART, IMAGES, (True, True, False), GRADIENT.nbytes),
        (GRADIENT, replace(IMAGES, strides=(2 * 32 * 64**2, 64**2, 64, 1)), (True, True, False), IMAGES.nbytes),
        (PART, replace(IMAGES, strides=(2 * 32 * 64**2, 64**2, 64, 1)), (True, False, False), GRADIENT.nbytes),
    ],
)
def test_a_convolution_copies_gradients_and_inputs_with_gaps(grad: Any, x: Any, mask: Any, taken: int) -> None:
    args = {"grad_output": grad, "input": x, "weight": KERNEL, "output_mask": mask, "groups": 1}
    assert scratch_of("aten.convolution_backward.default", args, DEVICES["h100-80gb"]).transient_bytes == taken


def record(x: torch.Tensor) -> TensorRecord:
    return contiguous(tuple(x.shape), str(x.dtype).removeprefix("torch."))


@pytest.mark.parametrize(
    ("transposed", "stride", "padding", "dilation", "groups"),
    [(False, 1, 1, 1, 1), (False, 2, 3, 1, 1), (False, 1, 0, 2, 4), (True, 2, 1, 1, 1), (True, 3, 0, 2, 2)],
)
def test_a_convolution_s_workspace_holds_padded_copies_of_input_weight_and_result_and_parts(
    transposed: bool, stride: int, padding: int, dilation: int, groups: int
) -> None:
    channels = (8, 12 // groups) if transposed else (12, 8 // groups)
    x, weight = torch.empty(2, 8, 17, 23, device="meta"), torch.empty(*channels, 3, 5, device="meta")
    geometry = ([stride], [padding], [dilation], transposed, [0], groups)
    result = torch.ops.aten.convolution(x, weight, None, *geometry)
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    args = {"input": record(x), "weight": record(weight), **dict(zip(names, geometry, strict=True))}
    padded = [t.nbytes // t.shape[1] * groups * -(-t.shape[1] // groups // 4) * 4 for t in (x, result)]
    copies = sum(padded) + weight.nbytes + ALIGNING_BYTES
    assert workspace_bound("convolution", args) == copies + PARTS * result.nbytes
    backward = workspace_bound("convolution_backward", args | {"grad_output": record(result)})
    assert backward == copies + PARTS * max(x.nbytes, weight.nbytes)


def test_winograd_s_transform_takes_two_and_a_quarter_times_input_and_result_in_fp32() -> None:
    layer = {"stride": [1], "padding": [1], "dilation": [1], "transposed": False, "output_padding": [0], "groups": 1}
    for dtype, item in (("float32", 4), ("float16", 2)):
        args = {"input": contiguous((16, 64, 56, 56), dtype), "weight": contiguous((64, 64, 3, 3), dtype), **layer}
        maps, kernels = 2 * 16 * 64 * 56 * 56, 64 * 64
        copied = item * (maps + 9 * kernels) + ALIGNING_BYTES
        whole = copied if item == 2 else 9 * maps + 144 * kernels
        assert workspace_bound("convolution", args) == whole + MOST_PARTS_BYTES
    assert workspace_bound("mm", {}) == 0


def test_the_bound_holds_for_what_convolutions_took_on_a_gpu() -> None:
    """The tightest calls of each network, dtype and layout on an H200."""
    calls = json.loads((DATA / "cudnn_workspaces_h200.json").read_text())["calls"]
    assert len(calls) >= 60
    for call in calls:
        args = {name: as_argument(value) for name, value in call["args"].items()}
        known_bytes = scratch_of(call["op"], args, DEVICES["h200"]).transient_bytes
        assert call["bytes"] <= known_bytes + workspace_bound(call["op"], args), call


def test_a_workspace_is_what_an_op_is_handed_out_beside_results_and_known_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handed_out = 0

    def convolution_backward(grad_output: torch.Tensor, input: torch.Tensor, output_mask: list[bool]) -> Any:
        nonlocal handed_out
        results = [input.clone() if output_mask[0] else None, grad_output.clone() if output_mask[1] else None]
        handed_out += sum(t.nbytes for t in results if t is not None) + 4096 + (100 if output_mask[0] else 20)
        return results

    monkeypatch.setattr(cudnn_workspace, "_handed_out", lambda device: handed_out)
    monkeypatch.setattr(cudnn_workspace, "_MEASURED", {})
    arguments = {"grad_output": torch.ones(3), "input": torch.ones(5)}
    for mask, expected in (([True, True, False], (100, 20)), ([False, True, True], (0, 20))):
        found = measured_workspaces(convolution_backward, {**arguments, "output_mask": mask}, lambda call: 4096)
        assert found == expected
    assert measured_workspaces(lambda **given: 1 / 0, arguments, lambda call: 0) is None  # it does not run
    assert measured_workspaces(lambda **given: [torch.ones(4)], arguments, lambda call: 0) is None  # not counted here


def test_settings_are_read_where_precisions_were_set_by_newer_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flags:
        enabled = benchmark = deterministic = False

        @property
        def allow_tf32(self) -> bool:
            raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch.backends, "cudnn", Flags())
    assert cudnn_workspace._settings()[-1] is None


def test_a_workspace_comes_after_each_gradient_and_none_of_nothing() -> None:
    scratch = Scratch(first=(1000,), late_bytes=512)
    assert device_memory._with_workspaces(scratch, (0, 0)) == scratch
    both = device_memory._in_blocks(device_memory._with_workspaces(scratch, (0, 3000)))
    assert (both.first, both.after, both.transient_bytes) == ((1024,), (0, 3072), 1024 + 3072 - 512)
    assert device_memory._with_workspaces(Scratch(blocks=(512,)), (100,)).transient_bytes == 612


def test_each_tensor_that_a_group_norm_makes_inside_is_a_block_of_its_own() -> None:
    """The allocator rounds each up: 7,168 bytes, as PyTorch's host code took, where their sum is 6,656 rounded."""
    record = TensorRecord((8, 64, 4, 4), (1024, 16, 4, 1), "float32")
    args = {"N": 8, "C": 64, "HxW": 16, "group": 8, "weight": TensorRecord((64,), (1,), "float32")}
    backward = scratch_of(
        "native_group_norm_backward", {"grad_out": record, "input": record, **args}, DEVICES["a100-80gb"]
    )
    assert sum(map(rounded, backward.blocks)) == 7168
