"""Every notebook runs from its first cell to its last, in a fresh kernel, and carries the outputs of such a run."""

from pathlib import Path

import pytest

from tests.tiers import representatives

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
MOST_SECONDS = 120
SEARCH_BRIEFLY = """
import sys
sys.path.insert(0, "..")
from tests.search import search_briefly
search_briefly()
"""


def test_there_are_six_notebooks() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert sum(bool(cell.outputs) for cell in cells) >= len(cells) - 3


@pytest.mark.slow
@pytest.mark.usefixtures("kept_plans")
@pytest.mark.parametrize("path", representatives(NOTEBOOKS, NOTEBOOKS[0]), ids=lambda path: path.stem)
def test_a_notebook_runs_and_no_cell_takes_two_minutes(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SEARCH_BRIEFLY))
    nbclient.NotebookClient(notebook, timeout=MOST_SECONDS, resources=resources).execute()
