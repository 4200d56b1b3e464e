"""What README and docs show runs, and its figures are those of the committed results."""

import re
from pathlib import Path

import pytest

from benchmarks import readme
from benchmarks.libraries import import_torchvision

README = Path(__file__).parents[2] / "README.md"
PAGES = (README, README.parent / "docs" / "architecture.md")
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{i}")
    for page in PAGES
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]
NEEDS_ACCELERATE = "TrainingArguments"
"""A block with this word needs accelerate, which fxmem neither needs nor installs."""


@pytest.mark.slow
@pytest.mark.usefixtures("kept_plans")
@pytest.mark.parametrize("block", BLOCKS)
def test_the_code_in_readme_and_docs_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    if NEEDS_ACCELERATE in block:
        pytest.importorskip("accelerate")
        import_torchvision()  # transformers imports it
    exec(compile(block, "page", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out


def test_the_figures_in_readme_and_docs_are_those_of_the_committed_results() -> None:
    texts = [(readme.ROOT / name).read_text() for name in readme.FILLED]
    for text in texts:
        assert readme.filled(text) == text, "run python -m benchmarks.readme"
    assert all(any(f"<!-- results:{name} -->" in text for text in texts) for name in readme.SECTIONS)
    for name, page in readme.PAGES.items():
        assert (readme.ROOT / "docs" / name).read_text() == page(), "run python -m benchmarks.readme"
