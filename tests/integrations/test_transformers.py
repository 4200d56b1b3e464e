"""The Trainer's callback: batches of many lengths under one plan, planned for before the first step."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from benchmarks.libraries import import_library
from tests.exactness import same_bits

pytest.importorskip("accelerate")
transformers = import_library("transformers")
from fxmem.integrations.transformers import FxMemCallback  # noqa: E402

LENGTHS = (24, 48, 17, 40, 31)
BATCH, VOCABULARY = 2, 64


def build() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch, each row padded to the longest."""
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    mask = (ids != 0).long()
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def rows() -> list[dict[str, Tensor]]:
    """Return rows of which each two make a batch of one of the lengths, the second one shorter, then a smaller batch."""
    torch.manual_seed(1)
    lengths = [m for n in LENGTHS for m in (n, n - 3)] + [LENGTHS[0]]
    return [{"input_ids": torch.randint(1, VOCABULARY, (n,))} for n in lengths]


def trained(model: nn.Module, folder: Path, *callbacks: Any) -> list[Any]:
    """Train one epoch; return losses and norms of gradients of all steps."""
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows(), data_collator=padded, callbacks=[*callbacks])
    torch.manual_seed(2)
    trainer.train()
    return [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]


@pytest.mark.slow
def test_prepared_for_all_lengths_of_the_data_loader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eager = build()
    model = copy.deepcopy(eager)
    worst = padded(rows()[2:4])
    budget = int(0.8 * fxmem.estimate(model.train(), None, worst, cost="cpu").peak_bytes)
    expected = trained(eager, tmp_path / "eager")
    found = trained(model, tmp_path / "ours", FxMemCallback(budget=budget, prepare=True, planner="chen", cost="cpu"))
    assert len(found) == len(LENGTHS) + 1
    assert found == expected
    plans = model.fxmem.plans.asked
    assert plans.num_planned == 1, "lengths that come later cost no planning"
    assert model.fxmem.plan.dropped
    said = capsys.readouterr().out
    assert f"{len(LENGTHS) + 1} batches of {len(LENGTHS) + 1} sizes, 1 plans" in said
    assert model.fxmem.report.predicted_peak_bytes <= budget
    plain = fxmem.restore(model)
    assert plain is model
    assert type(plain) is transformers.GPT2LMHeadModel
    assert all(same_bits(a, b) for a, b in zip(eager.parameters(), plain.parameters(), strict=True))
