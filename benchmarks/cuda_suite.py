"""The comparison on a GPU, within eight minutes a call: ``python -m benchmarks.cuda_suite``.

The same measurements as on CPU at full-size models, under deterministic algorithms, with the bytes asked of the caching
allocator as the measured peak beside the prediction and reserved bytes in the allocator's column (NOTE [What is
measured], 2). Results go to ``benchmarks/results/compare_gpu.json``; another call takes up where the last one stopped.
Without a GPU it says so and measures nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from benchmarks import compare

DEADLINE_SECONDS = 400
"""The last measurement may take another minute."""
MODELS = ("resnet50", "gpt2", "unet", "vit", "mobilenet_v2", "densenet121", "llama", "bert")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure until the deadline, print the tables; arguments are those of ``python -m benchmarks``."""
    if not torch.cuda.is_available():
        print("no CUDA device here: the GPU suite measured nothing (the CPU suite is python -m benchmarks)")
        return 0
    given = list(sys.argv[1:] if argv is None else argv)
    models = [] if "--models" in given else ["--models", *MODELS]
    limits = ["--scale", "gpu", "--no-compile", "--deadline", str(DEADLINE_SECONDS), "--seconds", "3"]
    return compare.main([*limits, *models, *given])


if __name__ == "__main__":
    raise SystemExit(main())
