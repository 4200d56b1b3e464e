"""Losses of the architectures: output -> scalar. Targets are functions of the shape; nothing random is drawn."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def own_loss(output: Any) -> Tensor:
    """Return the loss that the model computed itself, from the labels it was given."""
    loss: Tensor = output.loss
    return loss


def cross_entropy(logits: Tensor) -> Tensor:
    """Return the cross entropy against classes 0, 1, 2, ... over the batch (and the pixels, if there are any)."""
    shape = (logits.shape[0], *logits.shape[2:])
    count = int(torch.Size(shape).numel())
    target = torch.arange(count, device=logits.device).remainder(logits.shape[1]).reshape(shape)
    return F.cross_entropy(logits, target)


def googlenet_loss(output: Any) -> Tensor:
    """Return the weighted sum over GoogLeNet's three classifiers."""
    auxiliary = cross_entropy(output.aux_logits1) + cross_entropy(output.aux_logits2)
    return cross_entropy(output.logits) + 0.3 * auxiliary


def inception_loss(output: Any) -> Tensor:
    """Return the weighted sum over Inception v3's two classifiers."""
    return cross_entropy(output.logits) + 0.4 * cross_entropy(output.aux_logits)


def segmentation_loss(output: Any) -> Tensor:
    """Return the weighted sum over the two heads of torchvision's segmentation models."""
    return cross_entropy(output["out"]) + 0.5 * cross_entropy(output["aux"])


def sample_loss(output: Any) -> Tensor:
    """Return the mean square of a diffusion model's output."""
    sample: Tensor = output.sample
    return sample.square().mean()
