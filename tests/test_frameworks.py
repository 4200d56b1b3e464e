"""What the committed table of frameworks says, and that peaks of several processes are as predicted."""

import json

import pytest

from benchmarks import frameworks
from benchmarks.frameworks import PATH, FrameworkRow

TOLD = ("above the budget", "counts in no budget", "comes on top of the budget")


def rows() -> list[FrameworkRow]:
    return [FrameworkRow(**row) for row in json.loads(PATH.read_text())["rows"]]


def test_no_loop_of_a_framework_trains_with_other_numbers_or_saves_other_files() -> None:
    for row in rows():
        name = f"{row.framework}: {row.loop}"
        assert row.result in ("runs", "refused"), name
        assert row.trains, f"{name}: the remedy that the error names does not work"
        assert row.same_bits, name
        assert row.saved_alike is not False, name


def test_what_goes_over_the_budget_is_told() -> None:
    for row in rows():
        told = any(told in text for text in row.said for told in TOLD)
        assert row.within or told, f"{row.framework}: {row.loop}"


@pytest.mark.exhaustive
def test_peaks_of_two_processes_are_as_predicted() -> None:
    for row in frameworks.ranks():
        assert row["same_bits"], row
        assert row["predicted_bytes"] == row["peak_bytes"], row
        assert max(row["peak_bytes"]) < min(row["eager_bytes"]), row
