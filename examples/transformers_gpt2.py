"""A model of transformers inside a memory budget: the batch is a dict, the loss is the model's own."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import fxmem


def main() -> None:
    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=3, n_head=4, use_cache=False, bos_token_id=1, eos_token_id=2
    )
    model = GPT2LMHeadModel(config).train()
    tokens = torch.randint(3, 256, (4, 64))
    batch = {"input_ids": tokens, "labels": tokens}

    needed = fxmem.estimate(model, example_kwargs=batch, optimizer="adamw")
    budget = (needed.peak_bytes + needed.floor_bytes) // 2
    model = fxmem.optimize(model, example_kwargs=batch, budget=budget, optimizer="adamw")  # plans now
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for _ in range(3):
        with fxmem.track(model, optimizer, batch) as memory:
            output = model(**batch)
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    print(f"loss {output.loss.item():.4f}; peak {memory.peak_bytes} bytes, budget {budget}, eager {needed.peak_bytes}")
    assert memory.peak_bytes == model.fxmem.report.predicted_peak_bytes <= budget


if __name__ == "__main__":
    main()
