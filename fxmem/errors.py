"""Every error fxmem raises on purpose. All derive from :class:`FxMemError` and from the fitting builtin."""

from __future__ import annotations

import textwrap
import traceback
from collections.abc import Iterable, Iterator


class FxMemError(Exception):
    """Base of all errors of fxmem."""


class InputError(FxMemError, ValueError):
    """An argument of a public function cannot be used; the message says what to pass."""


class BudgetError(InputError):
    """The budget is not a usable number of bytes."""


class InfeasibleBudgetError(FxMemError, ValueError):
    """No plan fits the budget.

    ``budget_bytes``: what was asked. ``least_bytes``: the least peak any plan reached. ``breakdown``: (kind, bytes)
    pairs that sum to ``least_bytes``. ``place``: node, module path and source line of that peak. ``remedy``: what else
    helps, as text.
    """

    def __init__(
        self,
        budget_bytes: int,
        least_bytes: int,
        breakdown: tuple[tuple[str, int], ...] = (),
        place: str = "",
        remedy: str = "",
    ) -> None:
        self.budget_bytes, self.least_bytes = budget_bytes, least_bytes
        self.breakdown, self.place, self.remedy = breakdown, place, remedy
        unit, scale = unit_of(least_bytes)
        parts = ", ".join(f"{kind} {nbytes / scale:.3f}" for kind, nbytes in breakdown if nbytes)
        budget, least = budget_bytes / scale, least_bytes / scale
        message = f"Budget {budget:.3f} {unit} is below the least reachable peak {least:.3f} {unit}"
        if place:
            message += f" (at {place})"
        if parts:
            message += f": even recomputing everything, that step holds {parts}"
        enough = -(-1000 * least_bytes // int(scale)) / 1000
        message += f". Raise the budget to {enough:.3f} {unit} or more, or train on a smaller micro-batch."
        super().__init__(message + (f" {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.budget_bytes, self.least_bytes, self.breakdown, self.place, self.remedy))


def unit_of(peak_bytes: int) -> tuple[str, float]:
    """Return (name, bytes) of the unit to write memory in: GB, or a smaller one for a model that is a toy."""
    units = (("GB", 1e9, 1e8), ("MB", 1e6, 1e5), ("kB", 1e3, 0))
    return next((name, scale) for name, scale, least in units if peak_bytes >= least)


def in_units(nbytes: int) -> str:
    """Return ``nbytes`` as a text with its unit: ``"8 GB"``, ``"0.2126 MB"``."""
    unit, scale = unit_of(nbytes)
    return f"{nbytes / scale:.4g} {unit}"


class CaptureError(FxMemError, RuntimeError):
    """The model's graph could not be captured faithfully."""


class ChangedArgumentError(CaptureError):
    """The model changes an argument that is no tensor, of which it is given a copy in every planned call."""


class ProfileError(FxMemError, RuntimeError):
    """The captured graph could not be run on fake tensors."""


class PlanMismatchError(FxMemError, RuntimeError):
    """At run time a tensor is not what was planned for; going on could give wrong gradients."""


class SavedTensorModifiedError(FxMemError, RuntimeError):
    """A tensor needed for backward was modified in place after it was saved, as autograd itself would report."""


class NotPlannedError(FxMemError, AttributeError):
    """The optimized module has not seen a training-mode call yet, so it has no plan, report or graph."""


class VerificationError(FxMemError, RuntimeError):
    """The emitted module, run on fake tensors, does not keep what the plan promises."""


__all__ = [
    "BudgetError",
    "CaptureError",
    "FxMemError",
    "InfeasibleBudgetError",
    "InputError",
    "NotPlannedError",
    "PlanMismatchError",
    "ProfileError",
    "SavedTensorModifiedError",
    "VerificationError",
]


def first_lines(error: Exception, limit: int = 600) -> str:
    """Return the beginning of an error's message on one line, in whole words; its type's name if it has none."""
    return textwrap.shorten(str(error), limit, placeholder=" ...") or type(error).__name__


def raised_in(error: BaseException, modules: Iterable[tuple[str, object]]) -> str:
    """Return the one of a model's named modules whose code raised ``error``, with the source line; empty if none did."""
    names = {id(module): name or "the model" for name, module in modules}
    place = ""
    for cause in chain_of(error):
        for frame, line in traceback.walk_tb(cause.__traceback__):
            owner = names.get(id(frame.f_locals.get("self")))
            if owner and not str(frame.f_globals.get("__name__")).startswith("torch."):
                place = f" in {owner} ({frame.f_code.co_filename.rsplit('/', 1)[-1]}:{line})"
    return place


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and what led to it; the first error comes last."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
