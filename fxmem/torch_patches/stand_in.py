"""A CUDA device for fakes in a process that has none: what autograd asks the process for, answered."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from fxmem.torch_patches.replacing import patch, replaced
from fxmem.torch_private import FakeTensorMode, PythonDeviceGuard, device_types, register_device_guard

_CLASSES = (b"N2at18CUDAHooksInterfaceE", b"N2at4cuda6detail9CUDAHooksE")
"""Those that answer for CUDA in a build without it, and in one with it."""
_NUM_SLOTS = 40
"""Of a table of virtual functions that are copied; the two in question are among the first."""
_ANSWER = ctypes.CFUNCTYPE(ctypes.c_bool)
_lock, _depth = threading.Lock(), 0


@patch
@contextmanager
def cuda_for_fakes() -> Iterator[None]:
    """Let the body run forward and backward of fakes on CUDA where there is no CUDA device.

    The kernels that fakes dispatch to, autocast's lists and autograd's formulas are in every build of torch. What lacks is
    an answer to two questions of autograd's engine: which stream the device has, asked of the table of device guards,
    and whether CUDA is the accelerator and in use, asked of the object that answers for CUDA. Both are C++ objects of
    torch's that Python has no way to set, so their entries are written by address, where they are what they should be
    by name, and written back at the end. The streams given are all the same one, so nothing ever waits. Errors:
    ``NotImplementedError`` where torch is built otherwise (Windows). torch 2.11 to 2.15.
    """
    global _depth
    with _lock:
        if _depth == 0:
            _entries().exchange()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _entries().exchange()


@patch
@contextmanager
def cuda_asked(name: str, capability: tuple[int, int]) -> Iterator[None]:
    """Answer in the body what models ask of a CUDA device where there is none, and let them enter its autocast regions.

    torch would raise, and would switch autocast off. torch 2.11 to 2.15.
    """
    answers = {
        "is_bf16_supported": True,  # where there are no kernels for it, torch computes in another type
        "get_device_capability": capability,
        "get_device_name": name,
        "current_device": 0,
        "device_count": 1,
    }
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False))
        for function, answer in answers.items():
            stack.enter_context(replaced(torch.cuda, function, lambda *_, answer=answer, **__: answer))
        yield


@patch
@contextmanager
def kernels_on_cuda(kernels: Mapping[str, Callable[..., Any]], *, with_autograd: bool = False) -> Iterator[None]:
    """Give ATen's ops of these names other kernels for CUDA while the body runs; ``with_autograd``: above autograd too.

    Nothing public takes kernels back. torch 2.11 to 2.15.
    """
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in kernels.items():
        for key in ("AutogradCUDA", "CUDA") if with_autograd else ("CUDA",):
            library.impl(name, kernel, key, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


class _Guard(PythonDeviceGuard):
    """A device guard in Python: torch has such for backends written in it."""

    def type_(self) -> Any:
        return device_types.CUDA


@functools.cache
def _entries() -> _Entries:
    """Errors: ``NotImplementedError`` where torch is built otherwise."""
    return _Entries()


class _Entries:
    """Two words of torch's memory, and what they are exchanged for."""

    def __init__(self) -> None:
        folder = Path(torch.__file__).parent / "lib"
        try:
            c10, self._cpu = (ctypes.CDLL(str(next(folder.glob(f"lib{name}.*")))) for name in ("c10", "torch_cpu"))
            self._guards = (ctypes.c_void_p * 32).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
            hooks = self._cpu["_ZN2at6detail12getCUDAHooksEv"]
        except (StopIteration, ValueError, AttributeError, OSError) as error:
            raise NotImplementedError(f"torch {torch.__version__} has no such entry: {error}") from None
        hooks.restype = ctypes.c_void_p
        self._table = ctypes.c_void_p.from_address(hooks())
        self._check_class()
        self._guard = self._guard_of_python()
        self._answers = self._table_of_answers()
        self._check_backward()

    def exchange(self) -> None:
        """Put in what is out, and out what is in."""
        cuda = device_types.CUDA.value
        self._guards[cuda], self._guard = self._guard, self._guards[cuda]
        self._table.value, self._answers = self._answers, self._table.value

    def _check_backward(self) -> None:
        """Errors: ``NotImplementedError`` if autograd asks for something else still."""
        self.exchange()
        try:
            with FakeTensorMode(), torch.autograd.set_multithreading_enabled(False):
                a = torch.ones(2, device="cuda", requires_grad=True)
                (a * a).sum().backward()
        except RuntimeError as error:
            raise NotImplementedError(f"autograd of torch {torch.__version__} wants a CUDA device: {error}") from None
        finally:
            self.exchange()

    def _check_class(self) -> None:
        """A table of virtual functions has its class's type before it, and a type its name: so the C++ ABI of Linux."""
        type_info = ctypes.c_void_p.from_address((self._table.value or 0) - 8)
        name = ctypes.c_char_p.from_address((type_info.value or 0) + 8).value
        if name is None or name.lstrip(b"*") not in _CLASSES:
            raise NotImplementedError(f"torch {torch.__version__} answers for CUDA by {name!r}")

    def _guard_of_python(self) -> int:
        """Return the address of a guard in Python, whose registration, meant for another backend, is taken back."""
        place = device_types.PrivateUse1.value
        if self._guards[place]:
            raise NotImplementedError("a backend of another accelerator is loaded in this process")
        self._kept = _Guard()
        register_device_guard(self._kept)
        pointer, self._guards[place] = self._guards[place], None
        return int(pointer or 0)

    def _table_of_answers(self) -> int:
        """Return the address of a table that says that torch is built with CUDA and that the device is in use.

        Which slot is which is found by trying: with the right one, torch has an accelerator; the other is the one without
        which a backward does not run (AcceleratorHooksInterface.h: isBuilt, isAvailable, hasPrimaryContext).
        """
        original = (ctypes.c_void_p * (_NUM_SLOTS + 2)).from_address((self._table.value or 0) - 16)
        self._copy = (ctypes.c_void_p * (_NUM_SLOTS + 2))(*original)
        self._yes = _ANSWER(lambda: True)
        yes = ctypes.cast(self._yes, ctypes.c_void_p).value
        built = next((slot for slot in range(4, _NUM_SLOTS) if self._makes_accelerator(slot, yes)), None)
        if built is None:
            raise NotImplementedError(f"torch {torch.__version__} cannot be told of an accelerator")
        self._copy[built] = self._copy[built + 2] = yes
        return ctypes.addressof(self._copy) + 16

    def _makes_accelerator(self, slot: int, yes: int | None) -> bool:
        before = self._copy[slot], self._table.value
        self._copy[slot], self._table.value = yes, ctypes.addressof(self._copy) + 16
        found = torch.accelerator.current_accelerator()
        self._copy[slot], self._table.value = before
        return found is not None
