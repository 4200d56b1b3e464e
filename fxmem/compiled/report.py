"""What is told of a compiled step: plain data, without Inductor, whose import takes seconds."""

from __future__ import annotations

from dataclasses import dataclass

from fxmem.errors import in_units
from fxmem.ir import PlainData


@dataclass(frozen=True, slots=True)
class CompiledReport(PlainData):
    """What was planned for one compiled training step. Bytes are those of the whole step, as allocated."""

    budget_bytes: int | None
    predicted_peak_bytes: int
    """Of the code that Inductor generated for the plan, run on fakes."""
    keep_all_peak_bytes: int
    """Of the same step with nothing recomputed but what is free."""
    fixed_bytes: int
    """Of the peak: parameters, buffers, batch, optimizer state."""
    saved_bytes: int
    """Alive between forward and backward."""
    keep_all_seconds: float
    """Estimated time of the step with nothing recomputed but what is free."""
    overhead_seconds: float
    """Estimated time of what is recomputed in one step, and of other layouts, which may be less than nothing."""
    overhead_ratio: float
    """``overhead_seconds`` over ``keep_all_seconds``."""
    num_kernels: int
    num_recomputed: int
    """Values in memory that the plan drops and makes again."""
    num_lowered: int
    """Plans whose code was generated and judged."""
    plan_seconds: float
    layouts_left: bool = False
    """Whether convolutions are laid out as they are: Inductor's copies of their weights, channels last, are spared."""
    tight_backward: bool = False
    """Whether the backward is compiled for less memory: no kernels are fused because they read the same, which may
    recompute too early, and no buffer is held for a later one to take over."""
    most_bytes: int = 0
    """On CUDA, the most that a step takes, the first included, in which Inductor tries kernels; within the budget too."""
    num_calls: int = 1
    """Of compiled graphs in one step, whose peak is told for all of them together."""

    def __str__(self) -> str:
        most = f", up to {in_units(self.most_bytes)} while kernels are tried" if self.most_bytes else ""
        budget = "no budget" if self.budget_bytes is None else f"budget {in_units(self.budget_bytes)}"
        several = self.num_calls > 1
        return (
            f"compiled step: peak {in_units(self.predicted_peak_bytes)}{most} ({budget}; keeping all "
            f"{in_units(self.keep_all_peak_bytes)}; parameters, batch and optimizer {in_units(self.fixed_bytes)}), "
            f"{self.num_recomputed} of {self.num_kernels} kernels run again, time {self.overhead_ratio:+.1%} "
            f"(estimate); planned in {self.plan_seconds:.1f} s, {self.num_lowered} plans lowered"
            + ("; weights of convolutions are not copied to channels last" if self.layouts_left else "")
            + ("; the backward is compiled for less memory" if self.tight_backward else "")
            + (f"; {self.num_calls} calls of compiled graphs, what runs between them not counted" if several else "")
        )


@dataclass(frozen=True, slots=True)
class CompiledCost(PlainData):
    """What one budget of a compiled step costs."""

    budget_bytes: int
    """The least budget for which this is the plan."""
    peak_bytes: int
    """Of the code that Inductor generates for the plan, run on fakes."""
    overhead_seconds: float
    """Estimated time of what is recomputed in one step, and of other layouts."""
    overhead_ratio: float
    """``overhead_seconds`` over the estimated time of the step with nothing recomputed."""


@dataclass(frozen=True, slots=True)
class CompiledEstimate(PlainData):
    """What one compiled training step takes that recomputes nothing but what is free."""

    peak_bytes: int
    """Of the whole step, allocated."""
    fixed_bytes: int
    """Of it: parameters, buffers, batch and the optimizer's state."""
    saved_bytes: int
    """Alive between forward and backward."""

    def __str__(self) -> str:
        return (
            f"compiled step: peak {in_units(self.peak_bytes)}, of it parameters, batch and optimizer "
            f"{in_units(self.fixed_bytes)}; between forward and backward {in_units(self.saved_bytes)}"
        )
