"""docs/comparison.md: every peer beside fxmem at its measured peak, from benchmarks/results/compare_cpu.json."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator

from benchmarks.frontier import PEERS
from benchmarks.measure import Row
from benchmarks.models import MODELS
from benchmarks.results_file import RESULTS, load_rows, where_measured
from benchmarks.verdicts import OURS, OURS_COMPILED, PEER_WRONG, Verdict, megabytes, verdicts_of
from benchmarks.ways import NOT_INSTALLABLE


def comparison_page() -> str:
    """Return docs/comparison.md: every peer beside fxmem at its measured peak."""
    results = json.loads((RESULTS / "compare_cpu.json").read_text())
    rows = compared()
    verdicts = list(verdicts_in(rows))
    lines = [_line(v) for v in verdicts]
    absent = [f"- {row.model}, {row.way}: {row.problem}" for row in rows if row.problem and "fxmem" not in row.kind]
    machine = results["machine"]
    return "\n".join(
        (
            "# fxmem beside its peers",
            "",
            f"From `benchmarks/results/compare_cpu.json` ({where_measured(rows)}, torch {machine['torch']}, one "
            "thread); made by `python -m benchmarks --inductor`, this page by `python -m benchmarks.readme`.",
            "",
            "Each peer and eager take turns in one process, fxmem at the peer's measured peak and eager in another; times "
            "are CPU times over eager's, medians of pairs. A compiled peer's extra time is counted over its own time "
            "without recomputation, since fusion is its merit and recomputation its cost. *lost*: fxmem is slower by more "
            "than the spread of its own pairs, or cannot reach the peak. A negative extra time counts as none in the "
            "shares and sums; a share of a peer's one or two percent says little, as times spread about as wide. Gradients "
            "are called wrong where they differ by more than 1e-3 and by more than ten times what eager's change by where "
            "each parameter changes by its last bit (`rounding.json`, `python -m benchmarks.rounding`): batch "
            "normalization at random weights enlarges rounding, so that two right compilers may differ by percents. They "
            "are compared with eager's, and where a model draws dropout masks with those of the same compiler that "
            "recomputes nothing. Rows were measured at several commits and dates, on the processors named above; the file "
            "names each row's.",
            "",
            *HEAD,
            *lines,
            "",
            *_totals(verdicts),
            "",
            "Why fxmem loses where it does. The compiler trains another graph: ops taken apart, dropout drawn anew from a "
            "seed (inductor's masks, hence its gradients, are not eager's), and what lies inside a fused kernel is "
            "recomputed for nothing. So its first savings are free, and with inductor's C++ kernels on the CPU most are: "
            "it keeps less than eager even at its budget of 1. fxmem runs eager's own kernels, each of which goes "
            "over memory once more when it runs again. On a network "
            "of a thousand small layers the Python around each recomputation "
            f"({_recipe_ms():.2f} ms on the CPU, `python -m benchmarks.overhead`) costs more than the kernels.",
            "",
            *_compiled_beside_torch(rows),
            "How low each goes:",
            "",
            *_floors(),
            "",
            "What could not be measured:",
            "",
            *absent,
            *(f"- {name}: {reason}" for name, reason in NOT_INSTALLABLE.items()),
            "",
        )
    )


HEAD = (
    "| model | peer | peak MB | its step over eager's | its extra time | fxmem's extra time | of it | | remarks |",
    "|---|---|---|---|---|---|---|---|---|",
)


def _line(v: Verdict) -> str:
    return (
        f"| {v.model} | {v.peer} | {v.peer_bytes / 1e6:.1f} | {v.peer_ratio:.2f} | {v.peer_extra:+.0%} | "
        f"{percent(v.our_extra)} | "
        f"{'' if v.ratio is None else format(v.ratio, '.2f')} | {'lost' if v.lost else ''} | {v.note} |"
    )


def _compiled_beside_torch(rows: list[Row]) -> Iterator[str]:
    """Yield what fxmem in inductor's seat takes at the peaks of torch.compile's own budgets, and how low both go."""
    verdicts = list(verdicts_in(rows, OURS_COMPILED))
    if not verdicts:
        return
    yield (
        "The compiled backend (`backend=\"inductor\"`: fused kernels, not eager's bits), at the peaks of torch.compile's "
        "own budgets; extra times of both are over the same compiler's time at its default, budget 1:"
    )
    yield from ("", *HEAD, *map(_line, verdicts), "")
    right = right_of(verdicts)
    yield (
        f"{len(verdicts)} points, lost {sum(v.lost for v in verdicts)}; of the {len(right)} where torch's gradients are "
        f"right, lost {sum(v.lost for v in right)}. {' '.join(_least_of_compiled(rows))}"
    )
    yield from ("", with_both_backends(rows))
    yield ""


def with_both_backends(rows: list[Row]) -> str:
    """Return a sentence on where neither of fxmem's backends is ahead of a peer."""
    points: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in (*verdicts_in(rows), *verdicts_in(rows, OURS_COMPILED)):
        points.setdefault((verdict.model, verdict.peer), []).append(verdict)
    lost = [verdicts[0] for verdicts in points.values() if all(v.lost for v in verdicts)]
    num_beaten = sum(_is_beaten(verdict, rows) for verdict in lost)
    return (
        f"With the better of both backends fxmem's extra time is not above the peer's, beyond the spread, at "
        f"{len(points) - len(lost)} of {len(points)} points ({1 - len(lost) / len(points):.1%}); at {num_beaten} of the "
        f"other {len(lost)} a measured step of fxmem takes less time than the peer's, and no more memory."
    )


def _is_beaten(verdict: Verdict, rows: list[Row]) -> bool:
    """True if a step of fxmem takes less time than the peer's, in no more memory: whatever each compiler brings."""
    return any(
        row.time_ratio < verdict.peer_ratio and row.peak_bytes <= verdict.peer_bytes
        for row in rows
        if row.model == verdict.model and row.way.startswith("fxmem") and row.time_ratio and row.peak_bytes
    )


def _least_of_compiled(rows: list[Row]) -> Iterator[str]:
    for ours, theirs in least_compiled(rows):
        yield f"{ours.model}: least peak {megabytes(ours.peak_bytes)} MB, torch's {megabytes(theirs)}."


def least_compiled(rows: list[Row]) -> Iterator[tuple[Row, int]]:
    """Yield the row of fxmem's least compiled peak on each model, and the bytes of torch.compile's."""
    for row in rows:
        if row.way == "fxmem, inductor least" and row.peak_bytes is not None:
            yield row, min(r.peak_bytes for r in rows if r.model == row.model and r.kind == "inductor" and r.peak_bytes)


def right_of(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Return the verdicts on peers whose gradients are right."""
    return [v for v in verdicts if PEER_WRONG not in v.note]


def _floors() -> list[str]:
    """Return a table of the least measured peaks, and what it says."""
    rows = json.loads((RESULTS / "frontier.json").read_text())["floors"]
    ways = [*PEERS, "fxmem, measured"]
    lines = [f"| least peak over eager's | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
    for row in rows:
        shares = ["" if row[way] is None else f"{row[way] / row['eager']:.3f}" for way in ways]
        lines.append(f"| {row['model']} | {' | '.join(shares)} |")
    lowest = sum(row["fxmem, measured"] <= min(row[way] for way in PEERS if row[way] is not None) for row in rows)
    return [
        *lines,
        "",
        f"The whole step's peak, measured (`python -m benchmarks.frontier --floors`): fxmem's is the lowest on {lowest} of "
        f"{len(rows)} models. The compiler's partitioner is taken at the best of its budgets, checkpoint_sequential at the "
        "best number of segments (an empty cell: the way does not apply, or failed), sqrt(n) is Chen's plan run by fxmem.",
    ]


def _totals(verdicts: list[Verdict]) -> list[str]:
    """Return a line on each kind of peers."""
    lines = []
    for what, some in by_kind(verdicts).items():
        ratios = [v.ratio for v in some if v.ratio is not None]
        reached = [v for v in some if v.our_extra is not None]
        if ratios:
            lines.append(
                f"{what}: {len(some)} points, lost {sum(v.lost for v in some)}, of these {len(some) - len(reached)} for a "
                f"peak that fxmem cannot reach; at the others fxmem's extra time over the peer's: mean "
                f"{statistics.mean(ratios):.2f}, median {statistics.median(ratios):.2f} of the {len(ratios)} where the "
                f"peer's is above one percent, {_of_sums(reached):.2f} of all summed. By step time, all things counted, "
                f"fxmem is the faster one at {_faster(some)} points."
            )
            lines.append("")
    return lines[:-1]


def by_kind(verdicts: list[Verdict]) -> dict[str, list[Verdict]]:
    return {
        "All": verdicts,
        "Eager peers": [v for v in verdicts if v.eager],
        "torch.compile's partitioner alone": [v for v in verdicts if "partitioner" in v.peer],
        "torch.compile with inductor": [v for v in verdicts if "inductor" in v.peer],
    }


def compared() -> list[Row]:
    """Return the rows, model by model in the benchmark's order, whatever was measured last."""
    order = list(MODELS)
    return sorted(load_rows(RESULTS / "compare_cpu.json"), key=lambda row: order.index(row.model))


def verdicts_in(rows: list[Row], ours_at: str = OURS) -> Iterator[Verdict]:
    for name in dict.fromkeys(row.model for row in rows):
        yield from verdicts_of(rows, name, ours_at)


def _faster(verdicts: list[Verdict]) -> int:
    """Return at how many points fxmem's step takes less time than the peer's."""
    return sum(v.our_extra is not None and 1 + v.our_extra < v.peer_ratio for v in verdicts)


def _of_sums(verdicts: list[Verdict]) -> float:
    """Return fxmem's extra times over the peers', both summed; a negative one counts as none."""
    ours = sum(max(0.0, v.our_extra or 0.0) for v in verdicts)
    return ours / sum(max(0.0, v.peer_extra) for v in verdicts)


def _recipe_ms() -> float:
    """Return what running one small recipe again costs on the CPU."""
    overhead = json.loads((RESULTS / "overhead.json").read_text())
    return min(float(row["recipe_us"]) for row in overhead["rows"]) / 1000


def percent(share: float | None) -> str:
    return "not reached" if share is None else f"{share:+.0%}"
