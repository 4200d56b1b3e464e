"""fxmem: train a PyTorch model inside a memory budget, with the same numbers."""

from fxmem.api.estimate import Estimate, estimate
from fxmem.api.frontier import BudgetPoint, frontier
from fxmem.api.module import OptimizedModule, optimize
from fxmem.api.track import track
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
from fxmem.ir import Plan
from fxmem.report.text import Report

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
