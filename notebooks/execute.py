"""Runs the notebooks and keeps what they print: ``python notebooks/execute.py [01 02 ...]``, all if none is named.

Outputs are committed, so the notebooks can be read without running them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent


def main(prefixes: tuple[str, ...]) -> None:
    """Execute the notebooks whose names start with one of ``prefixes``, each in a kernel of its own."""
    for path in sorted(HERE.glob("*.ipynb")):
        if prefixes and not path.name.startswith(prefixes):
            continue
        notebook = nbformat.read(path, as_version=4)
        metadata = dict(notebook.metadata)
        NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(HERE)}}).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times of execution would differ on every run
        notebook.metadata = metadata
        nbformat.write(notebook, path)
        print(f"wrote {path.name}", flush=True)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
