"""Models, optimizers and comparisons that several tests of predicted steps use."""

from typing import Any

import torch
from torch import nn

import fxmem
from fxmem.profiling.training_step import run_step


def measured_peak(model: nn.Module, batch: Any, loss_fn: Any, optimizer: torch.optim.Optimizer | None) -> int:
    args, kwargs = batch
    with fxmem.track(model, optimizer or [], args, kwargs) as memory:
        run_step(lambda: model(*args, **kwargs), loss_fn, optimizer)
    return memory.peak_bytes
