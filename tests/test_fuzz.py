"""Random models under random planners and budgets train to eager's bits; the command that runs many of them works."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxmem.planners.registry import PLANNERS
from tests import fuzz
from tests.fuzz_cases import MAKES, WRITES, Case, check_case

NUM_CASES, NUM_CASES_IN_ALL = 40, 150
"""Of every test run, and of ``make test-all``; ``make fuzz`` (tests/fuzz.py) runs many more, new ones every time."""

programs = st.lists(
    st.tuples(st.sampled_from([*MAKES, *MAKES, *WRITES]), st.integers(0, 30), st.integers(0, 30)),
    min_size=1,
    max_size=14,
).map(tuple)


cases = st.builds(
    Case,
    program=programs,
    seed=st.integers(0, 999),
    requires_grad=st.booleans(),
    planner=st.sampled_from(sorted(PLANNERS)),
    share=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75]),
)


@pytest.mark.slow
@settings(max_examples=NUM_CASES, suppress_health_check=list(HealthCheck))
@given(case=cases)
def test_fuzz_random_models_train_to_the_same_bits(case: Case) -> None:
    check_case(case)


@pytest.mark.exhaustive
@settings(max_examples=NUM_CASES_IN_ALL, suppress_health_check=list(HealthCheck))
@given(case=cases)
def test_fuzz_many_random_models_train_to_the_same_bits(case: Case) -> None:
    check_case(case)


def test_the_fuzz_command_repeats_a_case_and_cuts_a_failing_one_down(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fuzz.case_of(3, 5) == fuzz.case_of(3, 5) != fuzz.case_of(3, 6)

    def fails_on_tanh(case: Case) -> bool:
        assert all(name != "tanh" for name, _, _ in case.program), "the tanh"
        return True

    monkeypatch.setattr(fuzz, "check_case", fails_on_tanh)
    case = Case((("relu", 0, 0), ("tanh", 1, 2), ("gelu", 3, 4)), 1, True, "auto", 0.5)
    smaller, problem = fuzz.shrunk(case, "the tanh")
    assert smaller.program == (("tanh", 1, 2),)
    assert "the tanh" in problem
    number = next(n for n in range(100) if any(name == "tanh" for name, _, _ in fuzz.case_of(3, n).program))
    assert fuzz.main(["--seed", "3", "--only", str(number), "--workers", "1"]) == 1
    quiet = next(n for n in range(100) if all(name != "tanh" for name, _, _ in fuzz.case_of(3, n).program))
    assert fuzz.main(["--seed", "3", "--only", str(quiet), "--workers", "1"]) == 0
