"""What opt-in choices bring below the floor that recomputation alone reaches: ``python -m benchmarks.below_the_floor``.

Floors, predicted on the meta device, of GPT-2 and of Llama blocks under a vocabulary of 128,256, each with AdamW; and steps
that ran on the CPU (:mod:`benchmarks.below_the_floor_steps`). ``--floors`` or ``--steps`` asks for one of the two. All is
written to ``benchmarks/results/below_the_floor.json``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import fxmem
from benchmarks import below_the_floor_steps as steps
from benchmarks.libraries import import_library
from benchmarks.results_file import RESULTS, machine
from fxmem.passes.choices import DEFAULT

PATH = RESULTS / "below_the_floor.json"
NUM_PAIRS = 8
"""Of steps whose CPU time is taken, one way and the other."""
VOCABULARY = 128_256
"""Of Llama 3."""
PARTS = ("gradients", "times", "in_backward", "micro_batches")
"""Of the steps."""
ALLOWED = {
    "recompute": DEFAULT,
    "+ chunk": (*DEFAULT, "chunk"),
    "+ optimizer_in_backward": (*DEFAULT, "optimizer_in_backward"),
    "+ both": (*DEFAULT, "chunk", "optimizer_in_backward"),
}


class LossAlone(nn.Module):
    """A language model of transformers that returns its loss alone: its scores are no output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    batch: tuple[int, int]


def gpt2(**changes: Any) -> nn.Module:
    transformers = import_library("transformers")
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return LossAlone(transformers.GPT2LMHeadModel(transformers.GPT2Config(**off, **changes)))


def llama_blocks(
    num_layers: int = 4, width: int = 2048, num_heads: int = 32, dtype: torch.dtype | None = None
) -> nn.Module:
    transformers = import_library("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 4,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LossAlone(transformers.LlamaForCausalLM(config)).to(dtype)


CASES = (
    Case("GPT-2, vocabulary 50,257, batch 8 x 1,024", gpt2, (8, 1024)),
    Case("4 Llama blocks of 2,048, vocabulary 128,256, batch 8 x 1,024", llama_blocks, (8, 1024)),
    Case("4 Llama blocks of 2,048, vocabulary 128,256, batch 2 x 8,192", llama_blocks, (2, 8192)),
    Case("the same in bf16, batch 8 x 1,024", partial(llama_blocks, dtype=torch.bfloat16), (8, 1024)),
)


@dataclass(frozen=True, slots=True)
class Floor:
    """The least peak of one case under one set of choices, in bytes."""

    model: str
    allow: str
    """A key of :data:`ALLOWED`."""
    floor_bytes: int
    static_bytes: int
    """Of it: parameters, buffers, the batch and the optimizer's state, which are there all the time."""


def floors(case: Case, plan_seconds: float) -> Iterator[Floor]:
    """Yield the floor of each set of choices."""
    with torch.device("meta"):
        model, tokens = case.build().train(), torch.zeros(case.batch, dtype=torch.int64)
    for name, allow in ALLOWED.items():
        estimate = fxmem.estimate(model, tokens, plan_seconds=plan_seconds, cost="cpu", allow=allow)
        parts = estimate.breakdown
        static = parts.parameters_bytes + parts.buffers_bytes + parts.inputs_bytes + parts.optimizer_state_bytes
        yield Floor(case.name, name, estimate.floor_bytes, static)


def steps_of(parts: Sequence[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield what steps that ran under choices showed, by part."""
    languages = (
        (
            "GPT-2, 2 layers of 64, vocabulary 50,257, batch 2 x 128",
            partial(gpt2, n_layer=2, n_embd=64, n_head=2),
            50_257,
        ),
        ("2 Llama blocks of 64, vocabulary 128,256, batch 2 x 128", partial(llama_blocks, 2, 64, 4), VOCABULARY),
    )
    timed = (
        (
            "GPT-2, 4 layers of 256, vocabulary 50,257, batch 2 x 512",
            partial(gpt2, n_layer=4, n_embd=256, n_head=4),
            50_257,
        ),
        ("4 Llama blocks of 256, vocabulary 128,256, batch 2 x 256", partial(llama_blocks, 4, 256, 4), VOCABULARY),
    )
    if "gradients" in parts:
        yield "gradients", [asdict(steps.gradients_of(name, build, (2, 128), n)) for name, build, n in languages]
    if "times" in parts:
        found = [
            steps.measured_time(name, build, batch, n, NUM_PAIRS)
            for (name, build, n), batch in zip(timed, ((2, 512), (2, 256)), strict=True)
        ]
        found += [row for case in CASES for row in steps.predicted_times(case.name, case.build, case.batch)]
        yield "times", [asdict(row) for row in found]
    if "in_backward" in parts:
        yield "in_backward", [asdict(steps.in_backward("GPT-2, batch 1 x 32", gpt2, (1, 32), 50_257))]
    if "micro_batches" in parts:
        yield "micro_batches", [asdict(steps.micro_batches())]


def text() -> str:
    """Return the committed floors as a table: GB, and shares of recomputation's, with what is static and without."""
    results = json.loads(PATH.read_text(encoding="utf-8"))
    found = [Floor(**row) for row in results["floors"]]
    lines = [f"| model | static | {' | '.join(ALLOWED)} |", f"|---|---|{'---|' * len(ALLOWED)}"]
    for name in dict.fromkeys(floor.model for floor in found):
        of_model = {floor.allow: floor for floor in found if floor.model == name}
        first = of_model["recompute"]
        cells = [f"{first.floor_bytes / 1e9:.3f} GB", *(_cell(first, of_model[k]) for k in list(ALLOWED)[1:])]
        lines.append(f"| {name} | {first.static_bytes / 1e9:.3f} GB | {' | '.join(cells)} |")
    machine = results["machine"]
    lines += ["", f"From `benchmarks/results/below_the_floor.json` (torch {machine['torch']}, {machine['date']})."]
    return "\n".join(lines)


def steps_text() -> str:
    """Return what the committed steps showed, as a list."""
    return "\n".join(f"- {line}" for line in steps.step_text(_kept()).splitlines())


def _cell(first: Floor, floor: Floor) -> str:
    share = floor.floor_bytes / first.floor_bytes
    apart = (floor.floor_bytes - floor.static_bytes) / (first.floor_bytes - first.static_bytes)
    return f"{floor.floor_bytes / 1e9:.3f} GB ({share:.2f}; {apart:.2f})"


def save(rows: Iterable[Floor]) -> None:
    """Write ``rows`` in place of those of the same cases."""
    rows = list(rows)
    kept = [row for row in _kept().get("floors", ()) if row["model"] not in {floor.model for floor in rows}]
    order = [case.name for case in CASES]
    _write("floors", sorted((*kept, *map(asdict, rows)), key=lambda row: order.index(row["model"])))


def _kept() -> dict[str, Any]:
    return dict(json.loads(PATH.read_text(encoding="utf-8"))) if PATH.exists() else {}


def _write(part: str, rows: list[dict[str, Any]]) -> None:
    results = {**_kept(), "machine": machine(), part: rows}
    PATH.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Plan and run what is asked for, write it, print all that is known."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plan-seconds", type=float, default=10.0)
    parser.add_argument("--floors", action="store_true", help="floors, but no steps")
    parser.add_argument(
        "--steps", nargs="*", choices=PARTS, metavar="PART", help="steps, or some of them, but no floors"
    )
    parser.add_argument("--case", metavar="TEXT", default="", help="only floors of cases whose name contains it")
    arguments = parser.parse_args()
    if arguments.steps is None:
        for case in (case for case in CASES if arguments.case in case.name):
            save(floors(case, arguments.plan_seconds))
    if not arguments.floors:
        for part, rows in steps_of(arguments.steps or PARTS):
            _write(part, rows)
            print(steps.step_text({part: rows}), flush=True)
    print(text())
    print(steps.step_text(_kept()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
