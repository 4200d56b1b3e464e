"""The table of choices: what may be done to a training step so that it takes less memory (``allow=``).

Each row says what a choice changes in the numbers; the two that are allowed by default change none.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fxmem.errors import InputError

CHOICES = {
    "recompute": "values are dropped and computed once more in the backward; no bit changes",
    "inplace": "ops that provably may write over their input do; no bit changes",
    "offload": "values wait for the backward in host memory, copied while the device computes; no bit changes",
    "reorder": "ops that do not depend on each other run in another order; no bit changes",
    "chunk": "heads with their loss, and MLPs, run in pieces of rows; sums over rows are added in another order, the same "
    "bits each time",
    "microbatch": "where no plan keeps the budget, the batch runs in pieces, in one call; gradients are added in "
    "another order",
    "fuse": "chains of elementwise ops run as one kernel each, where a compiler's has eager's bits and all of them gain "
    "2 % of a step's time; no bit changes",
    "optimizer_in_backward": "each parameter is stepped within the backward and its gradient let go of; no bit changes, "
    "but there are no gradients to clip by norm, to accumulate or to scale",
}
"""By name: what it does, and what that changes in the numbers."""

DEFAULT = ("recompute", "inplace")


def check_choices(allow: Any) -> frozenset[str]:
    """Return the choices named. Errors: ``InputError`` for what is no collection of known names."""
    if isinstance(allow, str) or not isinstance(allow, Collection):
        raise InputError(f'allow must be a sequence of choices, such as ("recompute", "inplace"), not {allow!r}')
    unknown = next((name for name in allow if name not in CHOICES), None)
    if unknown is not None:
        raise InputError(f"unknown choice {unknown!r} in allow; known: {', '.join(sorted(CHOICES))}")
    return frozenset(allow)
