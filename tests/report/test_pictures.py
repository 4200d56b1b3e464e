"""The pictures of a report: what they show is what was simulated, and they say what to do without matplotlib."""

import sys

import pytest
import torch
from torch import nn

import fxmem
from fxmem.ir import Phase
from fxmem.report.graph import collapsed
from fxmem.report.plots import curve_of, phases_of


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(torch.tanh(self.first(x)))


@pytest.fixture(scope="module")
def report() -> fxmem.Report:
    model = nn.Sequential(*[Block() for _ in range(4)])
    x = torch.randn(256, 16)
    free = fxmem.optimize(model, x, optimizer=None).report
    budget = (free.floor_bytes + free.eager_peak_bytes) // 2
    return fxmem.optimize(model, x, budget=budget, optimizer=None).report


@pytest.mark.slow
def test_the_timelines_peak_at_the_planned_and_the_eager_peak(report: fxmem.Report) -> None:
    assert max(b for _, b, _ in curve_of(report.timeline)) == report.predicted_peak_bytes
    assert max(b for _, b, _ in curve_of(report.eager_timeline)) == report.eager_peak_bytes
    assert any(recompute for _, _, recompute in curve_of(report.timeline))
    assert not any(recompute for _, _, recompute in curve_of(report.eager_timeline))


@pytest.mark.slow
def test_a_timeline_runs_forward_in_time_through_all_phases(report: fxmem.Report) -> None:
    times = [t for t, _, _ in curve_of(report.timeline)]
    assert times == sorted(times)
    assert [p for p, _, _ in phases_of(report.timeline)] == [p for p, _, _ in phases_of(report.eager_timeline)]
    assert next(phases_of(report.timeline))[0] is Phase.FORWARD


def test_collapsing_keeps_all_bytes_and_the_order_of_execution(report: fxmem.Report) -> None:
    whole = collapsed(report.graph, depth=9)
    blocks = collapsed(report.graph, depth=1)
    assert blocks.number_of_nodes() == 4 < whole.number_of_nodes()
    assert [blocks.nodes[g]["label"] for g in blocks] == ["0", "1", "2", "3"]
    assert sorted(blocks.edges) == [(0, 1), (1, 2), (2, 3)]
    for graph in (whole, blocks):
        assert sum(d["kept_bytes"] for _, d in graph.nodes(data=True)) == report.kept_bytes
        assert sum(d["dropped_bytes"] for _, d in graph.nodes(data=True)) == report.dropped_bytes
        assert all(a < b for a, b in graph.edges)


def test_pictures_are_matplotlib_figures(report: fxmem.Report) -> None:
    pytest.importorskip("matplotlib")
    memory = report.plot_memory()
    assert f"budget {report.budget_bytes / 1e3:.0f} kB" in [t.get_text() for t in memory.axes[0].get_legend().texts]
    assert len(report.draw_graph(depth=1).axes) == 1


def test_a_figure_can_be_drawn_on_axes_of_ones_own(report: fxmem.Report) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    figure, (left, _) = plt.subplots(1, 2)
    assert report.plot_memory(left) is figure


def test_without_matplotlib_the_error_says_how_to_get_it(report: fxmem.Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        report.plot_memory()


def test_html_shows_the_figures_and_both_curves_without_matplotlib(
    report: fxmem.Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    html = report._repr_html_()
    assert f"{report.predicted_peak_bytes / 1e6:.4g} MB instead of" in html
    assert html.count("<polyline") == 2
    assert "<script" not in html
