"""How long the default planner searches in tests: briefly, in all its stages, but where the quality of plans is tested.

Most tests ask for bits, bytes and errors, and any sound plan shows those. The shipped numbers are `WHOLE`'s; the fixture
`whole_search` of tests/conftest.py brings them back.
"""

from fxmem.planners import portfolio

BRIEF = {"MOST_TRIALS": 200, "MOST_WINDOWS": 3}
"""Of the local search and its like, and of the neighbourhoods chosen anew."""
WHOLE = {name: getattr(portfolio, name) for name in BRIEF}


def search_briefly() -> None:
    """Let this process search briefly from now on."""
    for name, value in BRIEF.items():
        setattr(portfolio, name, value)
