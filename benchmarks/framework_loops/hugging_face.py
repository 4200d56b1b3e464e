"""Loops of transformers, peft, TRL, accelerate and sentence-transformers. Models are built from configurations."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.framework_loops.loop import Run, loop

VOCABULARY, LENGTH = 128, 48


def gpt2(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=3, n_head=2, **ends, **options)
    )


def texts(num: int = 32) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"input_ids": row, "labels": row} for row in torch.randint(1, VOCABULARY, (num, LENGTH))]


def trainer(run: Run, model: nn.Module, callbacks: list[Any], **options: Any) -> Any:
    """Return the Trainer of transformers with ``options`` as its arguments."""
    from transformers import Trainer, TrainingArguments

    given = {
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    arguments = TrainingArguments(str(run.folder), **given)
    data = texts()
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)


def train(run: Run, made: Any, **options: Any) -> None:
    """Train and note the losses of training and evaluation."""
    made.train(**options)
    run.note(*(row[key] for row in made.state.log_history for key in ("loss", "grad_norm", "eval_loss") if key in row))


def by_callback(run: Run, model: nn.Module, **options: Any) -> None:
    from fxmem.integrations.transformers import FxMemCallback

    train(run, trainer(run, model, run.callbacks(FxMemCallback, model), **options))


@loop("transformers Trainer", "FxMemCallback")
def plain(run: Run) -> None:
    by_callback(run, gpt2())


@loop("transformers Trainer", "optimize before")
def optimized_before(run: Run) -> None:
    train(run, trainer(run, run.optimize(gpt2()), []))


@loop("transformers Trainer", "gradient accumulation")
def accumulation(run: Run) -> None:
    by_callback(run, gpt2(), gradient_accumulation_steps=2)


@loop("transformers Trainer", "bf16")
def bf16(run: Run) -> None:
    by_callback(run, gpt2(), bf16=True)


@loop("transformers Trainer", "eval_loss, save, load_best_model_at_end")
def saves(run: Run) -> None:
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    by_callback(run, gpt2(), save_strategy="steps", save_steps=2, **evaluated)


@loop("transformers Trainer", "save, resume (tied weights)")
def resumes(run: Run) -> None:
    from fxmem.integrations.transformers import FxMemCallback

    first = gpt2()
    train(run, trainer(run, first, run.callbacks(FxMemCallback, first), save_strategy="steps", save_steps=2))
    second = gpt2()
    later = trainer(run, second, run.callbacks(FxMemCallback, second), save_strategy="steps", save_steps=2, max_steps=6)
    train(run, later, resume_from_checkpoint=str(run.folder / "checkpoint-4"))


@loop("transformers Trainer", "gradient_checkpointing left on", share=0.9)
def checkpointing(run: Run) -> None:
    by_callback(run, gpt2(), gradient_checkpointing=True)


# -- peft ----------------------------------------------------------------------------------------------------------------


def adapted(**options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    base = gpt2()
    torch.manual_seed(2)
    return get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn", "c_proj"], task_type="CAUSAL_LM", **options))


def steps(run: Run, model: nn.Module, num: int = 4, **options: Any) -> None:
    """Make steps of a plain loop on texts."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)
    rows = torch.stack([row["input_ids"] for row in texts()])
    for k in range(num):
        ids = rows[4 * k : 4 * k + 4]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        run.note(loss)
        optimizer.step()
        optimizer.zero_grad()


@loop("peft", "LoRA, adapter saved")
def lora(run: Run) -> None:
    model = run.optimize(adapted(lora_dropout=0.1).train())
    steps(run, model)
    model.save_pretrained(run.folder)


@loop("peft", "DoRA")
def dora(run: Run) -> None:
    model = run.optimize(adapted(use_dora=True).train())
    steps(run, model)
    model.save_pretrained(run.folder)


@loop("peft", "adapter added to an optimized base")
def added_later(run: Run) -> None:
    from peft import LoraConfig

    model = run.optimize(gpt2().train())
    torch.manual_seed(2)
    model.add_adapter(LoraConfig(r=4, target_modules=["c_attn"]))
    steps(run, model)
    model.save_pretrained(run.folder)


@loop("peft", "Trainer with LoRA")
def lora_trainer(run: Run) -> None:
    by_callback(run, adapted(lora_dropout=0.1), save_strategy="steps", save_steps=4)


# -- TRL -----------------------------------------------------------------------------------------------------------------


def tokenizer() -> Any:
    """Return a tokenizer of whole numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{str(k): k for k in range(2, VOCABULARY)}}
    own = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="<eos>")


def sentence(length: int) -> str:
    return " ".join(map(str, torch.randint(2, VOCABULARY, (length,)).tolist()))


COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "max_steps": 4,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "max_length": LENGTH,
    "gradient_checkpointing": False,
}


@loop("TRL", "SFTTrainer")
def sft(run: Run) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from fxmem.integrations.transformers import FxMemCallback

    model = gpt2()
    data = Dataset.from_list([{"text": sentence(LENGTH - 2 - k % 5)} for k in range(16)])
    arguments = SFTConfig(str(run.folder), save_strategy="no", **COMMON)
    callbacks = run.callbacks(FxMemCallback, model)
    train(run, SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks))


@loop("TRL", "DPOTrainer")
def dpo(run: Run) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from fxmem.integrations.transformers import FxMemCallback

    model = gpt2()
    torch.manual_seed(3)
    rows = [{"prompt": sentence(8), "chosen": sentence(20), "rejected": sentence(18)} for _ in range(16)]
    arguments = DPOConfig(str(run.folder), save_strategy="no", **COMMON)
    train(
        run,
        DPOTrainer(
            model,
            copy.deepcopy(model),
            arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
            callbacks=run.callbacks(FxMemCallback, model),
        ),
    )


# -- accelerate ----------------------------------------------------------------------------------------------------------


@loop("accelerate", "prepare, accumulate, save_state")
def accelerated(run: Run) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = run.optimize(gpt2().train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(texts(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            run.note(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(str(run.folder))
    accelerator.unwrap_model(model).save_pretrained(run.folder / "model")


@loop("accelerate", "mixed_precision bf16")
def accelerated_bf16(run: Run) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = run.optimize(gpt2().train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    for k in range(4):
        ids = torch.stack([row["input_ids"] for row in texts()[4 * k : 4 * k + 4]])
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        run.note(loss)
        optimizer.step()
        optimizer.zero_grad()


# -- sentence-transformers -------------------------------------------------------------------------------------------------


def sentence_model(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    bert = BertModel(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes))
    path = str(folder.parent / "bert")
    bert.save_pretrained(path)
    tokenizer().save_pretrained(path)
    words = models.Transformer(path, max_seq_length=32)
    return SentenceTransformer(modules=[words, models.Pooling(words.get_word_embedding_dimension())], device="cpu")


@loop("sentence-transformers", "fit, optimized as a whole")
def fitted(run: Run) -> None:
    _fit(run, lambda model: run.optimize_(model))


@loop("sentence-transformers", "fit, its transformer optimized")
def fitted_part(run: Run) -> None:
    def part(model: Any) -> None:
        run.optimize_(model[0].auto_model)

    _fit(run, part)


def _fit(run: Run, optimize: Any) -> None:
    from sentence_transformers import InputExample, losses

    model = sentence_model(run.folder)
    torch.manual_seed(4)
    random.seed(4)  # what was imported now may have drawn
    run.begin(model)
    optimize(model)
    run.model = model
    examples = [InputExample(texts=[sentence(20), sentence(20)], label=random.random()) for _ in range(16)]
    loader = torch.utils.data.DataLoader(examples, batch_size=4)
    random.seed(0)
    np.random.seed(0)
    model.fit(
        [(loader, losses.CosineSimilarityLoss(model))],
        epochs=1,
        warmup_steps=0,
        show_progress_bar=False,
        output_path=str(run.folder / "saved"),
    )
