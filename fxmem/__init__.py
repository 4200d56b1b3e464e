"""fxmem: train a PyTorch model inside a memory budget, with the same numbers."""

from fxmem.advice.advise import Advice, advise
from fxmem.api import pickles  # noqa: F401  (names that old pickles look for)
from fxmem.api.estimate import Estimate, estimate
from fxmem.api.frontier import BudgetPoint, Frontier, frontier
from fxmem.api.module import OptimizedModule, optimize, optimize_, restore
from fxmem.api.planned_class import FxMemModule
from fxmem.api.prepare import Prepared, PreparedSize, prepare
from fxmem.api.track import Measurement, track
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
from fxmem.ir import Phase, Plan, Timeline, TimelineStep, Verification
from fxmem.profiling.caching_allocator import AllocatorPeaks
from fxmem.profiling.training_step import Loop, TrainingStep
from fxmem.progress import log_to_stderr
from fxmem.report.peak import Breakdown, Place
from fxmem.report.text import Report, Row
from fxmem.watching.graphs import GraphWatch, HeldGraphs, watch_graphs
from fxmem.watching.memory import MemoryWatch, watch

__version__ = "0.2.0"

log_to_stderr()

__all__ = [
    "Advice",
    "AllocatorPeaks",
    "Breakdown",
    "BudgetError",
    "BudgetPoint",
    "CaptureError",
    "Estimate",
    "Frontier",
    "FxMemError",
    "FxMemModule",
    "GraphWatch",
    "HeldGraphs",
    "InfeasibleBudgetError",
    "InputError",
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
