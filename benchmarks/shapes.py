"""``python -m benchmarks.shapes``: what batches of many sizes cost, on the CPU.

Two questions, each answered beside eager in one process:

1. **Trainer**: 14 steps of GPT-2 (3 layers) by the Trainer of transformers, each padded to another length, with
   ``FxMemCallback(budget=..., prepare=True)``. Printed: seconds of the first plan, seconds of the steps over eager's,
   whether the losses are equal to the bit.
2. **New sizes**: models planned for their largest size see smaller ones, twice each. Printed: CPU seconds that the first
   call takes more than the second one, whether loss and gradients are eager's to the bit.

Op times are the CPU preset's and nothing is kept on disk. Results go to ``benchmarks/results/shapes.json``.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import fxmem
from benchmarks.libraries import import_torchvision
from benchmarks.results_file import RESULTS, machine

PATH = RESULTS / "shapes.json"
SHARE = 0.4
"""The budget, as a share of the way from the floor to eager's peak at the largest size."""
LENGTHS = (192, 160, 77, 120, 96, 184, 64, 143, 101, 170, 88, 131, 152, 110)
"""Of the Trainer's batches, in their order."""
BATCH, VOCABULARY = 8, 4096

Call = dict[str, Any]


@dataclass(frozen=True)
class TrainerRow:
    """14 steps of 14 lengths; seconds by the clock and of CPU time."""

    steps: int
    eager_seconds: float
    fxmem_seconds: float
    plan_seconds: float
    eager_cpu_seconds: float
    fxmem_cpu_seconds: float
    plans: int
    same_losses: bool


@dataclass(frozen=True)
class SizeRow:
    """A new size of a model that was planned for a larger one."""

    model: str
    size: str
    first_cpu_seconds: float
    second_cpu_seconds: float
    planned_anew: bool
    same_bits: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=["trainer", *CASES], default=["trainer", *CASES])
    only = parser.parse_args().only
    torch.set_num_threads(1)
    os.environ["FXMEM_CACHE"] = "0"
    import_torchvision()
    results = json.loads(PATH.read_text()) if PATH.exists() else {}
    results["machine"] = machine()
    if "trainer" in only:
        results["trainer"] = asdict(_trained())
        print(tabulate([results["trainer"]], headers="keys", floatfmt=".2f"))
    rows = {row["model"] + row["size"]: row for row in results.get("sizes", [])}
    for name in only:
        if name in CASES:
            found = [asdict(row) for row in _new_sizes(name)]
            rows |= {row["model"] + row["size"]: row for row in found}
            print(tabulate(found, headers="keys", floatfmt=".3f"))
    PATH.write_text(json.dumps(results | {"sizes": list(rows.values())}, indent=1) + "\n")
    return 0


# -- the Trainer ---------------------------------------------------------------------------------------------------------


def _gpt2(num_layers: int, width: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=256, n_embd=width, n_layer=num_layers, n_head=4, use_cache=False, **ends
        )
    )


def _padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch, each row padded to the longest."""
    length = max(len(row["input_ids"]) for row in rows)
    ids, labels = torch.zeros(len(rows), length, dtype=torch.long), torch.full((len(rows), length), -100)
    mask = torch.zeros_like(ids)
    for k, row in enumerate(rows):
        own = row["input_ids"]
        ids[k, : len(own)], labels[k, : len(own)], mask[k, : len(own)] = own, own, 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def _texts() -> list[dict[str, torch.Tensor]]:
    """Return rows that, taken in order, make a batch of each of the lengths; of every third batch all rows are as long."""
    torch.manual_seed(1)
    rows = []
    for k, length in enumerate(LENGTHS):
        shorter = 0 if k % 3 == 2 else length // 4
        lengths = [length, *(length - int(torch.randint(shorter + 1, ())) for _ in range(BATCH - 1))]
        rows += [{"input_ids": torch.randint(1, VOCABULARY, (n,))} for n in lengths]
    return rows


def _trainer(model: nn.Module, folder: str, callbacks: Sequence[Any] = ()) -> Any:
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=BATCH,
        max_steps=len(LENGTHS),
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    return InOrder(model, arguments, train_dataset=_texts(), data_collator=_padded, callbacks=[*callbacks])


def _losses_and_seconds(trainer: Any) -> tuple[list[float], float, float]:
    torch.manual_seed(2)
    start, cpu = time.perf_counter(), time.process_time()
    trainer.train()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], seconds, cpu_seconds


def _trained() -> TrainerRow:
    from fxmem.integrations.transformers import FxMemCallback

    class Timed(FxMemCallback):
        seconds = cpu_seconds = 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            start, cpu = time.perf_counter(), time.process_time()
            super().on_train_begin(*args, **kwargs)
            self.seconds, self.cpu_seconds = time.perf_counter() - start, time.process_time() - cpu

    eager = _gpt2(3, 256).train()
    ours = copy.deepcopy(eager)
    budget = _budget(eager, _text_call(BATCH, max(LENGTHS), padded=True))
    with tempfile.TemporaryDirectory() as folder:
        eager_losses, eager_seconds, eager_cpu = _losses_and_seconds(_trainer(eager, folder))
        callback = Timed(budget=budget, prepare=True, plan_seconds=10, cost="cpu", cache=False)
        losses, seconds, cpu = _losses_and_seconds(_trainer(ours, folder, [callback]))
    plans = ours.fxmem.plans.asked.num_planned
    return TrainerRow(
        len(LENGTHS),
        eager_seconds,
        seconds - callback.seconds,
        callback.seconds,
        eager_cpu,
        cpu - callback.cpu_seconds,
        plans,
        losses == eager_losses,
    )


def _budget(model: nn.Module, call: Call) -> int:
    """Return a budget that is tight for ``call``."""
    estimate = fxmem.estimate(model, None, call, planner="chen", cost="cpu", cache=False)
    return estimate.floor_bytes + round(SHARE * (estimate.peak_bytes - estimate.floor_bytes))


def _optimized(model: nn.Module, call: Call) -> fxmem.FxMemModule:
    """Return the model under a budget that is tight for ``call``."""
    return fxmem.optimize(model, budget=_budget(model, call), plan_seconds=10, cost="cpu", cache=False)


# -- new sizes -----------------------------------------------------------------------------------------------------------


def _text_call(batch: int, length: int, *, padded: bool) -> Call:
    torch.manual_seed(length)
    ids = torch.randint(1, VOCABULARY, (batch, length))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, -3:] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def _image_call(batch: int, side: int) -> Call:
    torch.manual_seed(side)
    return {"x": torch.randn(batch, 3, side, side)}


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512
    )
    return BertForMaskedLM(config)


def _resnet() -> nn.Module:
    torch.manual_seed(0)
    return import_torchvision().models.resnet18(num_classes=10)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    calls: Callable[[], list[Call]]
    """The largest first, then two of another size from which on sizes are symbolic, then new ones."""


def _text_calls(padded: bool) -> list[Call]:
    return [_text_call(b, n, padded=padded) for b, n in ((4, 128), (4, 96), (4, 77), (3, 128), (2, 50))]


CASES = {
    "gpt2-12": Case(lambda: _gpt2(12, 128), lambda: _text_calls(padded=False)),
    "bert-padded": Case(_bert, lambda: _text_calls(padded=True)),
    "resnet18": Case(_resnet, lambda: [_image_call(b, n) for b, n in ((4, 96), (4, 80), (4, 64), (3, 96), (2, 72))]),
}


def _new_sizes(name: str) -> Iterator[SizeRow]:
    case = CASES[name]
    calls = case.calls()
    eager = case.build().train()
    optimized = _optimized(copy.deepcopy(eager), calls[0])
    fxmem.prepare(optimized, calls, arguments=lambda batch: batch)
    num_plans = optimized.fxmem.plans.asked.num_planned
    for call in calls[1:]:
        expected, _ = _step(eager, call)
        actual, first = _step(optimized, call)
        _step(eager, call)  # buffers move on alike
        _, second = _step(optimized, call)
        size = "x".join(map(str, next(iter(call.values())).shape))
        planned_anew = optimized.fxmem.plans.asked.num_planned > num_plans
        yield SizeRow(name, size, first, second, planned_anew, all(map(torch.equal, expected, actual)))


def _step(model: nn.Module, call: Call) -> tuple[list[torch.Tensor], float]:
    """Return loss, gradients and buffers of a step, and the CPU seconds of its forward and backward."""
    model.zero_grad()
    torch.manual_seed(3)
    start = time.process_time()
    output = model(**call)
    loss = output.loss if hasattr(output, "loss") else output.square().mean()
    loss.backward()
    seconds = time.process_time() - start
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()], seconds


if __name__ == "__main__":
    raise SystemExit(main())
