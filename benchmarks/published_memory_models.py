"""Models whose training memory others have published, built from their configurations on the default device.

In: a name such as ``timm/resnet50`` and options of the model. Out: a module that takes a batch and targets and returns the
loss, and the output where the measured code holds it through the backward. Nothing is downloaded. The two decoders below
are written for this benchmark: they do op by op what the sources describe, since libraries of today do it in other ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.libraries import import_library, import_torchvision

Batch = tuple[Tensor, Tensor]


class WithLoss(nn.Module):
    """A classifier and its cross-entropy. ``half``: the batch is cast to the weights' dtype, the output back."""

    def __init__(self, model: nn.Module, half: bool = False) -> None:
        super().__init__()
        self.model, self.half = model, half

    def forward(self, batch: Tensor, targets: Tensor) -> Tensor:
        dtype = next(self.model.parameters()).dtype
        output = self.model(batch.to(dtype) if self.half and batch.is_floating_point() else batch)
        output = output.float() if self.half and batch.is_floating_point() else output
        return F.cross_entropy(output.flatten(0, -2), targets.flatten())


class OwnLoss(nn.Module):
    """A model of transformers, which returns its loss. The logits stay."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        output = self.model(input_ids=batch, labels=targets)
        return output.loss, output.logits


# -- GPT-2's size, from plain ops to PyTorch's own ------------------------------------------------------------------------


@dataclass(frozen=True)
class PlainGPT:
    """What is PyTorch's own in a GPT of 124 M parameters with an output matrix of its own."""

    mask_kept: bool = False
    native: bool = False
    """LayerNorm and GELU."""
    fused: bool = False
    """Attention."""
    width: int = 768
    heads: int = 12
    layers: int = 12
    context: int = 1024
    words: int = 50257
    dropout: float = 0.1


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(var + 1e-5)) + self.shift


class _Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


class _PlainAttention(nn.Module):
    def __init__(self, of: PlainGPT) -> None:
        super().__init__()
        self.of = of
        self.parts = nn.ModuleList(nn.Linear(of.width, of.width, bias=False) for _ in range(3))
        self.out = nn.Linear(of.width, of.width)
        if of.mask_kept:
            self.register_buffer("mask", torch.triu(torch.ones(of.context, of.context), 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.of.heads, -1)).transpose(1, 2) for part in self.parts)
        scores, length = q @ k.transpose(2, 3), x.shape[1]
        ones = torch.ones(length, length, device=x.device, dtype=torch.bool)
        mask = self.mask.bool()[:length, :length] if self.of.mask_kept else torch.triu(ones, 1)
        scores.masked_fill_(mask, -torch.inf)
        weights = F.dropout(torch.softmax(scores / k.shape[-1] ** 0.5, -1), self.of.dropout)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class _FusedAttention(nn.Module):
    def __init__(self, of: PlainGPT) -> None:
        super().__init__()
        self.of = of
        self.parts, self.out = nn.Linear(of.width, 3 * of.width, bias=False), nn.Linear(of.width, of.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x).unflatten(-1, (3, self.of.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.of.dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().view(x.shape))  # type: ignore[no-any-return]


class _PlainBlock(nn.Module):
    def __init__(self, of: PlainGPT) -> None:
        super().__init__()
        norm = nn.LayerNorm if of.native else _Norm
        self.mix = (_FusedAttention if of.fused else _PlainAttention)(of)
        gelu = nn.GELU(approximate="tanh") if of.native else _Gelu()
        self.mlp = nn.Sequential(nn.Linear(of.width, 4 * of.width), gelu, nn.Linear(4 * of.width, of.width))
        self.norm1, self.norm2, self.dropout = norm(of.width), norm(of.width), nn.Dropout(of.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.mix(self.norm1(x))) + x
        return self.dropout(self.mlp(self.norm2(x))) + x  # type: ignore[no-any-return]


class _PlainGPT(nn.Module):
    def __init__(self, of: PlainGPT) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(of.words, of.width), nn.Embedding(of.context, of.width)
        self.dropout, self.blocks = nn.Dropout(of.dropout), nn.Sequential(*(_PlainBlock(of) for _ in range(of.layers)))
        self.norm, self.head = (
            (nn.LayerNorm if of.native else _Norm)(of.width),
            nn.Linear(of.width, of.words, bias=False),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(self.dropout(x))))  # type: ignore[no-any-return]


# -- decoders with low-rank updates of queries and values -----------------------------------------------------------------


@dataclass(frozen=True)
class Decoder:
    """A decoder whose weights are frozen and whose queries and values have updates of low rank (Hu et al. 2021)."""

    width: int
    layers: int
    heads: int
    inner: int
    words: int
    gated: bool = True
    """RMSNorm and SwiGLU, one after the other; else LayerNorm and GELU, side by side."""
    shared_norm: bool = False
    bias: bool = False
    rotary: float = 1.0
    rank: int = 8
    dropout: float = 0.05
    chunk: int = 128
    """Tokens whose logits are one tensor."""


DECODERS = {
    "llama-2-7b": Decoder(4096, 32, 32, 11008, 32000),
    "llama-2-13b": Decoder(5120, 40, 40, 13824, 32000),
    "phi-1.5": Decoder(2048, 24, 32, 8192, 51200, gated=False, shared_norm=True, bias=True, rotary=0.5),
    "stablelm-alpha-3b": Decoder(4096, 16, 32, 16384, 50688, gated=False, bias=True, rotary=0.25),
}


class _RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(torch.mean(x * x, -1, keepdim=True) + 1e-5))


class _UpdatedLinear(nn.Linear):
    """Queries, keys and values; the update lies in a tensor of zeros as wide as all three."""

    def __init__(self, of: Decoder) -> None:
        super().__init__(of.width, 3 * of.width, bias=of.bias)
        self.of = of
        self.down = nn.Parameter(torch.zeros(2 * of.rank, of.width))
        self.up = nn.Parameter(torch.zeros(2 * of.width, of.rank))

    def forward(self, x: Tensor) -> Tensor:
        result = F.linear(x, self.weight, self.bias)
        low = F.linear(F.dropout(x, self.of.dropout), self.down)
        update = F.conv1d(low.transpose(-2, -1), self.up.unsqueeze(-1), groups=2).transpose(-2, -1).transpose(0, 1)
        width = self.of.width
        places = torch.cat([torch.arange(width, device=x.device), torch.arange(2 * width, 3 * width, device=x.device)])
        wide = update.new_zeros((*update.shape[:-1], 3 * width)).view(-1, 3 * width)
        wide = wide.index_copy(1, places, update.reshape(-1, 2 * width)).view(*update.shape[:-1], 3 * width)
        result += wide.transpose(0, 1) * 2.0
        return result


class _DecoderBlock(nn.Module):
    def __init__(self, of: Decoder) -> None:
        super().__init__()
        self.of = of
        norm = _RmsNorm if of.gated else nn.LayerNorm
        self.norm1, self.norm2 = norm(of.width), None if of.shared_norm else norm(of.width)
        self.parts, self.out = _UpdatedLinear(of), nn.Linear(of.width, of.width, bias=of.bias)
        self.into = nn.ModuleList(nn.Linear(of.width, of.inner, bias=of.bias) for _ in range(1 + of.gated))
        self.back = nn.Linear(of.inner, of.width, bias=of.bias)

    def _mix(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        count, length, width = x.shape
        parts = self.parts(x).view(count, length, self.of.heads, 3, -1).permute(0, 2, 3, 1, 4)
        q, k, v = (part.reshape(count, self.of.heads, length, -1) for part in parts.split(1, dim=2))
        q, k = self._turned(q, cos, sin), self._turned(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(count, length, width))  # type: ignore[no-any-return]

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        head, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        half = head.shape[-1] // 2
        turned = torch.cat((-head[..., half:], head[..., :half]), -1)
        return torch.cat(((head * cos + turned * sin).to(x.dtype), rest), -1)

    def _mlp(self, x: Tensor) -> Tensor:
        inner = [linear(x) for linear in self.into]
        return self.back(F.silu(inner[0]) * inner[1] if self.of.gated else F.gelu(inner[0]))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm1(x)
        mixed = self._mix(normed, cos, sin)
        if not self.of.gated:
            return self._mlp(normed if self.norm2 is None else self.norm2(x)) + mixed + x
        x = mixed + x
        assert self.norm2 is not None
        return self._mlp(self.norm2(x)) + x


class _Decoder(nn.Module):
    def __init__(self, of: Decoder) -> None:
        super().__init__()
        self.of = of
        self.words, self.head = nn.Embedding(of.words, of.width), nn.Linear(of.width, of.words, bias=False)
        self.blocks = nn.ModuleList(_DecoderBlock(of) for _ in range(of.layers))
        self.norm = (_RmsNorm if of.gated else nn.LayerNorm)(of.width)
        turned = int(of.rotary * of.width // of.heads)
        self.register_buffer("cos", torch.zeros(2048, turned))
        self.register_buffer("sin", torch.zeros(2048, turned))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith(("down", "up")))

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        x, length = self.words(ids), ids.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        halves = [self.head(part) for part in self.norm(x).split(self.of.chunk, 1)]
        logits = [part.float() for part in halves]  # Fabric's bf16-true gives what a model returns in fp32
        del halves
        losses = [
            F.cross_entropy(part.reshape(-1, self.of.words), target.reshape(-1), reduction="none")
            for part, target in zip(logits, targets.split(self.of.chunk, 1), strict=True)
        ]
        return torch.cat(losses).mean(), *logits


# -- an optimizer of before ---------------------------------------------------------------------------------------------


class AdamOfTorch20(torch.optim.Optimizer):
    """Adam over all parameters at once as torch 2.0 and 2.1 step it: the denominator is a tensor of its own."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in held:
            if not self.state[p]:
                self.state[p] = {"mean": torch.zeros_like(p), "square": torch.zeros_like(p)}
        with torch.no_grad():
            grads = [p.grad for p in held]
            means, squares = ([self.state[p][name] for p in held] for name in ("mean", "square"))
            torch._foreach_lerp_(means, grads, 0.1)
            torch._foreach_mul_(squares, 0.999)
            torch._foreach_addcmul_(squares, grads, grads, 0.001)
            roots = torch._foreach_sqrt(squares)
            torch._foreach_div_(roots, 1.0)
            sums = torch._foreach_add(roots, 1e-8)
            torch._foreach_addcdiv_(held, means, sums, -1e-3)


# -- by name ------------------------------------------------------------------------------------------------------------


def _timm(name: str, options: dict[str, Any]) -> nn.Module:
    layers = import_library("timm.layers")
    fused = layers.use_fused_attn() > 0
    layers.set_fused_attn(options.get("fused", True))
    try:
        return WithLoss(import_library("timm").create_model(name))
    finally:
        layers.set_fused_attn(fused)


def _torchvision(name: str, options: dict[str, Any]) -> nn.Module:
    return WithLoss(getattr(import_torchvision().models, name)(**options), half=True)


def _bert_large(name: str, options: dict[str, Any]) -> nn.Module:
    library = import_library("transformers")
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    model = library.BertForSequenceClassification(library.BertConfig(**sizes, attn_implementation="eager"))
    if options.get("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": options.get("use_reentrant", False)})
    return OwnLoss(model)


def _tiny_llama(name: str, options: dict[str, Any]) -> nn.Module:
    library = import_library("transformers")
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
    config = library.LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=32000, use_cache=False)
    return OwnLoss(library.LlamaForCausalLM(config))


_FAMILIES: dict[str, Callable[[str, dict[str, Any]], nn.Module]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers/bert-large": _bert_large,
    "transformers/tiny-llama": _tiny_llama,
    "gpt-124m": lambda name, options: WithLoss(_PlainGPT(PlainGPT(**options))),
    "low-rank": lambda name, options: _Decoder(DECODERS[name]),
}


def build(name: str, options: dict[str, Any], dtype: torch.dtype | None = None) -> nn.Module:
    """Return the model called ``name``, in training mode. Errors: ``KeyError`` for a family that is not known."""
    family, _, own = name.partition("/")
    model = (_FAMILIES.get(name) or _FAMILIES[family])(own, options).train()
    return model if dtype is None else model.to(dtype)
