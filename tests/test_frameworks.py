"""What the committed table of frameworks says, and that DDP's peaks are as predicted."""

import json

import pytest

from benchmarks import frameworks
from benchmarks.frameworks import PATH, FrameworkRow

TOLD = ("above the budget", "counts in no budget", "comes on top of the budget")
NOT_FOLLOWED = {
    "sentence-transformers: fit, optimized as a whole",
    "ultralytics: YOLO, model(batch) as its trainer calls it",
    "ultralytics: DetectionTrainer.train, a callback optimizes",
    "PyG: GCNConv (add_self_loops)",
    "PyG: GATConv (add_self_loops)",
    "transformers wav2vec2: CTC, no masks",
    "transformers wav2vec2: CTC, SpecAugment and LayerDrop (its defaults)",
    "torchdiffeq: odeint, dopri5 (its steps depend on values)",
    "snntorch: Leaky neurons, 10 steps of time",
    "vector-quantize-pytorch: VectorQuantize, kmeans_init, dead codes replaced",
    "e3nn: FullyConnectedTensorProduct, Gate",
    "torch: AveragedModel (EMA), state_dict saved",
    "torch: GAN: two models, each in the other's loss",
}
"""Refused loops whose remedy the benchmark does not follow yet."""


def rows() -> list[FrameworkRow]:
    return [FrameworkRow(**row) for row in json.loads(PATH.read_text())["rows"]]


def test_no_loop_of_a_framework_trains_with_other_numbers_or_saves_other_files() -> None:
    for row in rows():
        name = f"{row.framework}: {row.loop}"
        assert row.result in ("runs", "refused"), name
        if row.result == "runs":
            assert row.same_bits, name
            assert row.saved_alike is not False, name
        else:
            assert row.remedy_works or name in NOT_FOLLOWED, name


def test_what_goes_over_the_budget_is_told() -> None:
    over = [row for row in rows() if row.result == "runs" and not row.within]
    untold = [
        f"{row.framework}: {row.loop}" for row in over if not any(told in text for text in row.said for told in TOLD)
    ]
    assert untold == ["torchdiffeq: odeint, rk4"], "parts of a model notice no loops (docs/limits.md)"


@pytest.mark.exhaustive
def test_peaks_of_two_processes_are_as_predicted() -> None:
    for row in frameworks.ranks():
        assert row["same_bits"], row
        assert row["predicted_bytes"] in (None, row["peak_bytes"]), row
        assert max(row["peak_bytes"]) < min(row["eager_bytes"]), row
