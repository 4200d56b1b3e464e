"""The one judge of a plan: peak bytes and recompute seconds of a whole training step, by running it on integers.

In: a :class:`GraphProfile` and a :class:`Plan`. Out: a :class:`Timeline`. It follows the runtime's rules exactly (who
holds what, and when it lets go), so its peak is the emitted module's peak to the byte. Not modelled: anything that
depends on the values in tensors. :class:`Tables` and :class:`Run` are the same judge for planners, who ask thousands
of times: tables are made once for a profile (or a part of it), a run costs microseconds per tick.

NOTE [Who holds a managed storage]

1. The forward holds it from its creation to ``last_used``.
2. If it is kept: every saved tensor of autograd on it holds it until released, and so does every empty slot that lists
   it among its recipe's inputs.
3. If it is dropped: it has a *slot*, empty after the forward. A slot lives while a saved tensor on its storage, or an
   empty slot whose recipe reads it, lives. An empty slot holds the slots of its recipe's inputs; a full one holds its
   storage and nothing else.
4. Unpacking an empty slot runs the recipes of all empty slots it needs, in position order. A storage made on the way
   goes into its slot if the plan's limit allows; else it is held until its last reader in this recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add

from fxmem.ir import KEEP, GraphProfile, Phase, Plan, Timeline, TimelineStep
from fxmem.planners.offload.recipes import with_offloads
from fxmem.planners.prefix import Prefix, TickRow, prefix_of

NO_RECIPE = -1
"""Position, in :class:`Tables`, of a storage that may not be dropped."""

SECONDS_UNIT = 2.0**40
"""Parts of a second that times are rounded to."""


def simulate(profile: GraphProfile, plan: Plan, *, with_steps: bool = False) -> Timeline:
    """Return the peak and the recompute time of ``profile``'s step under ``plan``.

    Errors: ``ValueError`` if the plan drops a storage that has no recipe. ``with_steps`` fills ``Timeline.steps``.
    """
    check_limits(profile, plan)
    profile = with_offloads(profile, plan)
    run = run_of(profile, plan.limits, record=with_steps or bool(plan.offloads))
    num_fetched = sum(recipe in plan.fetched for _, recipe, _ in run.steps or ())
    steps = tuple(_timeline_step(profile, plan, *step) for step in run.steps or ()) if with_steps else ()
    return Timeline(run.peak_bytes, run.peak_tick, run.recompute_seconds, run.num_recomputed - num_fetched, steps)


def run_of(profile: GraphProfile, limits: Sequence[int], *, record: bool = False) -> Run:
    """Return the finished run of a step under ``limits``, which fit."""
    tables = tables_of(profile)
    run = Run(tables, limits, record=record)
    first = run.advance_prefix()
    run.advance(tables.ticks[first:], first)
    return run


def _timeline_step(profile: GraphProfile, plan: Plan, tick: int, recipe: int | None, live_bytes: int) -> TimelineStep:
    phase = profile.ticks[tick].phase
    node = profile.ticks[tick].node if recipe is None else profile.recipes[recipe].nodes[-1]
    label = profile.nodes[node].name if node is not None else phase.value
    label = f"{label} (from host memory)" if recipe in plan.fetched else label
    gradient_bytes = profile.ticks[max(0, tick - 1) if recipe is not None else tick].gradient_bytes
    return TimelineStep(phase, label, live_bytes, recipe is not None, gradient_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """A profile, or a part of one, as flat lists: the simulator's input. Positions are indices into the recipe lists."""

    nbytes: list[int]
    num_saves: list[int]
    internal: list[bool]
    position: list[int]
    """Of each storage's recipe; ``NO_RECIPE`` if it may not be dropped."""
    slot_inputs: list[tuple[int, ...]]
    """For each storage, the inputs of its recipe: what its empty slot holds."""
    inputs: list[tuple[int, ...]]
    products: list[tuple[int, ...]]
    seconds: list[float]
    """Multiples of 2^-40 s (0.9 ps), so that sums up to 8,192 s are exact in whatever order."""
    peak_bytes: list[int]
    capture_peak_bytes: list[int]
    ticks: list[TickRow]
    prefix: Prefix = field(default_factory=Prefix)


_latest: tuple[GraphProfile, Tables] | None = None  # the tables of the profile asked for last


def tables_of(profile: GraphProfile) -> Tables:
    """Return the tables of the whole profile; those of the latest profile are remembered."""
    global _latest
    if _latest is None or _latest[0] is not profile:
        _latest = (profile, _make_tables(profile))
    return _latest[1]


def _make_tables(profile: GraphProfile) -> Tables:
    storages, recipes = profile.storages, profile.recipes
    nbytes = [s.nbytes for s in storages]
    ticks = [(t.unpacks, t.start_bytes, t.peak_bytes, t.creates, t.last_used, t.releases) for t in profile.ticks]
    return Tables(
        nbytes=nbytes,
        num_saves=[s.num_saves for s in storages],
        internal=[s.internal for s in storages],
        position=[NO_RECIPE if s.recipe is None else s.recipe for s in storages],
        slot_inputs=[() if s.recipe is None else recipes[s.recipe].inputs for s in storages],
        inputs=[r.inputs for r in recipes],
        products=[r.products for r in recipes],
        seconds=[round(r.seconds * SECONDS_UNIT) / SECONDS_UNIT for r in recipes],
        peak_bytes=[r.peak_bytes for r in recipes],
        capture_peak_bytes=[r.capture_peak_bytes for r in recipes],
        ticks=ticks,
        prefix=prefix_of(ticks, nbytes),
    )


@dataclass(slots=True, eq=False)
class Mark:
    """The state of a run between two ticks, and its figures so far."""

    full: bytearray
    owners: list[int]
    alive: bytearray
    in_forward: bytearray
    managed_bytes: int
    recompute_seconds: float
    num_recomputed: int
    num_steps: int
    """Of those recorded so far."""

    def copy(self) -> Mark:
        """Return a mark whose lists are its own."""
        lists = self.full.copy(), self.owners.copy(), self.alive.copy(), self.in_forward.copy()
        return Mark(*lists, self.managed_bytes, self.recompute_seconds, self.num_recomputed, self.num_steps)

    def is_state_of(self, run: Run) -> bool:
        """Tell whether a run has come to the same state; its figures may be others."""
        same = self.full == run.full and self.alive == run.alive and self.in_forward == run.in_forward
        return same and self.owners == run.owners


class Run:
    """The state of one simulated step (NOTE [Who holds a managed storage]). Lists are indexed by storage.

    ``owners`` counts the saved tensors on a storage plus the empty slots that hold it. ``full`` is true of kept
    storages, of refilled slots and of slots that are gone.
    """

    def __init__(
        self, tables: Tables, limits: Sequence[int], *, record: bool = False, start: Mark | None = None
    ) -> None:
        """``start``: a state to begin in, which becomes the run's own."""
        self.tables, self.limits = tables, limits
        self.peak_bytes, self.peak_tick, self.tick = -1, 0, 0
        self.steps: list[tuple[int, int | None, int]] | None = [] if record else None
        if start is not None:
            self.full, self.owners, self.alive, self.in_forward = (
                start.full,
                start.owners,
                start.alive,
                start.in_forward,
            )
            self.managed_bytes = start.managed_bytes
            self.recompute_seconds, self.num_recomputed = start.recompute_seconds, start.num_recomputed
            return
        self.in_forward, self.alive = bytearray(len(limits)), bytearray(len(limits))
        self.full = bytearray(limit == KEEP for limit in limits)
        self.owners = tables.num_saves.copy()
        self._hold_inputs_of_live_slots()
        self.managed_bytes, self.recompute_seconds, self.num_recomputed = 0, 0.0, 0

    def mark(self) -> Mark:
        """Return the state."""
        figures = self.managed_bytes, self.recompute_seconds, self.num_recomputed, len(self.steps or ())
        return Mark(self.full, self.owners, self.alive, self.in_forward, *figures).copy()

    def _hold_inputs_of_live_slots(self) -> None:
        """Count, for each storage, the empty slots that will hold it; slots no saved tensor reaches do not exist."""
        full, owners, slot_inputs = self.full, self.owners, self.tables.slot_inputs
        stack = [s for s, is_full in enumerate(full) if not is_full and owners[s]]
        seen = set(stack)
        while stack:
            for i in slot_inputs[stack.pop()]:
                owners[i] += 1
                if not full[i] and i not in seen:
                    seen.add(i)
                    stack.append(i)

    def advance_prefix(self) -> int:
        """Live through the ticks of ``tables.prefix``, all at once; return their number."""
        prefix, full, owners, nbytes = self.tables.prefix, self.full, self.owners, self.tables.nbytes
        num_ticks = len(prefix.live_bytes)
        change = [0] * (num_ticks + 1)
        for s, tick in prefix.gone.items():
            if full[s] and owners[s]:
                self.alive[s] = True
                change[tick + 1] += nbytes[s]
        for s in prefix.staying:
            self.in_forward[s] = self.alive[s] = True
        if not num_ticks:
            return 0
        kept_bytes = list(accumulate(change))
        live_bytes = list(map(add, prefix.live_bytes, kept_bytes))
        self.managed_bytes = kept_bytes[-1] + sum(nbytes[s] for s in prefix.staying)
        self.peak_bytes = max(live_bytes)
        self.peak_tick = live_bytes.index(self.peak_bytes)
        if self.steps is not None:
            self.steps += [(tick, None, live) for tick, live in enumerate(live_bytes)]
        return num_ticks

    def least_seconds(self) -> float:
        """Return, of a step that has not begun its backward, a lower bound of its recompute seconds.

        What is unpacked while empty, and all that is empty on the way to it, is made at least once.
        """
        tables, full = self.tables, self.full
        stack = [s for s in tables.prefix.unpacked_later if not full[s]]
        seen = set(stack)
        while stack:
            for i in tables.slot_inputs[stack.pop()]:
                if not full[i] and i not in seen:
                    seen.add(i)
                    stack.append(i)
        return sum(tables.seconds[p] for p in {tables.position[s] for s in seen})

    def advance(self, ticks: Sequence[TickRow], first: int = 0) -> None:
        """Live through ``ticks``, the first of which has number ``first``."""
        full, owners, alive, in_forward = self.full, self.owners, self.alive, self.in_forward
        nbytes, steps = self.tables.nbytes, self.steps
        for tick, (unpacks, start_bytes, tick_bytes, creates, last_used, releases) in enumerate(ticks, first):
            for s in unpacks:
                if not full[s]:
                    self.tick = tick
                    self._recompute(s, start_bytes)
            live_bytes = self.managed_bytes + tick_bytes
            if live_bytes > self.peak_bytes:
                self.peak_bytes, self.peak_tick = live_bytes, tick
            if steps is not None:
                steps.append((tick, None, live_bytes))
            for s in creates:
                in_forward[s] = alive[s] = True
                self.managed_bytes += nbytes[s]
            for s in last_used:
                in_forward[s] = False
                if alive[s] and not (full[s] and owners[s]):
                    alive[s] = False
                    self.managed_bytes -= nbytes[s]
            for s in releases:
                owners[s] -= 1
                if not owners[s]:
                    if not full[s]:
                        self._drop_slot(s)
                    elif alive[s] and not in_forward[s]:
                        alive[s] = False
                        self.managed_bytes -= nbytes[s]

    def _drop_slot(self, slot: int) -> None:
        """A slot without owner goes; if it was empty, it lets go of its inputs (a chain of slots may follow)."""
        full, owners = self.full, self.owners
        stack = [slot]
        while stack:
            s = stack.pop()
            if not full[s]:
                full[s] = True  # it is gone: nothing will ask for it again
                for i in self.tables.slot_inputs[s]:
                    owners[i] -= 1
                    if not owners[i]:
                        stack.append(i)
            elif self.alive[s] and not self.in_forward[s]:
                self.alive[s] = False
                self.managed_bytes -= self.tables.nbytes[s]

    def _recompute(self, target: int, unmanaged_bytes: int) -> None:
        """Run the recipes of every empty storage that ``target`` needs (rule 4)."""
        tables, full, owners, limits, alive = self.tables, self.full, self.owners, self.limits, self.alive
        if all(map(full.__getitem__, tables.slot_inputs[target])):
            self._rerun(tables.position[target], unmanaged_bytes)
            return
        nbytes, internal, steps = tables.nbytes, tables.internal, self.steps
        peak_bytes, capture_peak_bytes = tables.peak_bytes, tables.capture_peak_bytes
        target_position = tables.position[target]
        positions, readers = self._needed(target)
        for p in positions:
            inputs, refilled, capture, made_bytes = tables.inputs[p], [], False, 0
            for s in tables.products[p]:
                if not full[s] and owners[s] and (s == target or target_position <= limits[s]):
                    refilled.append(s)
                    capture = capture or internal[s]
                elif not readers.get(s):
                    continue
                alive[s] = True
                made_bytes += nbytes[s]
            above_bytes = max(made_bytes, (capture_peak_bytes if capture else peak_bytes)[p])
            live_bytes = self.managed_bytes + unmanaged_bytes + above_bytes
            if live_bytes > self.peak_bytes:
                self.peak_bytes, self.peak_tick = live_bytes, self.tick
            if steps is not None:
                steps.append((self.tick, p, live_bytes))
            self.managed_bytes += made_bytes
            for s in refilled:
                full[s] = True
                for i in inputs:
                    owners[i] -= 1
                    if not owners[i]:
                        self._drop_slot(i)
            for i in inputs:
                if i in readers:
                    readers[i] -= 1
                    held = self.in_forward[i] or (full[i] and owners[i])  # a slot that is gone holds nothing
                    if not readers[i] and alive[i] and not held:
                        alive[i] = False
                        self.managed_bytes -= nbytes[i]
        self.recompute_seconds += sum(map(tables.seconds.__getitem__, positions))
        self.num_recomputed += len(positions)

    def _rerun(self, p: int, unmanaged_bytes: int) -> None:
        """Run one recipe whose inputs are there: most recomputations are no more. What it makes, a plan lets stay."""
        tables, full, owners = self.tables, self.full, self.owners
        num_refilled, capture, made_bytes = 0, False, 0
        for s in tables.products[p]:
            if not full[s] and owners[s]:
                full[s] = self.alive[s] = True
                num_refilled += 1
                capture = capture or tables.internal[s]
                made_bytes += tables.nbytes[s]
        above_bytes = max(made_bytes, (tables.capture_peak_bytes if capture else tables.peak_bytes)[p])
        live_bytes = self.managed_bytes + unmanaged_bytes + above_bytes
        if live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_tick = live_bytes, self.tick
        if self.steps is not None:
            self.steps.append((self.tick, p, live_bytes))
        self.managed_bytes += made_bytes
        for i in tables.inputs[p]:
            owners[i] -= num_refilled
            if not owners[i]:
                self._drop_slot(i)
        self.recompute_seconds += tables.seconds[p]
        self.num_recomputed += 1

    def _needed(self, target: int) -> tuple[list[int], dict[int, int]]:
        """Return the recipes to run, in order, and for each storage they make the number of its readers among them."""
        tables, full = self.tables, self.full
        readers, stack = {target: 0}, [target]
        while stack:
            for i in tables.slot_inputs[stack.pop()]:
                if not full[i] and i not in readers:
                    readers[i] = 0
                    stack.append(i)
        positions = sorted({tables.position[s] for s in readers})
        for p in positions:
            for i in tables.inputs[p]:
                if i in readers:
                    readers[i] += 1
        return positions, readers


def check_limits(profile: GraphProfile, plan: Plan) -> None:
    """Raise ``ValueError`` if ``plan`` does not fit ``profile`` or drops what may not be dropped."""
    if len(plan.limits) != len(profile.storages):
        raise ValueError(f"the plan has {len(plan.limits)} limits, the profile {len(profile.storages)} storages")
    for storage, limit in zip(profile.storages, plan.limits, strict=True):
        if limit != KEEP and storage.recipe is None:
            raise ValueError(f"the plan drops {storage.name}, which may not be dropped: {storage.why_kept}")
        if limit != KEEP and not storage.recipe <= limit:  # type: ignore[operator]
            raise ValueError(f"the retain limit {limit} of {storage.name} lies before its position {storage.recipe}")


def keep_all(profile: GraphProfile) -> Plan:
    """Return the plan that drops nothing: eager's own behaviour."""
    return Plan("keep_all", (KEEP,) * len(profile.storages))


def drop_all(profile: GraphProfile) -> Plan:
    """Return the plan that drops whatever may be dropped, each storage refilled only when asked for."""
    return Plan("drop_all", tuple(KEEP if s.recipe is None else s.recipe for s in profile.storages))


__all__ = [
    "NO_RECIPE",
    "Phase",
    "Run",
    "Tables",
    "check_limits",
    "drop_all",
    "keep_all",
    "run_of",
    "simulate",
    "tables_of",
]
