"""The page of a report in a browser: it shows without an error, and pointing, opening, sorting and filtering work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import fxmem
from benchmarks.libraries import import_library
from fxmem.advice.advise import Advice
from fxmem.advice.evaluate import Row
from tests.browser import Browser, Page, chromium, chromium_path
from tests.report.test_pictures import Block

pytestmark = pytest.mark.skipif(chromium_path() is None, reason="no Chromium is there: apt-get install chromium")

SIZES = [(1280, 800), (390, 844)]
MOST_BYTES, MOST_MS, NUM_NODES = 5_000_000, 3000, 2500
READY = "+document.documentElement.dataset.ready"
TIP = "document.getElementById('tip')"
SHOWN = "[...document.querySelectorAll('#tables tbody tr')]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def page_of_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four blocks under a plan, with advice."""
    found = fxmem.estimate(nn.Sequential(*[Block() for _ in range(4)]), torch.randn(256, 16), plan_seconds=1)
    report = found.report((found.floor_bytes + found.peak_bytes) // 2)
    path = tmp_path_factory.mktemp("page") / "blocks.html"
    half = Row("half", "half the batch", "method", 200_000, 100_000, True, "batch_size=128", "")
    report.save_html(path, title="four <blocks>", advice=Advice(300_000, "", None, (half,), None, {"half": half}))
    return path


@pytest.fixture(scope="module")
def page_of_deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of as many layers as give 2,500 nodes, under a plan."""
    transformers = import_library("transformers")
    config = transformers.GPT2Config(
        n_layer=73, n_embd=32, n_head=2, vocab_size=256, n_positions=64, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    ids = torch.randint(0, 256, (4, 64))
    call = {"input_ids": ids, "labels": ids}
    found = fxmem.estimate(transformers.GPT2LMHeadModel(config), None, call, planner="chen")  # whatever time there is
    report = found.report(int(0.7 * found.peak_bytes))
    assert len(report.graph) >= NUM_NODES
    path = tmp_path_factory.mktemp("page") / "deep.html"
    report.save_html(path)
    return path


def box_named(label: str) -> str:
    return f"[...document.querySelectorAll('#graph .box')].find((box) => box.getAttribute('aria-label') === '{label}')"


def num_boxes(page: Page) -> int:
    return int(page.run("document.querySelectorAll('#graph .box').length"))


def column(page: Page, place: int) -> list[str]:
    """The texts of a column of the table that is shown."""
    texts: list[str] = page.run(f"{SHOWN}.map((row) => row.cells[{place}].textContent)")
    return texts


def check_is_quiet_and_fits(page: Page, path: Path) -> None:
    assert page.errors() == []
    assert page.requests() == [path.resolve().as_uri()]
    assert page.run("document.documentElement.scrollWidth <= innerWidth")


def check_sorting_and_filtering(page: Page) -> None:
    for _ in range(2):  # down, then up
        page.click("document.querySelectorAll('#tables thead th button')[5]")
        kept = page.run(f"{SHOWN}.length"), page.run("document.querySelectorAll('#tables th')[5].ariaSort")
        assert kept[1] in ("descending", "ascending")
        order = [bytes_of(text) for text in column(page, 5)]
        assert order == sorted(order, reverse=kept[1] == "descending")
    whole = page.run(f"{SHOWN}.length")
    page.type("document.querySelector('#tables input')", "linear")
    assert 0 < page.run(f"{SHOWN}.length") <= whole
    assert all("linear" in name.lower() for name in column(page, 1))
    page.click("[...document.querySelectorAll('#tables button')].find((b) => b.textContent === 'saved tensors')")
    assert set(column(page, 2)) <= {"kept", "recomputed"}


def bytes_of(text: str) -> float:
    number, _, unit = text.partition(" ")
    return float(number) * {"": 1, "B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


@pytest.mark.slow
def test_what_is_wrong_with_a_page_is_seen(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "wrong.html"
    path.write_text("<script>throw Error('thrown')</script><script>console.error('told')</script><img src='none.png'>")
    page = browser.open(path, *SIZES[0])
    assert len(page.errors()) == 3
    assert [Path(address).name for address in page.requests()] == ["wrong.html", "none.png"]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_page_can_be_pointed_at_opened_sorted_and_filtered(
    browser: Browser, page_of_blocks: Path, width: int, height: int
) -> None:
    page = browser.open(page_of_blocks, width, height, dark=width < 600)
    assert page.run("document.querySelector('h1').textContent") == "four <blocks>"
    assert page.run("[...document.querySelectorAll('main section')].filter((s) => s.hidden).length") == 0
    page.hover("document.querySelector('#memory .u-over')")
    assert "under the plan" in page.run("document.querySelector('#memory .readout').textContent")
    assert page.run(f"{TIP}.hidden")

    page.hover("document.querySelector('.icicle div')")
    assert page.run(f"{TIP}.textContent").startswith("the whole model")
    page.click("[...document.querySelectorAll('.icicle div')].find((d) => d.textContent.startsWith('1'))")
    assert page.run("document.querySelector('.crumbs').textContent") == "model › 1"

    closed = num_boxes(page)
    assert closed == 4
    page.click(box_named("2"))
    page.click(box_named("last"))
    assert num_boxes(page) > closed + 3
    point = page.tap if width < 600 else page.hover
    point("[...document.querySelectorAll('#graph .box:not([aria-expanded])')].pop()")
    told = page.run(f"{TIP}.textContent")
    assert "for the backward" in told
    assert "test_pictures.py:" in told
    page.click(box_named("2"))
    assert num_boxes(page) == closed
    page.click("document.querySelector('#graph button')")
    assert page.run("document.querySelectorAll('#graph .peak').length") == 1

    check_sorting_and_filtering(page)
    assert page.run("document.querySelector('#advice tbody tr').textContent").startswith("half the batch")
    check_is_quiet_and_fits(page, page_of_blocks)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_page_of_a_deep_model_is_small_and_quick(
    browser: Browser, page_of_deep_model: Path, width: int, height: int
) -> None:
    assert page_of_deep_model.stat().st_size < MOST_BYTES
    page = browser.open(page_of_deep_model, width, height)
    assert page.run(READY) < MOST_MS
    for name in ("transformer", "h", "24 … 47", "30", "mlp"):
        page.click(box_named(name))
    page.hover(box_named("c_fc"))
    assert "transformer.h.30.mlp.c_fc" in page.run(f"{TIP}.textContent")
    check_sorting_and_filtering(page)
    check_is_quiet_and_fits(page, page_of_deep_model)
