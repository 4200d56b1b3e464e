"""The site is built without warnings and loads nothing from a network; everything public is in it."""

import re
from pathlib import Path

import pytest

import fxmem

ROOT = Path(__file__).resolve().parents[2]
LOADED = re.compile(r"""<(?:script|img|iframe|source)[^>]+src="(?:https?:)?//|<link[^>]+href="(?:https?:)?//""")
LOADED_BY_STYLE = re.compile(r"""(?:@import\s+|url\()\s*["']?(?:https?:)?//""")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The built site; a warning fails the build."""
    build = pytest.importorskip("sphinx.cmd.build")
    out = tmp_path / "html"
    assert build.main(["-q", "-W", "--keep-going", "-d", str(tmp_path / "trees"), str(ROOT / "docs"), str(out)]) == 0
    return out


@pytest.mark.slow
def test_the_site_has_everything_public_and_loads_nothing_from_a_network(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 7
    assert [page.name for page in pages if LOADED.search(page.read_text())] == []
    assert [path.name for path in site.rglob("*.css") if LOADED_BY_STYLE.search(path.read_text())] == []
    reference = (site / "api.html").read_text()
    assert [name for name in fxmem.__all__ if f'id="fxmem.{name}"' not in reference] == []


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_between_texts_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_what_texts_tell_to_run_with_make_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md"):
        told = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / page).read_text(), re.MULTILINE))
        assert told <= targets, f"{page} tells of {told - targets}"
