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

from benchmarks.libraries import import_library, import_torchvision

Batch = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """One model and how it is trained. ``scaled``: with a GradScaler."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    autocast: torch.dtype | None = None
    channels_last: bool = False
    scaled: bool = False
    in_suite_of_25: bool = False

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


# -- models of a few lines ------------------------------------------------------------------------------------------------


class _Mlp(nn.Sequential):
    def __init__(self, width: int, depth: int, dropout: float, norm: bool = True) -> None:
        super().__init__(
            *(
                nn.Sequential(
                    nn.Linear(width, 4 * width),
                    nn.GELU(),
                    nn.Dropout(dropout),
                    nn.Linear(4 * width, width),
                    nn.LayerNorm(width) if norm else nn.Identity(),
                )
                for _ in range(depth)
            )
        )


class _ConvUNet(nn.Module):
    """A U-Net of three levels, with BatchNorm or GroupNorm."""

    def __init__(self, width: int = 32, groups: int = 0) -> None:
        super().__init__()
        norm = (lambda c: nn.GroupNorm(groups, c)) if groups else nn.BatchNorm2d

        def block(num_in: int, num_out: int) -> nn.Sequential:
            layers: list[nn.Module] = []
            for first in (num_in, num_out):
                layers += [nn.Conv2d(first, num_out, 3, padding=1), norm(num_out), nn.ReLU(inplace=True)]
            return nn.Sequential(*layers)

        widths = [width << level for level in range(4)]
        self.down = nn.ModuleList(block(i, o) for i, o in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(w, w // 2, 2, 2) for w in reversed(widths[1:]))
        self.merge = nn.ModuleList(block(w, w // 2) for w in reversed(widths[1:]))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(kept[:-1]), strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        return self.head(x)  # type: ignore[no-any-return]


class _GroupNormed(nn.Sequential):
    def __init__(self, width: int = 64, depth: int = 6) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class _Words(nn.Module):
    """An embedding, a matrix of all words, cross-entropy."""

    def __init__(self, num_words: int = 32000, width: int = 256) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(num_words, width), nn.Linear(width, num_words, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.table(ids)).flatten(0, 1), targets.flatten())


class _Indexed(nn.Module):
    """Rows moved by index in five ways."""

    def __init__(self, rows: int = 4096, width: int = 512) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.zeros(rows, width))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        h = self.first(x)
        wide = places[:, None].expand_as(h)
        put = torch.zeros_like(h).index_put((places,), h, accumulate=True).index_add(0, places, self.second(h))
        gathered = put.gather(0, wide)
        return (torch.zeros_like(gathered).scatter_add(0, wide, gathered) + self.table[places]).sum(-1)


class _Ordered(nn.Module):
    """Top-k, sort, scans, reductions."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        best, _ = h.topk(64, -1)
        mixed = torch.where(h > 0, h, h.cumsum(-1))
        out = self.second(mixed + h.sort(-1)[0])[..., :64] * best + F.log_softmax(h, -1)[..., :64]
        return out + h.std(-1, keepdim=True) + h.logsumexp(-1, keepdim=True) + h.masked_fill(h < 0, 0.0).amax(-1, True)


class _Encoder(nn.Module):
    """PyTorch's own transformer layers."""

    def __init__(self, width: int = 256, depth: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.layers(x, src_key_padding_mask=mask)  # type: ignore[no-any-return]


class _Causal(nn.Module):
    """A language model whose attention is told that it is causal, without a mask."""

    def __init__(self, width: int = 512, depth: int = 3, heads: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.words, self.head = nn.Embedding(8000, width), nn.Linear(width, 8000, bias=False)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "mix": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "mlp": nn.Sequential(
                        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
                    ),
                }
            )
            for _ in range(depth)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            parts = block["mix"](block["norm"](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(*parts, dropout_p=self.dropout, is_causal=True)
            x = x + F.dropout(block["out"](mixed.transpose(1, 2).flatten(2)), self.dropout)
            x = x + block["mlp"](x)
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class _LowRank(nn.Module):
    """A frozen language model with trained low-rank updates of its linear layers (Hu et al. 2021)."""

    def __init__(self, base: nn.Module, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        for name, module in list(base.named_modules()):
            for child_name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and not name.endswith("lm_head"):
                    setattr(module, child_name, _LowRankLinear(child, rank))

    def forward(self, **kwargs: Any) -> Any:
        return self.base(**kwargs)


class _LowRankLinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        like = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.down = nn.Parameter(torch.zeros(rank, base.in_features, **like))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, **like))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)  # type: ignore[no-any-return]


class _Gan(nn.Module):
    """A generator and the discriminator it is trained against: the generator's step."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        up, down = [], []
        for i, o in ((128, 4 * width), (4 * width, 2 * width), (2 * width, width)):
            up += [nn.ConvTranspose2d(i, o, 4, 2, 1), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]
        for i, o in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
            down += [nn.Conv2d(i, o, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)]
        self.generator = nn.Sequential(*up, nn.Conv2d(width, 3, 3, padding=1), nn.Tanh())
        self.judge = nn.Sequential(*down, nn.Flatten(), nn.Linear(4 * width * 16, 1)).requires_grad_(False)

    def forward(self, noise: Tensor) -> Tensor:
        verdict = self.judge(self.generator(noise))
        return F.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict))


class _Losses(nn.Module):
    """An autoencoder under a loss that keeps or takes buffers."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], squash: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 128), nn.PReLU(128), nn.Linear(128, 512))
        self.loss, self.squash = loss, squash

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return self.loss(torch.sigmoid(y) if self.squash else y, x.clamp(0, 1))


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
    Case("resnet50 fp32", _vision("resnet50"), _images(32), in_suite_of_25=True),
    Case("resnet50 fp16 autocast", _vision("resnet50"), _images(32), HALF, scaled=True, in_suite_of_25=True),
    Case("resnet50 bf16 autocast", _vision("resnet50"), _images(32), BF16, in_suite_of_25=True),
    Case("resnet50 channels last, fp16 autocast", _vision("resnet50"), _images(32), HALF, True, in_suite_of_25=True),
    Case("resnet50 bf16 weights", _vision("resnet50", BF16), _images(32, dtype=BF16), in_suite_of_25=True),
    Case("resnet18 channels last", _vision("resnet18"), _images(16), channels_last=True),
    Case("mobilenet_v2 fp32", _vision("mobilenet_v2"), _images(32), in_suite_of_25=True),
    Case("mobilenet_v3 fp16 autocast", _vision("mobilenet_v3_small"), _images(32), HALF, scaled=True),
    Case("vgg16 fp32", _vision("vgg16"), _images(16), in_suite_of_25=True),
    Case("densenet121 fp32", _vision("densenet121"), _images(8)),
    Case("efficientnet_b0 bf16 autocast", _vision("efficientnet_b0"), _images(16), BF16),
    Case("regnet_y_400mf fp32", _vision("regnet_y_400mf"), _images(16)),
    Case("convnext_tiny fp16 autocast", _vision("convnext_tiny"), _images(16), HALF, in_suite_of_25=True),
    Case("unet fp32", _ConvUNet, _images(4, 256), in_suite_of_25=True),
    Case("unet GroupNorm, fp16 autocast", lambda: _ConvUNet(groups=8), _images(4, 256), HALF, in_suite_of_25=True),
    Case("unet channels last, bf16 autocast", _ConvUNet, _images(4, 256), BF16, channels_last=True),
    Case("convolutions with GroupNorm", _GroupNormed, _images(8, 128), in_suite_of_25=True),
    Case("vit_b_16 fp32", _vision("vit_b_16"), _images(16), in_suite_of_25=True),
    Case("vit_b_16 bf16 autocast", _vision("vit_b_16"), _images(16), BF16, in_suite_of_25=True),
    Case("swin_t fp16 autocast", _vision("swin_t"), _images(16), HALF, in_suite_of_25=True),
    Case("swin_t fp32", _vision("swin_t"), _images(4)),
    Case("mlp fp32", lambda: _Mlp(1024, 8, 0.1), _rows(512, 1024), in_suite_of_25=True),
    Case("mlp bf16 autocast", lambda: _Mlp(512, 4, 0.1, norm=False), _rows(8192, 512), BF16),
    Case("gpt2 fp32", _gpt2(), _texts(4, 512), in_suite_of_25=True),
    Case("gpt2 bf16 autocast", _gpt2(), _texts(4, 512), BF16, in_suite_of_25=True),
    Case("gpt2 bf16 autocast, no dropout", _gpt2(**_NO_DROPOUT), _texts(4, 512), BF16, in_suite_of_25=True),
    Case("gpt2 fp32, no dropout", _gpt2(**_NO_DROPOUT), _texts(4, 512), in_suite_of_25=True),
    Case("causal fp32", _Causal, _tokens, in_suite_of_25=True),
    Case("causal bf16 autocast", _Causal, _tokens, BF16, in_suite_of_25=True),
    Case("causal bf16 autocast, no dropout", lambda: _Causal(dropout=0.0), _tokens, BF16, in_suite_of_25=True),
    Case("causal fp16 autocast, heads of 80", lambda: _Causal(width=640, dropout=0.0), _tokens, HALF, scaled=True),
    Case("bert fp32", _bert(), _texts(8, 256, mask=False), in_suite_of_25=True),
    Case("bert fp32, padded", _bert(), _texts(8, 256), in_suite_of_25=True),
    Case("bert fp16 autocast", _bert(), _texts(8, 256, mask=False), HALF, scaled=True, in_suite_of_25=True),
    Case("llama bf16", _llama(BF16), _texts(2, 1024), in_suite_of_25=True),
    Case("llama fp32", _llama(), _texts(2, 512), in_suite_of_25=True),
    Case("llama bf16, eager attention", _llama(BF16, attention="eager"), _texts(2, 512), in_suite_of_25=True),
    Case("llama bf16, one key head", _llama(BF16, kv=1), _texts(2, 256)),
    Case("llama bf16, low-rank updates", lambda: _LowRank(_llama(BF16)()), _texts(2, 256)),
    Case(
        "t5 fp32",
        _transformers(
            "T5ForConditionalGeneration", "T5Config", num_layers=3, use_cache=False, decoder_start_token_id=0
        ),
        _texts(4, 128),
        in_suite_of_25=True,
    ),
    Case("mixtral bf16", _mixtral(), _texts(2, 256), in_suite_of_25=True),
    Case("torch encoder fp32", _Encoder, _sequences(masked=False)),
    Case("torch encoder bf16 autocast, padded", _Encoder, _sequences(masked=True), BF16),
    Case("words fp32", _Words, lambda: ((_ids(8, 512), _ids(8, 512)), {}), in_suite_of_25=True),
    Case("words bf16 autocast", _Words, lambda: ((_ids(8, 512), _ids(8, 512)), {}), BF16, in_suite_of_25=True),
    Case("indexed rows", _Indexed, lambda: ((torch.zeros(4096, 512), torch.arange(4096)), {}), in_suite_of_25=True),
    Case("sorted rows", _Ordered, _rows(4096, 512), in_suite_of_25=True),
    Case("generator against discriminator", _Gan, lambda: ((torch.zeros(32, 128, 4, 4),), {})),
    Case("autoencoder, squared error", lambda: _Losses(F.mse_loss), _rows(16384, 512)),
    Case("autoencoder, binary cross-entropy", lambda: _Losses(F.binary_cross_entropy, True), _rows(16384, 512)),
    Case("autoencoder, Huber", lambda: _Losses(F.huber_loss), _rows(16384, 512)),
)
CASES = {case.name: case for case in _CASES}
"""By name."""
