"""The state of autocast: that which a graph was planned in, entered again where it re-runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from fxmem.torch_private import sequence_of


@dataclass(frozen=True, slots=True)
class Autocast:
    """The autocast state a graph runs under."""

    device_type: str
    dtype: torch.dtype

    @staticmethod
    def of(device_type: str, dtype: torch.dtype | None = None) -> Autocast | None:
        """Return the region of ``dtype``; None: the one there is around the call, if there is any."""
        if dtype is None and torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        return None if dtype is None else Autocast(device_type, dtype)

    def enter(self) -> torch.autocast:
        return torch.autocast(self.device_type, self.dtype)


@contextmanager
def no_autocast() -> Iterator[None]:
    """Have ops in the body run as they are called, as in code that torch compiled: casts are in it."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


class Regions:
    """Tells regions of autocast apart. What a region's cache keeps is cast once, whoever asks."""

    def __init__(self, device: torch.device) -> None:
        self._leaf = torch.empty(0, 0, device=device, requires_grad=True)

    def present(self) -> tuple[int, int | None]:
        """Return what is another value in every region, and each time where there is none or casts are not kept."""
        with torch.enable_grad():
            product = torch.mm(self._leaf, self._leaf)
        assert product.grad_fn is not None
        return threading.get_ident(), sequence_of(product.grad_fn.next_functions[0][0] or product.grad_fn)


class LatestRegion:
    """The region of autocast that the latest call of a model was in: gradients of what it has cast are summed with those of
    the next call there."""

    def __init__(self) -> None:
        self._regions: Regions | None = None
        self._latest: tuple[int, int | None] | None = None

    def goes_on(self, autocast: Autocast | None) -> bool:
        """True if a call, in a region ``autocast``, is in that one."""
        return autocast is not None and self._regions is not None and self._regions.present() == self._latest

    def note(self, autocast: Autocast | None) -> None:
        """Note the region of a call."""
        if autocast is None:
            self._regions = self._latest = None
            return
        if self._regions is None:
            self._regions = Regions(torch.device(autocast.device_type))
        self._latest = self._regions.present()


NOTHING = nullcontext()
"""A context that changes nothing, made once."""


def autocast_as_in_forward(
    autocast: Autocast | None, devices: Sequence[torch.device], *, regions_inside: bool = False
) -> AbstractContextManager[object]:
    """Return a context in which autocast is as in the forward, without its cache, which it leaves alone.

    A backward may run inside the user's autocast region; a graph planned without autocast re-runs without.
    ``regions_inside``: some ops enter regions of their own.
    """
    enabled = {device.type for device in devices if torch.is_autocast_enabled(device.type)}
    if autocast is None and not enabled and not regions_inside:
        return NOTHING
    return _as_in_forward(autocast, enabled)


@contextmanager
def _as_in_forward(autocast: Autocast | None, enabled: set[str]) -> Iterator[None]:
    torch.autocast_increment_nesting()  # no region inside is the outermost then, which would clear the cache
    try:
        with casts_kept(False), ExitStack() as stack:
            for device_type in enabled:
                stack.enter_context(torch.autocast(device_type, enabled=False))
            if autocast is not None:
                stack.enter_context(autocast.enter())
            yield
    finally:
        torch.autocast_decrement_nesting()


@contextmanager
def casts_kept(kept: bool) -> Iterator[None]:
    """Switch autocast's cache on or off in the body; regions inside that do not say otherwise follow."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(kept)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
