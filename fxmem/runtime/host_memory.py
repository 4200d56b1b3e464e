"""Copies of storages in host memory, and the way there and back.

In: a tensor on the device whose whole storage is to wait for the backward. Out: a :class:`HostCopy`, which holds no memory
of the device; from it, the same bytes on fresh memory of the device.

NOTE [Copies in host memory]

1. On CUDA a copy goes to pinned memory on a stream of its own, once what was enqueued before is done. It holds the original
   until the present stream has been told to wait for it (:meth:`HostCopy.left`); then its memory is free for what is
   enqueued next, as any other's, and the allocator need not be told of another stream.
2. The way back is the same: the copy runs on a second stream into memory that the present stream allocated, and whoever
   reads it, or lets go of it unread, waits first (:class:`Arriving`).
3. Elsewhere, and on fakes, copies are plain ones, done when asked for.
4. Storages may also be set aside for a while (:func:`set_aside`): they are emptied, and refilled on the same stream.
5. What is allocated here counts as memory of the host, not of the device, also where both are the same
   (:func:`allocates_host_memory`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fxmem.runtime.layout import elements
from fxmem.torch_private import FakeTensor

_here = threading.local()
_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}


def allocates_host_memory() -> bool:
    """Tell whether what this thread allocates now is a copy in host memory."""
    return getattr(_here, "on_host", False)


def _empty_on_host(like: torch.Tensor, *, pinned: bool) -> torch.Tensor:
    _here.on_host = True
    try:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)
    finally:
        _here.on_host = False


class HostCopy:
    """The bytes of one storage in host memory (NOTE [Copies in host memory])."""

    __slots__ = ("_device", "_host", "_original", "_sent")

    def __init__(self, tensor: torch.Tensor) -> None:
        """``tensor``: any tensor on the storage, whose values are final."""
        source = elements(tensor.detach(), tensor.dtype)
        self._device, stream = source.device, _stream(source, "to host")
        self._host = _empty_on_host(source, pinned=stream is not None)
        self._sent = _copied(self._host, source, stream)
        self._original: torch.Tensor | None = source

    def left(self) -> None:
        """Let the present stream wait until the copy is made, and let go of the original."""
        _wait_for(self._sent, self._device)
        self._original = None

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy the bytes into the storage of ``tensor``, which is as large as the one they are of."""
        _wait_for(self._sent, self._device)
        elements(tensor.data, tensor.dtype).copy_(self._host, non_blocking=True)

    def fetch(self) -> Arriving:
        """Return a copy on fresh memory of the device, which may still be on its way."""
        tensor = torch.empty(self._host.shape, dtype=self._host.dtype, device=self._device)
        stream = _stream(tensor, "to device")
        if stream is not None and self._sent is not None:
            stream.wait_event(self._sent)
        return Arriving(tensor, _copied(tensor, self._host, stream))


class Arriving:
    """A tensor that is being copied to the device; whoever reads it waits first."""

    __slots__ = ("_event", "tensor")

    def __init__(self, tensor: torch.Tensor, event: torch.cuda.Event | None) -> None:
        self.tensor, self._event = tensor, event

    def wait(self) -> None:
        """Let what is enqueued on the present stream from now on wait for the copy."""
        event, self._event = self._event, None
        _wait_for(event, self.tensor.device)

    def __del__(self) -> None:
        self.wait()


@contextmanager
def set_aside(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """In the body, the storages of ``tensors``, each of which has one of its own on CUDA, are empty."""
    copies = list(map(HostCopy, tensors))
    sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
    for tensor, copy in zip(tensors, copies, strict=True):
        copy.left()
        tensor.untyped_storage().resize_(0)
    try:
        yield
    finally:
        for tensor, copy, nbytes in zip(tensors, copies, sizes, strict=True):
            tensor.untyped_storage().resize_(nbytes)
            copy.fill(tensor)


def _stream(tensor: torch.Tensor, way: str) -> torch.cuda.Stream | None:
    """Return the stream for copies ``way``; None where copies are plain."""
    if tensor.device.type != "cuda" or isinstance(tensor, FakeTensor):
        return None
    key = (tensor.device, way)
    if key not in _streams:
        _streams.setdefault(key, torch.cuda.Stream(tensor.device))
    return _streams[key]


def _copied(to: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """Copy after all that is enqueued on the present stream; return the event of its end."""
    if stream is None:
        to.copy_(source)
        return None
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        to.copy_(source, non_blocking=True)
        event: torch.cuda.Event = stream.record_event()
    return event


def _wait_for(event: torch.cuda.Event | None, device: torch.device) -> None:
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
