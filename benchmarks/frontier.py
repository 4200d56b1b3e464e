"""``python -m benchmarks.frontier``: what each peak costs, from eager's down to the floor, beside the design's figures.

Nine architectures at one size each; the whole step is followed allocation by allocation on fakes, without optimizer
state, op times are an A100's roofline, the step is three times the forward. Printed for each: the floor and
the bound below which no plan can go, as shares of eager's peak; the extra recompute in percent of the step at peaks of
75, 50, 35 and 25 % of the way from the floor to eager's peak, once from our own floor and once from the design's (the
same share of eager's peak for both); and what near-floor peaks cost. The design's figures are those of its prototype, whose
sizes are not recorded: a share of eager's peak is comparable where the shares of parameters and activations are alike.
Results go to ``benchmarks/results/frontier.json``; a second run goes on where the first stopped (``--again`` does not).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.models import UNet, cross_entropy, import_library, import_torchvision
from benchmarks.results_file import RESULTS, machine
from fxmem.capture import Inputs, capture
from fxmem.pipeline import Settings, profile_model
from fxmem.planners import PLANNERS, cheapest_within
from fxmem.planners.bound import Relaxation
from fxmem.simulate import tables_of
from fxmem.timing import PRESETS
from fxmem.types import FrontierPoint, GraphProfile

PATH = RESULTS / "frontier.json"
SHARES = (0.75, 0.5, 0.35, 0.25)
NEAR = (0.05, 0.03, 0.01, 0.0)
"""Shares of the span from floor to eager at which near-floor plans are priced."""


@dataclass(frozen=True)
class Entry:
    """One architecture, and the design's figures for it: floor and sqrt(n)'s floor over eager, percent at SHARES."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    loss: Callable[[Any], Tensor]
    floor: float
    sqrt_floor: float
    percents: tuple[float, float, float, float]


@dataclass(frozen=True)
class Row:
    """What one architecture's frontier says; percents of the step's time, shares of eager's peak."""

    model: str
    num_recipes: int
    eager_bytes: int
    floor: float
    bound: float
    """No plan's peak is lower: parameters, gradients, what backward holds at one time in any case."""
    chen_floor: float
    percents: tuple[float, ...]
    design_floor: float
    design_sqrt_floor: float
    design_percents: tuple[float, ...]
    percents_at_design_peaks: tuple[float | None, ...]
    """None: the design's peak lies below our floor."""
    near_floor_percents: tuple[float, ...]
    num_points: int
    plan_seconds: float


# -- the architectures -----------------------------------------------------------------------------------------------------


def gpt(num_layers: int) -> Callable[[], nn.Module]:
    """Return the maker of a GPT-2 of width 512, context 512 and 8,192 tokens."""

    def build() -> nn.Module:
        transformers = import_library("transformers")
        config = transformers.GPT2Config(
            n_layer=num_layers, n_embd=512, n_head=8, n_positions=512, vocab_size=8192, use_cache=False
        )
        model: nn.Module = transformers.GPT2LMHeadModel(config)
        return model

    return build


def mlp(num_layers: int, width: int, activation: type[nn.Module]) -> nn.Module:
    """Return ``num_layers`` linear layers, each with its activation."""
    return nn.Sequential(*(m for _ in range(num_layers) for m in (nn.Linear(width, width), activation())))


def _tokens() -> tuple[tuple[Any, ...], dict[str, Any]]:
    ids = torch.zeros(8, 512, dtype=torch.long)
    return (), {"input_ids": ids, "labels": ids}


def _images(batch: int, size: int) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda: ((torch.empty(batch, 3, size, size),), {})


def _vision(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: import_torchvision().models.get_model(name, weights=None, **options)


def _own_loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def _inception_loss(output: Any) -> Tensor:
    return cross_entropy(output.logits) + 0.4 * cross_entropy(output.aux_logits)


def _sum(output: Tensor) -> Tensor:
    return output.sum()


def _hrnet() -> nn.Module:
    model: nn.Module = import_library("timm").create_model("hrnet_w18", pretrained=False)
    return model


ENTRIES = (
    Entry("GPT, 6 layers", gpt(6), _tokens, _own_loss, 0.37, 0.49, (2.8, 7.1, 10.6, 12.9)),
    Entry("GPT, 24 layers", gpt(24), _tokens, _own_loss, 0.32, 0.37, (1.4, 5.6, 10.8, 14.3)),
    Entry("ResNet-18", _vision("resnet18"), _images(8, 224), cross_entropy, 0.74, 0.83, (1.2, 2.3, 3.1, 4.4)),
    Entry("ResNet-50", _vision("resnet50"), _images(32, 224), cross_entropy, 0.30, 0.34, (1.6, 4.4, 6.9, 8.9)),
    Entry("UNet", UNet, _images(8, 256), cross_entropy, 0.34, 0.53, (2.5, 5.9, 8.4, 10.2)),
    Entry("DenseNet-121", _vision("densenet121"), _images(32, 224), cross_entropy, 0.21, 0.25, (3.6, 8.0, 11.7, 14.4)),
    Entry(
        "Inception v3", _vision("inception_v3", init_weights=False), _images(32, 299), _inception_loss,
        0.25, 0.32, (2.4, 5.0, 7.2, 9.7),
    ),
    Entry("HRNet-W18", _hrnet, _images(32, 224), cross_entropy, 0.29, 0.38, (2.9, 6.5, 9.3, 11.8)),
    Entry(
        "MLP, 1000 layers, GELU", lambda: mlp(1000, 256, nn.GELU), lambda: ((torch.empty(1024, 256),), {}), _sum,
        0.23, 0.24, (7.0, 14.0, 18.0, 21.0),
    ),
    Entry(
        "MLP, 1000 layers, ReLU", lambda: mlp(1000, 256, nn.ReLU), lambda: ((torch.empty(1024, 256),), {}), _sum,
        0.23, 0.24, (7.0, 14.0, 18.0, 21.0),
    ),
)  # fmt: skip


def profile_of(entry: Entry) -> GraphProfile:
    """Return the profile of the entry's step; only parameters and the batch are allocated."""
    model, inputs = entry.build().train(), Inputs.of(*entry.batch())
    settings = Settings(
        budget_bytes=None,
        optimizer=None,
        loss_fn=entry.loss,
        planner="auto",
        plan_seconds=120.0,
        hardware=PRESETS["a100"],
        cache=False,
    )
    return profile_model(model, capture(model, inputs), inputs, settings).profile
