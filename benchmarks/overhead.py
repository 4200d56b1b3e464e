"""``python -m benchmarks.overhead``: what fxmem's own Python costs, beside the kernels, on the CPU.

Two models made so small that their kernels take next to nothing: eager, under fxmem with no budget, and under one that
drops about half of what can be. Printed for each: eager's step; what the emitted graph and the look at the model's
state add to it when nothing is dropped; and, under the budget, what the forward takes more for each call that runs on
the tape, and the backward for each recipe it runs again (its small kernels included). Then the same two as programs: what
they add to eager's step. All ways take turns in one process, figures are the least of all turns, CPU time of the thread
that runs them. Results go to
``benchmarks/results/overhead.json``; the planner's charge for a recipe on the CPU,
:data:`fxmem.profiling.op_benchmark.TAPE_SECONDS`, rests on them.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxmem
from benchmarks.libraries import import_torchvision
from benchmarks.results_file import RESULTS, machine
from fxmem.runtime.tape import TapedCall

PATH = RESULTS / "overhead.json"
NUM_TURNS = 400
SHARE = 0.5
"""The budget, as a share of the way from the floor to eager's peak."""


@dataclass(frozen=True)
class Row:
    """One model; times in microseconds."""

    model: str
    num_modules: int
    num_calls: int
    eager_us: float
    no_budget_us: float
    """What a step takes more with nothing dropped."""
    num_taped: int
    num_recipes: int
    taped_call_us: float
    recipe_us: float
    program_no_budget_us: float
    """What a step as a program takes more than eager's with nothing dropped."""
    program_half_us: float
    """Under the budget."""
    tape_half_us: float
    """The same on the tape."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    torch.set_num_threads(1)
    rows = [_measure(name, *make()) for name, make in MODELS.items()]
    print(tabulate([asdict(row) for row in rows], headers="keys", floatfmt=".0f"))
    PATH.write_text(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0


# -- models --------------------------------------------------------------------------------------------------------------


Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[[Any], Tensor]]


def _mlp() -> Made:
    layers = [layer for _ in range(60) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU())]
    return nn.Sequential(*layers), (torch.randn(64, 16),), {}, _mean_square


def _gpt() -> Made:
    import_torchvision()  # transformers imports it
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=6, n_embd=16, n_head=2, vocab_size=32, n_positions=16, use_cache=False, bos_token_id=1, eos_token_id=2
    )
    ids = torch.randint(0, 32, (8, 16))
    return GPT2LMHeadModel(config), (), {"input_ids": ids, "labels": ids}, lambda output: output.loss


def _mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


MODELS: dict[str, Callable[[], Made]] = {"MLP, 60 layers": _mlp, "GPT, 6 layers": _gpt}


# -- measuring -----------------------------------------------------------------------------------------------------------


def _measure(
    name: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], Tensor]
) -> Row:
    model.train()

    def optimized(budget_bytes: int | None, runtime: str = "tape") -> fxmem.OptimizedModule:
        os.environ["FXMEM_RUNTIME"] = runtime
        return fxmem.optimize(
            copy.deepcopy(model), args, kwargs, budget=budget_bytes, optimizer="sgd", loss_fn=loss, cost="a100"
        )

    free = optimized(None)
    low, high = free.report.floor_bytes, free.report.eager_peak_bytes
    budget = int(low + SHARE * (high - low))
    half, free_program, half_program = optimized(budget), optimized(None, "program"), optimized(budget, "program")
    ways: list[nn.Module] = [model, free, half, free_program, half_program]
    least = [(float("inf"), float("inf"))] * len(ways)
    for _ in range(NUM_TURNS):
        for number, way in enumerate(ways):
            forward, backward = _step_us(way, args, kwargs, loss)
            least[number] = (min(least[number][0], forward), min(least[number][1], backward))
    eager, without, within, program, program_within = least
    calls = [node for node in half.graph_module.graph.nodes if node.op == "call_function"]
    num_taped = sum(isinstance(node.target, TapedCall) for node in calls)
    num_recipes = half.report.timeline.num_recomputed
    return Row(
        model=name,
        num_modules=len(list(model.modules())),
        num_calls=len(calls),
        eager_us=sum(eager),
        no_budget_us=sum(without) - sum(eager),
        num_taped=num_taped,
        num_recipes=num_recipes,
        taped_call_us=(within[0] - without[0]) / max(1, num_taped),
        recipe_us=(within[1] - without[1]) / max(1, num_recipes),
        program_no_budget_us=sum(program) - sum(eager),
        program_half_us=sum(program_within) - sum(eager),
        tape_half_us=sum(within) - sum(eager),
    )


def _step_us(
    way: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], Tensor]
) -> tuple[float, float]:
    for parameter in way.parameters():
        parameter.grad = None
    start = time.thread_time()
    value = loss(way(*args, **kwargs))
    middle = time.thread_time()
    value.backward()
    return 1e6 * (middle - start), 1e6 * (time.thread_time() - middle)


if __name__ == "__main__":
    raise SystemExit(main())
