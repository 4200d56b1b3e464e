"""What builds the entries of the zoo (:mod:`tests.zoo`): the libraries' models at small sizes, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.libraries import import_library, import_torchvision
from benchmarks.losses import cross_entropy, sample_loss

Batch = tuple[tuple[Any, ...], dict[str, Any]]

NUM_CLASSES = 10
VOCABULARY = 512


@dataclass(frozen=True)
class ZooModel:
    """One architecture at one size.

    name: what `get` takes.
    family: the library that it comes from, one of `FAMILIES`.
    build: makes the module, in training mode.
    batch: batch size -> (args, kwargs) of one call.
    default_batch: a batch size that fits the time limit; from 2 on all are allowed (BatchNorm over one value is not).
    loss_fn: output -> scalar loss; None where the model gets labels and returns an output with a `loss`.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    default_batch: int
    loss_fn: Callable[[Any], Tensor] | None

    def loss(self, output: Any) -> Tensor:
        """The scalar to call `backward()` on."""
        loss: Tensor = output.loss if self.loss_fn is None else self.loss_fn(output)
        return loss


# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------


def images(size: int, channels: int = 3) -> Callable[[int], Batch]:
    return lambda batch: ((torch.randn(batch, channels, size, size),), {})


def labelled_images(size: int) -> Callable[[int], Batch]:
    def batch(num: int) -> Batch:
        return (), {
            "pixel_values": torch.randn(num, 3, size, size),
            "labels": torch.randint(NUM_CLASSES, (num,)),
        }

    return batch


def tokens(length: int) -> Callable[[int], Batch]:
    """Language modelling: the labels are the tokens."""

    def batch(num: int) -> Batch:
        ids = torch.randint(3, VOCABULARY, (num, length))
        return (), {"input_ids": ids, "labels": ids.clone()}

    return batch


def padded_tokens(length: int) -> Callable[[int], Batch]:
    """Masked language modelling on rows of different lengths; the padding has label -100."""

    def batch(num: int) -> Batch:
        ids = torch.randint(3, VOCABULARY, (num, length))
        lengths = length - torch.arange(num).remainder(4) * (length // 8)
        mask = (torch.arange(length) < lengths[:, None]).long()
        return (), {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    return batch


def sequence_to_sequence(source: int, target: int) -> Callable[[int], Batch]:
    def batch(num: int) -> Batch:
        kwargs = {
            "input_ids": torch.randint(3, VOCABULARY, (num, source)),
            "attention_mask": torch.ones(num, source, dtype=torch.long),
            "labels": torch.randint(3, VOCABULARY, (num, target)),
        }
        return (), kwargs

    return batch


def speech(frames: int, target: int) -> Callable[[int], Batch]:
    def batch(num: int) -> Batch:
        labels = torch.randint(3, VOCABULARY, (num, target))
        return (), {"input_features": torch.randn(num, 80, frames), "labels": labels}

    return batch


def image_text_pairs(size: int, length: int) -> Callable[[int], Batch]:
    def batch(num: int) -> Batch:
        kwargs = {
            "input_ids": torch.randint(3, VOCABULARY, (num, length)),
            "pixel_values": torch.randn(num, 3, size, size),
            "return_loss": True,
        }
        return (), kwargs

    return batch


def noised(size: int, channels: int, text: tuple[int, int] | None = None) -> Callable[[int], Batch]:
    """Noised images with their time steps, and encoded text of (length, width)."""

    def batch(num: int) -> Batch:
        args = (torch.randn(num, channels, size, size), torch.randint(1000, (num,)))
        return args, {} if text is None else {"encoder_hidden_states": torch.randn(num, *text)}

    return batch


def noised_of_class(size: int, channels: int) -> Callable[[int], Batch]:
    def batch(num: int) -> Batch:
        kwargs = {"timestep": torch.randint(1000, (num,)), "class_labels": torch.randint(NUM_CLASSES, (num,))}
        return (torch.randn(num, channels, size, size),), kwargs

    return batch


# ---------------------------------------------------------------------------------------------------------------------
# One maker of entries for each library
# ---------------------------------------------------------------------------------------------------------------------


def torchvision(
    name: str,
    image_size: int = 64,
    default_batch: int = 4,
    loss_fn: Callable[[Any], Tensor] = cross_entropy,
    **options: Any,
) -> ZooModel:
    def build() -> nn.Module:
        models = import_torchvision().models
        return models.get_model(name, weights=None, num_classes=NUM_CLASSES, **options).train()

    return ZooModel(name, "torchvision", build, images(image_size), default_batch, loss_fn)


def torchvision_class(
    name: str, module: str, class_name: str, image_size: int, default_batch: int, options: dict[str, Any]
) -> ZooModel:
    """For architectures whose ready-made sizes are too large: the same class with smaller numbers."""

    def build() -> nn.Module:
        cls = getattr(import_library(f"torchvision.models.{module}"), class_name)
        return cls(num_classes=NUM_CLASSES, **options).train()

    return ZooModel(name, "torchvision", build, images(image_size), default_batch, cross_entropy)


def timm(name: str, image_size: int = 64, default_batch: int = 4, **options: Any) -> ZooModel:
    def build() -> nn.Module:
        return import_library("timm").create_model(name, pretrained=False, num_classes=NUM_CLASSES, **options).train()

    return ZooModel(name, "timm", build, images(image_size), default_batch, cross_entropy)


def transformers(
    name: str,
    model_class: str,
    batch: Callable[[int], Batch],
    default_batch: int = 8,
    loss_fn: Callable[[Any], Tensor] | None = None,
    **config: Any,
) -> ZooModel:
    def build() -> nn.Module:
        cls = getattr(import_library("transformers"), model_class)
        return cls(cls.config_class(**config)).train()

    return ZooModel(name, "transformers", build, batch, default_batch, loss_fn)


def diffusers(
    name: str, model_class: str, batch: Callable[[int], Batch], default_batch: int = 4, **config: Any
) -> ZooModel:
    def build() -> nn.Module:
        return getattr(import_library("diffusers"), model_class)(**config).train()

    return ZooModel(name, "diffusers", build, batch, default_batch, sample_loss)


def smp(name: str, model_class: str, image_size: int = 64, default_batch: int = 4, **options: Any) -> ZooModel:
    def build() -> nn.Module:
        cls = getattr(import_library("segmentation_models_pytorch"), model_class)
        return cls(encoder_weights=None, classes=NUM_CLASSES, **options).train()

    return ZooModel(name, "smp", build, images(image_size), default_batch, cross_entropy)


DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "use_cache": False,
}
ROTARY_DECODER = {**DECODER, "intermediate_size": 256, "num_key_value_heads": 2, "attention_dropout": 0.1}
ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 160,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
