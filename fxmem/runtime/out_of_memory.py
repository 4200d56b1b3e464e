"""Who explains an error of memory in a recomputation: whoever called the forward says so, and the forward's tape remembers.

A backward starts from autograd, which knows nothing of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Explain = Callable[[BaseException], None]
_present: ContextVar[Explain | None] = ContextVar("_present", default=None)


@contextmanager
def explaining(explain: Explain) -> Iterator[None]:
    """Let ``explain`` be given the errors of memory of what runs in the body, and of its backward."""
    token = _present.set(explain)
    try:
        yield
    finally:
        _present.reset(token)


def explainer() -> Explain:
    """Return who explains errors of memory at present."""
    return _present.get() or (lambda error: None)
