"""Budgets as users write them, in bytes."""

from __future__ import annotations

import math
import re

from fxmem.errors import BudgetError

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{infix}b": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}


def parse_gigabytes(budget_gb: float) -> int:
    """Return ``budget_gb`` (10^9 bytes each) in bytes. Errors: ``BudgetError``."""
    if isinstance(budget_gb, bool) or not isinstance(budget_gb, int | float):
        raise BudgetError(f"budget_gb must be a number of GB (10^9 bytes), not {budget_gb!r}")
    if not math.isfinite(budget_gb) or budget_gb <= 0:
        raise BudgetError(f"budget_gb must be above 0 and finite, not {budget_gb!r}; leave it out for no bound")
    return int(budget_gb * 1e9)


def parse_bytes(budget: int | str) -> int:
    """Return ``budget``, an int of bytes or a text such as "24GiB" or "800 MB", in bytes. Errors: ``BudgetError``."""
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?b?)\s*", budget.lower())
        if match is None or match[2] not in _UNITS:
            raise BudgetError(f'budget {budget!r} is not a size; write bytes or, say, "24GiB" or "800MB"')
        nbytes = int(float(match[1]) * _UNITS[match[2]])
    elif isinstance(budget, bool) or not isinstance(budget, int):
        raise BudgetError(f'budget must be an int of bytes or a text like "24GiB", not {budget!r}')
    else:
        nbytes = budget
    if nbytes <= 0:
        raise BudgetError(f"budget must be above 0 bytes, not {budget!r}; leave it out for no bound")
    return nbytes
