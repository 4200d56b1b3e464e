"""The page of a report: its data is the report's, it loads nothing, and no text in it is taken for HTML."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from fxmem.report.model_explorer import COLOURS
from fxmem.report.page import SCRIPTS, VENDORED, page_data, page_html, sentence
from tests.project.test_docs import LOADED, LOADED_BY_STYLE
from tests.report.test_pictures import Block

VENDOR = files("fxmem.report") / "vendor"


@pytest.fixture(scope="module")
def report() -> fxmem.Report:
    """Four blocks on half of what can be saved."""
    found = fxmem.estimate(nn.Sequential(*[Block() for _ in range(4)]), torch.randn(256, 16), plan_seconds=1)
    return found.report((found.floor_bytes + found.peak_bytes) // 2)


def rows_of(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for row in table["rows"]:
        yield dict(zip(table["columns"], row, strict=True))


def data_in(page: str) -> Any:
    """The data that a browser reads out of a page."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_the_data_of_a_page_is_that_of_the_report(report: fxmem.Report) -> None:
    data = page_data(report, "title")
    timeline, nodes = data["timeline"], list(rows_of(data["nodes"]))
    assert max(timeline["after_bytes"]) == data["planned_peak_bytes"] == report.predicted_peak_bytes
    assert max(b for b in timeline["before_bytes"] if b is not None) == report.eager_peak_bytes
    assert len({len(timeline[column]) for column in ("x", "before_bytes", "after_bytes", "recompute", "label")}) == 1
    assert sum(timeline["recompute"]) == report.timeline.num_recomputed > 0
    assert [b is None for b in timeline["before_bytes"]] == [bool(again) for again in timeline["recompute"]]
    assert sum(node["kept_bytes"] for node in nodes) == report.kept_bytes
    assert sum(node["dropped_bytes"] for node in nodes) == report.dropped_bytes
    assert all(read < place for place, node in enumerate(nodes) for read in node["reads"])
    assert {data["nodes"]["texts"][node["module"]] for node in nodes} == {node.module_path for node in report.graph}
    assert all("test_pictures.py:" in data["nodes"]["texts"][node["line"]] for node in nodes)
    assert sum(row["recomputed_bytes"] for row in rows_of(data["modules"])) == report.dropped_bytes
    assert sum(row["nbytes"] for row in rows_of(data["storages"])) == report.kept_bytes + report.dropped_bytes
    assert data["figures"][:3] == [
        ["budget", report.budget_bytes],
        ["predicted peak", report.predicted_peak_bytes],
        ["eager peak", report.eager_peak_bytes],
    ]


def test_the_frontier_of_a_report_falls_from_keeping_all_to_the_floor(report: fxmem.Report) -> None:
    peaks = [point.peak_bytes for point in report.frontier]
    assert peaks == sorted(peaks, reverse=True)
    assert (report.frontier[0].overhead_ratio, peaks[-1]) == (0.0, report.floor_bytes)
    assert (report.predicted_peak_bytes, report.overhead_ratio) in [
        (point.peak_bytes, point.overhead_ratio) for point in report.frontier
    ]
    as_it_is = fxmem.estimate(nn.Linear(4, 4), torch.randn(2, 4)).report()
    assert as_it_is.frontier == ()  # its step fits as it is: nothing was planned


def test_a_page_loads_nothing_and_has_the_licences(report: fxmem.Report, tmp_path: Path) -> None:
    report.save_html(tmp_path / "page.html", title="four blocks")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert data_in(page) == json.loads(json.dumps(page_data(report, "four blocks")))
    assert len(page.encode()) - len(json.dumps(page_data(report, ""))) < 2_000_000
    assert not LOADED.search(page)
    assert not LOADED_BY_STYLE.search(page)
    assert "default-src 'none'" in page
    for _, terms in VENDORED:
        assert (VENDOR / terms).read_text(encoding="utf-8").strip() in page


def test_texts_of_a_model_are_never_html(report: fxmem.Report) -> None:
    evil = "</script><script>alert(1)</script><!-- & \u2028"
    told = replace(report, notes=(evil,), graph=tuple(replace(node, module_path=evil) for node in report.graph))
    page = page_html(page_data(told, evil))
    assert page.count("<script") == page.count("</script>") == page_html(page_data(report, "")).count("<script") == 3
    assert data_in(page)["notes"] == [evil]
    assert "<!--" not in page
    assert "<title>&lt;/script&gt;" in page


def test_the_first_sentence_tells_peaks_time_and_budget(report: fxmem.Report) -> None:
    told = replace(
        report,
        eager_peak_bytes=30_000_000,
        predicted_peak_bytes=12_000_000,
        overhead_ratio=0.25,
        budget_bytes=15_000_000,
    )
    assert sentence(told) == (
        "One training step takes 30 MB of memory at its peak as the model is. Under this plan it takes 12 MB, 60% less, "
        "and about 25.0% more time, in which dropped values are computed again. The budget was 15 MB."
    )
    unchanged = replace(told, predicted_peak_bytes=30_000_000)
    assert sentence(unchanged).endswith(
        "The plan changes nothing. The budget was 15 MB, which no plan that was found keeps."
    )
    assert sentence(replace(unchanged, budget_bytes=None)).endswith("No budget was set.")


def test_the_libraries_are_those_that_the_list_says() -> None:
    listed = dict(re.findall(r"\| (\S+) \| ([0-9a-f]{64}) \|", (VENDOR / "README.md").read_text(encoding="utf-8")))
    assert {name: hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() for name in listed} == listed
    there = {each.name for each in VENDOR.iterdir()} - {"README.md"} - {terms for _, terms in VENDORED}
    assert there == set(listed)
    assert set(SCRIPTS) == {each.name for each in (VENDOR / ".." / "assets").iterdir() if each.name.endswith(".js")}


def test_the_graph_for_model_explorer_is_that_of_the_report(report: fxmem.Report, tmp_path: Path) -> None:
    report.save_model_explorer(tmp_path / "graph.json", tmp_path / "data.json")
    (graph,) = json.loads((tmp_path / "graph.json").read_text())["graphs"]
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert list(nodes) == [node.name for node in report.graph]
    for node in report.graph:
        written = nodes[node.name]
        assert written["namespace"] == node.module_path.replace(".", "/")
        reads = [edge["sourceNodeId"] for edge in written["incomingEdges"]]
        assert reads == [report.graph[read].name for read in node.reads]
        attributes = {each["key"]: each["value"] for each in written["attrs"]}
        assert written["style"]["backgroundColor"] == COLOURS[attributes["plan"]]
        assert int(attributes["bytes recomputed"]) == node.dropped_bytes
    data = json.loads((tmp_path / "data.json").read_text())[graph["id"]]
    assert sum(each["value"] for each in data["results"].values()) == report.kept_bytes + report.dropped_bytes
    assert set(data["results"]) <= set(nodes)
