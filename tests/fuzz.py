"""Many random cases on all cores: ``python -m tests.fuzz --cases 10000`` (make fuzz).

Case number i of seed s is always the same. Progress is printed; a failing case is cut down for at most
``SHRINK_SECONDS`` and printed as an argument of ``tests.fuzz_cases.check_case``, with what differs. The exit status is 1
if any case failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from fxmem.planners.registry import PLANNERS
from tests.fuzz_cases import MAKES, WRITES, Case, check_case

SHRINK_SECONDS = 120.0
INSTRUCTIONS = [*MAKES, *MAKES, *WRITES]


@dataclass(frozen=True)
class Outcome:
    """What became of a case: ``problem`` is empty if it passed."""

    number: int
    trained: bool
    case: Case
    problem: str = ""


def case_of(seed: int, number: int) -> Case:
    """Return case ``number`` of ``seed``."""
    draw = random.Random(f"{seed} {number}")
    program = tuple(
        (draw.choice(INSTRUCTIONS), draw.randint(0, 30), draw.randint(0, 30)) for _ in range(draw.randint(1, 14))
    )
    share = draw.choice([0.0, 0.0, round(draw.random(), 2)])
    return Case(program, draw.randint(0, 999), draw.random() < 0.5, draw.choice(sorted(PLANNERS)), share)


def run_case(seed_and_number: tuple[int, int]) -> Outcome:
    """Run a case, and cut it down if it fails."""
    case = case_of(*seed_and_number)
    trained, problem = _tried(case)
    if problem:
        case, problem = shrunk(case, problem)
    return Outcome(seed_and_number[1], trained, case, problem)


def _tried(case: Case) -> tuple[bool, str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return check_case(case), ""
    except Exception as error:
        return True, "".join(traceback.format_exception_only(error)).strip()


def shrunk(case: Case, problem: str, seconds: float = SHRINK_SECONDS) -> tuple[Case, str]:
    """Leave out instructions, one at a time, as long as the case fails and there is time."""
    deadline, index = time.monotonic() + seconds, len(case.program) - 1
    while index >= 0 and time.monotonic() < deadline:
        smaller = replace(case, program=case.program[:index] + case.program[index + 1 :])
        failed = _tried(smaller)[1] if smaller.program else ""
        if failed:
            case, problem = smaller, failed
        index -= 1
    return case, problem


def outcomes(seed: int, numbers: list[int], workers: int) -> Iterator[Outcome]:
    """Yield the outcome of each case as it comes."""
    todo = [(seed, number) for number in numbers]
    if workers == 1:
        _one_thread()
        yield from map(run_case, todo)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _one_thread, maxtasksperchild=500) as pool:
        yield from pool.imap_unordered(run_case, todo, chunksize=5)


def _one_thread() -> None:
    torch.set_num_threads(1)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="default: a new one")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", type=int, help="run this case number alone")
    arguments = parser.parse_args(argv)
    numbers = list(range(arguments.cases)) if arguments.only is None else [arguments.only]
    print(f"seed {arguments.seed}, {len(numbers)} cases, {arguments.workers} workers", flush=True)
    start, failed, trained = time.monotonic(), 0, 0
    for done, outcome in enumerate(outcomes(arguments.seed, numbers, arguments.workers), 1):
        trained += outcome.trained
        if outcome.problem:
            failed += 1
            print(f"\ncase {outcome.number} FAILED:\n    check_case({outcome.case!r})\n{outcome.problem}\n", flush=True)
        if done % 100 == 0 or done == len(numbers):
            seconds = time.monotonic() - start
            left = seconds / done * (len(numbers) - done)
            print(f"{done} done, {trained} trained, {failed} failed; {seconds:.0f} s, {left:.0f} s left", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
