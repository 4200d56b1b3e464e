"""The models of the benchmarks, at two sizes: ``cpu`` (a step in well under a second on one thread) and ``gpu``.

In: a name. Out: a :class:`BenchModel`, whose ``build(scale)`` makes the module in training mode and whose
``batch(scale)`` makes one call's arguments. Weights are random, nothing is downloaded. ``blocks`` are the modules that
per-block checkpointing wraps by the architecture's own notion of a block; ``chain`` returns the model as a flat
``nn.Sequential`` over the same parameters, where it is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.batches import Batch, images, noised, speech, tokens
from benchmarks.libraries import import_library, import_torchvision
from benchmarks.losses import cross_entropy, googlenet_loss, own_loss, sample_loss, segmentation_loss

SCALES = ("cpu", "gpu")


@dataclass(frozen=True)
class BenchModel:
    """One architecture with its sizes; the fields that are callables take the scale."""

    name: str
    build: Callable[[str], nn.Module]
    batch: Callable[[str], Batch]
    loss: Callable[[Any], Tensor]
    blocks: tuple[str, ...]
    """Patterns of module paths; a ``*`` stands for one name. Modules without children are no blocks."""
    chain: Callable[[nn.Module], nn.Sequential] | None = None
    quick: bool = field(default=False)

    def block_names(self, model: nn.Module) -> list[str]:
        """Return the paths of the modules to checkpoint one by one."""
        named = [(name, module) for name, module in model.named_modules() if list(module.children())]
        return [name for name, _ in named if any(_matches(name, pattern) for pattern in self.blocks)]


def _matches(name: str, pattern: str) -> bool:
    return name.count(".") == pattern.count(".") and fnmatch(name, pattern)


def get(name: str) -> BenchModel:
    """Return the model called ``name``; KeyError lists the known names."""
    if name not in MODELS:
        raise KeyError(f"no benchmark model {name!r}; known: {', '.join(MODELS)}")
    return MODELS[name]


# -- models written here -----------------------------------------------------------------------------------------------


class DoubleConv(nn.Sequential):
    """Two 3x3 convolutions, each with BatchNorm and ReLU: the block of the UNet."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(
            nn.Conv2d(num_in, num_out, 3, padding=1), nn.BatchNorm2d(num_out), nn.ReLU(inplace=True),
            nn.Conv2d(num_out, num_out, 3, padding=1), nn.BatchNorm2d(num_out), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    """The UNet of Ronneberger et al. 2015 with BatchNorm, as MONeT and Checkmate measured it; ``width``: first level."""

    def __init__(self, width: int = 64, num_classes: int = 2) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(5)]
        self.down = nn.ModuleList(DoubleConv(i, o) for i, o in zip([3, *widths[:-1]], widths, strict=True))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(i, i // 2, kernel_size=2, stride=2) for i in reversed(widths[1:]))
        self.up = nn.ModuleList(DoubleConv(i, i // 2) for i in reversed(widths[1:]))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat([skips.pop(), rise(x)], 1))
        return self.head(x)


class PreActBottleneck(nn.Module):
    """The residual block of He et al. 2016: BatchNorm, ReLU, convolution, three times."""

    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        num_out = 4 * width
        self.first = nn.Sequential(nn.BatchNorm2d(num_in), nn.ReLU(inplace=True))
        self.rest = nn.Sequential(
            nn.Conv2d(num_in, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, num_out, 1, bias=False),
        )  # fmt: skip
        same = num_in == num_out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        shortcut = x if isinstance(self.shortcut, nn.Identity) else self.shortcut(y)
        return self.rest(y) + shortcut


def deep_resnet(blocks: tuple[int, ...], widths: tuple[int, ...], num_classes: int, stem: nn.Module) -> nn.Sequential:
    """Return a pre-activation ResNet of ``sum(blocks)`` bottlenecks of three layers each, as one flat chain."""
    layers: list[nn.Module] = [stem]
    num_in = next(m.out_channels for m in reversed(list(stem.modules())) if isinstance(m, nn.Conv2d))
    for stage, (count, width) in enumerate(zip(blocks, widths, strict=True)):
        for i in range(count):
            layers.append(PreActBottleneck(num_in, width, stride=2 if i == 0 and stage else 1))
            num_in = 4 * width
    layers += [nn.BatchNorm2d(num_in), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(num_in, num_classes))


def _resnet1001(scale: str) -> nn.Module:
    """He et al. 2016's 1001-layer network for 32x32 images, 333 bottlenecks; narrow on CPU."""
    width = 4 if scale == "cpu" else 16
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    return deep_resnet((111, 111, 111), (width, 2 * width, 4 * width), 10, stem)


# -- chains ------------------------------------------------------------------------------------------------------------


def _resnet_chain(model: Any) -> nn.Sequential:
    blocks = [b for layer in (model.layer1, model.layer2, model.layer3, model.layer4) for b in layer]
    stem = (model.conv1, model.bn1, model.relu, model.maxpool)
    return nn.Sequential(*stem, *blocks, model.avgpool, nn.Flatten(), model.fc)


def _vgg_chain(model: Any) -> nn.Sequential:
    return nn.Sequential(*model.features, model.avgpool, nn.Flatten(), *model.classifier)


def _mobilenet_chain(model: Any) -> nn.Sequential:
    return nn.Sequential(*model.features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *model.classifier)


def _itself(model: Any) -> nn.Sequential:
    chain: nn.Sequential = model
    return chain


# -- makers ------------------------------------------------------------------------------------------------------------


def _torchvision(
    name: str,
    cpu: tuple[int, int],
    gpu: tuple[int, int],
    blocks: tuple[str, ...],
    chain: Callable[[Any], nn.Sequential] | None = None,
    loss: Callable[[Any], Tensor] = cross_entropy,
    quick: bool = False,
    **options: Any,
) -> BenchModel:
    def build(scale: str) -> nn.Module:
        num_classes = 10 if scale == "cpu" else 1000
        model = import_torchvision().models.get_model(name, weights=None, num_classes=num_classes, **options)
        return model.train()

    return BenchModel(name, build, images(cpu, gpu), loss, blocks, chain, quick)


def _vgg16() -> BenchModel:
    def build(scale: str) -> nn.Module:
        models = import_torchvision().models
        if scale == "gpu":
            return models.vgg16(weights=None).train()
        model = models.vgg16(weights=None, num_classes=10)  # 4096-wide classifiers would drown the activations
        model.classifier = nn.Sequential(nn.Linear(25088, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, 10))
        return model.train()

    return BenchModel("vgg16", build, images((4, 64), (64, 224)), cross_entropy, (), _vgg_chain)


def _vit(scale: str) -> nn.Module:
    vision_transformer = import_library("torchvision.models.vision_transformer")
    if scale == "gpu":
        return import_torchvision().models.vit_b_16(weights=None, dropout=0.1).train()
    return vision_transformer.VisionTransformer(
        image_size=64, patch_size=8, num_layers=8, num_heads=4, hidden_dim=192, mlp_dim=768, dropout=0.1,
        attention_dropout=0.1, num_classes=10,
    ).train()  # fmt: skip


def _mixer(scale: str) -> nn.Module:
    timm = import_library("timm")
    if scale == "gpu":
        return timm.create_model("mixer_b16_224", pretrained=False, drop_rate=0.1, proj_drop_rate=0.1).train()
    mixer = import_library("timm.models.mlp_mixer").MlpMixer
    return mixer(10, img_size=64, patch_size=8, num_blocks=8, embed_dim=192, drop_rate=0.1, proj_drop_rate=0.1).train()


def _transformers(
    name: str,
    model_class: str,
    batch: Callable[[str], Batch],
    blocks: tuple[str, ...],
    cpu: dict[str, Any],
    gpu: dict[str, Any],
    common: dict[str, Any],
    quick: bool = False,
) -> BenchModel:
    def build(scale: str) -> nn.Module:
        cls = getattr(import_library("transformers"), model_class)
        sizes = cpu if scale == "cpu" else gpu
        return cls(cls.config_class(**{"vocab_size": 512, **common, **sizes})).train()

    return BenchModel(name, build, batch, own_loss, blocks, quick=quick)


def _diffusers_unet() -> BenchModel:
    def build(scale: str) -> nn.Module:
        widths = (32, 64, 64) if scale == "cpu" else (128, 256, 512)
        return (
            import_library("diffusers")
            .UNet2DModel(
                in_channels=3,
                out_channels=3,
                layers_per_block=2,
                block_out_channels=widths,
                down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
                norm_num_groups=8,
                dropout=0.1,
            )
            .train()
        )

    blocks = ("*_blocks.*.resnets.*", "mid_block.resnets.*", "*_blocks.*.attentions.*", "mid_block.attentions.*")
    return BenchModel("diffusers_unet", build, noised((4, 32), (16, 64)), sample_loss, blocks)


# -- the entries -------------------------------------------------------------------------------------------------------

_RESNET = ("layer?.*",)
_GPT = {
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_ROTARY = {"use_cache": False, "attention_dropout": 0.1, "num_key_value_heads": 2}


def _decoder_sizes(width: int, layers: int, heads: int, length: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "max_position_embeddings": length,
    }


def _gpt2(name: str, cpu_layers: int, quick: bool = False) -> BenchModel:
    return _transformers(
        name,
        "GPT2LMHeadModel",
        tokens((4, 128), (8, 1024)),
        ("transformer.h.*",),
        cpu={"n_positions": 128, "n_embd": 192, "n_layer": cpu_layers, "n_head": 4},
        gpu={"n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257},
        common=_GPT,
        quick=quick,
    )


def _vision() -> Iterator[BenchModel]:
    yield _torchvision("resnet18", (8, 96), (128, 224), _RESNET, _resnet_chain, quick=True)
    yield _gpt2("gpt2_2l", 2, quick=True)
    yield BenchModel(
        "unet",
        lambda scale: UNet(8 if scale == "cpu" else 64).train(),
        images((4, 96), (16, 256)),
        cross_entropy,
        ("down.*", "up.*"),
        quick=True,
    )
    yield _gpt2("gpt2", 6)
    yield _torchvision("resnet50", (8, 96), (128, 224), _RESNET, _resnet_chain)
    yield _torchvision("resnet152", (4, 96), (64, 224), _RESNET, _resnet_chain)
    yield _vgg16()
    yield _torchvision("densenet121", (4, 96), (64, 224), ("features.denseblock?.*", "features.transition?"))
    yield _torchvision("mobilenet_v2", (8, 96), (128, 224), ("features.*",), _mobilenet_chain)
    yield _torchvision("mobilenet_v3_large", (8, 96), (128, 224), ("features.*",), _mobilenet_chain)
    yield _torchvision("efficientnet_b0", (8, 96), (128, 224), ("features.*.*",))
    yield _torchvision(
        "googlenet", (8, 96), (128, 224), ("inception*",), loss=googlenet_loss, init_weights=False, aux_logits=True
    )
    yield _torchvision("convnext_tiny", (4, 64), (64, 224), ("features.*.*",))
    yield _torchvision("swin_t", (4, 64), (64, 224), ("features.*.*",))
    yield BenchModel("vit", _vit, images((4, 64), (64, 224)), cross_entropy, ("encoder.layers.*",))
    yield BenchModel("mlp_mixer", _mixer, images((4, 64), (64, 224)), cross_entropy, ("blocks.*",))
    yield _torchvision(
        "deeplabv3_resnet50",
        (2, 64),
        (16, 256),
        ("backbone.layer?.*", "classifier"),
        loss=segmentation_loss,
        weights_backbone=None,
        aux_loss=True,
    )
    yield _transformers(
        "bert",
        "BertForMaskedLM",
        tokens((4, 128), (32, 512)),
        ("bert.encoder.layer.*",),
        cpu=_decoder_sizes(192, 6, 4, 128),
        gpu=_decoder_sizes(768, 12, 12, 512) | {"vocab_size": 30522},
        common=_ENCODER,
    )


def _language_and_other() -> Iterator[BenchModel]:
    yield _transformers(
        "t5",
        "T5ForConditionalGeneration",
        tokens((4, 64), (16, 512)),
        ("encoder.block.*", "decoder.block.*"),
        cpu={"d_model": 192, "d_kv": 32, "d_ff": 768, "num_layers": 3, "num_heads": 6},
        gpu={"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
        common={"dropout_rate": 0.1, "decoder_start_token_id": 0, "use_cache": False},
    )
    yield _transformers(
        "llama",
        "LlamaForCausalLM",
        tokens((4, 128), (8, 1024)),
        ("model.layers.*",),
        cpu=_decoder_sizes(192, 6, 4, 128),
        gpu=_decoder_sizes(1024, 16, 16, 1024) | {"vocab_size": 32000},
        common=_ROTARY,
    )
    yield _transformers(
        "mixtral",
        "MixtralForCausalLM",
        tokens((4, 64), (8, 512)),
        ("model.layers.*",),
        cpu=_decoder_sizes(128, 4, 4, 128),
        gpu=_decoder_sizes(512, 8, 8, 1024),
        common={**_ROTARY, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    )
    yield _transformers(
        "whisper",
        "WhisperForConditionalGeneration",
        speech((4, 256, 32), (16, 3000, 128)),
        ("model.encoder.layers.*", "model.decoder.layers.*"),
        cpu={
            "d_model": 192, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 768, "decoder_ffn_dim": 768, "max_source_positions": 128,
            "max_target_positions": 64,
        },
        gpu={
            "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8,
            "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048,
            "max_source_positions": 1500, "max_target_positions": 448,
        },
        common={
            "num_mel_bins": 80, "dropout": 0.1, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1,
            "eos_token_id": 2, "decoder_start_token_id": 1,
        },
    )  # fmt: skip
    yield _diffusers_unet()
    yield BenchModel("resnet1001", _resnet1001, images((4, 16), (64, 32)), cross_entropy, ("*",), _itself)


MODELS = {entry.name: entry for entry in (*_vision(), *_language_and_other())}
