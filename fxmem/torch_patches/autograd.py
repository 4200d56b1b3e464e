"""Patches of autograd's state: what is around a call of fxmem's and must not reach inside."""

from __future__ import annotations

import functools
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from fxmem.torch_patches.replacing import patch, replaced
from fxmem.torch_private import without_modes

_planning = threading.RLock()


def _renew_lock() -> None:
    global _planning
    _planning = threading.RLock()


if hasattr(os, "register_at_fork"):  # another thread's lock would never be released in the child
    os.register_at_fork(after_in_child=_renew_lock)


@patch
@contextmanager
def as_in_training() -> Iterator[None]:
    """Plan in the body as for a training call, whatever grad mode there is around; one thread at a time.

    Modes that watch or change ops around the call (``fxmem.track``, a FLOP counter) do not see the fakes. One
    thread, as capturing exchanges functions of torch for a while (so does torch.export). Anomaly mode, which looks at
    values, is off: fakes have none. torch 2.11 to 2.15.
    """
    with (
        _planning,
        without_modes(),
        outermost_in_autocast(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.set_detect_anomaly(False),
        without_cached_parametrizations(),
        without_hooks_on_saved_tensors(),
    ):
        yield


_casts = threading.local()


@contextmanager
def casts_stay_at_hand(stay: Callable[[], bool]) -> Iterator[None]:
    """Plan in the body without :func:`outermost_in_autocast`, if casts of the region around are to ``stay``. It is asked
    only where something is planned."""
    before, _casts.stay = getattr(_casts, "stay", None), stay
    try:
        yield
    finally:
        _casts.stay = before


@patch
@contextmanager
def outermost_in_autocast() -> Iterator[None]:
    """Let regions of autocast in the body end as outermost ones do, whatever region there is around.

    Only an outermost region lets go of its casts: those of a step on fakes would be there in its backward, and take memory.
    It lets go of those of the region around too, which are made anew afterwards. torch 2.11 to 2.15, which tells no depth
    but by changing it.
    """
    torch.autocast_increment_nesting()
    depth = torch.autocast_decrement_nesting()
    stay = getattr(_casts, "stay", None)
    if depth and stay is not None and stay():
        depth = 0
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(depth):
            torch.autocast_increment_nesting()


@patch
@contextmanager
def without_cached_parametrizations() -> Iterator[None]:
    """Switch off the cache of ``torch.nn.utils.parametrize.cached``.

    A step on fakes inside of it would leave the fake weights there, and the next real forward would take them. torch
    2.11 to 2.15, which can switch it on only.
    """
    with replaced(parametrize, "_cache_enabled", 0):
        yield


@patch
@contextmanager
def without_hooks_on_saved_tensors() -> Iterator[None]:
    """Take away the hooks on saved tensors that are set around the call, and set them again.

    They are not for fakes: ``save_on_cpu`` would move each to the CPU, and its bytes would count as the CPU's. torch 2.11
    to 2.15, where hooks nest and only the innermost pair is asked.
    """
    hooks = []
    while (pair := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        saved_tensors_hooks(*pair).__exit__()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            saved_tensors_hooks(pack, unpack).__enter__()


_NOTHING = nullcontext()
_BATCHING: Any = torch._C._dispatch_key_parse("VmapMode")


def in_batched_backward() -> bool:
    """True inside a backward that computes many gradients at once (``is_grads_batched``) from one forward's tensors."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(_BATCHING))


@patch
def outside_of_batch() -> AbstractContextManager[object]:
    """Return a context in which no tensor stands for many, as outside of such a backward.

    Recomputation inside of it runs the forward's ops on the forward's tensors, which are not batched; a random op among
    them would be refused ("vmap: called random operation"). torch 2.11 to 2.15, where ``is_grads_batched`` sets that key.
    """
    return _unbatched() if in_batched_backward() else _NOTHING


@contextmanager
def _unbatched() -> Iterator[None]:
    torch._C._dispatch_tls_set_dispatch_key_included(_BATCHING, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(_BATCHING, True)


@patch
@contextmanager
def graphs_shown_to(show: Callable[[Sequence[Any]], None]) -> Iterator[None]:
    """Call ``show(roots)`` with the tensors or edges that each backward in the body starts from, before it runs.

    Nothing public tells of a backward that begins. Bodies may end in any order. torch 2.11 to 2.15.
    """
    with _showing:
        _shown_to.append(show)
        if len(_shown_to) == 1:
            run = vars(torch.autograd)["_engine_run_backward"]

            def shown(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
                for each in tuple(_shown_to):
                    each(roots)
                return run(roots, *args, **kwargs)

            _installed.enter_context(replaced(torch.autograd, "_engine_run_backward", shown))
    try:
        yield
    finally:
        with _showing:
            _shown_to.remove(show)
            if not _shown_to:
                _installed.close()


@patch
@contextmanager
def calls_shown_to(mode: TorchFunctionMode) -> Iterator[None]:
    """Have ``mode`` see torch's functions, below all modes that there are: those that end in the body find themselves on
    top, as they left the stack. Bodies may end in any order, and where they like: while ``mode`` sees a call torch has it
    off the stack and puts it back afterwards, and a finalizer may run in any thread; then it ends with a later
    collection of garbage in its thread. torch 2.11 to 2.15.
    """
    with _no_function_modes() as around:
        around.insert(0, mode)
    try:
        yield
    finally:
        if not _taken_off(mode):
            with _showing:
                _to_take_off.append(weakref.ref(mode))
                if _take_off_more not in gc.callbacks:
                    gc.callbacks.append(_take_off_more)


def _taken_off(mode: TorchFunctionMode | None) -> bool:
    """Take ``mode`` off this thread's stack; False if it is not there. None is a mode that no stack has any more."""
    with _no_function_modes() as around:
        found = mode is None or any(each is mode for each in around)
        around[:] = [each for each in around if each is not mode]
    return found


def _take_off_more(*_: Any) -> None:
    with _showing:
        for each in tuple(_to_take_off):
            if _taken_off(each()):
                _to_take_off.remove(each)
        if not _to_take_off and _take_off_more in gc.callbacks:
            gc.callbacks.remove(_take_off_more)


_to_take_off: list[weakref.ref[TorchFunctionMode]] = []


@contextmanager
def _no_function_modes() -> Iterator[list[Any]]:
    """Take all modes off the stack and give them as a list; what is in the list then is the stack again."""
    modes: list[Any] = []
    while torch._C._len_torch_function_stack():
        modes.insert(0, torch._C._pop_torch_function_stack())
    try:
        yield modes
    finally:
        for mode in modes:
            torch._C._push_on_torch_function_stack(mode)


@patch
@contextmanager
def calls_of_backward_shown_to(show: Callable[[Sequence[Any]], None]) -> Iterator[None]:
    """Call ``show(roots)`` as ``backward`` or ``grad`` is called, while all modes around are in their places.

    :func:`graphs_shown_to` is told inside, where a mode that sees the call cannot end. Bodies may end in any order.
    torch 2.11 to 2.15.
    """
    with _showing:
        _called_for.append(show)
        if len(_called_for) == 1:
            for owner, name in ((torch.Tensor, "backward"), (torch.autograd, "backward"), (torch.autograd, "grad")):
                _called.enter_context(replaced(owner, name, _shown(vars(owner)[name])))
    try:
        yield
    finally:
        with _showing:
            _called_for.remove(show)
            if not _called_for:
                _called.close()


def _shown(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def shown(roots: Any, *args: Any, **kwargs: Any) -> Any:
        for each in tuple(_called_for):
            each([roots] if isinstance(roots, torch.Tensor) else list(roots))
        return run(roots, *args, **kwargs)

    return shown


_called_for: list[Callable[[Sequence[Any]], None]] = []
_called = ExitStack()
_shown_to: list[Callable[[Sequence[Any]], None]] = []
_installed = ExitStack()
_showing = threading.RLock()
