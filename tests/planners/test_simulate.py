"""The simulator against numbers worked out by hand, and against a second simulator made of objects that hold objects."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from fxmem.ir import KEEP, GraphProfile, Plan
from fxmem.planners.simulate import drop_all, keep_all, simulate
from tests.synthetic import Op, build, chain, hourglass, random_dag, random_limits, residual_blocks


class Memory:
    """Bytes that live objects occupy."""

    def __init__(self) -> None:
        self.live_bytes = 0


@dataclass(eq=False)
class Block:
    """One copy of a storage's bytes; it goes when its last holder lets go."""

    memory: Memory
    nbytes: int
    holders: set[object] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.memory.live_bytes += self.nbytes

    def hold(self, holder: object) -> None:
        self.holders.add(holder)

    def let_go(self, holder: object) -> None:
        if holder in self.holders:
            self.holders.remove(holder)
            if not self.holders:
                self.memory.live_bytes -= self.nbytes


@dataclass(eq=False)
class Slot:
    """What saved tensors and empty slots refer to; exists once, dies with its last referrer."""

    storage: int
    kept: bool
    referrers: list[object] = field(default_factory=list)
    block: Block | None = None
    inputs: list[Slot] = field(default_factory=list)

    def release(self, referrer: object) -> None:
        self.referrers.remove(referrer)
        if not self.referrers:
            self.empty_inputs()
            if self.block is not None:
                self.block.let_go(self)

    def empty_inputs(self) -> None:
        inputs, self.inputs = self.inputs, []
        for slot in inputs:
            slot.release(self)

    def fill(self, block: Block) -> None:
        block.hold(self)
        self.block = block


class NaiveStep:
    """The same step with Python objects: slots refer to slots, blocks die when nobody holds them."""

    def __init__(self, profile: GraphProfile, limits: tuple[int, ...]) -> None:
        self.profile, self.limits = profile, limits
        self.memory = Memory()
        self.slots = [Slot(s.index, limits[s.index] == KEEP) for s in profile.storages]
        for storage in profile.storages:
            self.slots[storage.index].referrers = [f"saved{i}" for i in range(storage.num_saves)]
        reached: set[int] = set()
        for storage in profile.storages:
            if storage.num_saves:
                self._link(storage.index, reached)
        self.peak_bytes, self.seconds, self.num_recomputed = 0, 0.0, 0

    def _link(self, storage: int, reached: set[int]) -> None:
        if storage in reached or self.slots[storage].kept:
            return
        reached.add(storage)
        for i in self._recipe(storage).inputs:
            self.slots[storage].inputs.append(self.slots[i])
            self.slots[i].referrers.append(self.slots[storage])
            self._link(i, reached)

    def _recipe(self, storage: int):
        return self.profile.recipes[self.profile.storages[storage].recipe]

    def live(self) -> NaiveStep:
        forward: dict[int, Block] = {}
        for tick in self.profile.ticks:
            for s in tick.unpacks:
                if not self.slots[s].kept and self.slots[s].block is None:
                    self._refill(s, tick.start_bytes)
            self._see(tick.peak_bytes)
            for s in tick.creates:
                block = forward[s] = Block(self.memory, self.profile.storages[s].nbytes)
                block.hold("forward")
                if self.slots[s].kept and self.slots[s].referrers:
                    self.slots[s].fill(block)
            for s in tick.last_used:
                forward.pop(s).let_go("forward")
            for s in tick.releases:
                slot = self.slots[s]
                slot.release(next(r for r in slot.referrers if isinstance(r, str)))
        return self

    def _see(self, more_bytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes, self.memory.live_bytes + more_bytes)

    def _missing(self, storage: int, found: set[int]) -> set[int]:
        if storage not in found and not self.slots[storage].kept and self.slots[storage].block is None:
            found.add(storage)
            for i in self._recipe(storage).inputs:
                self._missing(i, found)
        return found

    def _refill(self, target: int, unmanaged_bytes: int) -> None:
        missing = self._missing(target, set())
        order = sorted({self._recipe(s).index for s in missing})
        uses_left = {s: [p for p in order if s in self.profile.recipes[p].inputs] for s in missing}
        in_passing: dict[int, Block] = {}
        for p in order:
            recipe = self.profile.recipes[p]
            asked = [
                s
                for s in recipe.products
                if self.slots[s].referrers and not self.slots[s].kept and self.slots[s].block is None
            ]
            stays = [s for s in asked if s == target or self._recipe(target).index <= self.limits[s]]
            captures = any(self.profile.storages[s].internal for s in stays)
            self._see(unmanaged_bytes + (recipe.capture_peak_bytes if captures else recipe.peak_bytes))
            self.seconds += recipe.seconds
            self.num_recomputed += 1
            for s in recipe.products:
                if s in stays or uses_left.get(s):
                    block = Block(self.memory, self.profile.storages[s].nbytes)
                    if uses_left.get(s):
                        block.hold("this recomputation")
                        in_passing[s] = block
                    if s in stays:
                        self.slots[s].fill(block)
            for s in stays:
                self.slots[s].empty_inputs()
            for s in recipe.inputs:
                if s in uses_left:
                    uses_left[s].remove(p)
                    if not uses_left[s]:
                        in_passing.pop(s).let_go("this recomputation")


@pytest.mark.parametrize("seed", range(60))
def test_both_simulators_agree_on_random_graphs_and_limits(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_dag(seed, rng.randint(2, 40), reach=rng.randint(1, 8))
    for _ in range(8):
        limits = random_limits(profile, rng)
        naive = NaiveStep(profile, limits).live()
        timeline = simulate(profile, Plan("random", limits))
        assert timeline.peak_bytes == naive.peak_bytes
        assert timeline.recompute_seconds == naive.seconds
        assert timeline.num_recomputed == naive.num_recomputed
        assert naive.memory.live_bytes == 0


@pytest.mark.parametrize("profile", [chain(9), residual_blocks(3), hourglass(4)], ids=["chain", "blocks", "hourglass"])
def test_both_simulators_agree_on_keeping_and_dropping_all(profile: GraphProfile) -> None:
    for plan in (keep_all(profile), drop_all(profile)):
        naive = NaiveStep(profile, plan.limits).live()
        timeline = simulate(profile, plan)
        assert (timeline.peak_bytes, timeline.recompute_seconds) == (naive.peak_bytes, naive.seconds)


def test_keeping_all_of_a_chain_holds_every_saved_input_at_the_first_backward() -> None:
    profile = chain(5)
    timeline = simulate(profile, keep_all(profile))
    # four saved inputs, the gradient of the output and that of the last op's input
    assert (timeline.peak_bytes, timeline.recompute_seconds) == (6, 0.0)
    assert profile.ticks[timeline.peak_step].node == 4


def test_late_refill_of_a_chain_reruns_the_whole_prefix_each_time() -> None:
    profile = chain(5)
    assert simulate(profile, drop_all(profile)).recompute_seconds == 4 + 3 + 2 + 1


def test_refill_on_the_way_reruns_each_recipe_once() -> None:
    profile = chain(5)
    timeline = simulate(profile, Plan("way", (3, 3, 3, 3, KEEP)))
    assert (timeline.recompute_seconds, timeline.num_recomputed) == (4.0, 4)


def test_a_limit_between_holds_only_for_targets_up_to_it() -> None:
    profile = chain(5)
    # storage 1 is passed by targets 3 and 2 and held only from target 2 on
    timeline = simulate(profile, Plan("nested", (KEEP, 2, 3, 3, KEEP)))
    assert timeline.recompute_seconds == 3 + 1
    late = simulate(profile, Plan("late", (KEEP, 1, 3, 3, KEEP)))
    assert late.recompute_seconds == 3 + 1
    way = simulate(profile, Plan("way", (KEEP, 3, 3, 3, KEEP)))
    assert way.recompute_seconds == 3


def test_one_rerun_serves_all_products_of_a_recipe() -> None:
    profile = build([Op(), Op((0,), internal_bytes=2, saves_output=True), Op((1,))])
    output, internal = profile.nodes[1].creates
    limits = [KEEP] * len(profile.storages)
    limits[output] = limits[internal] = 1
    assert simulate(profile, Plan("both", tuple(limits))).num_recomputed == 1


def test_capturing_an_internal_costs_its_bytes_while_the_recipe_runs() -> None:
    profile = build([Op(nbytes=10), Op((0,), 10, internal_bytes=7), Op((1,), saves_inputs=False), Op((2,), 1)])
    internal = profile.nodes[1].creates[1]
    limits = [KEEP] * len(profile.storages)
    limits[internal] = 1
    steps = simulate(profile, Plan("internal", tuple(limits)), with_steps=True).steps
    # the kept input, the gradient in flight, the output and the internal
    assert [s.live_bytes for s in steps if s.recompute] == [10 + 10 + 10 + 7]


def test_unsaved_storages_cost_nothing_unless_a_recomputation_reads_them() -> None:
    profile = build([Op(nbytes=8), Op((0,), 8, saves_inputs=False), Op((1,), 8), Op((2,), 8)])
    alone = simulate(profile, Plan("keep", (KEEP, KEEP, KEEP, KEEP)))
    unread = simulate(profile, Plan("drop unsaved", (0, KEEP, KEEP, KEEP)))
    assert alone.peak_bytes == unread.peak_bytes
    read = simulate(profile, Plan("drop saved", (KEEP, 1, KEEP, KEEP)))
    assert read.recompute_seconds == 1.0


def test_steps_are_recorded_only_when_asked_for_and_their_largest_is_the_peak() -> None:
    profile = residual_blocks(3)
    plan = drop_all(profile)
    assert simulate(profile, plan).steps == ()
    timeline = simulate(profile, plan, with_steps=True)
    assert max(s.live_bytes for s in timeline.steps) == timeline.peak_bytes
    assert sum(s.recompute for s in timeline.steps) == timeline.num_recomputed


def test_a_plan_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="the plan has 1 limits, the profile 5 storages"):
        simulate(chain(5), Plan("short", (KEEP,)))


def test_dropping_the_output_is_refused_with_its_reason() -> None:
    with pytest.raises(ValueError, match="the plan drops op4, which may not be dropped: output or impure"):
        simulate(chain(5), Plan("bad", (KEEP, KEEP, KEEP, KEEP, 4)))


def test_a_limit_before_the_own_position_is_refused() -> None:
    with pytest.raises(ValueError, match="the retain limit 1 of op2 lies before its position 2"):
        simulate(chain(5), Plan("bad", (KEEP, KEEP, 1, KEEP, KEEP)))
