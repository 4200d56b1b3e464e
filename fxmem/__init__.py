"""fxmem: train a PyTorch model inside a memory budget, with the same numbers.

Names are imported where they are first asked for: torch takes seconds, and ``fxmem --help`` needs none of it.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fxmem.api import pickles  # noqa: F401  (names that old pickles look for)
from fxmem.progress import log_to_stderr

if TYPE_CHECKING:
    from fxmem.advice.advise import Advice, advise
    from fxmem.api.compiled import CompiledModule, backend
    from fxmem.api.estimate import Estimate, estimate
    from fxmem.api.frontier import BudgetPoint, Frontier, frontier
    from fxmem.api.module import OptimizedModule, optimize, optimize_, restore
    from fxmem.api.planned_class import FxMemModule
    from fxmem.api.prepare import Prepared, PreparedSize, prepare
    from fxmem.api.track import Measurement, track
    from fxmem.compiled.report import CompiledEstimate, CompiledReport
    from fxmem.errors import (
        BudgetError,
        CaptureError,
        FxMemError,
        InfeasibleBudgetError,
        InputError,
        NotPlannedError,
        PlanMismatchError,
        ProfileError,
        SavedTensorModifiedError,
        VerificationError,
    )
    from fxmem.ir import Launches, Phase, Plan, Timeline, TimelineStep, Verification
    from fxmem.profiling.allocator_state import AllocatorPeaks
    from fxmem.profiling.training_step import Loop, TrainingStep
    from fxmem.report.peak import Breakdown, Place
    from fxmem.report.text import Report, Row
    from fxmem.watching.graphs import GraphWatch, HeldGraphs, watch_graphs
    from fxmem.watching.memory import MemoryWatch, watch

__version__ = "0.2.0"

_NAMES = {
    "fxmem.advice.advise": "Advice advise",
    "fxmem.api.compiled": "CompiledModule backend",
    "fxmem.api.estimate": "Estimate estimate",
    "fxmem.api.frontier": "BudgetPoint Frontier frontier",
    "fxmem.api.module": "optimize optimize_ OptimizedModule restore",
    "fxmem.api.planned_class": "FxMemModule",
    "fxmem.api.prepare": "prepare Prepared PreparedSize",
    "fxmem.api.track": "Measurement track",
    "fxmem.compiled.report": "CompiledEstimate CompiledReport",
    "fxmem.errors": "BudgetError CaptureError FxMemError InfeasibleBudgetError InputError NotPlannedError "
    "PlanMismatchError ProfileError SavedTensorModifiedError VerificationError",
    "fxmem.ir": "Launches Phase Plan Timeline TimelineStep Verification",
    "fxmem.profiling.allocator_state": "AllocatorPeaks",
    "fxmem.profiling.training_step": "Loop TrainingStep",
    "fxmem.report.peak": "Breakdown Place",
    "fxmem.report.text": "Report Row",
    "fxmem.watching.graphs": "GraphWatch HeldGraphs watch_graphs",
    "fxmem.watching.memory": "MemoryWatch watch",
}
"""By module, what is public of it."""
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
        return value
    inside = f"fxmem.{name}"
    if not name.startswith("_") and (inside in sys.modules or find_spec(inside) is not None):
        return import_module(inside)
    raise AttributeError(f"module 'fxmem' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


log_to_stderr()

__all__ = [
    "Advice",
    "AllocatorPeaks",
    "Breakdown",
    "BudgetError",
    "BudgetPoint",
    "CaptureError",
    "CompiledEstimate",
    "CompiledModule",
    "CompiledReport",
    "Estimate",
    "Frontier",
    "FxMemError",
    "FxMemModule",
    "GraphWatch",
    "HeldGraphs",
    "InfeasibleBudgetError",
    "InputError",
    "Launches",
    "Loop",
    "Measurement",
    "MemoryWatch",
    "NotPlannedError",
    "OptimizedModule",
    "Phase",
    "Place",
    "Plan",
    "PlanMismatchError",
    "Prepared",
    "PreparedSize",
    "ProfileError",
    "Report",
    "Row",
    "SavedTensorModifiedError",
    "Timeline",
    "TimelineStep",
    "TrainingStep",
    "Verification",
    "VerificationError",
    "advise",
    "backend",
    "estimate",
    "frontier",
    "optimize",
    "optimize_",
    "restore",
    "prepare",
    "track",
    "watch",
    "watch_graphs",
]
