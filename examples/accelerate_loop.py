"""A loop of accelerate in bf16 with accumulation, around an optimized model. Needs accelerate."""

import torch
from accelerate import Accelerator
from torch import nn

import fxmem


def train(*, planned: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 8))
    if planned:
        fxmem.optimize_(model, budget="1MB", optimizer="sgd", accumulate=True)  # the one line
    accelerator = Accelerator(mixed_precision="bf16", cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _ in range(4):
        with accelerator.accumulate(model):
            loss = model(torch.randn(32, 64)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    whole = accelerator.unwrap_model(model)
    assert isinstance(whole, fxmem.FxMemModule) == planned
    return losses, accelerator.get_state_dict(model)


def main() -> None:
    (expected, state), (found, planned) = train(planned=False), train(planned=True)
    assert expected == found
    assert list(state) == list(planned)
    assert all(map(torch.equal, state.values(), planned.values()))
    print("losses", found)


if __name__ == "__main__":
    main()
