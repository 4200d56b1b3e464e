"""The picture of a report's page in the docs, of their small network: ``python -m tests.page_picture`` takes it anew."""

from __future__ import annotations

import tempfile
from pathlib import Path

from PIL import Image

from fxmem.cli.main import main
from tests.browser import chromium

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "page.png"
COMMAND = [
    "plan",
    str(ROOT / "docs/commands/net.py") + ":Net",
    "--input",
    "32x3x32x32",
    "--budget",
    "15MB",
    "-q",
    "--html",
]


def take(path: Path) -> None:
    """Write a page, open it down to the peak, and take its picture to ``path``."""
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        main([*COMMAND, f"{folder}/page.html"])
        page = browser.open(Path(folder) / "page.html", 1000, 1980)
        page.run("document.querySelector('h1').textContent = 'Memory of one training step: net.py:Net'")
        page.click("document.querySelector('#graph button')")
        page.run("document.activeElement.blur()")
        page.run("scrollTo(0, 0)")
        page.run("new Promise(requestAnimationFrame)")
        page.screenshot(path)
    with Image.open(path) as picture:
        few_colours = picture.convert("RGB").quantize(96)
    few_colours.save(path, optimize=True)


if __name__ == "__main__":
    take(PICTURE)
