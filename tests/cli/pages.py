"""The pages of the command line: their commands, and what these print. ``python -m tests.cli.pages`` writes it anew."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from fxmem.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "commands").glob("*.md"))
BLOCK = re.compile(r"```console\n\$ fxmem ([^\n]*)\n(.*?)```\n", re.DOTALL)


def commands_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the commands of a page with what they print by it."""
    yield from re.findall(BLOCK, page.read_text(encoding="utf-8"))


def printed(command: str) -> str:
    """Return what a command prints, run in the root of the project."""
    text, before = io.StringIO(), Path.cwd()
    os.chdir(ROOT)
    try:
        with contextlib.redirect_stdout(text):
            main(shlex.split(command))
    finally:
        os.chdir(before)
    return re.sub(r" +$", "", text.getvalue(), flags=re.MULTILINE)


if __name__ == "__main__":
    for path in PAGES:
        source = path.read_text(encoding="utf-8")
        again = BLOCK.sub(lambda match: f"```console\n$ fxmem {match[1]}\n{printed(match[1])}```\n", source)
        path.write_text(again, encoding="utf-8")
