"""The comparison on a GPU, within eight minutes a call: ``python -m benchmarks.cuda_suite``.

The same measurements as on CPU at full-size models, under deterministic algorithms, with what the caching allocator
counts as allocated beside the prediction and reserved bytes in the allocator's column (NOTE [What is measured], 2).
Results go to ``benchmarks/results/compare_gpu.json``, or where ``--results`` says; a call measures at most three models,
the first that are not done, and another call takes up where the last one stopped. Without a GPU it says so and
measures nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import compare
from benchmarks.results_file import RESULTS, load_rows

DEADLINE_SECONDS = 400
"""The last measurement may take another minute."""
MOST_MODELS = 3
"""Of one call."""
MODELS = ("resnet50", "gpt2", "unet", "vit", "mobilenet_v2", "densenet121", "llama", "bert")
LAST_WAY = "fxmem floor"
"""The way that is measured last of a model."""


def next_models(results: Path) -> tuple[str, ...]:
    """Return the first models that ``results`` has not all ways of."""
    done = {row.model for row in load_rows(results) if row.way == LAST_WAY}
    return tuple(name for name in MODELS if name not in done)[:MOST_MODELS]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure until the deadline, print the tables; arguments are those of ``python -m benchmarks``."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--models", nargs="+", default=())
    parser.add_argument("--results", type=Path, default=RESULTS / "compare_gpu.json")
    known, _ = parser.parse_known_args(given)
    if len(known.models) > MOST_MODELS:
        parser.error(f"at most {MOST_MODELS} models a call, not {len(known.models)}: {', '.join(known.models)}")
    if not torch.cuda.is_available():
        print("no CUDA device here: the GPU suite measured nothing (the CPU suite is python -m benchmarks)")
        return 0
    models = [] if known.models else ["--models", *(next_models(known.results) or MODELS[:MOST_MODELS])]
    limits = ["--scale", "gpu", "--no-compile", "--deadline", str(DEADLINE_SECONDS), "--seconds", "3"]
    return compare.main([*limits, *models, *given])


if __name__ == "__main__":
    raise SystemExit(main())
