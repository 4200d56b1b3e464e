"""Which candidate a budget takes: few are lowered, and more bytes never cost more time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxmem.compiled import choice
from fxmem.compiled.choice import FINER, NUM_CANDIDATES, Candidates, Choices
from fxmem.compiled.step_run import IN_ORDER, TIGHT, StepRun, least_of
from fxmem.ir import FrontierPoint, Plan


@pytest.fixture
def none_finer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "FINER", 1)


def candidates(num: int) -> Candidates:
    return Candidates(tuple(FrontierPoint(Plan("test", (i,)), 1000 - i, float(i)) for i in range(num)))


def place_of(peaks: list[int], budget_bytes: int) -> tuple[int | None, int]:
    """Return the place that is taken where lowered plans have these peaks, and how many were lowered."""
    tried = candidates(len(peaks))
    place = tried.cheapest_within(budget_bytes, lambda point, _: run_of(peaks[point.plan.limits[0]]))
    return place, len(tried.runs)


def run_of(peak: int) -> StepRun:
    return StepRun(peak, 0, 0, peak, 1.0)


@pytest.mark.usefixtures("none_finer")
def test_what_an_op_takes_inside_while_all_is_kept_is_not_taken_for_what_other_plans_take() -> None:
    tried = candidates(NUM_CANDIDATES)

    def run(point: FrontierPoint, _: float) -> StepRun:
        place = point.plan.limits[0]
        return run_of(1000 - place) if place else replace(run_of(1500), inside_bytes=500)

    assert tried.cheapest_within(990, run) == 10


@given(st.lists(st.integers(1, 50), min_size=2, max_size=NUM_CANDIDATES), st.integers(1, 50), st.integers(0, 50))
def test_more_bytes_never_cost_more_time_whatever_lowered_plans_take(peaks: list[int], budget: int, more: int) -> None:
    place, _ = place_of(peaks, budget)
    above, _ = place_of(peaks, budget + more)
    if place is not None:
        assert peaks[place] <= budget
        assert above is not None
        assert above <= place


@given(st.lists(st.integers(1, 50), min_size=1, max_size=NUM_CANDIDATES))
def test_the_least_budget_that_is_told_is_not_refused_and_no_lower_one_fits(peaks: list[int]) -> None:
    least = candidates(len(peaks)).least_bytes(lambda point, _: run_of(peaks[point.plan.limits[0]]))
    place, _ = place_of(peaks, least)
    assert place is not None
    assert peaks[place] <= least
    assert place_of(peaks, least - 1)[0] is None


@given(st.lists(st.integers(0, 1), min_size=20, max_size=NUM_CANDIDATES), st.integers(-900, 900), st.integers(0, 40))
def test_few_are_lowered_where_the_planner_is_wrong_by_about_the_same(
    above: list[int], constant: int, budget: int
) -> None:
    """Two candidates, two of the finer ones; for low budgets the deepest one."""
    peaks = [1000 - i + constant + (more if i else 0) for i, more in enumerate(above)]
    place, num_lowered = place_of(peaks, peaks[0] - budget)
    assert num_lowered <= 5 + (budget > (len(peaks) - 1) // 2)
    assert place == next((i for i, peak in enumerate(peaks) if peak <= peaks[0] - budget), None)


def test_a_budget_below_the_end_of_the_step_costs_one_lowering() -> None:
    """No plan changes what gradients and the optimizer take."""
    tried = candidates(NUM_CANDIDATES)

    def run(_: FrontierPoint, __: float) -> StepRun:
        return replace(run_of(4004), floor_bytes=4000)

    assert tried.cheapest_within(3999, run) is None
    assert tried.least_bytes(run) == 4004
    assert len(tried.runs) == 1


@pytest.mark.parametrize("num", [2, 3, 5, 6, 9])
def test_few_candidates_have_no_middle_one_and_are_found_too(num: int) -> None:
    points = [FrontierPoint(Plan("test", (i,)), 1000 - 100 * i, float(i)) for i in range(num)]
    tried = Candidates(tuple(points))

    def run(point: FrontierPoint, _: float) -> StepRun:
        return run_of(1000 - 60 * point.plan.limits[0])

    least = tried.least_bytes(run)
    assert least == 1000 - 60 * (num - 1)
    for budget in range(least, 1001):
        assert tried.cheapest_within(budget, run) is not None


def test_no_less_than_the_end_of_the_step_is_told_to_fit() -> None:
    """Of the first candidate, whose end the others may be some bytes below."""
    tried = candidates(NUM_CANDIDATES)

    def run(point: FrontierPoint, _: float) -> StepRun:
        return replace(run_of(5000 if point is tried.points[0] else 3990), floor_bytes=4000)

    assert tried.least_bytes(run) == 4000
    assert tried.cheapest_within(4000, run) is not None


@pytest.mark.usefixtures("none_finer")
def test_one_that_fits_among_others_that_do_not_is_found() -> None:
    peaks = [60, *[50] * 17, 45, *[50] * 13]
    place, _ = place_of(peaks, 45)
    assert place == 18


def test_what_was_lowered_for_one_budget_is_not_lowered_again_for_another() -> None:
    peaks = list(range(NUM_CANDIDATES, 0, -1))
    tried, lowered = candidates(NUM_CANDIDATES), []

    def run(point: FrontierPoint, _: float) -> StepRun:
        lowered.append(point.plan.limits[0])
        return run_of(peaks[point.plan.limits[0]])

    assert [tried.cheapest_within(budget, run) for budget in (32, 26, 3, 26)] == [0, 6, 29, 6]
    assert len(set(lowered)) == len(lowered)
    assert tried.least_bytes(run) == 1


@pytest.mark.usefixtures("none_finer")
def test_what_the_planner_knows_not_to_fit_is_not_lowered() -> None:
    tried = candidates(NUM_CANDIDATES)  # of which the first is planned to take 1000
    place = tried.cheapest_within(990, lambda point, _: run_of(1000 - point.plan.limits[0]))
    assert place == 10
    assert sorted(tried.runs) == [0, 10]


@pytest.mark.usefixtures("none_finer")
def test_plans_that_take_the_more_over_what_is_planned_the_deeper_they_are_are_found_soon() -> None:
    """As those of convolutions do. Where nothing fits, few are lowered to find the least budget to name."""

    def run(point: FrontierPoint, _: float) -> StepRun:
        return run_of(10_000 - 60 * point.plan.limits[0])

    def planned() -> Candidates:
        points = [FrontierPoint(Plan("test", (i,)), 10_000 - 100 * i, float(i)) for i in range(NUM_CANDIDATES)]
        return Candidates(tuple(points))

    def lowered(budget_bytes: int, place: int | None) -> int:
        tried = planned()
        assert tried.cheapest_within(budget_bytes, run) == place
        if place is None:
            assert tried.least_bytes(run) == 10_000 - 60 * (NUM_CANDIDATES - 1)
        return len(tried.runs)

    assert lowered(8300, 29) <= 10
    assert lowered(8000, None) <= 10
    assert lowered(1000, None) <= 10


@pytest.mark.usefixtures("none_finer")
def test_one_plan_that_takes_much_more_than_planned_hides_no_other() -> None:
    """As the deepest one of MobileNet-V2, of which much is made again at once."""

    def run(point: FrontierPoint, _: float) -> StepRun:
        is_deepest = point.plan.limits[0] == NUM_CANDIDATES - 1
        return run_of(8000 if is_deepest else 10_000 - 95 * point.plan.limits[0])

    points = [FrontierPoint(Plan("test", (i,)), 10_000 - 100 * i, float(i)) for i in range(NUM_CANDIDATES)]
    least = 10_000 - 95 * (NUM_CANDIDATES - 2)
    assert Candidates(tuple(points)).cheapest_within(least, run) == NUM_CANDIDATES - 2
    assert Candidates(tuple(points)).least_bytes(run) == least


@pytest.mark.usefixtures("none_finer")
@pytest.mark.parametrize("first", [100, 5000])
def test_what_the_planner_sees_too_much_or_too_little_of_keeping_all_is_taken_off_the_others(first: int) -> None:
    tried = candidates(NUM_CANDIDATES)
    assert tried.cheapest_within(first - 10, lambda point, _: run_of(first - point.plan.limits[0])) == 10
    assert sorted(tried.runs) == [0, 10]


@pytest.mark.usefixtures("none_finer")
def test_candidates_span_the_frontier() -> None:
    frontier = [FrontierPoint(Plan("test", (i,)), 1000 - i, float(i)) for i in range(300)]
    points = Candidates.of(frontier).points
    assert len(points) == NUM_CANDIDATES
    assert (points[0], points[-1]) == (frontier[0], frontier[-1])


@pytest.mark.usefixtures("none_finer")
def test_code_that_takes_much_more_than_guessed_is_made_otherwise_too() -> None:
    """What is guessed: as planned, off by what the first one is. Much: 5 % of what plans may spare."""
    tried, asked = candidates(NUM_CANDIDATES), {}

    def run(point: FrontierPoint, enough_bytes: float) -> StepRun:
        place = point.plan.limits[0]
        asked[place] = enough_bytes
        return replace(run_of(1100 - place), floor_bytes=900)

    assert tried.cheapest_within(1090, run) == 10
    assert asked == {0: math.inf, 10: 1090 + 0.05 * 200}


def test_a_tight_backward_is_taken_only_if_it_takes_less() -> None:
    usual, more, less = run_of(100), run_of(110), run_of(90)
    assert least_of(usual, 100, lambda _: less) is usual
    assert least_of(usual, 99, lambda _: more) is usual
    assert least_of(usual, 99, lambda _: less) == replace(less, tightness=TIGHT)
    assert least_of(usual, 99, {TIGHT: more, IN_ORDER: less}.__getitem__) == replace(less, tightness=IN_ORDER)
    assert least_of(usual, 89, {TIGHT: less, IN_ORDER: more}.__getitem__) == replace(less, tightness=TIGHT)


def test_of_the_deepest_a_tight_backward_is_always_tried() -> None:
    tried, asked = candidates(NUM_CANDIDATES), {}

    def run(point: FrontierPoint, enough_bytes: float) -> StepRun:
        asked[point.plan.limits[0]] = enough_bytes
        return run_of(1100 - point.plan.limits[0])

    tried.least_bytes(run)
    assert asked[NUM_CANDIDATES - 1] == 0


def test_of_the_finer_ones_the_first_is_taken_that_fits_and_gains() -> None:
    """Planned are a byte less each; what is lowered takes two more than planned from the second on."""
    tried = candidates(NUM_CANDIDATES)

    def run(point: FrontierPoint, _: float) -> StepRun:
        place = point.plan.limits[0]
        return run_of(1000 - place + (2 if place else 0))

    assert tried.cheapest_within(993, run) == 9
    assert sorted(tried.runs) == [0, 8, 9, 12], "10 and 11 come later, 1 to 7 do not fit by what is planned"
    level = Candidates(tuple(replace(point, recompute_seconds=0.0) for point in tried.points))
    assert level.cheapest_within(993, run) == 12, "none of these gains"


def test_finer_candidates_lie_between_the_others() -> None:
    frontier = [FrontierPoint(Plan("test", (i,)), 1000 - i, float(i)) for i in range(300)]
    found = Candidates.of(frontier)
    assert len(found.places) == NUM_CANDIDATES
    assert len(found.points) == FINER * (NUM_CANDIDATES - 1) + 1
    assert (found.places[0], found.places[-1]) == (0, len(found.points) - 1)


def choices(usual_seconds: float, left_seconds: float) -> Choices:
    """Return choices of a step of a second, half of it in convolutions, which take so long when timed; layouts as they are
    take 300 bytes less, and each candidate a byte less and a hundredth of a second more."""
    points = tuple(FrontierPoint(Plan("test", (i,)), 1000 - i, i / 100) for i in range(NUM_CANDIDATES))

    def run(point: FrontierPoint, layouts_left: bool, _: float) -> StepRun:
        peak = 1000 - point.plan.limits[0] - 300 * layouts_left
        seconds = left_seconds if layouts_left else usual_seconds
        return replace(run_of(peak), laid_out_seconds=0.5, measured_seconds=seconds)

    return Choices(Candidates(points), Candidates(points), run)


@pytest.mark.parametrize(
    ("left_seconds", "share", "at_995"), [(3.0, 0.25, False), (2.04, 0.01, True), (1.9, 0.0, True), (1.0, -0.25, True)]
)
def test_layouts_are_left_where_convolutions_are_so_much_quicker_or_cost_less_than_recomputing(
    left_seconds: float, share: float, at_995: bool
) -> None:
    """Timed with layouts as Inductor has them: two seconds."""
    tried = choices(2.0, left_seconds)
    assert tried.layout_seconds == pytest.approx(share)
    free, short, shorter = (tried.cheapest_within(budget) for budget in (math.inf, 995, 700))
    assert free is not None
    assert short is not None
    assert shorter is not None
    assert free.layouts_left == (share < 0)
    assert tried.overhead_ratio(free) == pytest.approx(min(share, 0.0))
    assert short.layouts_left == at_995
    assert shorter.layouts_left
    assert tried.overhead_ratio(free) <= tried.overhead_ratio(short) <= tried.overhead_ratio(shorter)


@given(
    st.lists(st.integers(1, 60), min_size=2, max_size=NUM_CANDIDATES),
    st.lists(st.integers(1, 60), min_size=2, max_size=NUM_CANDIDATES),
    st.integers(1, 60),
    st.floats(0.0, 4.0),
)
def test_the_cheaper_of_both_layouts_is_taken_whatever_they_take(
    usual: list[int], left: list[int], budget: int, left_seconds: float
) -> None:
    """Of both lists the first that fits; candidates cost a hundredth of a second more each."""
    num = min(len(usual), len(left))
    points = tuple(FrontierPoint(Plan("test", (i,)), 1000 - i, i / 100) for i in range(num))

    def run(point: FrontierPoint, layouts_left: bool, _: float) -> StepRun:
        peak = (left if layouts_left else usual)[point.plan.limits[0]]
        return replace(run_of(peak), laid_out_seconds=0.5, measured_seconds=left_seconds if layouts_left else 2.0)

    tried = Choices(Candidates(points), Candidates(points), run)
    assert tried.least_bytes() == min(
        Candidates(points).least_bytes(lambda p, e, own=own: run(p, own, e)) for own in (False, True)
    )
    alone = [Candidates(points).cheapest_within(budget, lambda p, e, own=own: run(p, own, e)) for own in (False, True)]
    more = (0.0, tried.layout_seconds)
    costs = [points[place].recompute_seconds + more[i] for i, place in enumerate(alone) if place is not None]
    taken = tried.cheapest_within(budget)
    assert (taken is None) == (not costs)
    if taken is not None:
        assert tried.overhead_seconds(taken) == min(costs)
        assert taken.run.peak_bytes <= budget


def taking_as_guessed_only_with_layouts_left() -> tuple[Choices, list[tuple[int, bool]]]:
    """Return choices, and what was lowered of them: places, and whether with layouts left. With usual layouts no candidate
    but the first takes what the planner guesses."""
    points = candidates(NUM_CANDIDATES).points
    lowered: list[tuple[int, bool]] = []

    def run(point: FrontierPoint, layouts_left: bool, _: float) -> StepRun:
        place = point.plan.limits[0]
        lowered.append((place, layouts_left))
        return run_of(1000 - place if layouts_left or place == 0 else 999)

    return Choices(Candidates(points), Candidates(points), run), lowered


def test_usual_layouts_that_cost_more_than_others_that_fit_are_not_lowered() -> None:
    """With layouts left the candidate at place 5 fits, a finer one of that at 8."""
    tried, lowered = taking_as_guessed_only_with_layouts_left()
    taken = tried.cheapest_within(995)
    assert taken is not None
    assert (taken.place, taken.layouts_left) == (5, True)
    assert sorted(lowered) == [(0, False), (0, True), (5, True), (8, False), (8, True)]


def test_usual_layouts_that_are_planned_to_take_more_than_others_reach_are_not_lowered() -> None:
    tried, lowered = taking_as_guessed_only_with_layouts_left()
    assert tried.least_bytes() == 1000 - (NUM_CANDIDATES - 1)
    assert [place for place, layouts_left in lowered if not layouts_left] == [0, NUM_CANDIDATES - 1]


def test_what_is_not_timed_is_taken_to_cost_a_twentieth() -> None:
    assert choices(0.0, 0.0).layout_seconds == pytest.approx(0.05)


def test_a_plan_whose_code_loses_writes_is_lowered_with_layouts_left() -> None:
    """Once. Where there is another layout; else the code is what it is, and that is told."""
    both, lowered = choices(1.0, 1.0), []

    def run(point: FrontierPoint, layouts_left: bool, enough_bytes: float) -> StepRun:
        lowered.append((point, layouts_left))
        return replace(both.run(point, layouts_left, enough_bytes), loses_writes=not layouts_left)

    taken = replace(both, run=run).cheapest_within(float("inf"))
    assert taken is not None
    assert not taken.run.loses_writes
    assert taken.levers.layouts_left
    assert len(set(lowered)) == len(lowered) == 2
    alone = replace(choices(1.0, 1.0), as_laid_out=None, run=run).cheapest_within(float("inf"))
    assert alone is not None
    assert alone.run.loses_writes
    assert not alone.levers.layouts_left
