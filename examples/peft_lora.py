"""LoRA by peft inside a memory budget: the adapter is saved as an adapter. Needs peft."""

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import fxmem


def build() -> PeftModel:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4))
    return get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"))


def train(model: PeftModel, folder: str) -> list[float]:
    torch.manual_seed(1)
    tokens = torch.randint(3, 256, (4, 64))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(folder)
    return losses


def main() -> None:
    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as planned:
        expected = train(build(), plain)
        model = fxmem.optimize(build(), budget="8MB", optimizer="adamw")
        assert train(model, planned) == expected
        assert isinstance(model, PeftModel)
        files = [{path.name: path.read_bytes() for path in Path(folder).iterdir()} for folder in (plain, planned)]
        assert files[0] == files[1]
        print(f"losses {expected}; saved {', '.join(sorted(files[1]))}; peak {model.fxmem.report.predicted_peak_bytes}")


if __name__ == "__main__":
    main()
