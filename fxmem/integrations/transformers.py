"""A callback for the Trainer of transformers, and for those made from it (TRL's).

In: a budget and the options of :func:`fxmem.optimize`. The Trainer's model is optimized in place when the Trainer is made,
so that whatever the Trainer and accelerate put around it stays around it; what the step has beside the model is taken from
the Trainer when training begins.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from fxmem.api.module import optimize_
from fxmem.api.planned_class import PlannedModule
from fxmem.api.prepare import prepare as prepare_for_batches
from fxmem.errors import InputError
from fxmem.profiling.training_step import Loop, TrainingStep


class FxMemCallback(TrainerCallback):
    """Trains the Trainer's model inside a memory budget: ``Trainer(..., callbacks=[FxMemCallback(budget_gb=8)])``.

    - ``budget_gb`` in 10^9 bytes, or ``budget`` as for :func:`fxmem.optimize`, whose other options are taken too. The
      optimizer is the Trainer's, and so is whether gradients accumulate, unless ``step``, ``optimizer`` or
      ``accumulate`` is given.
    - ``prepare``: whether the training batches are read once before training, as :func:`fxmem.prepare` does, so that the
      largest is planned for first and no length that comes later costs planning. It prints the peaks.

    A model that was optimized before is left as it is. The model's own activation checkpointing is switched off: the plan
    decides what is recomputed. Errors: those of :func:`fxmem.optimize_`.
    """

    def __init__(
        self,
        budget_gb: float | None = None,
        *,
        budget: float | str | None = None,
        prepare: bool = False,
        **options: Any,
    ) -> None:
        if prepare and options.get("backend", "eager") != "eager":
            raise InputError(
                "prepare= is for the eager backend: each size of a batch is compiled by itself; leave it out, and pad "
                "batches to few lengths"
            )
        self._options: dict[str, Any] = {"budget_gb": budget_gb, "budget": budget, **options}
        self._prepare = prepare
        self._ours: PlannedModule | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        if _optimized_in(model) is None:
            self._ours = optimize_(model, **self._options)

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        train_dataloader: Any = None,
        **others: Any,
    ) -> None:
        _without_checkpointing(model)
        if self._ours is not None and not self._options.keys() & {"step", "optimizer", "accumulate"}:
            self._ours._fxmem.plan_anew(self._step_of(args, optimizer))
        ours = _optimized_in(model)
        if self._prepare and ours is not None:
            ours.train()
            prepare_for_batches(ours, train_dataloader, arguments=lambda batch: _call_of(ours, batch))

    def _step_of(self, args: Any, optimizer: Any) -> TrainingStep:
        options = {name: self._options[name] for name in ("loss_fn", "autocast", "scaler") if name in self._options}
        return TrainingStep(
            optimizer=getattr(optimizer, "optimizer", optimizer),  # accelerate's is around the Trainer's
            accumulate=args.gradient_accumulation_steps > 1,
            loop=Loop(keeps_output=False),  # compute_loss returns the loss alone
            **options,
        )


def _call_of(model: torch.nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the Trainer passes of a batch, and beside it: the number of labels, where the model takes any name."""
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())
    if not takes_any or "labels" not in batch:
        return dict(batch)
    number = batch["labels"].ne(-100).sum()
    shares_a_batch = hasattr(Trainer, "get_tp_size")  # since then it divides by the devices that do
    return {**batch, "num_items_in_batch": number / 1 if shares_a_batch else number}


def _without_checkpointing(model: Any) -> None:
    for is_on, off in _CHECKPOINTING:
        if hasattr(model, is_on):
            if getattr(model, is_on):
                getattr(model, off)()
                warnings.warn(
                    "the model's activation checkpointing is switched off, for fxmem plans what is recomputed; leave it "
                    "out of TrainingArguments",
                    stacklevel=3,
                )
            return


_CHECKPOINTING = (
    ("is_activation_checkpointing", "activation_checkpointing_disable"),
    ("is_gradient_checkpointing", "gradient_checkpointing_disable"),
)
"""What transformers calls it, and what it called it before."""


def _optimized_in(model: torch.nn.Module) -> PlannedModule | None:
    """Return the first optimized module in ``model``, itself included."""
    return next((module for module in model.modules() if isinstance(module, PlannedModule)), None)
