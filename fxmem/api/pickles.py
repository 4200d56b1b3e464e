"""Pickles of version 0.1 name modules by where they were: these names go on leading to their classes.

They name ``fxmem.pipeline.Settings`` too, which that module still has. What they lead to is imported when it is asked for.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

OLD_MODULES = {
    "fxmem.module": "fxmem.api.module",  # OptimizedModule
    "fxmem.step": "fxmem.profiling.training_step",  # TrainingStep
    "fxmem.timing": "fxmem.profiling.roofline",  # Hardware
}


class _Moved(ModuleType):
    """A module under its old name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_module(OLD_MODULES[self.__name__]), name)


for _name in OLD_MODULES:
    sys.modules.setdefault(_name, _Moved(_name))
