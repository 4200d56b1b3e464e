"""The longest sequence that Llama-3-8B with LoRA trains on one card: ``python -m benchmarks.lengths``.

Predicted for an H100 of 80 GB, from the configuration alone: bf16, batch 1, LoRA of rank 16 on queries and values (peft's
default for Llama), AdamW. By choices: recomputation alone, with heads and MLPs in pieces, with values in host memory too.
Of the plans, those count whose recomputation and waiting take at most a third of the step's estimated time.

The step of 32 layers is not planned whole: peaks of 2 and 3 layers give a line, on which 32 is read off; the peak of 4 says
how far off a line is. (ALST, Bekman et al. 2025, sweeps lengths so.)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import nn

import fxmem
from benchmarks.below_the_floor import LossAlone
from benchmarks.libraries import import_library
from benchmarks.results_file import RESULTS, machine

PATH = RESULTS / "lengths.json"
DEVICE = "cuda:h100-80gb"
BUDGET_BYTES = 80 * 10**9
NUM_LAYERS = 32
FEW_LAYERS = (2, 3)
CHECKED_LAYERS = 4
MOST_OVERHEAD = 1 / 3
STEP = 1024
"""Lengths are multiples of it."""
DEFAULT = ("recompute", "inplace")
ALLOWED = {
    "recompute": DEFAULT,
    "+ chunk": (*DEFAULT, "chunk"),
    "+ offload": (*DEFAULT, "chunk", "offload"),
}


@dataclass(frozen=True, slots=True)
class Longest:
    """The longest sequence under one set of choices."""

    allow: str
    """A key of :data:`ALLOWED`."""
    tokens: int
    peak_bytes: int
    """Of all layers, by the line."""
    checked_bytes: int
    """Of :data:`CHECKED_LAYERS` layers at this length, planned."""
    line_bytes: int
    """The same, by the line."""


def model_of(num_layers: int) -> nn.Module:
    """Return so many layers of Llama-3-8B, its base frozen, on the device of the context."""
    transformers, peft = import_library("transformers"), import_library("peft")
    config = transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=2**23,
        rope_theta=500_000.0,
        use_cache=False,
        attn_implementation="sdpa",
        dtype=torch.bfloat16,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return LossAlone(peft.get_peft_model(model, lora)).train()


def peak_of(num_layers: int, tokens: int, allow: str, plan_seconds: float) -> int:
    """Return the least planned peak, in bytes, that takes at most :data:`MOST_OVERHEAD` of the step more."""
    with torch.device("meta"):
        model, batch = model_of(num_layers), torch.zeros(1, tokens, dtype=torch.int64)
    estimate = fxmem.estimate(
        model, batch, device=DEVICE, optimizer="adamw", allow=ALLOWED[allow], plan_seconds=plan_seconds, cache=False
    )
    return min(p.predicted_peak_bytes for p in estimate.frontier() if p.overhead_ratio <= MOST_OVERHEAD)


def line_of(tokens: int, allow: str, plan_seconds: float) -> tuple[int, int]:
    """Return (bytes of no layer, bytes of each) at a length."""
    first, second = FEW_LAYERS
    low, high = (peak_of(n, tokens, allow, plan_seconds) for n in FEW_LAYERS)
    each = (high - low) // (second - first)
    return low - first * each, each


def longest(allow: str, plan_seconds: float) -> Longest:
    """Return the longest sequence: peaks are all but affine in it, so a few secant steps find it."""
    lines: dict[int, tuple[int, int]] = {}

    def need(tokens: int) -> int:
        if tokens not in lines:
            lines[tokens] = line_of(tokens, allow, plan_seconds)
            print(f"{allow}, {tokens} tokens: {lines[tokens]}", flush=True)
        base, each = lines[tokens]
        return base + NUM_LAYERS * each

    low, high = 8 * STEP, 16 * STEP
    need(low)
    while True:
        slope = (need(high) - need(low)) / (high - low)
        guess = max(1, int((high + (BUDGET_BYTES - need(high)) / slope) // STEP)) * STEP
        fitting = [n for n in lines if need(n) <= BUDGET_BYTES]
        failing = [n for n in lines if need(n) > BUDGET_BYTES]
        guess = min(max(guess, max(fitting, default=0) + STEP), min(failing, default=2**40) - STEP)
        if guess in lines or guess <= 0:
            break
        low, high = high, guess
    tokens = max(fitting)
    base, each = lines[tokens]
    checked = peak_of(CHECKED_LAYERS, tokens, allow, plan_seconds)
    return Longest(allow, tokens, need(tokens), checked, base + CHECKED_LAYERS * each)


def text() -> str:
    """Return the committed results as a table."""
    results = json.loads(PATH.read_text(encoding="utf-8"))
    rows = [Longest(**row) for row in results["lengths"]]
    off = max(abs(row.checked_bytes / row.line_bytes - 1) for row in rows)
    lines = [
        "| choices | longest sequence | peak of 32 layers, by the line | 4 layers, planned | 4 layers, by the line |",
        "|---|---|---|---|---|",
        *(
            f"| {row.allow} | {row.tokens:,} | {row.peak_bytes / 1e9:.2f} GB | {row.checked_bytes / 1e9:.3f} GB | "
            f"{row.line_bytes / 1e9:.3f} GB |"
            for row in rows
        ),
        "",
        f"The peak of 4 layers is at most {off:.1%} off the line. From `benchmarks/results/lengths.json` (torch "
        f"{results['machine']['torch']}, {results['machine']['date']}).",
    ]
    return "\n".join(lines)


def all_longest(names: list[str], plan_seconds: float) -> Iterator[Longest]:
    """Yield the longest sequence of each set of choices."""
    for name in names:
        yield longest(name, plan_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan-seconds", type=float, default=4.0)
    parser.add_argument("--allow", nargs="+", choices=tuple(ALLOWED), default=list(ALLOWED))
    arguments = parser.parse_args()
    rows = json.loads(PATH.read_text(encoding="utf-8"))["lengths"] if PATH.exists() else []
    rows = [row for row in rows if row["allow"] not in arguments.allow]
    for found in all_longest(arguments.allow, arguments.plan_seconds):
        rows = sorted((*rows, asdict(found)), key=lambda row: list(ALLOWED).index(row["allow"]))
        PATH.write_text(json.dumps({"machine": machine(), "lengths": rows}, indent=1) + "\n", encoding="utf-8")
    print(text())


if __name__ == "__main__":
    main()
