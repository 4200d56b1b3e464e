"""What a step allocates, in what order, and what CUDA's caching allocator makes of many of them, one after the other.

In: the allocations of a step on fakes, as they come. Out: :class:`StepEvents`, and their peaks in a new process and in
this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fxmem.ir import Phase
from fxmem.profiling.allocator_state import ORDERS, AllocatorPeaks, AllocatorState
from fxmem.profiling.caching_allocator import Allocation, CachingAllocator, allocator_peaks, peaks_of

MOST_STEPS = 32
"""As many steps are simulated where each leaves other free blocks than the one before; most settle within four: the first
has no optimizer state, the second has it where the first was short of nothing, the third finds what the second left."""


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What one training step allocates, by when it first does."""

    present: tuple[Allocation, ...] = ()
    """Parameters, buffers, batch, gradients of earlier micro-batches."""
    state: tuple[Allocation, ...] = ()
    """Of the optimizer: there when the step starts, but made at the end of the first step."""
    step: tuple[Allocation, ...] = ()
    optimizer_at: int = 0
    """Place in ``step`` where the optimizer's part begins."""
    libraries: tuple[tuple[int, int], ...] = ()
    """(place in ``step``, bytes) of the workspaces that libraries take where they are used first, and keep."""
    workspaces: tuple[tuple[int, int], ...] = ()
    """(place in ``step``, bytes) of the most that cuDNN may take there, and give back at once."""
    scaler: tuple[Allocation, ...] = ()
    """State of a scaler: there when the step starts, but made where the first loss is scaled, at ``scaled_at``."""
    scaled_at: int = 0
    left: tuple[int, ...] = ()
    """Keys of gradients that stay until the next step clears them, in place of those that are present."""

    @property
    def gradients(self) -> tuple[Allocation, ...]:
        """Those of ``present`` that the step clears: gradients that are there as it begins."""
        freed = {key for kind, key, _ in self.step if kind == "free"}
        return tuple(event for event in self.present if event[0] == "alloc" and event[1] in freed)

    @property
    def library_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.libraries)

    def history(self, num_steps: int = MOST_STEPS, emptied: bool = False) -> Iterator[Allocation]:
        """Yield what a process allocates that puts model and batch on the device and trains some steps. ``emptied``: the
        cache is emptied after each."""
        late = set(self.gradients) if self.left else set()  # the first step has none yet
        yield from (event for event in self.present if event not in late)
        yield from self._steps(num_steps, emptied)

    def _steps(self, num_steps: int, emptied: bool) -> Iterator[Allocation]:
        gradients = () if self.left else self.gradients
        made = {key for kind, key, _ in self.step if kind == "alloc"}
        own = made.union(key for _, key, _ in gradients)
        span = 1 + self._last_key()
        for number in range(num_steps):
            shift, before = number * span, [key + (number - 1) * span for key in self.left] if number else []
            if number:  # earlier micro-batches of each step leave gradients
                yield from ((kind, key + shift, nbytes) for kind, key, nbytes in gradients)
            for place, (kind, key, nbytes) in enumerate(self.step):
                yield from self._new_at(place) if number == 0 else ()
                if before and kind == "free" and key not in made:
                    yield from (("free", each, 0) for each in before)
                    before = []
                yield kind, key + shift if key in own else key, nbytes
            yield from self._new_at(len(self.step)) if number == 0 else ()
            yield from (("free", key + shift, 0) for key in sorted(own.difference(self.left)))
            yield from [("empty", 0, 0)] * emptied
            yield "end", 0, 0

    def _new_at(self, place: int) -> Iterator[Allocation]:
        for index, (at, nbytes) in enumerate(self.libraries):
            if at == place:
                yield "alloc", ~index, nbytes
        if place == self.scaled_at:
            yield from self.scaler
        if place == self.optimizer_at:
            yield from self.state

    def _last_key(self) -> int:
        return max((key for _, key, _ in (*self.present, *self.state, *self.scaler, *self.step)), default=0)

    def peaks(
        self, now: AllocatorState | None = None, *, expandable: bool | None = None, emptied: bool = False
    ) -> AllocatorPeaks:
        """Return what the caching allocator makes of it, in a new process and, where ``now`` is given, in this one: the
        larger. What others hold in this process is left out. The rest: as of :func:`allocator_peaks`, :meth:`history`."""
        peaks = allocator_peaks(self.history(emptied=emptied), expandable=expandable)
        most = peaks
        if self.workspaces:
            most = allocator_peaks(self._with_workspaces().history(emptied=emptied), expandable=expandable)
        result = AllocatorPeaks(
            peaks.allocated_bytes,
            peaks.reserved_bytes,
            self.library_bytes,
            max(peaks.allocated_bytes, most.allocated_bytes),
            max(peaks.reserved_bytes, most.reserved_bytes),
        )
        return result if now is None else result.with_allocated(max(peaks.allocated_bytes, self.allocated_from(now)))

    def allocated_from(self, now: AllocatorState) -> int:
        """Return the most that is allocated by steps which start from ``now``."""
        there = dict(zip(now.gradients, (key for _, key, _ in self.gradients), strict=False))
        (lacking, library_bytes), present = now.lacking(self.libraries), self.gradients[len(there) :]
        steps = replace(self, present=present, state=() if now.has_state else self.state, libraries=lacking)
        most_bytes = 0
        for rising in ORDERS:
            allocator = CachingAllocator.holding(now, there, rising=rising)
            own_bytes = now.own_bytes + allocator.owned_bytes + library_bytes
            others = allocator.allocated_bytes - own_bytes
            most_bytes = max(most_bytes, peaks_of(steps.history(), allocator).allocated_bytes - others)
        return most_bytes

    def _with_workspaces(self) -> StepEvents:
        """Return the step in which each workspace is allocated and freed."""
        key = 1 + self._last_key()
        step: list[Allocation] = []
        start = 0
        for number, (place, nbytes) in enumerate(self.workspaces):
            step += self.step[start:place]
            step += (("alloc", key + number, nbytes), ("free", key + number, 0))
            start = place
        earlier = [place for place, _ in self.workspaces]

        def moved(place: int) -> int:
            return place + 2 * sum(each < place for each in earlier)

        libraries = tuple((moved(place), nbytes) for place, nbytes in self.libraries)
        places = {"optimizer_at": moved(self.optimizer_at), "scaled_at": moved(self.scaled_at)}
        return replace(self, step=(*step, *self.step[start:]), libraries=libraries, workspaces=(), **places)  # type: ignore[arg-type]


class StepLog:
    """Writes down the allocations of a step as :class:`StepEvents`."""

    def __init__(self) -> None:
        self._all: list[Allocation] = []
        self._state_at = self._scaler_at = self._step_at = self._scaled_at = self._optimizer_at = 0
        self._libraries: list[int] = []
        self._left: tuple[int, ...] = ()
        self._workspaces: list[tuple[int, int]] = []

    def note(self, kind: str, key: int, nbytes: int) -> None:
        self._all.append((kind, key, nbytes))

    def state_starts(self) -> None:
        self._state_at = len(self._all)

    def scaler_starts(self) -> None:
        self._scaler_at = len(self._all)

    def step_starts(self) -> None:
        self._step_at = self._scaled_at = self._optimizer_at = len(self._all)

    def phase_starts(self, phase: Phase) -> None:
        if phase is Phase.BACKWARD:
            self._scaled_at = len(self._all)
        elif phase is Phase.OPTIMIZER:
            self._optimizer_at = len(self._all)

    def note_left(self, keys: Iterable[int]) -> None:
        """Note the gradients that stay until the next step clears them."""
        self._left = tuple(keys)

    def note_library(self) -> None:
        self._libraries.append(len(self._all) - self._step_at)

    def note_workspace(self, nbytes: int) -> None:
        self._workspaces.append((len(self._all) - self._step_at, nbytes))

    def events(self, libraries_bytes: Sequence[int]) -> StepEvents:
        """Return what was noted; ``libraries_bytes``: of each library's workspace."""
        return StepEvents(
            tuple(self._all[: self._state_at]),
            tuple(self._all[self._state_at : self._scaler_at]),
            tuple(self._all[self._step_at :]),
            self._optimizer_at - self._step_at,
            tuple(zip(self._libraries, libraries_bytes, strict=False)),
            tuple(self._workspaces),
            tuple(self._all[self._scaler_at : self._step_at]),
            self._scaled_at - self._step_at,
            self._left,
        )
