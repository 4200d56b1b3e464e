"""What a compiled step takes, as its code tells that ran on fakes: plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

TIGHT, IN_ORDER = 1, 2
TIGHTNESSES = (TIGHT, IN_ORDER)
"""Of a backward that is to take less: NOTE [Tight backwards] and NOTE [What is written when] in
:mod:`fxmem.compiled.levers`."""


@dataclass(frozen=True, slots=True)
class StepRun:
    """A compiled step that ran on fakes; bytes are sums over storages, all of the step included."""

    peak_bytes: int
    forward_peak_bytes: int
    """Before the backward: of the forwards and of a loss outside of the graphs."""
    saved_bytes: int
    """Alive between forward and backward, outputs included."""
    backward_peak_bytes: int
    seconds: float
    """Estimated from bytes that kernels move and FLOPs of other ops."""
    most_bytes: int = 0
    """The most that a step takes on CUDA: in the first one Inductor may try each kernel, and what the
    allocator leaves unsplit depends on what compiling left it (:mod:`fxmem.compiled.fakerun`)."""
    floor_bytes: int = 0
    """What the end of the step takes, gradients and the optimizer's step: no plan changes that."""
    inside_bytes: int = 0
    """By how much that which ops take inside raises the peak."""
    laid_out_seconds: float = 0.0
    """Of ``seconds``: of what layouts decide, convolutions and copies from one layout to another; 0 if not measured."""
    measured_seconds: float = 0.0
    """What these take on this machine."""
    tightness: int = 0
    """Of the backward, if that is why it takes less (:data:`TIGHTNESSES`)."""
    layouts_left: bool = False
    """Whether convolutions are laid out as they are, since the code would else lose writes."""
    loses_writes: bool = False
    """NOTE [Scatters before convolutions] in :mod:`fxmem.compiled.levers`."""

    @property
    def needed_bytes(self) -> int:
        """The least budget that it keeps."""
        return max(self.peak_bytes, self.most_bytes)

    @property
    def outside_peak_bytes(self) -> int:
        """The peak but for what ops take inside."""
        return self.peak_bytes - self.inside_bytes

    @property
    def room_in_forwards_bytes(self) -> int:
        """What may be there beside until the backward begins, and the step takes no more."""
        return max(self.backward_peak_bytes, self.floor_bytes, self.forward_peak_bytes) - self.forward_peak_bytes

    def beside(self, present_bytes: int, in_forwards_bytes: int, added_bytes: int = 0) -> StepRun:
        """Return the same step where so much more is there: until it is over, and until the backward begins.
        ``added_bytes``: of gradients that are added to others then, and freed."""
        before = max(self.forward_peak_bytes, self.backward_peak_bytes, self.floor_bytes)
        forward = self.forward_peak_bytes + present_bytes + in_forwards_bytes
        backward, floor = self.backward_peak_bytes + present_bytes, self.floor_bytes + present_bytes - added_bytes
        more = max(forward, backward, floor) - before
        return replace(
            self,
            peak_bytes=self.peak_bytes + more,
            forward_peak_bytes=forward,
            saved_bytes=self.saved_bytes + present_bytes + in_forwards_bytes,
            backward_peak_bytes=backward,
            most_bytes=self.most_bytes and self.most_bytes + more,
            floor_bytes=floor,
        )


def least_of(usual: StepRun, enough_bytes: float, tight: Callable[[int], StepRun]) -> StepRun:
    """Return ``usual``, or while that takes more than ``enough_bytes`` the run with a tighter backward that takes least."""
    least = usual
    for tightness in TIGHTNESSES:
        if least.needed_bytes <= enough_bytes:
            break
        other = replace(tight(tightness), tightness=tightness)
        least = min(least, other, key=lambda run: run.needed_bytes)
    return least
