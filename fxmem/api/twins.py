"""Other objects that are one model: they share its ``__dict__``, and have a class of their own.

In: a model. Out: an object whose attributes, parameters and submodules are the model's, whoever sets them. What the class
keeps for one object alone, hooks for one, is an attribute of :class:`Own`.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from fxmem.capture.reports import reporting_methods

HOOKS = tuple(n for n in vars(torch.nn.Module()) if "hook" in n and "state_dict" not in n)


class Own:
    """An attribute that is kept with the class, which is this one module's, not with what original and module share."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, owner: Any) -> Any:
        if module is None:
            return getattr(torch.nn.Module, self._name, None)
        return owner._fxmem_own[self._name]

    def __set__(self, module: Any, value: Any) -> None:
        type(module)._fxmem_own[self._name] = value


def twin_of(model: torch.nn.Module, kind: type[torch.nn.Module] | None = None) -> torch.nn.Module:
    """Return another object that is ``model``, of class ``kind``, by default of the same."""
    made = object.__new__(kind or type(model))
    object.__setattr__(made, "__dict__", model.__dict__)
    return made


class _WithForward(torch.nn.Module):
    """A model whose forward is another one of its methods, around which no hooks run."""

    _fxmem_own: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Nothing, as for :class:`FxMemModule`."""


for _name in HOOKS:
    setattr(_WithForward, _name, Own(_name))


def with_method(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """Return another object that is ``model``, but whose forward is its method ``name``."""
    method = getattr(model, name)
    return with_forward(model, name, getattr(method, "__func__", None) or staticmethod(method))


def with_forward(model: torch.nn.Module, name: str, forward: Any) -> torch.nn.Module:
    """Return another object that is ``model``, but whose forward is the function ``forward``, called ``name``."""
    kind = type(model)
    members = {
        "__module__": kind.__module__,
        "__call__": torch.nn.Module.__call__,
        "_fxmem_own": {n: v for n, v in vars(torch.nn.Module()).items() if n in HOOKS},
        **reporting_methods(kind),
        "forward": forward,
    }
    label = f"{kind.__name__}.{name}"
    return twin_of(model, types.new_class(label, (_WithForward, kind), {}, lambda own: own.update(members)))
