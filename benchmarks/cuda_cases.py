"""Models as people train them on GPUs: in fp32, under autocast, with channels last, with and without dropout and masks.

What goes in: a name. What comes out: a :class:`Case`, which makes the model, a batch, and says how its step goes. Sizes are
such that a step on fakes takes seconds; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cuda_models import (
    Causal,
    ConvUNet,
    Encoder,
    Gan,
    GroupNormed,
    Indexed,
    Losses,
    LowRank,
    Mlp,
    Ordered,
    Words,
)
from benchmarks.libraries import import_library, import_torchvision

Batch = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """One model and how it is trained. ``scaled``: with a GradScaler. ``in_first_run``: a first run on a GPU has it."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    autocast: torch.dtype | None = None
    channels_last: bool = False
    scaled: bool = False
    in_first_run: bool = False

    def build(self) -> nn.Module:
        """Return the model in training mode, on the default device."""
        model = self.model().train()
        return model.to(memory_format=torch.channels_last) if self.channels_last else model  # type: ignore[call-overload,no-any-return]

    def inputs(self) -> Batch:
        """Return one call's arguments."""
        args, kwargs = self.batch()
        if self.channels_last:
            args = tuple(a.contiguous(memory_format=torch.channels_last) if a.dim() == 4 else a for a in args)
        return args, kwargs


# -- models of libraries --------------------------------------------------------------------------------------------------


def _vision(name: str, dtype: torch.dtype | None = None) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: nn.Module = getattr(import_torchvision().models, name)()
        return model if dtype is None else model.to(dtype)

    return make


def _transformers(name: str, config: str, dtype: torch.dtype | None = None, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        library = import_library("transformers")
        model: nn.Module = getattr(library, name)(getattr(library, config)(**options))
        return model if dtype is None else model.to(dtype)

    return make


def _gpt2(layers: int = 3, **options: Any) -> Callable[[], nn.Module]:
    return _transformers("GPT2LMHeadModel", "GPT2Config", n_layer=layers, use_cache=False, **options)


_NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def _bert(layers: int = 3) -> Callable[[], nn.Module]:
    return _transformers("BertForMaskedLM", "BertConfig", num_hidden_layers=layers)


def _llama(
    dtype: torch.dtype | None = None, layers: int = 2, kv: int = 8, attention: str = "sdpa"
) -> Callable[[], nn.Module]:
    return _transformers(
        "LlamaForCausalLM",
        "LlamaConfig",
        dtype,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=kv,
        vocab_size=32000,
        use_cache=False,
        attn_implementation=attention,
    )


def _mixtral() -> Callable[[], nn.Module]:
    return _transformers(
        "MixtralForCausalLM",
        "MixtralConfig",
        torch.bfloat16,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8000,
        num_local_experts=8,
        use_cache=False,
    )


# -- batches --------------------------------------------------------------------------------------------------------------


def _images(count: int, size: int = 224, dtype: torch.dtype = torch.float32) -> Callable[[], Batch]:
    return lambda: ((torch.zeros(count, 3, size, size, dtype=dtype),), {})


def _ids(count: int, length: int) -> Tensor:
    return torch.zeros(count, length, dtype=torch.long)


def _texts(count: int, length: int, *, mask: bool = True) -> Callable[[], Batch]:
    """Padded texts: transformers decides by values whether it needs a mask, and on an emulated device all values are zero,
    so that only texts that do need one go one way everywhere."""

    def make() -> Batch:
        named = {"input_ids": _ids(count, length), "labels": _ids(count, length)}
        if mask:
            named["attention_mask"] = torch.ones(count, length, dtype=torch.long)
            named["attention_mask"][:, length // 2 :] = 0
        return (), named

    return make


def _tokens() -> Batch:
    return (_ids(8, 512),), {}


def _rows(count: int, width: int, dtype: torch.dtype = torch.float32) -> Callable[[], Batch]:
    return lambda: ((torch.zeros(count, width, dtype=dtype),), {})


def _sequences(*, masked: bool) -> Callable[[], Batch]:
    def make() -> Batch:
        mask = torch.zeros(16, 128, dtype=torch.bool)
        mask[:, 100:] = True
        return (torch.zeros(16, 128, 256), mask) if masked else (torch.zeros(16, 128, 256),), {}

    return make


HALF, BF16 = torch.float16, torch.bfloat16

_CASES = (
    Case("resnet50 fp32", _vision("resnet50"), _images(32), in_first_run=True),
    Case("resnet50 fp16 autocast", _vision("resnet50"), _images(32), HALF, scaled=True, in_first_run=True),
    Case("resnet50 bf16 autocast", _vision("resnet50"), _images(32), BF16, in_first_run=True),
    Case("resnet50 channels last, fp16 autocast", _vision("resnet50"), _images(32), HALF, True, in_first_run=True),
    Case("resnet50 bf16 weights", _vision("resnet50", BF16), _images(32, dtype=BF16), in_first_run=True),
    Case("resnet18 channels last", _vision("resnet18"), _images(16), channels_last=True),
    Case("mobilenet_v2 fp32", _vision("mobilenet_v2"), _images(32), in_first_run=True),
    Case("mobilenet_v3 fp16 autocast", _vision("mobilenet_v3_small"), _images(32), HALF, scaled=True),
    Case("vgg16 fp32", _vision("vgg16"), _images(16), in_first_run=True),
    Case("densenet121 fp32", _vision("densenet121"), _images(8)),
    Case("efficientnet_b0 bf16 autocast", _vision("efficientnet_b0"), _images(16), BF16),
    Case("regnet_y_400mf fp32", _vision("regnet_y_400mf"), _images(16)),
    Case("convnext_tiny fp16 autocast", _vision("convnext_tiny"), _images(16), HALF, in_first_run=True),
    Case("unet fp32", ConvUNet, _images(4, 256), in_first_run=True),
    Case("unet GroupNorm, fp16 autocast", lambda: ConvUNet(groups=8), _images(4, 256), HALF, in_first_run=True),
    Case("unet channels last, bf16 autocast", ConvUNet, _images(4, 256), BF16, channels_last=True),
    Case("convolutions with GroupNorm", GroupNormed, _images(8, 128), in_first_run=True),
    Case("vit_b_16 fp32", _vision("vit_b_16"), _images(16), in_first_run=True),
    Case("vit_b_16 bf16 autocast", _vision("vit_b_16"), _images(16), BF16, in_first_run=True),
    Case("swin_t fp16 autocast", _vision("swin_t"), _images(16), HALF, in_first_run=True),
    Case("swin_t fp32", _vision("swin_t"), _images(4)),
    Case("mlp fp32", lambda: Mlp(1024, 8, 0.1), _rows(512, 1024), in_first_run=True),
    Case("mlp bf16 autocast", lambda: Mlp(512, 4, 0.1, norm=False), _rows(8192, 512), BF16),
    Case("gpt2 fp32", _gpt2(), _texts(4, 512), in_first_run=True),
    Case("gpt2 bf16 autocast", _gpt2(), _texts(4, 512), BF16, in_first_run=True),
    Case("gpt2 bf16 autocast, no dropout", _gpt2(**_NO_DROPOUT), _texts(4, 512), BF16, in_first_run=True),
    Case("gpt2 fp32, no dropout", _gpt2(**_NO_DROPOUT), _texts(4, 512), in_first_run=True),
    Case("causal fp32", Causal, _tokens, in_first_run=True),
    Case("causal bf16 autocast", Causal, _tokens, BF16, in_first_run=True),
    Case("causal bf16 autocast, no dropout", lambda: Causal(dropout=0.0), _tokens, BF16, in_first_run=True),
    Case("causal fp16 autocast, heads of 80", lambda: Causal(width=640, dropout=0.0), _tokens, HALF, scaled=True),
    Case("bert fp32", _bert(), _texts(8, 256, mask=False), in_first_run=True),
    Case("bert fp32, padded", _bert(), _texts(8, 256), in_first_run=True),
    Case("bert fp16 autocast", _bert(), _texts(8, 256, mask=False), HALF, scaled=True, in_first_run=True),
    Case("llama bf16", _llama(BF16), _texts(2, 1024), in_first_run=True),
    Case("llama fp32", _llama(), _texts(2, 512), in_first_run=True),
    Case("llama bf16, eager attention", _llama(BF16, attention="eager"), _texts(2, 512), in_first_run=True),
    Case("llama bf16, one key head", _llama(BF16, kv=1), _texts(2, 256)),
    Case("llama bf16, low-rank updates", lambda: LowRank(_llama(BF16)()), _texts(2, 256)),
    Case(
        "t5 fp32",
        _transformers(
            "T5ForConditionalGeneration", "T5Config", num_layers=3, use_cache=False, decoder_start_token_id=0
        ),
        _texts(4, 128),
        in_first_run=True,
    ),
    Case("mixtral bf16", _mixtral(), _texts(2, 256), in_first_run=True),
    Case("torch encoder fp32", Encoder, _sequences(masked=False)),
    Case("torch encoder bf16 autocast, padded", Encoder, _sequences(masked=True), BF16),
    Case("words fp32", Words, lambda: ((_ids(8, 512), _ids(8, 512)), {}), in_first_run=True),
    Case("words bf16 autocast", Words, lambda: ((_ids(8, 512), _ids(8, 512)), {}), BF16, in_first_run=True),
    Case("indexed rows", Indexed, lambda: ((torch.zeros(4096, 512), torch.arange(4096)), {}), in_first_run=True),
    Case("sorted rows", Ordered, _rows(4096, 512), in_first_run=True),
    Case("generator against discriminator", Gan, lambda: ((torch.zeros(32, 128, 4, 4),), {})),
    Case("autoencoder, squared error", lambda: Losses(F.mse_loss), _rows(16384, 512)),
    Case("autoencoder, binary cross-entropy", lambda: Losses(F.binary_cross_entropy, True), _rows(16384, 512)),
    Case("autoencoder, Huber", lambda: Losses(F.huber_loss), _rows(16384, 512)),
)
CASES = {case.name: case for case in _CASES}
"""By name."""
