"""FxMemCallback in the Trainer of transformers: prepared for the worst batch, a loader of many lengths costs one plan."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from benchmarks.libraries import import_torchvision
from fxmem.profiling.storage_tracker import StorageTracker, tensors_of

LENGTHS = (9, 21, 32, 27)
"""Of batches, in their order."""
ROWS = 2


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM", "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, **ends)).train()


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch, each row padded to the longest."""
    texts = [row["input_ids"] for row in rows]
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def texts(lengths: Sequence[int]) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    rows = [length - short for length in lengths for short in range(ROWS)]
    return [{"input_ids": torch.randint(1, 64, (length,))} for length in rows]


def trained(folder: Path, callbacks: list[Any], lengths: Sequence[int] = LENGTHS) -> Any:
    """Return the Trainer that made one step of each length."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=ROWS,
        max_steps=len(lengths),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    made = InOrder(gpt2(), arguments, train_dataset=texts(lengths), data_collator=padded, callbacks=callbacks)
    made.train()
    return made


def losses(trainer: Any) -> list[float]:
    return [row[key] for row in trainer.state.log_history for key in ("loss", "grad_norm") if key in row]


@pytest.mark.slow
def test_the_callback_prepares_for_the_worst_batch_of_the_loader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("accelerate")
    import_torchvision()
    from transformers import TrainerCallback

    from fxmem.integrations.transformers import FxMemCallback

    peaks: list[int] = []

    class Peaks(TrainerCallback):
        def on_step_begin(self, *args: Any, model: Any, optimizer: Any, **others: Any) -> None:
            self.tracker = StorageTracker()
            self.tracker.hold(tensors_of((model, optimizer.optimizer)))
            self.tracker.__enter__()

        def on_step_end(self, *args: Any, **others: Any) -> None:
            self.tracker.__exit__(None, None, None)
            peaks.append(self.tracker.peak_bytes)

    worst = padded([{"input_ids": torch.ones(max(LENGTHS), dtype=torch.long)}] * ROWS)
    quick: dict[str, Any] = {"planner": "chen", "cost": "cpu"}
    budget = int(0.9 * fxmem.estimate(gpt2(), None, worst, **quick).peak_bytes)
    capsys.readouterr()
    ours = trained(tmp_path / "ours", [FxMemCallback(budget=budget, prepare=True, **quick), Peaks()])
    printed = capsys.readouterr().out
    table = dict(re.findall(r"(p50|p95|max) +\(2, (\d+)\)", printed))
    assert table == {"p50": "27", "p95": "32", "max": "32"}
    assert f"4 batches of 4 sizes, {ours.model.fxmem.plans.asked.num_planned} plans" in printed, "none was made since"
    assert ours.model.fxmem.report.dropped_bytes > 0
    assert max(peaks) <= budget
    assert losses(ours) == losses(trained(tmp_path / "eager", []))


@pytest.mark.slow
def test_the_callback_compiles_the_model_where_that_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    import_torchvision()
    from fxmem.integrations.transformers import FxMemCallback

    lengths, options = (16, 16, 16), {"backend": "inductor", "cost": "cpu", "plan_seconds": 1.0}
    eager = losses(trained(tmp_path / "eager", [], lengths))
    trainer = trained(tmp_path / "compiled", [FxMemCallback(budget="2MB", **options)], lengths)
    assert isinstance(trainer.model, fxmem.CompiledModule)
    assert losses(trainer) == pytest.approx(eager, rel=0.2)  # dropout draws other masks
    report = trainer.model.fxmem.report
    assert report.predicted_peak_bytes <= 2_000_000
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").exists()
    with pytest.raises(fxmem.InputError, match="prepare= is for the eager backend"):
        FxMemCallback(budget="2MB", prepare=True, **options)
