"""Pickles of version 0.1 name modules by where they were: these names go on leading to their classes.

They name ``fxmem.pipeline.Settings`` too, which that module still has.
"""

from __future__ import annotations

import sys
from types import ModuleType

from fxmem.api import module
from fxmem.profiling import roofline, training_step

OLD_MODULES: dict[str, ModuleType] = {
    "fxmem.module": module,  # OptimizedModule
    "fxmem.step": training_step,  # TrainingStep
    "fxmem.timing": roofline,  # Hardware
}

for name, now in OLD_MODULES.items():
    sys.modules.setdefault(name, now)
