"""Are gradients of a recomputed step the bits of the eager one, on a GPU: dropout, BatchNorm, cuDNN, flash attention."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fxmem
from benchmarks.cuda_calls import is_emulated
from benchmarks.gpu_rows import Row, row
from fxmem.profiling.training_step import run_step


class _FlashBlock(nn.Module):
    """Causal attention with dropout: flash attention in half precision."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.mix, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mix(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, dropout_p=0.1, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _dropout() -> tuple[nn.Module, Tensor]:
    layers = (nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
    return nn.Sequential(*layers), torch.randn(1024, 256)


def _batch_norm() -> tuple[nn.Module, Tensor]:
    layers = (nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU()) for _ in range(4))
    return nn.Sequential(*layers), torch.randn(1024, 256)


def _convolution() -> tuple[nn.Module, Tensor]:
    layers = (nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.SiLU()) for _ in range(4))
    return nn.Sequential(*layers), torch.randn(16, 32, 56, 56)


def _flash() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(_FlashBlock() for _ in range(3))).bfloat16(), torch.randn(4, 512, 256).bfloat16()


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "dropout": _dropout,
    "BatchNorm": _batch_norm,
    "cuDNN convolution": _convolution,
    "flash attention with dropout": _flash,
}


def bits() -> Iterator[Row]:
    """Yield, with deterministic algorithms and without, whether eager repeats itself and whether recomputing does."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is used first
    options: dict[str, Any] = {"optimizer": None, "plan_seconds": 1, "cost": "h100"}
    for name, make in MODELS.items():
        model, x = make()
        model, x = model.cuda(), x.cuda()
        floor = fxmem.optimize(model, x, **options).report.floor_bytes
        optimized = fxmem.optimize(model, x, budget=floor, **options)
        for deterministic in (True, False):
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
            first, again, recomputed = (_numbers(candidate, model, x) for candidate in (model, model, optimized))
            what = f"{name}, deterministic={deterministic}"
            yield row(f"{what}: eager again", "equal", None, _compared(first, again))
            again_note = f"{optimized.report.overhead_ratio:.0%} recomputed"
            yield row(f"{what}: recomputed", "equal", None, _compared(first, recomputed), again_note)


def _numbers(candidate: nn.Module, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return gradients and buffers after a step from seed 0 and the model's present state, which is put back."""
    state = {name: b.clone() for name, b in model.named_buffers()}
    torch.manual_seed(0)
    run_step(lambda: candidate(x))
    numbers = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    numbers |= {name: b.cpu() for name, b in model.named_buffers()}
    model.zero_grad()
    for name, b in model.named_buffers():
        b.data.copy_(state[name])
    return numbers


def _compared(one: dict[str, Tensor], other: dict[str, Tensor]) -> str:
    if is_emulated():
        return "nothing computed"
    if one.keys() != other.keys():
        return "other tensors"
    wrong = [name for name in one if not torch.equal(one[name], other[name])]
    if not wrong:
        return "equal" if any(bool(t.any()) for t in one.values()) else "equal, but all are zero"
    worst = max(float((one[n].double() - other[n].double()).abs().max()) for n in wrong)
    return f"{len(wrong)} of {len(one)} differ, by {worst:.1e} at most"
