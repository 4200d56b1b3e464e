"""Small models of which each takes memory in a way of its own: norms, indices, losses, attention, low-rank updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Sequential):
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


class ConvUNet(nn.Module):
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


class GroupNormed(nn.Sequential):
    def __init__(self, width: int = 64, depth: int = 6) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class Words(nn.Module):
    """An embedding, a matrix of all words, cross-entropy."""

    def __init__(self, num_words: int = 32000, width: int = 256) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(num_words, width), nn.Linear(width, num_words, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.table(ids)).flatten(0, 1), targets.flatten())


class Indexed(nn.Module):
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


class Ordered(nn.Module):
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


class Encoder(nn.Module):
    """PyTorch's own transformer layers."""

    def __init__(self, width: int = 256, depth: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.layers(x, src_key_padding_mask=mask)  # type: ignore[no-any-return]


class Causal(nn.Module):
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


class LowRank(nn.Module):
    """A frozen language model with trained low-rank updates of its linear layers (Hu et al. 2021)."""

    def __init__(self, base: nn.Module, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        for name, module in list(base.named_modules()):
            for child_name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and not name.endswith("lm_head"):
                    setattr(module, child_name, LowRankLinear(child, rank))

    def forward(self, **kwargs: Any) -> Any:
        return self.base(**kwargs)


class LowRankLinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        like = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.down = nn.Parameter(torch.zeros(rank, base.in_features, **like))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, **like))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)  # type: ignore[no-any-return]


class Gan(nn.Module):
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


class Losses(nn.Module):
    """An autoencoder under a loss that keeps or takes buffers."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], squash: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 128), nn.PReLU(128), nn.Linear(128, 512))
        self.loss, self.squash = loss, squash

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return self.loss(torch.sigmoid(y) if self.squash else y, x.clamp(0, 1))
