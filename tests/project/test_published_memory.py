"""The published GPU peaks: well formed, each with a source, and predicted within a band."""

from dataclasses import replace

import pytest

from benchmarks import published_memory
from benchmarks.published_memory import MIB, Outcome, Point, load, predict, summary, table
from fxmem.devices import DEVICES
from fxmem.profiling.allocator_state import AllocatorPeaks

SOURCES, POINTS = load()


def test_every_point_has_a_source_a_figure_and_a_step() -> None:
    assert len(POINTS) >= 60
    assert len({point.name + point.source for point in POINTS}) == len(POINTS)
    for source in SOURCES.values():
        assert source["url"].startswith("https://")
        assert source["title"]
        assert source["measured"]
        assert source["reading"]
    for point in POINTS:
        assert point.source in SOURCES
        assert point.where
        assert point.device in DEVICES
        assert point.family in ("transformer", "convnet")
        assert point.measured in ("allocated", "reserved", "process", "fits")
        assert (point.fits is None) == (point.measured != "fits")
        assert (point.published_bytes is None) == (point.measured == "fits")
        assert (point.image is None) != (point.length is None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "band"),
    [("gpt-124m bf16, PyTorch's attention", 0.01), ("vit_l_16 batch 64 fp32", 0.01)],
)
def test_a_published_peak_is_predicted(name: str, band: float) -> None:
    outcome = predict(next(point for point in POINTS if point.name == name))
    assert not outcome.error
    assert outcome.difference == pytest.approx(0, abs=band)


@pytest.mark.slow
def test_a_published_peak_of_convolutions_lies_below_the_bound_with_workspaces() -> None:
    outcome = predict(next(point for point in POINTS if point.name == "vgg16 batch 128 fp32"))
    assert outcome.bounded
    assert outcome.difference is not None
    assert outcome.difference < -0.2  # 7 GB of workspaces are not in the prediction


def test_a_model_that_fails_is_listed_with_the_reason() -> None:
    outcome = predict(replace(POINTS[0], model="timm/nonsense"))
    assert outcome.peaks is None
    assert "nonsense" in outcome.error
    assert "not predicted" in table([outcome])


def test_a_bracket_is_judged_by_what_must_and_what_can_be_there() -> None:
    point = Point("p", "s", "w", "fits", "rtx3090", "convnet", "timm/resnet18", 1, fits=True, image=224)
    total = DEVICES["rtx3090"].memory_bytes

    def verdict(allocated: int, reserved: int, fits: bool) -> str:
        return Outcome(replace(point, fits=fits), AllocatorPeaks(allocated, reserved), 0.0).verdict

    assert verdict(total - MIB, total, True) == verdict(total + MIB, total + 2 * MIB, False) == "consistent"
    assert verdict(total + MIB, total + MIB, True) == verdict(0, total, False) == "differs"
    assert verdict(total - MIB, total + MIB, True) == "consistent (between)"


def test_the_summary_leaves_calibrating_points_out() -> None:
    point = replace(POINTS[0], published_bytes=100, context_bytes=0, calibrates=False)
    rows = [Outcome(point, AllocatorPeaks(80, 90), 0.0), Outcome(replace(point, calibrates=True), None, 0.0)]
    told = summary(rows)[point.family]
    assert (told["points"], told["median %"], told["worst at"]) == (1, -10.0, point.name)
    assert published_memory.PATH.name == "published_memory.json"
