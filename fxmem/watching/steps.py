"""Where a step of a training loop ends: as an optimizer steps that has stepped before, or is the first to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle


class StepEnds:
    """Tells of each end of a step. The other optimizers of a step, as those of a GAN, end none of their own."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Since the last end of a step."""
        self.handle: RemovableHandle = register_optimizer_step_post_hook(self._after)
        """To stop by."""

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._stepped or optimizer in self._stepped:
            self._stepped.clear()
            self._tell()
        self._stepped.add(optimizer)
