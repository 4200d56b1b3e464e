"""What README shows runs, and its figures are those of the committed results."""

import re
from pathlib import Path

import pytest

from benchmarks import readme

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.usefixtures("kept_plans")
@pytest.mark.parametrize("block", BLOCKS, ids=[str(i) for i in range(len(BLOCKS))])
def test_the_code_in_readme_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out


def test_the_figures_in_readme_are_those_of_the_committed_results() -> None:
    assert readme.filled(README.read_text()) == README.read_text(), "run python -m benchmarks.readme"
    for name, page in readme.PAGES.items():
        assert (readme.ROOT / "docs" / name).read_text() == page(), "run python -m benchmarks.readme"
