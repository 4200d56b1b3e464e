"""The house stays easy to enter: files for a sitting, functions for a screen, folders that can be looked over."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES, MOST_OF_A_FUNCTION, MOST_FILES = 400, 60, 26


def sources() -> list[Path]:
    folders = ("fxmem", "benchmarks", "tests", "examples")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def functions_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the functions of a file with their lengths in lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or 0) - node.lineno + 1


def test_no_file_is_longer_than_a_sitting() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}
    assert {path: n for path, n in lengths.items() if n > MOST_LINES} == {}


@pytest.mark.slow
def test_no_function_is_longer_than_a_screen() -> None:
    lengths = {f"{path.relative_to(ROOT)}:{name}": n for path in sources() for name, n in functions_of(path)}
    assert {name: n for name, n in lengths.items() if n > MOST_OF_A_FUNCTION} == {}


@pytest.mark.parametrize("top", ["fxmem", "tests"])
def test_no_folder_holds_more_files_than_can_be_looked_over(top: str) -> None:
    folders = {path.parent for path in (ROOT / top).rglob("*.py")}
    counts = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {folder: n for folder, n in counts.items() if n > MOST_FILES} == {}


@pytest.mark.parametrize(
    "folder",
    [
        "advice",
        "api",
        "capture",
        "cli",
        "compiled",
        "fake",
        "passes",
        "planners",
        "profiling",
        "report",
        "runtime",
        "watching",
    ],
)
def test_packages_hand_on_names_and_do_nothing_else(folder: str) -> None:
    tree = ast.parse((ROOT / "fxmem" / folder / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    assert all(isinstance(node, ast.Expr | ast.ImportFrom | ast.Assign) for node in tree.body)
