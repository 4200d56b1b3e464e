"""What the pages of the command line show is what the commands print."""

from pathlib import Path

import pytest

from tests.cli.pages import PAGES, commands_of, printed


def test_every_command_has_a_page() -> None:
    from fxmem.cli.main import HELP

    assert {page.stem for page in PAGES} == set(HELP)


@pytest.mark.slow
@pytest.mark.usefixtures("whole_search")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_what_its_commands_print(page: Path) -> None:
    shown = dict(commands_of(page))
    assert shown
    assert {command: printed(command) for command in shown} == shown
