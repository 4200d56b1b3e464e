"""What opt-in choices bring below the floor that recomputation alone reaches: ``python -m benchmarks.below_the_floor``.

Predicted, on the meta device, of GPT-2 and of Llama blocks under a vocabulary of 128,256, each with AdamW. With ``--time``:
CPU seconds of a step of a small GPT-2, as it is and with its head in pieces and nothing recomputed, in turns, the median.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import fxmem
from benchmarks.libraries import import_library
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.passes.chunk import heads_of, in_pieces

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


def floors(case: Case, plan_seconds: float) -> list[list[str]]:
    """Return a row for each set of choices: the floor in GB, and its share of recomputation's."""
    with torch.device("meta"):
        model, tokens = case.build().train(), torch.zeros(case.batch, dtype=torch.int64)
    found = {
        name: fxmem.estimate(model, tokens, plan_seconds=plan_seconds, cost="cpu", allow=allow).floor_bytes
        for name, allow in ALLOWED.items()
    }
    first = found["recompute"]
    return [[case.name, name, f"{nbytes / 1e9:.3f}", f"{nbytes / first:.2f}"] for name, nbytes in found.items()]


def seconds_of_pieces(num_steps: int) -> tuple[float, float]:
    """Return the median seconds of a step of a small GPT-2: as it is, and with its head in :data:`NUM_PIECES`."""
    torch.manual_seed(0)
    model, tokens = gpt2(n_layer=4, n_embd=256, n_head=4).train(), torch.randint(0, 50_257, (2, 512))
    captured = capture(model, Inputs.of((tokens,), {}))
    heads, _ = heads_of(captured.graph_module.graph)
    pieces = in_pieces(captured, heads, NUM_PIECES)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(num_steps):
        for graph, taken in zip((captured, pieces), times, strict=True):
            start = time.process_time()
            graph.call(graph.graph_module, [tokens]).backward()
            taken.append(time.process_time() - start)
            model.zero_grad()
    return statistics.median(times[0][1:]), statistics.median(times[1][1:])


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
    cases = [case for case in CASES if arguments.case in case.name]
    rows = [row for case in cases for row in floors(case, arguments.plan_seconds)]
    print(tabulate(rows, headers=("model", "allow", "floor, GB", "share"), tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
