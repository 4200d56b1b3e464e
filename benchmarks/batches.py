"""Batches of the benchmarks' models, at the scales ``cpu`` and ``gpu``: random, of one call's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Batch = tuple[tuple[Any, ...], dict[str, Any]]


def images(cpu: tuple[int, int], gpu: tuple[int, int]) -> Callable[[str], Batch]:
    """Random images; ``cpu`` and ``gpu`` are (batch, height)."""

    def batch(scale: str) -> Batch:
        num, size = cpu if scale == "cpu" else gpu
        return (torch.randn(num, 3, size, size),), {}

    return batch


def tokens(cpu: tuple[int, int], gpu: tuple[int, int], vocabulary: int = 512) -> Callable[[str], Batch]:
    def batch(scale: str) -> Batch:
        ids = torch.randint(3, vocabulary, cpu if scale == "cpu" else gpu)
        return (), {"input_ids": ids, "labels": ids.clone()}

    return batch


def speech(cpu: tuple[int, int, int], gpu: tuple[int, int, int]) -> Callable[[str], Batch]:
    """(batch, frames, tokens)."""

    def batch(scale: str) -> Batch:
        num, frames, length = cpu if scale == "cpu" else gpu
        return (), {"input_features": torch.randn(num, 80, frames), "labels": torch.randint(3, 512, (num, length))}

    return batch


def noised(cpu: tuple[int, int], gpu: tuple[int, int]) -> Callable[[str], Batch]:
    def batch(scale: str) -> Batch:
        num, size = cpu if scale == "cpu" else gpu
        return (torch.randn(num, 3, size, size), torch.randint(1000, (num,))), {}

    return batch
