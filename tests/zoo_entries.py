"""The entries of the zoo (:mod:`tests.zoo`), by kind of architecture."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.losses import googlenet_loss, inception_loss, segmentation_loss
from tests.zoo_models import (
    DECODER,
    ENCODER,
    NUM_CLASSES,
    ROTARY_DECODER,
    VOCABULARY,
    ZooModel,
    diffusers,
    image_text_pairs,
    images,
    labelled_images,
    noised,
    noised_of_class,
    padded_tokens,
    sequence_to_sequence,
    smp,
    speech,
    timm,
    tokens,
    torchvision,
    torchvision_class,
    transformers,
)


def _gpt2(layers: int) -> ZooModel:
    return transformers(
        f"gpt2_{layers}l",
        "GPT2LMHeadModel",
        tokens(64),
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


def _convolutional() -> Iterator[ZooModel]:
    """Convolutional networks: chains, residuals, concatenations, auxiliary heads, grouped and depthwise convolutions."""
    yield torchvision("resnet18")
    yield torchvision("resnet50")
    yield torchvision("densenet121", drop_rate=0.1)
    yield torchvision("vgg16", image_size=32)
    yield torchvision("squeezenet1_1", default_batch=16)
    yield torchvision("googlenet", loss_fn=googlenet_loss, init_weights=False)
    yield torchvision("inception_v3", image_size=299, default_batch=2, loss_fn=inception_loss, init_weights=False)
    yield torchvision("mobilenet_v2", default_batch=8)
    yield torchvision("mobilenet_v3_small", default_batch=8)
    yield torchvision("mnasnet0_5", default_batch=8)
    yield torchvision("shufflenet_v2_x0_5", default_batch=8)
    yield torchvision("regnet_y_400mf")
    yield torchvision("efficientnet_b0")
    yield torchvision("convnext_tiny", default_batch=2)
    yield torchvision(
        "deeplabv3_resnet50",
        default_batch=2,
        loss_fn=segmentation_loss,
        weights_backbone=None,
        aux_loss=True,
    )


def _vision_transformers() -> Iterator[ZooModel]:
    """Vision transformers and mixtures of the two."""
    yield torchvision("swin_t", default_batch=2)
    yield torchvision_class(
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
    yield torchvision_class(
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
    yield timm("mixer_s32_224", img_size=64, drop_rate=0.1, proj_drop_rate=0.1)
    yield timm("hrnet_w18_small", default_batch=2)
    yield timm("coat_lite_tiny", drop_rate=0.1, drop_path_rate=0.1, img_size=64)
    yield timm("xcit_nano_12_p16_224", drop_path_rate=0.1, img_size=64)
    yield timm("resnetv2_50", default_batch=2)


def _language_models() -> Iterator[ZooModel]:
    """Decoders and encoders; experts; state spaces; shared and tied weights."""
    yield _gpt2(2)
    yield _gpt2(6)
    yield transformers(
        "opt",
        "OPTForCausalLM",
        tokens(64),
        **DECODER,
        ffn_dim=512,
        word_embed_proj_dim=128,
        dropout=0.1,
        attention_dropout=0.1,
    )
    yield transformers(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        tokens(64),
        **DECODER,
        intermediate_size=512,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    yield transformers("llama", "LlamaForCausalLM", tokens(64), **ROTARY_DECODER)
    yield transformers("qwen2", "Qwen2ForCausalLM", tokens(64), **ROTARY_DECODER, tie_word_embeddings=True)
    yield transformers(
        "gemma2",
        "Gemma2ForCausalLM",
        tokens(64),
        **ROTARY_DECODER,
        head_dim=32,
        sliding_window=32,
    )
    yield transformers(
        "mixtral",
        "MixtralForCausalLM",
        tokens(32),
        **ROTARY_DECODER,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        sliding_window=None,
    )
    yield transformers(
        "mamba",
        "MambaForCausalLM",
        tokens(32),
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        state_size=8,
        use_cache=False,
    )
    yield transformers("bert", "BertForMaskedLM", padded_tokens(64), **ENCODER)
    yield transformers("roberta", "RobertaForMaskedLM", padded_tokens(64), **ENCODER)
    yield transformers("albert", "AlbertForMaskedLM", padded_tokens(64), **ENCODER, embedding_size=64)


def _translating_models() -> Iterator[ZooModel]:
    """Encoders with relative positions, and models with an encoder and a decoder."""
    yield transformers(
        "deberta_v2",
        "DebertaV2ForMaskedLM",
        padded_tokens(32),
        **ENCODER,
        relative_attention=True,
        position_buckets=16,
        pos_att_type=["p2c", "c2p"],
    )
    yield transformers(
        "distilbert",
        "DistilBertForMaskedLM",
        padded_tokens(64),
        vocab_size=VOCABULARY,
        dim=128,
        n_layers=4,
        n_heads=4,
        hidden_dim=512,
        max_position_embeddings=128,
        dropout=0.1,
        attention_dropout=0.1,
    )
    yield transformers(
        "t5",
        "T5ForConditionalGeneration",
        sequence_to_sequence(64, 32),
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
    yield transformers(
        "bart",
        "BartForConditionalGeneration",
        sequence_to_sequence(64, 32),
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


def _speech_and_image_models() -> Iterator[ZooModel]:
    """Transformers over speech and over images."""
    yield transformers(
        "whisper",
        "WhisperForConditionalGeneration",
        speech(128, 32),
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
    yield transformers(
        "vit",
        "ViTForImageClassification",
        labelled_images(64),
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


def _image_text_models() -> Iterator[ZooModel]:
    """Two encoders whose outputs are compared."""
    yield transformers(
        "clip",
        "CLIPModel",
        image_text_pairs(64, 32),
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


def _diffusion() -> Iterator[ZooModel]:
    """Diffusion: U-shapes, whose long skips cross every cut of the chain."""
    yield diffusers(
        "unet2d",
        "UNet2DModel",
        noised(32, 3),
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
    yield diffusers(
        "unet2d_condition",
        "UNet2DConditionModel",
        noised(16, 4, text=(16, 64)),
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
    yield diffusers(
        "dit",
        "DiTTransformer2DModel",
        noised_of_class(16, 4),
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


def _autoencoders_and_segmentation() -> Iterator[ZooModel]:
    """Autoencoders, and segmentation with an encoder of another network."""
    yield diffusers(
        "vae",
        "AutoencoderKL",
        images(32),
        in_channels=3,
        out_channels=3,
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        norm_num_groups=8,
        latent_channels=4,
    )
    yield smp("smp_unet_resnet34", "Unet", encoder_name="resnet34")
    yield smp("smp_fpn_resnet18", "FPN", encoder_name="resnet18", decoder_dropout=0.2)
    yield smp("smp_unetplusplus_mobilenet_v2", "UnetPlusPlus", encoder_name="mobilenet_v2", default_batch=2)


KINDS = (
    _convolutional,
    _vision_transformers,
    _language_models,
    _translating_models,
    _speech_and_image_models,
    _image_text_models,
    _diffusion,
    _autoencoders_and_segmentation,
)


def entries() -> Iterator[ZooModel]:
    """All entries, in a fixed order."""
    for kind in KINDS:
        yield from kind()
