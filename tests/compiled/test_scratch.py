"""What ops take inside is measured on the CPU, once for each layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxmem.compiled import scratch
from fxmem.torch_private import FakeTensorMode

aten = torch.ops.aten


def test_what_an_op_holds_inside_is_measured_once_on_fakes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        x = torch.empty(100, 100)
        found = scratch.scratch_bytes(aten.logsumexp.default, (x, [1]), {})
        assert found >= x.nbytes, "the exponentials are all there before they are summed"

        def again(*args: Any) -> int:
            raise AssertionError("measured twice")

        monkeypatch.setattr(scratch, "_measured", again)
        assert scratch.scratch_bytes(aten.logsumexp.default, (x, [1]), {}) == found


def test_an_op_that_takes_nothing_inside_counts_nothing() -> None:
    assert scratch.scratch_bytes(aten.relu.default, (torch.empty(64),), {}) == 0


def test_a_product_that_is_added_to_what_lies_transposed_copies_that_in_blocks() -> None:
    a, out = torch.empty(64, 64), torch.empty(64, 64)
    found = [scratch.scratch_bytes(aten.addmm.out, (c, a, a), {"out": out}) for c in (a, a.T)]
    assert found[0] == 0
    assert found[1] > 0


def test_an_op_that_takes_more_of_larger_numbers_is_counted_with_more() -> None:
    matrix, before = torch.zeros(32, 32), torch.get_rng_state()
    found = scratch.scratch_bytes(aten.linalg_matrix_exp.default, (matrix,), {})
    assert found > scratch._measured(aten.linalg_matrix_exp.default, (matrix,), {})
    assert torch.equal(before, torch.get_rng_state())


def test_random_ops_are_not_run_to_be_measured() -> None:
    before = torch.get_rng_state()
    assert scratch.scratch_bytes(aten.bernoulli.default, (torch.ones(64),), {}) == 0
    assert torch.equal(before, torch.get_rng_state())


def test_an_op_is_timed_once_for_each_layout_on_fakes_too() -> None:
    with FakeTensorMode():
        x, weight = torch.empty(2, 8, 16, 16), torch.empty(8, 8, 3, 3)
        rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        before = len(scratch._TIMED)
        found = scratch.op_seconds(aten.convolution.default, (x, weight, *rest), {})
        assert found > 0
        assert scratch.op_seconds(aten.convolution.default, (x, weight, *rest), {}) == found
        scratch.op_seconds(aten.convolution.default, (x.to(memory_format=torch.channels_last), weight, *rest), {})
    assert len(scratch._TIMED) == before + 2
