"""The Trainer of transformers in one line: the same losses, evaluations and files as without. Needs accelerate."""

import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from fxmem.integrations.transformers import FxMemCallback


def train(folder: str, callbacks: list[FxMemCallback]) -> Trainer:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4))
    rows = torch.randint(3, 256, (16, 64))
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=2,
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        logging_steps=1,
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)
    trainer.train()
    return trainer


def main() -> None:
    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as planned:
        expected = train(plain, [])
        found = train(planned, [FxMemCallback(budget="8MB")])  # the one line
        losses = [
            [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]
            for trainer in (expected, found)
        ]
        assert losses[0] == losses[1], losses
        files = [
            {
                path.relative_to(folder): path
                for path in Path(folder).rglob("*")
                if path.suffix in (".safetensors", ".json")
            }
            for folder in (plain, planned)
        ]
        assert files[0].keys() == files[1].keys()
        for name, path in files[0].items():
            assert name.name == "trainer_state.json" or path.read_bytes() == files[1][name].read_bytes(), name
        assert isinstance(found.model, GPT2LMHeadModel)
        report = found.model.fxmem.report
    print(f"losses {losses[1]}; peak {report.predicted_peak_bytes} bytes, eager {report.eager_peak_bytes}")


if __name__ == "__main__":
    main()
