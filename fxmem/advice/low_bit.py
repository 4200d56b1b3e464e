"""AdamW with its moments in eight bits, for what it takes in memory.

What bitsandbytes keeps: of each moment a byte for each number and one scale for each 256 of them; of parameters with less
than 4,096 numbers, 32 bits. Its codes follow a table, here they are linear and coarser: not to train with.
Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

BLOCK = 256
"""Numbers that share a scale."""
LEAST_NUMBERS = 4096
"""Of a parameter whose moments are kept in eight bits."""
PIECE, MOST_PIECES = 1 << 22, 64
"""Numbers that are decoded at once, and into how many pieces a parameter is divided at most."""


class EightBitAdamW(torch.optim.Optimizer):
    """AdamW whose moments are kept in eight bits."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **ignored: Any,
    ) -> None:
        """``ignored``: options of other optimizers' groups."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["first"], state["second"] = _Moment.state(parameter), _Moment.state(parameter)
        state["step"] += 1
        weight, gradient = _flat(parameter), _flat(_laid_out(parameter))
        first, second = _Moment(state["first"]), _Moment(state["second"])
        beta1, beta2 = group["betas"]
        rate = group["lr"] / (1 - beta1 ** state["step"])
        spread = (1 - beta2 ** state["step"]) ** 0.5
        for start, stop in _pieces(weight.numel()):
            piece = gradient[start:stop].float()
            mean = first.read(start, stop).lerp_(piece, 1 - beta1)
            square = second.read(start, stop).mul_(beta2).addcmul_(piece, piece, value=1 - beta2)
            first.write(start, stop, mean)
            second.write(start, stop, square)
            weight[start:stop].mul_(1 - group["lr"] * group["weight_decay"])
            weight[start:stop].addcdiv_(mean, square.sqrt_().div_(spread).add_(group["eps"]), value=-rate)


class _Moment:
    """One moment of a parameter: its codes, and a scale for each block of them; without scales, plain numbers."""

    def __init__(self, state: tuple[torch.Tensor, ...]) -> None:
        self._codes = state[0]
        self._scales = state[1] if len(state) == 2 else None

    @staticmethod
    def state(parameter: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what is kept, all zero."""
        count, device = parameter.numel(), parameter.device
        if count < LEAST_NUMBERS:
            return (torch.zeros(count, dtype=torch.float32, device=device),)
        codes = torch.zeros(count, dtype=torch.int8, device=device)
        return codes, torch.zeros(-(-count // BLOCK), dtype=torch.float32, device=device)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return the numbers from ``start``, a multiple of :data:`BLOCK`, to ``stop``."""
        if self._scales is None:
            return self._codes[start:stop].clone()
        return self._codes[start:stop] * self._scales_of(start, stop)

    def write(self, start: int, stop: int, values: torch.Tensor) -> None:
        """Keep the numbers from ``start`` to ``stop``."""
        if self._scales is None:
            self._codes[start:stop] = values
            return
        padded = torch.nn.functional.pad(values, (0, -(stop - start) % BLOCK))
        self._scales[start // BLOCK : -(-stop // BLOCK)] = padded.view(-1, BLOCK).abs().amax(1) / 127
        codes = (values / self._scales_of(start, stop).clamp_(min=1e-30)).round_()
        self._codes[start:stop] = codes

    def _scales_of(self, start: int, stop: int) -> torch.Tensor:
        assert self._scales is not None
        scales = self._scales[start // BLOCK : -(-stop // BLOCK)]
        return scales.repeat_interleave(BLOCK)[: stop - start]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor in the order of memory, which it fills."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _laid_out(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter, laid out as that is."""
    gradient = parameter.grad
    assert gradient is not None
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)


def _pieces(count: int) -> Iterator[tuple[int, int]]:
    size = max(PIECE, -(-count // MOST_PIECES))
    size += -size % BLOCK
    for start in range(0, count, size):
        yield start, min(start + size, count)
