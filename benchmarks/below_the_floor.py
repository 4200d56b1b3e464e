"""What opt-in choices bring below the floor that recomputation alone reaches: ``python -m benchmarks.below_the_floor``.

Predicted, on the meta device, of GPT-2 and of Llama blocks under a vocabulary of 128,256, each with AdamW; written to
``benchmarks/results/below_the_floor.json``. With ``--time``:
CPU seconds of a step of a small GPT-2, as it is and with its head in pieces and nothing recomputed, in turns, the median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import fxmem
from benchmarks.libraries import import_library
from benchmarks.results_file import RESULTS, machine
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.passes.chunk import in_pieces
from fxmem.passes.chunk_chains import heads_of

PATH = RESULTS / "below_the_floor.json"
NUM_PIECES = 4
DEFAULT = ("recompute", "inplace")
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


def llama_blocks() -> nn.Module:
    transformers = import_library("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LossAlone(transformers.LlamaForCausalLM(config))


CASES = (
    Case("GPT-2, vocabulary 50,257, batch 8 x 1,024", gpt2, (8, 1024)),
    Case("4 Llama blocks of 2,048, vocabulary 128,256, batch 8 x 1,024", llama_blocks, (8, 1024)),
    Case("4 Llama blocks of 2,048, vocabulary 128,256, batch 2 x 8,192", llama_blocks, (2, 8192)),
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


def seconds_of_pieces(num_steps: int) -> tuple[float, float]:
    """Return the median seconds of a step of a small GPT-2: as it is, and with its head in :data:`NUM_PIECES`."""
    torch.manual_seed(0)
    model, tokens = gpt2(n_layer=4, n_embd=256, n_head=4).train(), torch.randint(0, 50_257, (2, 512))
    captured = capture(model, Inputs.of((tokens,), {}))
    heads, _ = heads_of(captured.graph_module.graph)
    pieces = in_pieces(captured, dict.fromkeys(heads, NUM_PIECES))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(num_steps):
        for graph, taken in zip((captured, pieces), times, strict=True):
            start = time.process_time()
            graph.call(graph.graph_module, [tokens]).backward()
            taken.append(time.process_time() - start)
            model.zero_grad()
    return statistics.median(times[0][1:]), statistics.median(times[1][1:])


def text() -> str:
    """Return the committed floors as a table: GB, and shares of recomputation's, with what is static and without."""
    results = json.loads(PATH.read_text(encoding="utf-8"))
    found = [Floor(**row) for row in results["floors"]]
    lines = [f"| model, fp32 | static | {' | '.join(ALLOWED)} |", f"|---|---|{'---|' * len(ALLOWED)}"]
    for name in dict.fromkeys(floor.model for floor in found):
        of_model = {floor.allow: floor for floor in found if floor.model == name}
        first = of_model["recompute"]
        cells = [f"{first.floor_bytes / 1e9:.3f} GB", *(_cell(first, of_model[k]) for k in list(ALLOWED)[1:])]
        lines.append(f"| {name} | {first.static_bytes / 1e9:.3f} GB | {' | '.join(cells)} |")
    machine = results["machine"]
    lines += ["", f"From `benchmarks/results/below_the_floor.json` (torch {machine['torch']}, {machine['date']})."]
    return "\n".join(lines)


def _cell(first: Floor, floor: Floor) -> str:
    share = floor.floor_bytes / first.floor_bytes
    apart = (floor.floor_bytes - floor.static_bytes) / (first.floor_bytes - first.static_bytes)
    return f"{floor.floor_bytes / 1e9:.3f} GB ({share:.2f}; {apart:.2f})"


def save(rows: Iterable[Floor]) -> None:
    """Write ``rows`` in place of those of the same cases."""
    rows = list(rows)
    kept = json.loads(PATH.read_text(encoding="utf-8"))["floors"] if PATH.exists() else []
    kept = [row for row in kept if row["model"] not in {floor.model for floor in rows}]
    order = [case.name for case in CASES]
    body = sorted((*kept, *map(asdict, rows)), key=lambda row: order.index(row["model"]))
    PATH.write_text(json.dumps({"machine": machine(), "floors": body}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan-seconds", type=float, default=10.0)
    parser.add_argument("--time", type=int, metavar="STEPS", default=0)
    parser.add_argument("--case", metavar="TEXT", default="", help="only cases whose name contains it")
    arguments = parser.parse_args()
    if arguments.time:
        whole, pieces = seconds_of_pieces(arguments.time)
        print(f"a step as it is {whole:.3f} s, with the head in pieces {pieces:.3f} s: {pieces / whole - 1:+.1%}")
        return
    for case in (case for case in CASES if arguments.case in case.name):
        save(floors(case, arguments.plan_seconds))
    print(text())


if __name__ == "__main__":
    main()
