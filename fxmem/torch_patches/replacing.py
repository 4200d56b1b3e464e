"""How a patch is made: an attribute replaced for a while, and the register of all patches."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

Made = TypeVar("Made", bound=Callable[..., Any])

PATCHES: dict[str, Callable[..., Any]] = {}
"""By name, every patch of torch. tests/torch_patches/test_canaries.py has a canary for each."""


def patch(made: Made) -> Made:
    """Put a patch on the register."""
    PATCHES[str(getattr(made, "__name__", made))] = made
    return made


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give ``owner`` another attribute ``name`` while the body runs."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def replaced_here(owner: Any, name: str, function: Callable[..., Any]) -> AbstractContextManager[None]:
    """Give ``owner`` another function ``name`` while the body runs, for the calls of this thread.

    A step that another thread trains meanwhile calls the original.
    """
    original, thread = getattr(owner, name), threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == thread else original)(*args, **kwargs)

    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    return replaced(owner, name, staticmethod(call) if is_static else call)
