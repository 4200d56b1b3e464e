"""What the committed runs on a GPU showed, as text: tables of docs/results.md and README's sentence."""

from __future__ import annotations

import json
from typing import Any

from tabulate import tabulate

from benchmarks.measure import Row
from benchmarks.results_file import RESULTS, load_rows

FIRST, BUDGETS, COMPARED = "first_gpu_h200.json", "cuda_budgets_h200.json", "compare_gpu.json"
COMPILED = "gpu_compiled_h200.json"


def told() -> str:
    """Return what was measured on the GPU beside what was told."""
    first = _json(FIRST)
    rows = {name.split()[1]: found["rows"] for name, found in first["measurements"].items()}
    facts = first["machine"]
    days = " and ".join(sorted({found.get("date", facts["date"]) for found in first["measurements"].values()}))
    exact = {name: sum(row.get("predicted") == row.get("real") for row in rows[name]) for name in ("sums", "ops")}
    recomputed = [row["real"] for row in rows["bits"] if row["what"].endswith("recomputed")]
    called = rows["convolutions"]
    bounded = sum(row["real"] <= row["predicted"] for row in called)
    networks = {row["what"].partition(" ")[0] for row in called}
    return "\n\n".join(
        (
            f"An {facts['gpu']}, torch {facts['torch']}, {days}. `python -m benchmarks.first_gpu FILE`: scratch of "
            f"sums is the predicted one, to the byte, on {exact['sums']} of {len(rows['sums'])} shapes, that of other ops "
            f"in {exact['ops']} of {len(rows['ops'])} cases (the rest: convolutions and batch norms, whose workspaces are "
            "measured before a step is planned there, attention by 16 to 256 bytes, group norms, gradients of `prod`, and "
            "bounds). The bound that stands for "
            f"a convolution's workspace where no GPU is, was one in {bounded} of {len(called)} calls of {len(networks)} "
            "networks, and is one in the rest since. Recomputed gradients and buffers are bitwise "
            f"eager's in {recomputed.count('equal')} of {len(recomputed)} runs (dropout, BatchNorm, cuDNN's convolutions, "
            "flash attention; deterministic algorithms on and off).",
            _budgets(),
            _compiled(),
            _compared(),
        )
    )


def in_short() -> str:
    """Return one sentence for README."""
    rows = [row for row in load_rows(RESULTS / COMPARED) if row.time_ratio is not None]
    models = list(dict.fromkeys(row.model for row in rows))
    parts = []
    for model in models:
        of = {row.way: row for row in rows if row.model == model}
        peer, ours = of["checkpoint per block"], of["fxmem at checkpoint per block"]
        parts.append(f"{model} {_extra(peer.time_ratio)} and {_extra(ours.time_ratio)}")
    return (
        f"On an {_json(COMPARED)['machine']['gpu']}, in the memory of checkpointing per block, a step takes longer by "
        f"(PyTorch's checkpointing and fxmem): {'; '.join(parts)}. More: [docs/results.md](docs/results.md#on-a-gpu)."
    )


def _budgets() -> str:
    found = _json(BUDGETS)["cases"]
    rows = [row for of_case in found.values() for row in of_case]
    ran = [row for row in rows if "measured" in row]
    over = sum(row["exceeded"] for row in ran)
    told_of = [(row["told"]["allocated"], row["steady"]["allocated"]) for row in ran]
    above = sum(taken <= said <= 1.002 * taken for said, taken in told_of)
    below = [said / taken - 1 for said, taken in told_of if said < taken]
    further = [1 - taken / said for said, taken in told_of if said > 1.002 * taken]
    return (
        f"Budgets (`python -m benchmarks.cuda_memory budgets h200 FILE`): {len(found)} models, AdamW and SGD, three "
        f"budgets each, the least one among them, in two runs. Of {len(ran)} steps **{over} went over**, "
        f"{len(rows) - len(ran)} were refused. In {above} steps the allocated peak was at most .2 % below what was told, "
        f"in {len(below)} above it, by {-min(below):.2%} at most, in {len(further)} further below, by up to "
        f"{max(further):.1%}."
    )


def _compiled() -> str:
    found = _json(COMPILED)
    lines, over, budgets = [], 0, set()
    for row in found["rows"]:
        told_bytes, said = row.get("predicted"), row.get("note", "")
        budgets |= {row["what"]} if ": budget of " in row["what"] else set()
        over += "OVER" in said
        share = f"{row['real'] / told_bytes - 1:+.2%}" if told_bytes else ""
        told_mb = f"{told_bytes / 1e6:,.1f}" if told_bytes else ""
        lines.append((row["what"], told_mb, f"{row['real'] / 1e6:,.1f}", share, said))
    head = ("model and way", "told MB", "measured MB", "beside", "")
    models = dict.fromkeys(row["what"].partition(":")[0] for row in found["rows"])
    cut_short = [m for m in models if not any(what.startswith(f"{m}: ") for what in budgets)]
    missing = f"Of {', '.join(cut_short)} no budget was measured. " if cut_short else ""
    dates = sorted({row.get("date", found["machine"]["date"]) for row in found["rows"]})
    return (
        "Compiled steps (`python -m benchmarks.gpu_compiled FILE`; several models at once, so that times are rough; "
        f"{' and '.join(dates)}): of {len(budgets)} budgets, the least, one half way and torch.compile's own peaks, "
        f"**{over} were exceeded**. Two steps that keep all differ where kernels add in any order. Steps that compute "
        "again differ more where ops round to bfloat16, or to TF32 as convolutions do; those of torch.compile's own "
        "budgets do as well, and with dropout they are wrong. "
        f"{missing}torch.compile alone breaks the graph of GPT-2 and BERT.\n\n"
        + tabulate(lines, headers=head, tablefmt="github", disable_numparse=True)
    )


def _compared() -> str:
    rows = [row for row in load_rows(RESULTS / COMPARED) if row.time_ratio is not None]
    table = [
        (
            row.model,
            row.way,
            *_peaks(row),
            f"{row.time_ratio:.2f}",
            row.gradients,
            (row.buffers or "").partition(",")[0],
        )
        for row in rows
    ]
    headers = ("model", "way", "peak GB", "of eager", "told", "time / eager", "gradients", "buffers")
    return "Time, in turn with eager's steps (two eager runs of gpt2 differ as well):\n\n" + (
        tabulate(table, headers=headers, tablefmt="github", disable_numparse=True)
    )


def _peaks(row: Row) -> tuple[str, str, str]:
    peak_bytes, told_bytes = row.peak_bytes or 0, row.predicted_peak_bytes
    share = f"{peak_bytes / (row.eager_peak_bytes or 1):.2f}"
    return f"{peak_bytes / 1e9:.2f}", share, f"{told_bytes / 1e9:.2f}" if told_bytes else ""


def _extra(ratio: float | None) -> str:
    return f"{(ratio or 1) - 1:+.0%}"


def _json(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found
