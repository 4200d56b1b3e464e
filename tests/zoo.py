"""Real models that nobody here wrote, small enough to train a step on one CPU thread in a second or two.

What goes in: a name. What comes out: a `ZooModel`, whose `build()` makes the module in training mode and whose
`batch(size)` makes its inputs. Both draw from torch's global generator, so the caller decides: `torch.manual_seed`
first. Weights are random and nothing is downloaded. Dropout and stochastic depth are on wherever the architecture has
them. The libraries are imported when a model is built, not before.

    entry = zoo.get("gpt2_2l")
    torch.manual_seed(0)
    model = entry.build()
    args, kwargs = entry.batch(entry.default_batch)
    entry.loss(model(*args, **kwargs)).backward()

Run `python -m tests.zoo` for a table of all entries with the seconds of one eager step.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.libraries import import_library, import_torchvision
from benchmarks.losses import cross_entropy, googlenet_loss, inception_loss, sample_loss, segmentation_loss

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


def get(name: str) -> ZooModel:
    """The entry called `name`; KeyError lists the known names."""
    try:
        return _ZOO[name]
    except KeyError:
        raise KeyError(f"no model {name!r} in the zoo; known: {', '.join(_ZOO)}") from None


def names(family: str | None = None) -> list[str]:
    """The names of all entries, or of one family's, in a fixed order."""
    if family is not None and family not in FAMILIES:
        raise KeyError(f"no family {family!r} in the zoo; known: {', '.join(FAMILIES)}")
    return [name for name, entry in _ZOO.items() if family in (None, entry.family)]


# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------


def _images(size: int, channels: int = 3) -> Callable[[int], Batch]:
    return lambda batch: ((torch.randn(batch, channels, size, size),), {})


def _labelled_images(size: int) -> Callable[[int], Batch]:
    def batch(num: int) -> Batch:
        return (), {
            "pixel_values": torch.randn(num, 3, size, size),
            "labels": torch.randint(NUM_CLASSES, (num,)),
        }

    return batch


def _tokens(length: int) -> Callable[[int], Batch]:
    """Language modelling: the labels are the tokens."""

    def batch(num: int) -> Batch:
        ids = torch.randint(3, VOCABULARY, (num, length))
        return (), {"input_ids": ids, "labels": ids.clone()}

    return batch


def _padded_tokens(length: int) -> Callable[[int], Batch]:
    """Masked language modelling on rows of different lengths; the padding has label -100."""

    def batch(num: int) -> Batch:
        ids = torch.randint(3, VOCABULARY, (num, length))
        lengths = length - torch.arange(num).remainder(4) * (length // 8)
        mask = (torch.arange(length) < lengths[:, None]).long()
        return (), {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    return batch


def _sequence_to_sequence(source: int, target: int) -> Callable[[int], Batch]:
    def batch(num: int) -> Batch:
        kwargs = {
            "input_ids": torch.randint(3, VOCABULARY, (num, source)),
            "attention_mask": torch.ones(num, source, dtype=torch.long),
            "labels": torch.randint(3, VOCABULARY, (num, target)),
        }
        return (), kwargs

    return batch


def _speech(frames: int, target: int) -> Callable[[int], Batch]:
    def batch(num: int) -> Batch:
        labels = torch.randint(3, VOCABULARY, (num, target))
        return (), {"input_features": torch.randn(num, 80, frames), "labels": labels}

    return batch


def _image_text_pairs(size: int, length: int) -> Callable[[int], Batch]:
    def batch(num: int) -> Batch:
        kwargs = {
            "input_ids": torch.randint(3, VOCABULARY, (num, length)),
            "pixel_values": torch.randn(num, 3, size, size),
            "return_loss": True,
        }
        return (), kwargs

    return batch


def _noised(size: int, channels: int, text: tuple[int, int] | None = None) -> Callable[[int], Batch]:
    """Noised images with their time steps, and encoded text of (length, width)."""

    def batch(num: int) -> Batch:
        args = (torch.randn(num, channels, size, size), torch.randint(1000, (num,)))
        return args, {} if text is None else {"encoder_hidden_states": torch.randn(num, *text)}

    return batch


def _noised_of_class(size: int, channels: int) -> Callable[[int], Batch]:
    def batch(num: int) -> Batch:
        kwargs = {"timestep": torch.randint(1000, (num,)), "class_labels": torch.randint(NUM_CLASSES, (num,))}
        return (torch.randn(num, channels, size, size),), kwargs

    return batch


# ---------------------------------------------------------------------------------------------------------------------
# One maker of entries for each library
# ---------------------------------------------------------------------------------------------------------------------


def _torchvision(
    name: str,
    image_size: int = 64,
    default_batch: int = 4,
    loss_fn: Callable[[Any], Tensor] = cross_entropy,
    **options: Any,
) -> ZooModel:
    def build() -> nn.Module:
        models = import_torchvision().models
        return models.get_model(name, weights=None, num_classes=NUM_CLASSES, **options).train()

    return ZooModel(name, "torchvision", build, _images(image_size), default_batch, loss_fn)


def _torchvision_class(
    name: str, module: str, class_name: str, image_size: int, default_batch: int, options: dict[str, Any]
) -> ZooModel:
    """For architectures whose ready-made sizes are too large: the same class with smaller numbers."""

    def build() -> nn.Module:
        cls = getattr(import_library(f"torchvision.models.{module}"), class_name)
        return cls(num_classes=NUM_CLASSES, **options).train()

    return ZooModel(name, "torchvision", build, _images(image_size), default_batch, cross_entropy)


def _timm(name: str, image_size: int = 64, default_batch: int = 4, **options: Any) -> ZooModel:
    def build() -> nn.Module:
        return import_library("timm").create_model(name, pretrained=False, num_classes=NUM_CLASSES, **options).train()

    return ZooModel(name, "timm", build, _images(image_size), default_batch, cross_entropy)


def _transformers(
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


def _diffusers(
    name: str, model_class: str, batch: Callable[[int], Batch], default_batch: int = 4, **config: Any
) -> ZooModel:
    def build() -> nn.Module:
        return getattr(import_library("diffusers"), model_class)(**config).train()

    return ZooModel(name, "diffusers", build, batch, default_batch, sample_loss)


def _smp(name: str, model_class: str, image_size: int = 64, default_batch: int = 4, **options: Any) -> ZooModel:
    def build() -> nn.Module:
        cls = getattr(import_library("segmentation_models_pytorch"), model_class)
        return cls(encoder_weights=None, classes=NUM_CLASSES, **options).train()

    return ZooModel(name, "smp", build, _images(image_size), default_batch, cross_entropy)


# ---------------------------------------------------------------------------------------------------------------------
# The entries
# ---------------------------------------------------------------------------------------------------------------------

_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "use_cache": False,
}
_ROTARY_DECODER = {**_DECODER, "intermediate_size": 256, "num_key_value_heads": 2, "attention_dropout": 0.1}
_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 160,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}


def _gpt2(layers: int) -> ZooModel:
    return _transformers(
        f"gpt2_{layers}l",
        "GPT2LMHeadModel",
        _tokens(64),
        vocab_size=VOCABULARY,
        n_positions=128,
        n_embd=128,
        n_layer=layers,
        n_head=4,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )


def _entries() -> Iterator[ZooModel]:
    # Convolutional networks: chains, residuals, concatenations, auxiliary heads, grouped and depthwise convolutions.
    yield _torchvision("resnet18")
    yield _torchvision("resnet50")
    yield _torchvision("densenet121", drop_rate=0.1)
    yield _torchvision("vgg16", image_size=32)
    yield _torchvision("squeezenet1_1", default_batch=16)
    yield _torchvision("googlenet", loss_fn=googlenet_loss, init_weights=False)
    yield _torchvision("inception_v3", image_size=299, default_batch=2, loss_fn=inception_loss, init_weights=False)
    yield _torchvision("mobilenet_v2", default_batch=8)
    yield _torchvision("mobilenet_v3_small", default_batch=8)
    yield _torchvision("mnasnet0_5", default_batch=8)
    yield _torchvision("shufflenet_v2_x0_5", default_batch=8)
    yield _torchvision("regnet_y_400mf")
    yield _torchvision("efficientnet_b0")
    yield _torchvision("convnext_tiny", default_batch=2)
    yield _torchvision(
        "deeplabv3_resnet50",
        default_batch=2,
        loss_fn=segmentation_loss,
        weights_backbone=None,
        aux_loss=True,
    )

    # Vision transformers and mixtures of the two.
    yield _torchvision("swin_t", default_batch=2)
    yield _torchvision_class(
        "vit_small",
        "vision_transformer",
        "VisionTransformer",
        image_size=64,
        default_batch=4,
        options={
            "image_size": 64,
            "patch_size": 8,
            "num_layers": 6,
            "num_heads": 4,
            "hidden_dim": 128,
            "mlp_dim": 512,
            "dropout": 0.1,
            "attention_dropout": 0.1,
        },
    )
    yield _torchvision_class(
        "maxvit_small",
        "maxvit",
        "MaxVit",
        image_size=128,
        default_batch=2,
        options={
            "input_size": (128, 128),
            "stem_channels": 32,
            "partition_size": 4,
            "block_channels": [32, 64, 128],
            "block_layers": [1, 2, 1],
            "head_dim": 32,
            "stochastic_depth_prob": 0.2,
        },
    )
    yield _timm("mixer_s32_224", img_size=64, drop_rate=0.1, proj_drop_rate=0.1)
    yield _timm("hrnet_w18_small", default_batch=2)
    yield _timm("coat_lite_tiny", drop_rate=0.1, drop_path_rate=0.1, img_size=64)
    yield _timm("xcit_nano_12_p16_224", drop_path_rate=0.1, img_size=64)
    yield _timm("resnetv2_50", default_batch=2)

    # Decoders, encoders, both; experts; state spaces; shared and tied weights.
    yield _gpt2(2)
    yield _gpt2(6)
    yield _transformers(
        "opt",
        "OPTForCausalLM",
        _tokens(64),
        **_DECODER,
        ffn_dim=512,
        word_embed_proj_dim=128,
        dropout=0.1,
        attention_dropout=0.1,
    )
    yield _transformers(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        _tokens(64),
        **_DECODER,
        intermediate_size=512,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    yield _transformers("llama", "LlamaForCausalLM", _tokens(64), **_ROTARY_DECODER)
    yield _transformers("qwen2", "Qwen2ForCausalLM", _tokens(64), **_ROTARY_DECODER, tie_word_embeddings=True)
    yield _transformers(
        "gemma2",
        "Gemma2ForCausalLM",
        _tokens(64),
        **_ROTARY_DECODER,
        head_dim=32,
        sliding_window=32,
    )
    yield _transformers(
        "mixtral",
        "MixtralForCausalLM",
        _tokens(32),
        **_ROTARY_DECODER,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        sliding_window=None,
    )
    yield _transformers(
        "mamba",
        "MambaForCausalLM",
        _tokens(32),
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        state_size=8,
        use_cache=False,
    )
    yield _transformers("bert", "BertForMaskedLM", _padded_tokens(64), **_ENCODER)
    yield _transformers("roberta", "RobertaForMaskedLM", _padded_tokens(64), **_ENCODER)
    yield _transformers("albert", "AlbertForMaskedLM", _padded_tokens(64), **_ENCODER, embedding_size=64)
    yield _transformers(
        "deberta_v2",
        "DebertaV2ForMaskedLM",
        _padded_tokens(32),
        **_ENCODER,
        relative_attention=True,
        position_buckets=16,
        pos_att_type=["p2c", "c2p"],
    )
    yield _transformers(
        "distilbert",
        "DistilBertForMaskedLM",
        _padded_tokens(64),
        vocab_size=VOCABULARY,
        dim=128,
        n_layers=4,
        n_heads=4,
        hidden_dim=512,
        max_position_embeddings=128,
        dropout=0.1,
        attention_dropout=0.1,
    )
    yield _transformers(
        "t5",
        "T5ForConditionalGeneration",
        _sequence_to_sequence(64, 32),
        vocab_size=VOCABULARY,
        d_model=128,
        d_kv=32,
        d_ff=512,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        use_cache=False,
    )
    yield _transformers(
        "bart",
        "BartForConditionalGeneration",
        _sequence_to_sequence(64, 32),
        vocab_size=VOCABULARY,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_position_embeddings=128,
        dropout=0.1,
        attention_dropout=0.1,
        activation_dropout=0.1,
        use_cache=False,
    )
    yield _transformers(
        "whisper",
        "WhisperForConditionalGeneration",
        _speech(128, 32),
        vocab_size=VOCABULARY,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        num_mel_bins=80,
        max_source_positions=64,
        max_target_positions=64,
        dropout=0.1,
        attention_dropout=0.1,
        activation_dropout=0.1,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    yield _transformers(
        "vit",
        "ViTForImageClassification",
        _labelled_images(64),
        image_size=64,
        patch_size=8,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=NUM_CLASSES,
    )
    yield _transformers(
        "clip",
        "CLIPModel",
        _image_text_pairs(64, 32),
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "attention_dropout": 0.1,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        vision_config={
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 64,
            "patch_size": 8,
            "attention_dropout": 0.1,
        },
        projection_dim=64,
    )

    # Diffusion and segmentation: U-shapes, whose long skips cross every cut of the chain.
    yield _diffusers(
        "unet2d",
        "UNet2DModel",
        _noised(32, 3),
        sample_size=32,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        dropout=0.1,
    )
    yield _diffusers(
        "unet2d_condition",
        "UNet2DConditionModel",
        _noised(16, 4, text=(16, 64)),
        sample_size=16,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=8,
        norm_num_groups=8,
        dropout=0.1,
    )
    yield _diffusers(
        "dit",
        "DiTTransformer2DModel",
        _noised_of_class(16, 4),
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        num_attention_heads=4,
        attention_head_dim=32,
        num_embeds_ada_norm=NUM_CLASSES,
        dropout=0.1,
        norm_num_groups=8,
    )
    yield _diffusers(
        "vae",
        "AutoencoderKL",
        _images(32),
        in_channels=3,
        out_channels=3,
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        norm_num_groups=8,
        latent_channels=4,
    )
    yield _smp("smp_unet_resnet34", "Unet", encoder_name="resnet34")
    yield _smp("smp_fpn_resnet18", "FPN", encoder_name="resnet18", decoder_dropout=0.2)
    yield _smp("smp_unetplusplus_mobilenet_v2", "UnetPlusPlus", encoder_name="mobilenet_v2", default_batch=2)


_ZOO = {entry.name: entry for entry in _entries()}
FAMILIES = tuple(dict.fromkeys(entry.family for entry in _ZOO.values()))


# ---------------------------------------------------------------------------------------------------------------------
# python -m tests.zoo
# ---------------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Prints name, family, parameters, batch, loss and the seconds of the second eager step of every entry."""
    torch.set_num_threads(1)
    for name in sys.argv[1:] or names():
        entry = get(name)
        torch.manual_seed(0)
        start = time.perf_counter()
        model = entry.build()
        build_seconds = time.perf_counter() - start
        args, kwargs = entry.batch(entry.default_batch)
        for _ in range(2):
            model.zero_grad()
            start = time.perf_counter()
            loss = entry.loss(model(*args, **kwargs))
            loss.backward()
            step_seconds = time.perf_counter() - start
        without_gradient = sum(p.requires_grad and p.grad is None for p in model.parameters())
        num_parameters = sum(p.numel() for p in model.parameters())
        print(
            f"{name:30} {entry.family:12} {num_parameters / 1e6:7.2f} M parameters  batch {entry.default_batch}  "
            f"loss {loss.item():8.4f}  build {build_seconds:5.2f} s  step {step_seconds:5.2f} s  "
            f"unused parameters {without_gradient}",
            flush=True,
        )


if __name__ == "__main__":
    main()
