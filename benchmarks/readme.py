"""README's figures and the tables in docs/ from the committed results: ``python -m benchmarks.readme``."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import ablation as ablation_of_stages
from benchmarks import ablation_runtime, below_the_floor, frameworks, lengths
from benchmarks.comparison_page import (
    by_kind,
    compared,
    comparison_page,
    least_compiled,
    percent,
    right_of,
    verdicts_in,
    with_both_backends,
)
from benchmarks.compiled import told as compiled_steps
from benchmarks.compiled_budgets import told as compiled_budgets
from benchmarks.cuda_memory import told as cuda_budgets
from benchmarks.fused_chains import told as fused_chains
from benchmarks.gpu_results import in_short as gpu_in_short
from benchmarks.gpu_results import told as on_a_gpu
from benchmarks.host_time import told as host_times
from benchmarks.measure import Row
from benchmarks.offload import told as offloads
from benchmarks.published import PATH as PUBLISHED
from benchmarks.published import Result, load_results, table
from benchmarks.published_memory import told
from benchmarks.report_time import told as report_times
from benchmarks.results_file import RESULTS
from benchmarks.verdicts import EAGER_PEERS, OURS_COMPILED, Verdict
from benchmarks.ways import FUSED

ROOT = Path(__file__).parent.parent


def sweep() -> str:
    """Return one sentence on predicted against measured peaks."""
    results = json.loads((RESULTS / "sweep_cpu.json").read_text())
    points = results["points"]
    planned = [r for records in points.values() for r in records if r["share"] != "eager"]
    eager = [r for records in points.values() for r in records if r["share"] == "eager"]
    models = len({key.partition("/")[0] for key in points})
    above = sum(r["measured_bytes"] > r["budget_bytes"] for r in planned)
    differ = sum(r["measured_bytes"] != r["predicted_bytes"] for r in planned)
    same = sum(r["measured_bytes"] == r["predicted_bytes"] for r in eager)
    return (
        f"{models} models (torchvision, timm, transformers, diffusers, segmentation-models-pytorch) x SGD and AdamW x "
        f"fp32 and bf16 autocast x five budgets from the floor up, on the CPU: {len(planned)} training steps under a "
        f"budget were measured, **{above} above the budget, {differ} where the measured peak is not the predicted one, "
        f"byte for byte**. Of {len(eager)} eager steps {same} were predicted to the byte (torch {results['torch']}, "
        f"{results['date']})."
    )


def architectures() -> str:
    """Return one sentence on the architectures of transformers and timm."""
    results = json.loads((RESULTS / "architecture_table.json").read_text())
    counts = Counter(outcome["verdict"] for outcome in results["outcomes"])
    ran = sum(n for verdict, n in counts.items() if verdict not in ("untrainable", "gave up"))
    tried = sorted({outcome["name"].split("/")[0] for outcome in results["outcomes"]})
    names = " and ".join(f"{name} {results[name]}" for name in tried)
    wrong = ", ".join(outcome["name"] for outcome in results["outcomes"] if outcome["verdict"] == "wrong")
    return (
        f"Of {ran} architectures of {names} that train when made small by their configuration, {counts['passed']} have "
        "eager's loss, gradients, buffers and random state to the bit and the predicted peak to the byte under two plans "
        f"each, {counts['in parts']} that no graph holds whole are planned in parts, with eager's bits and within a budget "
        f"of 90 % of eager's peak or the least that they reach, {counts['refused']} are rejected with a named cause, "
        f"**{counts['wrong']} "
        f"differ{'s' if counts['wrong'] == 1 else ''}**{f' ({wrong})' if wrong else ''} "
        f"(`python -m tests.architecture_table`, {results['date']})."
    )


def overhead() -> str:
    """Return two sentences on what the runtime itself costs."""
    results = json.loads((RESULTS / "overhead.json").read_text())
    shares = [f"{row['no_budget_us'] / row['eager_us']:+.1%} on {row['model']}" for row in results["rows"]]
    calls = [row["taped_call_us"] for row in results["rows"]]
    recipes = [row["recipe_us"] for row in results["rows"]]
    return (
        "What fxmem's own Python costs, seen on models made so small that little else counts (CPU, one thread, "
        f"`python -m benchmarks.overhead`, {results['machine']['date']}): with no budget a step takes "
        f"{' and '.join(shares)} beside eager's; under a budget each op whose values are dropped takes "
        f"{min(calls):.0f} to {max(calls):.0f} µs more in the forward, and each recomputation "
        f"{min(recipes):.0f} to {max(recipes):.0f} µs in the backward, its tiny kernels included."
    )


def ablation() -> str:
    """Return tables of what stages of the planner, bindings and forms of compression bring."""
    return "\n\n".join((ablation_of_stages.text(), ablation_runtime.text()))


def compare() -> str:
    """Return the comparison in three rows: per-block checkpointing beside fxmem, and where fxmem loses."""
    rows = compared()
    of_kind = by_kind(list(verdicts_in(rows)))
    per_block, fused = _per_block(of_kind["Eager peers"]), of_kind["torch.compile with inductor"]
    ours = [row for row in rows if row.kind == "fxmem" and row.peak_bytes]
    floors = [_least_peaks(rows, verdict.model) for verdict in per_block]
    their_floor = statistics.median(least / eager for eager, least, _ in floors)
    our_floor = statistics.median(floor / eager for eager, _, floor in floors)
    our_extra = statistics.median(v.our_extra for v in per_block if v.our_extra is not None)
    wrong = sum("BatchNorm wrong" in v.note for v in per_block)
    ours_wrong = len({row.model for row in ours if row.buffers != "equal"})
    reached = sum(v.our_extra is not None for v in per_block)
    return "\n".join(
        (
            f"| {len(per_block)} models, one CPU thread | PyTorch's checkpointing | fxmem |",
            "|---|---|---|",
            f"| extra time a step in the same memory (checkpoint per block; median) | "
            f"{statistics.median(v.peer_extra for v in per_block):+.0%} | {our_extra:+.0%} |",
            f"| least peak over eager's (per block, selective, sequential; median) | {their_floor:.2f} | {our_floor:.2f} |",
            f"| models whose BatchNorm statistics come out wrong | {wrong} | {ours_wrong} |",
            *_compiled_lines(rows),
            "",
            f"fxmem reaches the checkpointed peak on {reached} of {len(per_block)}. `torch.compile` fuses kernels; eager "
            "steps do not. Against its memory budget (inductor, CPU) eager fxmem loses at "
            f"{sum(v.lost for v in fused)} of {len(fused)} points. {_in_inductors_seat(rows)}Every number: "
            "[docs/results.md](docs/results.md), [docs/comparison.md](docs/comparison.md).",
        )
    )


def _compiled_lines(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of the compiled backend beside ``torch.compile``'s memory budget; none if it was not measured."""
    budgeted = right_of(v for v in verdicts_in(rows, OURS_COMPILED) if v.peer != FUSED.name)
    extra = [(v.peer_extra, v.our_extra) for v in budgeted if v.our_extra is not None]
    least = [
        (theirs / row.eager_peak_bytes, row.peak_bytes / row.eager_peak_bytes) for row, theirs in least_compiled(rows)
    ]  # type: ignore[operator]
    if extra and least:
        their_extra, our_extra, their_least, our_least = (
            statistics.median(column) for pairs in (extra, least) for column in zip(*pairs, strict=True)
        )
        yield (
            "| compiled (`backend=\"inductor\"`; other bits than eager's) beside `torch.compile`'s memory budget: extra "
            f"time in the same memory, where its gradients are right ({len(extra)} points; median) | {their_extra:+.0%} | "
            f"{our_extra:+.0%} |"
        )
        yield f"| compiled: least peak over eager's ({len(least)} models; median) | {their_least:.2f} | {our_least:.2f} |"


def _in_inductors_seat(rows: list[Row]) -> str:
    """Return a sentence on the compiled backend beside torch.compile's own budgets; nothing if it was not measured."""
    verdicts = list(verdicts_in(rows, OURS_COMPILED))
    right = right_of(verdicts)
    if not right:
        return ""
    return (
        f"fxmem's own compiled steps (`backend=\"inductor\"`: the compiler's numbers, not eager's bits) lose at "
        f"{sum(v.lost for v in verdicts)} of {len(verdicts)} points on {len({v.model for v in verdicts})} models, and at "
        f"{sum(v.lost for v in right)} of the {len(right)} where that budget's gradients are right but for rounding. "
        f"{with_both_backends(rows)} "
    )


def compare_table() -> str:
    """Return a table of per-block checkpointing beside fxmem on every model, and the count over all eager peers."""
    rows = compared()
    of_kind = by_kind(list(verdicts_in(rows)))
    verdicts, fused = of_kind["Eager peers"], of_kind["torch.compile with inductor"]
    lines = []
    for verdict in _per_block(verdicts):
        eager_bytes, least, floor = _least_peaks(rows, verdict.model)
        right = "**no**" if "BatchNorm wrong" in verdict.note else "yes"
        lines.append(
            f"| {verdict.model} | {eager_bytes / 1e6:.1f} | {verdict.peer_bytes / 1e6:.1f} | {verdict.peer_extra:+.0%} | "
            f"{percent(verdict.our_extra)} | {least / 1e6:.1f} | {floor / 1e6:.1f} | {right} |"
        )
    ratios = [v.ratio for v in verdicts if v.ratio is not None]
    ours = [row for row in rows if row.kind == "fxmem" and row.peak_bytes]
    exact = sum(row.exact for row in ours)
    lost = sum(v.lost for v in verdicts)
    return "\n".join(
        (
            "| model | eager MB | checkpoint per block MB | its time | fxmem's time in the same memory | least MB of "
            "checkpoint, selective, sequential | fxmem's least MB | BatchNorm of checkpoint right |",
            "|---|---|---|---|---|---|---|---|",
            *lines,
            "",
            f"{len(lines)} models, each step measured in turn with eager's, at the peer's own measured peak. Over all "
            f"{len(verdicts)} points (per block, selective, sequential) fxmem's extra time is "
            f"{statistics.mean(ratios):.2f} of the peer's in the mean, {statistics.median(ratios):.2f} in the median; it "
            f"loses {lost}, beyond the spread of its own pairs. Of {len(ours)} measured rows of fxmem {exact} have bitwise "
            "eager's gradients and buffers and the predicted peak, exactly. Of these rows "
            f"{sum(row.runtime == 'program' for row in ours)} are of steps as programs ([host_time.md](host_time.md)), as "
            "they run in a long training, the others on the tape. torch.compile's memory budget recomputes "
            f"inside kernels that inductor fuses, and wins on the CPU: beside it fxmem loses at "
            f"{sum(v.lost for v in fused)} of {len(fused)} points. All peers, and where fxmem loses: "
            "[comparison.md](comparison.md).",
        )
    )


def _per_block(verdicts: list[Verdict]) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.peer == "checkpoint per block"]


def _least_peaks(rows: list[Row], model: str) -> tuple[int, int, int]:
    """Return eager's peak, the least peak of the eager peers and fxmem's, in bytes."""
    of_model = [row for row in rows if row.model == model]
    eager_bytes = next(row.eager_peak_bytes for row in of_model if row.eager_peak_bytes)
    least = min(row.peak_bytes for row in of_model if row.kind in EAGER_PEERS and row.peak_bytes)
    return eager_bytes, least, min(row.floor_bytes for row in of_model if row.floor_bytes)


def published() -> str:
    """Return one sentence on the papers' own tables."""
    overheads, batches = _published()
    better = sum(r.better for r in overheads)
    met = sum(r.better for r in batches)
    return (
        f"Beside the papers' own figures, on their networks, batches and cards, by exact memory and estimated time: of "
        f"{len(overheads)} published points (MONeT, Chen, memonger, ColossalAI) fxmem's overhead is lower at {better} in "
        f"the same memory, and its largest batch within 16 GB is larger than Checkmate's on {met} of {len(batches)} "
        "networks: [published.md](published.md)."
    )


def published_page() -> str:
    """Return docs/published.md: the papers' tables beside fxmem."""
    machine = json.loads(PUBLISHED.read_text())["machine"]
    overheads, batches = _published()
    return "\n".join(
        (
            "# fxmem beside the papers' own figures",
            "",
            f"From `benchmarks/results/published.json` (torch {machine['torch']}, {machine['date']}); made by `python -m "
            "benchmarks.published`, this page by `python -m benchmarks.readme`. Sources are named in "
            "`benchmarks/published.py`.",
            "",
            "The papers' networks at the papers' batches, the whole step followed allocation by allocation; GB are 10^9 "
            "bytes. *Their overheads were timed on their cards, ours are roofline estimates for the same cards*: sustained "
            "FLOPs and bandwidth, both for the recomputation and for the eager step it is a share of, so kernels far from "
            "the roofline (depthwise convolutions, say) make ours look larger or smaller than it would be. *weights GB*: "
            "parameters and their gradients, which no plan makes smaller. *least +%*: what, by the same estimate, any "
            "choice of tensors to recompute costs at our peak (a Lagrangian lower bound): where theirs is below it, they "
            "ran other kernels than eager's, or the estimate is off; no planner could close the rest.",
            "",
            table(overheads, "github"),
            "",
            "Checkmate's largest batches within 16 GB and one more forward pass:",
            "",
            table(batches, "github"),
            "",
        )
    )


def _published() -> tuple[list[Result], list[Result]]:
    """Return the points with an overhead, and those with a largest batch."""
    results = load_results()
    return [r for r in results if r.their_max_batch is None], [r for r in results if r.their_max_batch is not None]


SECTIONS: dict[str, Callable[[], str]] = {
    "sweep": sweep,
    "architectures": architectures,
    "overhead": overhead,
    "ablation": ablation,
    "compare": compare,
    "compare_table": compare_table,
    "published": published,
    "compiled": compiled_steps,
    "compiled_budgets": compiled_budgets,
    "cuda_budgets": cuda_budgets,
    "on_a_gpu": on_a_gpu,
    "gpu_in_short": gpu_in_short,
    "published_memory": told,
    "host_time": host_times,
    "fused_chains": fused_chains,
    "report_time": report_times,
    "below_the_floor": below_the_floor.text,
    "below_the_floor_steps": below_the_floor.steps_text,
    "lengths": lengths.text,
    "offload": offloads,
}
FILLED = (
    "README.md",
    "docs/below_the_floor.md",
    "docs/compiled.md",
    "docs/host_time.md",
    "docs/offload.md",
    "docs/results.md",
)
"""Texts with sections between markers."""
PAGES = {"comparison.md": comparison_page, "published.md": published_page, "frameworks.md": frameworks.page}


def filled(text: str) -> str:
    """Return ``text`` with each section between its markers written anew."""
    for name, section in SECTIONS.items():
        pattern = rf"(<!-- results:{name} -->\n).*?(<!-- /results:{name} -->)"
        text = re.sub(pattern, lambda match, s=section: f"{match[1]}{s()}\n{match[2]}", text, flags=re.DOTALL)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    for path in (ROOT / name for name in FILLED):
        path.write_text(filled(path.read_text()))
    for name, page in PAGES.items():
        (ROOT / "docs" / name).write_text(page())
