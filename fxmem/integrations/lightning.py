"""A callback for Lightning's Trainer.

In: a budget and the options of :func:`fxmem.optimize`. The LightningModule's ``training_step`` is planned as a whole, with
the loss; what it logs is logged. What the step has beside it is taken from the Trainer when training begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from fxmem.api.module import optimize_
from fxmem.api.planned_class import FxMemModule, PlannedModule
from fxmem.errors import InputError
from fxmem.profiling.training_step import Loop, TrainingStep


class FxMemCallback(Callback):
    """Trains a LightningModule inside a memory budget: ``Trainer(..., callbacks=[FxMemCallback(budget_gb=8)])``.

    ``budget_gb`` in 10^9 bytes, or ``budget`` as for :func:`fxmem.optimize`, whose other options are taken too. Optimizer,
    gradient accumulation and scaler are the Trainer's, unless ``step``, ``optimizer`` or ``accumulate`` is given. A module
    that holds an optimized one is left as it is. Errors: ``InputError`` under manual optimization; those of
    :func:`fxmem.optimize_`.
    """

    def __init__(self, budget_gb: float | None = None, *, budget: float | str | None = None, **options: Any) -> None:
        self._options: dict[str, Any] = {"budget_gb": budget_gb, "budget": budget, **options}
        self._ours: FxMemModule | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Optimize the module in place."""
        if self._options.get("backend", "eager") != "eager":
            raise InputError(
                "what a training_step logs is no part of a graph, so it cannot be compiled as a whole: compile the network "
                'in it, in configure_model: self.net = fxmem.optimize(self.net, x, budget_gb=8, backend="inductor", '
                "optimizer=..., loss_fn=..., targets=...)"
            )
        if stage != "fit" or any(isinstance(module, PlannedModule) for module in pl_module.modules()):
            return
        if not pl_module.automatic_optimization:
            raise InputError(
                f"{type(pl_module).__name__} calls backward in its training_step (automatic_optimization=False), so no "
                "plan can be of the whole: optimize its networks in configure_model instead, "
                "self.net = fxmem.optimize(self.net, ...)"
            )
        loss = {} if "step" in self._options else {"loss_fn": loss_of}
        self._ours = optimize_(pl_module, methods=("training_step",), **{**loss, **self._options})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plan for the Trainer's step."""
        if self._ours is not None and not self._options.keys() & {"step", "optimizer", "accumulate"}:
            self._ours.fxmem.plan_anew(self._step_of(trainer))

    def _step_of(self, trainer: Trainer) -> TrainingStep:
        accumulates = trainer.accumulate_grad_batches > 1
        options: dict[str, Any] = {
            "optimizer": trainer.optimizers[0] if len(trainer.optimizers) == 1 else "adamw",
            "accumulate": accumulates,
            "scaler": getattr(trainer.precision_plugin, "scaler", None),
            "loss_fn": loss_of,
            "loop": Loop(zero_grad_before_backward=not accumulates),
        }
        names = {field.name for field in fields(TrainingStep)}
        given = {name: value for name, value in self._options.items() if name in names}
        return TrainingStep(**{**options, **given})


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss of what a ``training_step`` returns: a tensor, or a dict that has it as "loss"."""
    loss: torch.Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss
