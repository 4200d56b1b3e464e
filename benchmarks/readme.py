"""Fill README's figures in from the committed results: ``python -m benchmarks.readme``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"


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


def compare() -> str:
    """Return a table of each eager peer beside fxmem at the peer's own measured peak."""
    results = json.loads((RESULTS / "compare_cpu.json").read_text())
    rows = {(row["model"], row["way"]): row for row in results["rows"] if row.get("peak_bytes")}
    lines, ratios = [], []
    for (model, way), peer in rows.items():
        ours = rows.get((model, f"fxmem at {way}"))
        if ours is None or peer["kind"] not in ("checkpoint", "sequential", "selective"):
            continue
        theirs, mine = peer["time_ratio"] - 1, ours["time_ratio"] - 1
        ratios.append(mine / theirs)
        right = "yes" if peer["buffers"] == "equal" else "**no**"
        lines.append(
            f"| {model} | {way} | {peer['eager_peak_bytes'] / 1e6:.1f} | {peer['peak_bytes'] / 1e6:.1f} | "
            f"{ours['peak_bytes'] / 1e6:.1f} | {theirs:+.0%} | {mine:+.0%} | {right} |"
        )
    ours_all = [row for row in rows.values() if row["kind"] == "fxmem"]
    exact = sum(
        r["gradients"] == "bitwise" and r["buffers"] == "equal" and r["peak_bytes"] == r["predicted_peak_bytes"]
        for r in ours_all
    )
    lost = sum(ratio > 1 for ratio in ratios)
    return "\n".join(
        (
            "Beside what PyTorch offers today, each at its own measured peak (`make bench`; CPU "
            f"{results['machine']['cpu']}, {results['machine']['date']}, a machine that was busy: differences of a few "
            "points of time are noise):",
            "",
            "| model | peer | eager MB | peer MB | fxmem MB | peer's time | fxmem's time | peer's buffers right |",
            "|---|---|---|---|---|---|---|---|",
            *lines,
            "",
            f"In {len(ratios) - lost} of these {len(ratios)} fxmem costs less time, in {lost} more. Of the {len(ours_all)} "
            f"measured rows of fxmem {exact} have bitwise eager's gradients and buffers and the predicted peak, exactly.",
        )
    )


SECTIONS: dict[str, Callable[[], str]] = {"sweep": sweep, "compare": compare}


def filled(text: str) -> str:
    """Return ``text`` with each section between its markers made anew."""
    for name, section in SECTIONS.items():
        pattern = rf"(<!-- results:{name} -->\n).*?(<!-- /results:{name} -->)"
        text = re.sub(pattern, lambda match, s=section: f"{match[1]}{s()}\n{match[2]}", text, flags=re.DOTALL)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(filled(path.read_text()))
