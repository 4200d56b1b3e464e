"""Training calls that no plan is for: a method of an optimized model, or a submodule of it, that runs eager PyTorch.

An optimized model gives out its submodules as they are. Whoever asks for one in training mode may be about to call it: from
then to the model's next planned call a hook looks at all modules' calls (:func:`look`). Who calls a submodule in that time
has gone around the plan, and hears of it once, by the name of the method or the submodule; a forward that was set on the
model (:mod:`fxmem.api.set_forward`) is planned from then on.
"""

from __future__ import annotations

import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from fxmem.torch_private import FakeTensor
from fxmem.user_frames import level_of_user, method_running


@dataclass(frozen=True, slots=True)
class _Watched:
    model: weakref.ref[torch.nn.Module]
    inside: frozenset[int]
    """Ids of its submodules."""


class _Watch:
    """What is looked at now; one for the process, as the hook is."""

    def __init__(self) -> None:
        self.models: dict[int, _Watched] = {}
        self.told: weakref.WeakKeyDictionary[torch.nn.Module, set[str]] = weakref.WeakKeyDictionary()
        self.planned_calls = 0
        """How many run now, one inside another or in threads."""
        self._hook: RemovableHandle | None = None

    def add(self, model: torch.nn.Module) -> None:
        inside = frozenset(id(module) for module in model.modules() if module is not model)
        self.models[id(model)] = _Watched(weakref.ref(model), inside)
        if self._hook is None:
            self._hook = register_module_forward_pre_hook(_look_at_call)

    def drop(self, model_id: int) -> None:
        self.models.pop(model_id, None)
        if not self.models and self._hook is not None:
            self._hook.remove()
            self._hook = None


_WATCH = _Watch()


def look(model: torch.nn.Module) -> None:
    """From now to the next planned call of ``model``, tell of calls of its submodules that train.

    To be called where a submodule is asked for.
    """
    if _WATCH.planned_calls or id(model) in _WATCH.models or torch.compiler.is_compiling():
        return
    if model.training and torch.is_grad_enabled():
        _WATCH.add(model)


@contextmanager
def planned_call(model_id: int) -> Iterator[None]:
    """In the body, submodules are called by the plan, or to plan. ``model_id``: the id of the optimized model."""
    if model_id in _WATCH.models:
        _WATCH.drop(model_id)
    _WATCH.planned_calls += 1
    try:
        yield
    finally:
        _WATCH.planned_calls -= 1


class _Around(threading.local):
    """Forwards that were set on optimized models and run now, the innermost last."""

    def __init__(self) -> None:
        self.running: list[tuple[int, Callable[[str], None]]] = []


_AROUND = _Around()


@contextmanager
def submodules_told_to(model_id: int, told: Callable[[str], None]) -> Iterator[None]:
    """In the body, a forward that was set on the optimized model of this id, call ``told`` with the path of a submodule
    that is called around the plan."""
    _AROUND.running.append((model_id, told))
    try:
        yield
    finally:
        _AROUND.running.pop()


def _look_at_call(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    if torch.compiler.is_compiling() or _WATCH.planned_calls or not (module.training and torch.is_grad_enabled()):
        return
    if any(isinstance(arg, FakeTensor) for arg in args) or not any(p.requires_grad for p in module.parameters()):
        return
    for model_id, watched in list(_WATCH.models.items()):
        model = watched.model()
        if model is None:
            _WATCH.drop(model_id)
        elif id(module) in watched.inside:
            path = next((name for name, part in model.named_modules() if part is module), None)
            if path is not None:
                _WATCH.drop(model_id)
                told = next((told for running_id, told in reversed(_AROUND.running) if running_id == model_id), None)
                if told is not None:
                    told(path)
                else:
                    _tell(model, path, method_running(model))


def _tell(model: torch.nn.Module, path: str, method: str | None) -> None:
    told = _WATCH.told.setdefault(model, set())
    what = path if method is None else method
    if what in told:
        return
    told.add(what)
    kind, part = type(model).__name__, re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", f"model.{path}")
    if method is None:
        call, plan = f"{part}, a submodule of an optimized {kind}, was called", ""
    else:
        call = f"{kind}.{method} called {part}"
        plan = f'plan the method too: fxmem.optimize(model, methods=("forward", "{method}"), ...), or '
    warnings.warn(
        f"{call} in training mode, which runs outside of the plan: its memory is that of eager PyTorch and counts in no "
        f"budget. Call the model itself, {plan}optimize the submodule instead of the whole: "
        f"{part} = fxmem.optimize({part}, ...).",
        stacklevel=level_of_user(),
    )
