"""What rounding alone changes gradients by: ``python -m benchmarks.rounding [--models NAMES]``.

In: the models of the comparison, on the CPU. Out: ``benchmarks/results/rounding.json``: by model, the largest relative
error of eager's gradients where every parameter is changed by its last bit, up or down at random, of :data:`DRAWS` draws.
Batch normalization at random weights enlarges rounding a hundred thousand times: two compilers whose gradients differ so
much are both right. :mod:`benchmarks.verdicts` goes by it.
"""

from __future__ import annotations

import argparse
import copy
import json

import torch
from torch import nn

from benchmarks import models
from benchmarks.measure import SEED, Racer, largest_relative_error
from benchmarks.results_file import RESULTS, machine
from benchmarks.ways import EAGER

PATH = RESULTS / "rounding.json"
DRAWS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(models.MODELS), metavar="NAME")
    names = parser.parse_args().models
    torch.set_num_threads(1)
    errors = json.loads(PATH.read_text(encoding="utf-8"))["errors"] if PATH.exists() else {}
    for name in names:
        errors[name] = float(f"{rounding_error(name):.2g}")
        print(f"{name}: {errors[name]:.1e}", flush=True)
        PATH.write_text(json.dumps({"machine": machine(), "errors": errors}, indent=1) + "\n", encoding="utf-8")
    return 0


def rounding_error(name: str) -> float:
    """Return the largest relative error of a model's gradients where its parameters are changed by their last bit."""
    bench = models.get(name)
    torch.manual_seed(SEED)
    initial, batch = bench.build("cpu"), bench.batch("cpu")
    expected = Racer(EAGER, initial, bench, batch).gradients
    generator = torch.Generator().manual_seed(SEED)
    changed = (Racer(EAGER, _changed(initial, generator), bench, batch).gradients for _ in range(DRAWS))
    return max(largest_relative_error(expected, gradients) for gradients in changed)


@torch.no_grad()
def _changed(model: nn.Module, generator: torch.Generator) -> nn.Module:
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
        parameter.mul_(1 + torch.finfo(parameter.dtype).eps * signs)
    return model


if __name__ == "__main__":
    raise SystemExit(main())
