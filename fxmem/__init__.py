"""fxmem: train a PyTorch model inside a memory budget, with the same numbers."""

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
from fxmem.estimate import Estimate, estimate
from fxmem.frontier import BudgetPoint, frontier
from fxmem.module import OptimizedModule, optimize
from fxmem.report import Report
from fxmem.track import track
from fxmem.types import Plan

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "BudgetPoint",
    "CaptureError",
    "Estimate",
    "FxMemError",
    "InfeasibleBudgetError",
    "InputError",
    "NotPlannedError",
    "OptimizedModule",
    "Plan",
    "PlanMismatchError",
    "ProfileError",
    "Report",
    "SavedTensorModifiedError",
    "VerificationError",
    "estimate",
    "frontier",
    "optimize",
    "track",
]
