"""Plans that offload: what the judge makes of them, what the fake timeline says, what the planner finds."""

import pickle
from dataclasses import replace

import pytest

from fxmem.ir import KEEP, GraphProfile, Offload, Plan
from fxmem.planners.bound import Relaxation
from fxmem.planners.offload.choice import offload_all, with_offloading
from fxmem.planners.offload.link import (
    LINKS,
    Link,
    fetched_in_time,
    left_in_time,
    link_of,
    priced,
    sent_bytes,
    stalls_of,
)
from fxmem.planners.offload.recipes import with_offloads
from fxmem.planners.pareto import cheapest_within
from fxmem.planners.plan_check import check_plan
from fxmem.planners.segment_dp import frontier
from fxmem.planners.simulate import keep_all, simulate, tables_of
from fxmem.profiling.roofline import PRESETS
from tests.synthetic import Op, build, random_dag

UNIT = Link("one byte a second", 1.0, copy_seconds=0.0)


def chain(num_ops: int = 6, seconds: float = 4.0) -> GraphProfile:
    """Ops that each make one byte from the one before and save their input; 4 s forward, 8 s backward each."""
    return build([Op(reads=(i - 1,) if i else (), seconds=seconds) for i in range(num_ops)])


def offloading(profile: GraphProfile, *recipes: int, late: bool = True) -> Plan:
    """Return the plan that keeps all but what ``recipes`` make, which is fetched when it is asked for."""
    limits = [s.recipe if s.recipe in recipes else KEEP for s in profile.storages]
    if not late:
        limits = [KEEP if limit == KEEP else len(profile.recipes) - 1 for limit in limits]
    return Plan("test", tuple(limits), tuple(Offload(r) for r in recipes))


# -- the judge ---------------------------------------------------------------------------------------------------------


def test_what_waits_in_host_memory_weighs_nothing_and_is_not_recomputed() -> None:
    profile = chain()
    kept, plan = simulate(profile, keep_all(profile)), offload_all(profile, keep_all(profile))
    check_plan(profile, plan)
    offloaded = simulate(profile, plan)
    assert kept.peak_bytes == 7, "five saved values, and the gradients of what the last op made and read"
    assert offloaded.peak_bytes == 3, "one of them"
    assert (offloaded.num_recomputed, offloaded.recompute_seconds) == (0, 0.0)


def test_a_fetch_ahead_is_on_the_device_from_the_unpacking_that_starts_it() -> None:
    profile = chain()
    plan = offload_all(profile, keep_all(profile))
    ahead = replace(
        plan, offloads=tuple(replace(o, after=o.recipe + 1 if o.recipe < 4 else None) for o in plan.offloads)
    )
    steps = [simulate(profile, p, with_steps=True).steps for p in (plan, ahead)]
    fetches = [[step.live_bytes for step in each if step.recompute] for each in steps]
    assert [len(each) for each in fetches] == [5, 5], "each value once"
    assert max(fetches[1]) == max(fetches[0]) + 1, "the next value, beside the one in use"
    assert all(step.label.endswith("(from host memory)") for step in steps[0] if step.recompute)


def test_what_is_let_go_of_later_weighs_until_then() -> None:
    profile = chain()
    plan = offloading(profile, 0)
    held = replace(plan, offloads=(Offload(0, left=4),))
    forward = [[step.live_bytes for step in simulate(profile, p, with_steps=True).steps[:6]] for p in (plan, held)]
    assert forward[0] == [1, 2, 2, 3, 4, 5]
    assert forward[1] == [1, 2, 3, 4, 5, 5]


def test_a_plan_that_offloads_nothing_is_judged_on_the_profile_itself() -> None:
    profile = chain()
    assert with_offloads(profile, keep_all(profile)) is profile


def test_what_may_not_be_dropped_may_not_be_offloaded() -> None:
    profile = chain()
    plan = Plan("test", (KEEP,) * 5 + (5,), (Offload(4),))
    with pytest.raises(ValueError, match="may not be dropped"):
        check_plan(profile, plan)


def test_plans_pickled_before_there_were_offloads_have_none() -> None:
    plan = Plan("chen", (KEEP, 0))
    old = pickle.loads(pickle.dumps(plan))
    old.__setstate__(["chen", (KEEP, 0)])
    assert old == plan
    assert pickle.loads(pickle.dumps(offloading(chain(), 1))) == offloading(chain(), 1)


# -- the timeline ------------------------------------------------------------------------------------------------------


def test_a_copy_that_computing_hides_is_not_waited_for() -> None:
    """Each op takes 4 s, each byte 1 s: op 1 reads the value of op 0 while that is copied."""
    profile = chain()
    assert stalls_of(profile, offloading(profile, 0), UNIT) == {0: 1.0}, "the fetch alone, when it is asked for"
    slow = replace(UNIT, bytes_per_second=0.1)
    assert stalls_of(profile, offloading(profile, 0), slow) == {0: 6.0 + 10.0}, "10 s each way, 4 of them hidden"
    assert stalls_of(profile, offloading(profile, 0), replace(slow, overlaps=False)) == {0: 20.0}


def test_originals_that_stay_and_fetches_in_time_leave_no_waiting() -> None:
    profile, slow = chain(), replace(UNIT, bytes_per_second=0.1)
    plan = offloading(profile, 0)
    held = left_in_time(profile, plan, slow)
    assert held.offloads[0].left == 3, "the copy starts at 4 s and is over at 14 s, within op 3"
    assert stalls_of(profile, held, slow) == {0: 10.0}
    both = fetched_in_time(profile, offload_all(profile, keep_all(profile)), UNIT)
    assert all(offload.after is not None for offload in both.offloads if offload.recipe < 4)
    assert sum(stalls_of(profile, both, UNIT).values()) <= 1.0, "the first has nothing to hide behind"


def test_copies_of_one_way_follow_each_other() -> None:
    profile, slow = chain(), replace(UNIT, bytes_per_second=0.125)
    stalls = stalls_of(profile, left_in_time(profile, offloading(profile, 0, 1), slow), slow)
    assert stalls == {0: 8.0, 1: 8.0}, "sent one after the other until 20 s, within the forward of 24 s"


def test_a_plan_carries_its_waits_into_its_time() -> None:
    profile = chain()
    plan = priced(profile, offload_all(profile, keep_all(profile)), UNIT)
    assert simulate(profile, plan).recompute_seconds == pytest.approx(sum(o.stall_seconds for o in plan.offloads))
    assert sent_bytes(profile, plan) == dict.fromkeys(range(5), 1)


def test_waits_of_what_is_fetched_often_count_once() -> None:
    """Every value is dropped but the first, which is fetched anew for each of them."""
    profile = chain()
    plan = Plan("test", tuple(KEEP if s.recipe is None else s.recipe for s in profile.storages), (Offload(0),))
    (offload,) = priced(profile, plan, UNIT).offloads
    assert (offload.num_fetches, offload.stall_seconds) == (5, 5.0), "a second each time"
    waiting, hidden = (simulate(profile, p).recompute_seconds for p in (priced(profile, plan, UNIT), plan))
    assert waiting - hidden == pytest.approx(5.0)


def test_each_hardware_preset_has_a_link() -> None:
    assert link_of("gh200") is LINKS["nvlink-c2c"]
    assert link_of("h100") is LINKS["pcie5"]
    assert all(link_of(name).bytes_per_second > 0 for name in PRESETS)
    assert not link_of("cpu").overlaps


# -- the planner -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_no_point_is_worse_than_without_offloads_and_each_is_what_the_judge_says(seed: int) -> None:
    profile = random_dag(seed, 12, static_bytes=3)
    points = frontier(profile, seconds=5.0)
    link = replace(UNIT, bytes_per_second=20.0)
    found = with_offloading(profile, points, link, never=frozenset(), seconds=20.0)
    for point in points:
        best = cheapest_within(found, point.peak_bytes)
        assert best is not None
        assert best.recompute_seconds <= point.recompute_seconds
    for point in found:
        check_plan(profile, point.plan)
        timeline = simulate(profile, point.plan)
        assert (timeline.peak_bytes, timeline.recompute_seconds) == (point.peak_bytes, point.recompute_seconds)
        assert point.plan == priced(profile, point.plan, link)
    assert found[-1].peak_bytes >= Relaxation(tables_of(profile)).certain_bytes.max()


def test_with_a_fast_link_the_floor_is_what_every_plan_holds() -> None:
    profile = chain(12)
    found = with_offloading(profile, frontier(profile, seconds=5.0), UNIT, never=frozenset(), seconds=20.0)
    assert found[-1].peak_bytes == Relaxation(tables_of(profile)).certain_bytes.max()


def test_the_dearest_recomputation_is_offloaded_first() -> None:
    """Of two equal values one takes 50 times as long to compute."""
    ops = [Op(seconds=1.0), *(Op(reads=(i,), seconds=50.0 if i == 2 else 1.0) for i in range(6))]
    profile = build(ops)
    points = frontier(profile, seconds=5.0)
    found = with_offloading(profile, points, UNIT, never=frozenset(), seconds=20.0)
    dear = profile.storages[3].recipe
    at = cheapest_within(found, points[-1].peak_bytes)
    assert at is not None
    assert at.plan.limits[3] == KEEP or dear in at.plan.fetched
    assert at.recompute_seconds < points[-1].recompute_seconds or at.plan == points[-1].plan


def test_what_a_policy_says_to_recompute_is_never_offloaded() -> None:
    profile = chain(8)
    found = with_offloading(profile, frontier(profile, seconds=5.0), UNIT, never=frozenset({2, 3}), seconds=20.0)
    assert any(point.plan.offloads for point in found)
    assert all(point.plan.fetched.isdisjoint({2, 3}) for point in found)
